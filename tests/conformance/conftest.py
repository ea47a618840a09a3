"""Fixtures: one model that is installed, and its copy that is not: the oracle."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import transformers

import hf_generate_shim
from nanoserve_core.errors import UnsupportedOption
from tests.conformance.tally import TALLY, Pair
from tests.hf_generate_shim.calls import new_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hf_generate_shim import Handle


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how the drawn calls of this run were served."""
    tally = terminalreporter.config.stash.get(TALLY, None)
    if tally is not None:
        terminalreporter.section("conformance of drawn calls")
        terminalreporter.write("\n".join([*tally.lines(), ""]))


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """A model served with transformers' own random numbers where the engine has them."""
    reference = new_model()
    reference.generation_config.update(temperature=0.6, top_k=20)
    model = copy.deepcopy(reference)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # drawn calls earn many notes
    handle = install_exact(model)
    assert handle.thread.is_alive
    yield Pair(model=model, reference=reference, handle=handle)
    handle.close()
    transformers.logging.set_verbosity(verbosity)


def install_exact(model: transformers.Qwen3ForCausalLM) -> Handle:
    """With ``rng="hf"``, or without."""
    try:
        return hf_generate_shim.install(model, rng="hf", num_kvcache_blocks=256)
    except UnsupportedOption:
        return hf_generate_shim.install(model, num_kvcache_blocks=256)
