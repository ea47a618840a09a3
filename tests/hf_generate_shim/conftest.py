"""Fixtures: tiny models, and an installed one that leaves nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import Qwen3ForCausalLM

import hf_generate_shim
from hf_generate_shim.seam import BATCH_ENTRY_POINTS
from nanoserve_adapters.testing import leak_check, settle
from tests.hf_generate_shim.calls import new_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hf_generate_shim import Handle

PATCHED = ("generate", "_sample", "_get_stopping_criteria", *BATCH_ENTRY_POINTS)


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    """A model of the test's own."""
    return new_model()


@pytest.fixture
def handle(model: Qwen3ForCausalLM) -> Iterator[Handle]:
    """`model`, installed; afterwards all blocks are free, and the class is as it was."""
    with hf_generate_shim.installed(model, num_kvcache_blocks=256) as handle:
        yield handle
        settle(handle.thread)
        handle.thread.call(leak_check)


@pytest.fixture(autouse=True)
def class_is_restored() -> Iterator[None]:
    """No test leaves transformers' class patched (but module-wide fixtures may have)."""
    before = {name: vars(Qwen3ForCausalLM).get(name) for name in PATCHED}
    yield
    after = {name: vars(Qwen3ForCausalLM).get(name) for name in PATCHED}
    assert after == before
