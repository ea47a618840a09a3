"""accelerate around an installed model: prepared it is served, offloaded it is not."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch

import hf_generate_shim
from tests.hf_generate_shim.calls import Options, ragged
from tests.hf_generate_shim.wild.optional import optional

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle

accelerate = optional("accelerate")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("default::hf_generate_shim.NanoserveFallbackWarning"),
]

CALL: Options = {**ragged(), "max_new_tokens": 6}


@pytest.fixture
def handle(model: Qwen3ForCausalLM) -> Iterator[Handle]:
    """Not started: some of these models never can be."""
    with hf_generate_shim.installed(model, num_kvcache_blocks=256) as handle:
        yield handle


@pytest.fixture(autouse=True)
def _state_of_its_own() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 - accelerate's own tests do


def test_prepared_model_is_served(model: Qwen3ForCausalLM, handle: Handle) -> None:
    expected = copy.deepcopy(model).generate(**CALL).tolist()
    accelerator = accelerate.Accelerator(cpu=True)

    prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    output = accelerator.unwrap_model(prepared).generate(**CALL).tolist()

    assert output == expected
    assert handle.counters.fast == 1


def test_training_with_accelerate_is_seen(model: Qwen3ForCausalLM, handle: Handle) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    before = model.generate(**CALL).tolist()

    accelerator.backward(prepared(input_ids=CALL["input_ids"], labels=CALL["input_ids"]).loss)
    optimizer.step()
    output = model.generate(**CALL).tolist()

    assert output == copy.deepcopy(model).generate(**CALL).tolist() != before
    assert handle.counters.fast == 2


def test_mixed_precision_falls_back_until_the_model_is_unwrapped(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")

    prepared = accelerator.prepare(model)
    prepared.generate(**CALL)
    reasons = list(handle.counters.reasons)
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False).generate(**CALL)

    assert ["forward of the model is replaced" in reason for reason in reasons] == [True]
    assert (handle.counters.fast, handle.counters.fallback) == (1, 1)


@pytest.mark.parametrize("offload", ["cpu_offload", "hook"])
def test_offloaded_model_falls_back_with_the_reason(
    model: Qwen3ForCausalLM, handle: Handle, offload: str
) -> None:
    expected = copy.deepcopy(model).generate(**CALL).tolist()

    if offload == "cpu_offload":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())
    output = model.generate(**CALL).tolist()

    assert output == expected
    assert (handle.counters.fast, handle.counters.fallback) == (0, 1)
    assert "forward of the model is replaced" in next(iter(handle.counters.reasons))
