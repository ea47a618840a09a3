"""`cache_implementation="paged"` gives what the same call gives without it, un-patched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

import hf_generate_shim
from hf_generate_shim import NanoserveFallbackWarning, Path
from hf_generate_shim.paged import is_paged, plain_arguments
from nanoserve_adapters.testing import tiny_tokenizer
from tests.hf_generate_shim.calls import EOS, PAD, batch, prompt, ragged

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle

PAGED: dict[str, Any] = {"cache_implementation": "paged"}
CALLS: dict[str, dict[str, Any]] = {
    "left padding": {**ragged(), "max_new_tokens": 8},
    "one prompt": {**batch(prompt(7)), "max_new_tokens": 8},
    "max_length": {**ragged(), "max_length": 14},
    "rows of unequal length": {**ragged(), "max_new_tokens": 12, "eos_token_id": list(range(60))},
    "repetition penalty": {**batch(prompt(9)), "max_new_tokens": 8, "repetition_penalty": 5.0},
    "min_new_tokens": {
        **ragged(),
        "max_new_tokens": 8,
        "min_new_tokens": 5,
        "eos_token_id": list(range(90)),
    },
    "bad words": {**ragged(), "max_new_tokens": 8, "bad_words_ids": [[97], [118, 61]]},
    "no limit on top_k": {**ragged(), "max_new_tokens": 8, "do_sample": True, "top_k": 1},
    "mask with a hole": {
        "input_ids": torch.tensor([[1, 2, 3, 4]]),
        "attention_mask": torch.tensor([[1, 0, 1, 1]]),
        "max_new_tokens": 6,
    },
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_paged_call_equals_the_plain_one(model: Qwen3ForCausalLM, call: dict[str, Any]) -> None:
    expected = model.generate(**call, pad_token_id=PAD)

    with hf_generate_shim.installed(model, num_kvcache_blocks=256) as handle:
        found = model.generate(**call, pad_token_id=PAD, **PAGED)

    assert found.tolist() == expected.tolist()
    assert handle.counters.fast == 1


def test_default_length_is_twenty_new_tokens(model: Qwen3ForCausalLM, handle: Handle) -> None:
    with pytest.warns(UserWarning, match="max_length"):
        found = model.generate(**batch(prompt(5)), **PAGED)

    assert found.shape == (1, 25)
    assert handle.counters.fast == 1


def test_prompt_may_come_first_and_flat(model: Qwen3ForCausalLM, handle: Handle) -> None:
    ids = torch.tensor(prompt(6))
    expected = model.generate(ids[None], max_new_tokens=5).tolist()

    found = model.generate(ids, max_new_tokens=5, **PAGED)

    assert found.tolist() == expected
    assert handle.counters.fast == 2


def test_dict_output_is_given_as_asked(model: Qwen3ForCausalLM, handle: Handle) -> None:
    call = {**ragged(), "max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**call)

    found = model.generate(**call, **PAGED)

    assert found.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    assert handle.counters.fast == 2


def test_beams_run_in_transformers_own_loop(model: Qwen3ForCausalLM, handle: Handle) -> None:
    call = {**ragged(), "max_new_tokens": 4, "num_beams": 3, "pad_token_id": PAD}
    with pytest.warns(NanoserveFallbackWarning, match="num_beams"):
        expected = model.generate(**call)

    found = model.generate(**call, **PAGED)

    assert found.tolist() == expected.tolist()
    assert handle.counters.fallback == 2


@pytest.mark.filterwarnings("ignore::hf_generate_shim.NanoserveFallbackWarning")
def test_stop_strings_are_honoured(model: Qwen3ForCausalLM) -> None:
    tokenizer = tiny_tokenizer()
    call = {**batch(prompt(7)), "max_new_tokens": 12, "tokenizer": tokenizer}
    byte = next(i for i in model.generate(**call)[0, 7:18].tolist() if 32 < i < 127)
    call["stop_strings"] = chr(byte)
    expected = model.generate(**call).tolist()

    with hf_generate_shim.installed(model, num_kvcache_blocks=256):
        found = model.generate(**call, **PAGED).tolist()

    assert found == expected
    assert len(found[0]) < 19


def test_seed_of_the_config_reproduces_a_sampled_call(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    call = {**ragged(), "max_new_tokens": 8, "do_sample": True, **PAGED}
    seeds = [11, 11, 12]
    configs = [ContinuousBatchingConfig(seed=seed) for seed in seeds]
    state = torch.random.get_rng_state()

    found = [
        model.generate(**call, continuous_batching_config=config).tolist() for config in configs
    ]

    assert found[0] == found[1] != found[2]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert handle.counters.fast == 3


def test_user_s_config_is_left_as_it_was(model: Qwen3ForCausalLM, handle: Handle) -> None:
    config = GenerationConfig(max_new_tokens=4, eos_token_id=EOS)
    before = config.to_dict()

    model.generate(**ragged(), generation_config=config, **PAGED)

    assert config.to_dict() == before
    assert handle.counters.fast == 1


def test_explain_sees_a_plain_call(model: Qwen3ForCausalLM, handle: Handle) -> None:
    explanation = hf_generate_shim.explain(model, **ragged(), max_new_tokens=4, **PAGED)

    assert explanation.path is Path.FAST
    assert handle.stats().steps == 0


def test_word_in_a_config_is_no_detour() -> None:
    assert not is_paged({"generation_config": GenerationConfig(cache_implementation="paged")})
    assert not is_paged({"custom_generate": "a/repo", **PAGED})
    assert is_paged(PAGED)


def test_arguments_of_the_detour_are_dropped_and_all_others_kept() -> None:
    kept = {"max_new_tokens": 3, "typo": 1}

    found = plain_arguments({**PAGED, "progress_bar": True, "warmup": False, **kept})

    assert found == kept
