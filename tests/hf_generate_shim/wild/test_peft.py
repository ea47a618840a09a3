"""PEFT around an installed model: an adapter is never lost, merged ones are seen."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hf_generate_shim
from tests.hf_generate_shim.calls import Options, batch, prompt
from tests.hf_generate_shim.wild.optional import optional

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle

peft = optional("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("default::hf_generate_shim.NanoserveFallbackWarning"),
]

CALL: Options = {**batch(prompt(40), prompt(50)), "max_new_tokens": 8}

Wrapped = Any  # PEFT has no types


@pytest.fixture
def handle(model: Qwen3ForCausalLM) -> Iterator[Handle]:
    """Not started: some of these models never can be."""
    with hf_generate_shim.installed(model, num_kvcache_blocks=256) as handle:
        yield handle


def wrap(model: Qwen3ForCausalLM, **options: object) -> Wrapped:
    """With a LoRA adapter that changes the text."""
    config = peft.LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(model, config)


def test_adapter_is_applied_and_the_fallback_says_why(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    plain = model.generate(**CALL).tolist()
    twin = wrap(copy.deepcopy(model))

    output = wrap(model).generate(**CALL).tolist()

    assert output == twin.generate(**CALL).tolist() != plain
    assert (handle.counters.fast, handle.counters.fallback) == (1, 1)
    assert "q_proj is a peft.tuners.lora" in next(iter(handle.counters.reasons))


def test_disabled_adapter_is_not_applied(model: Qwen3ForCausalLM, handle: Handle) -> None:
    plain = model.generate(**CALL).tolist()
    wrapped = wrap(model)

    with wrapped.disable_adapter():
        output = wrapped.generate(**CALL).tolist()

    assert output == plain
    assert handle.counters.fallback == 1


def test_adapter_merged_and_unloaded_is_served(model: Qwen3ForCausalLM, handle: Handle) -> None:
    plain = model.generate(**CALL).tolist()
    expected = wrap(copy.deepcopy(model)).merge_and_unload().generate(**CALL).tolist()

    merged = wrap(model).merge_and_unload()
    output = merged.generate(**CALL).tolist()

    assert merged is model
    assert output == expected != plain
    assert handle.counters.fast == 2


def test_unloaded_adapter_leaves_the_model_as_it_was(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    plain = model.generate(**CALL).tolist()
    wrapped = wrap(model)
    wrapped.generate(**CALL)

    output = wrapped.unload().generate(**CALL).tolist()

    assert output == plain
    assert handle.counters.fast == 2


def test_merged_adapter_is_applied_and_unmerged_again(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    twin = wrap(copy.deepcopy(model))
    wrapped = wrap(model)

    for change in ("merge_adapter", "unmerge_adapter"):
        getattr(wrapped, change)()
        getattr(twin, change)()
        assert wrapped.generate(**CALL).tolist() == twin.generate(**CALL).tolist()

    assert handle.counters.fast + handle.counters.fallback == 2


def test_soft_prompt_falls_back(model: Qwen3ForCausalLM, handle: Handle) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    wrapped = peft.get_peft_model(model, config)
    twin = copy.deepcopy(wrapped)

    output = wrapped.generate(**CALL).tolist()

    assert output == twin.generate(**CALL).tolist()
    assert handle.counters.fast == 0
    assert handle.counters.fallback == 1
