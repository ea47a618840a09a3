"""A pytest plugin: runs a test suite with every `Qwen3ForCausalLM` served by the engine.

    pytest tests/models/qwen3 tests/generation -k generate -p hf_generate_shim.pytest_plugin

Meant for transformers' own tests in a checkout of the installed version (``make hf-conformance
TRANSFORMERS=path``). A model is installed at its first `generate` and uninstalled after the test.
The summary says for each test how its calls were served; a test that must be served by the engine
fails when one of its calls was left to transformers' loop.

``--nanoserve=off`` runs the same tests without the engine, to tell its faults from others;
``--nanoserve-must-be-fast=FILE`` names other tests that must be served: one `fnmatch` pattern of a
test's name on each line, ``#`` starts a comment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import transformers

from hf_generate_shim.install import install
from hf_generate_shim.seam import QWEN3

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import nn

    from hf_generate_shim.handle import Handle

MUST_BE_FAST = ("test_greedy_generate", "test_sample_generate", "test_generate_without_input_ids")
"""Tests of transformers' mixin for generating models whose calls ask for nothing unusual."""

NUM_KVCACHE_BLOCKS = 256
"""Room for a few thousand tokens: these models are tiny, and each gets an engine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options of the module's description."""
    group = parser.getgroup("nanoserve", "transformers' generate, served by nanoserve")
    group.addoption("--nanoserve", choices=("on", "off"), default="on", help="serve every model")
    group.addoption(
        "--nanoserve-must-be-fast",
        metavar="FILE",
        type=Path,
        help="patterns of the names of tests that may not fall back, one a line",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start serving, unless switched off."""
    if config.getoption("--nanoserve") == "off":
        return
    # The suite's own checks of warnings are about transformers'; fallbacks are counted here.
    config.addinivalue_line("filterwarnings", "ignore::hf_generate_shim.NanoserveFallbackWarning")
    file: Path | None = config.getoption("--nanoserve-must-be-fast")
    patterns = MUST_BE_FAST if file is None else _patterns(file)
    config.pluginmanager.register(ServedTests(patterns), "nanoserve-served-tests")


def _patterns(file: Path) -> tuple[str, ...]:
    lines = (line.partition("#")[0].strip() for line in file.read_text("utf-8").splitlines())
    return tuple(line for line in lines if line)


@dataclass
class Served:
    """How the calls of one test were served."""

    handles: list[Handle] = field(default_factory=list)
    """Of the models that the test called `generate` on; closed after the test."""
    paths: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Of the fallbacks."""

    def read(self) -> None:
        """Take the numbers from the handles."""
        found = [handle.counters for handle in self.handles]
        self.paths = Counter(
            fast=sum(counters.fast for counters in found),
            lockstep=sum(counters.lockstep for counters in found),
            fallback=sum(counters.fallback for counters in found),
        )
        self.reasons = sum((Counter(counters.reasons) for counters in found), Counter())

    def line(self) -> str:
        """``2 fast, 0 lockstep, 1 fallback (num_beams: samples ...)``."""
        numbers = ", ".join(f"{count} {path}" for path, count in self.paths.items())
        return f"{numbers} ({'; '.join(self.reasons)})" if self.reasons else numbers


class ServedTests:
    """Serves the models of each test, and keeps the numbers of all tests."""

    def __init__(self, must_be_fast: Sequence[str]) -> None:
        self._must_be_fast = must_be_fast
        self._tests: dict[str, Served] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Serve models from set-up to teardown of the test."""
        served = self._tests[item.nodeid] = Served()

        def attach(model: nn.Module) -> None:
            served.handles.append(install(model, num_kvcache_blocks=NUM_KVCACHE_BLOCKS))

        try:
            with QWEN3.serving_all(attach):
                return (yield)
        finally:
            served.read()
            for handle in served.handles:
                handle.close()
            served.handles.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test that fell back and must not."""
        result = yield
        served = self._tests[item.nodeid]
        served.read()
        name = getattr(item, "originalname", None) or item.name
        if served.paths["fallback"] and any(fnmatchcase(name, each) for each in self._must_be_fast):
            pytest.fail(f"{name} must be served by nanoserve, and was: {served.line()}")
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The numbers of each test that generates, then of all."""
        terminalreporter.section(f"nanoserve under transformers {transformers.__version__}")
        generating = {node: test for node, test in self._tests.items() if test.paths.total()}
        for node, test in generating.items():
            terminalreporter.write_line(f"{node}: {test.line()}")
        total = sum((test.paths for test in generating.values()), Counter())
        numbers = ", ".join(f"{total[path]} {path}" for path in ("fast", "lockstep", "fallback"))
        terminalreporter.write_line(f"{len(generating)} tests generate: {numbers}")
