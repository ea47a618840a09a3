"""Fixtures: one model that is installed, and its copy that is not: the oracle."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import transformers

import hf_generate_shim
from nanoserve_adapters.testing import leak_check, settle
from tests.conformance.tally import TALLY, Pair
from tests.hf_generate_shim.calls import new_model

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how the drawn calls of this run were served."""
    tally = terminalreporter.config.stash.get(TALLY, None)
    if tally is not None:
        terminalreporter.section("conformance of drawn calls")
        terminalreporter.write("\n".join([*tally.lines(), ""]))


@pytest.fixture(scope="module", params=["hf"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Served with the random numbers of transformers' loop, unless a module asks for others."""
    reference = new_model()
    reference.generation_config.update(temperature=0.6, top_k=20)
    model = copy.deepcopy(reference)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # drawn calls earn many notes
    with hf_generate_shim.installed(model, rng=request.param, num_kvcache_blocks=256) as handle:
        assert handle.thread.is_alive
        yield Pair(model=model, reference=reference, handle=handle)
        settle(handle.thread)
        handle.thread.call(leak_check)
    transformers.logging.set_verbosity(verbosity)
