"""What transformers warns of and refuses, it warns of and refuses on an installed model too.

Oracle: the same call before the model was installed: kind and text of its error, or its tokens and
the warnings on the way.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from transformers import DynamicCache, TextStreamer

import hf_generate_shim
from hf_generate_shim import NanoserveFallbackWarning
from nanoserve_adapters.testing import tiny_tokenizer
from nanoserve_core.errors import RequestFailed
from tests.hf_generate_shim.calls import CACHE, EOS, VOCAB_SIZE, Options, batch, prompt, ragged

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle

SAMPLED: Options = {"do_sample": True, "max_new_tokens": 3}


class Outcome(NamedTuple):
    """What a user sees of a call."""

    error: tuple[type, str] | None
    tokens: object
    warnings: list[tuple[type, str]]


def outcome(model: Qwen3ForCausalLM, options: Options) -> Outcome:
    """Run the call; a warning of a fallback is the door's own and does not count."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            output = model.generate(**options)
        except Exception as found:  # noqa: BLE001 - it is what the test compares
            result = Outcome((type(found), str(found)), None, [])
        else:
            result = Outcome(None, output.tolist(), [])
    theirs = [w for w in caught if w.category is not NanoserveFallbackWarning]
    return result._replace(warnings=[(w.category, str(w.message)) for w in theirs])


REFUSED: dict[str, Options] = {
    "max_length within the prompt": {"max_length": 4},
    "no new tokens": {"max_new_tokens": 0},
    "fewer than no new tokens": {"max_new_tokens": -1},
    "several greedy sequences": {"num_return_sequences": 2},
    "more sequences than beams": {"num_beams": 2, "num_return_sequences": 3},
    "temperature 0": {**SAMPLED, "temperature": 0.0},
    "negative temperature": {**SAMPLED, "temperature": -1.0},
    "integer temperature": {**SAMPLED, "temperature": 2},
    "penalty 0": {**SAMPLED, "repetition_penalty": 0.0},
    "integer penalty": {**SAMPLED, "repetition_penalty": 2},
    "negative top_k": {**SAMPLED, "top_k": -1},
    "min_p 2": {**SAMPLED, "min_p": 2.0},
    "healing without a tokenizer": {"token_healing": True},
    "unknown argument": {"temprature": 0.5},
    "argument of the model that generate does not pass on": {"return_dict": True},
    "generator": {**SAMPLED, "generator": torch.Generator()},
    "three-dimensional mask": {"attention_mask": torch.ones(4, 9, 9)},
    "tuple as a cache": {CACHE: ((torch.zeros(1), torch.zeros(1)),)},
    "two caches": {CACHE: DynamicCache(), "cache_implementation": "static"},
    "unknown cache": {"cache_implementation": "bogus"},
    "streamer and beams": {"num_beams": 2, "streamer": TextStreamer(tiny_tokenizer())},
    "text streamer and a batch": {"streamer": TextStreamer(tiny_tokenizer())},
    "ids twice": {"inputs": ragged()["input_ids"]},
    "ids of one dimension": {"input_ids": torch.tensor([1, 2, 3]), "attention_mask": None},
    "ids in a list": {"input_ids": [[1, 2, 3]], "attention_mask": None},
    "float ids": {"input_ids": torch.ones(1, 3), "attention_mask": None},
}  # fmt: skip

RUNS: dict[str, Options] = {
    "no length": {},
    "minimum above maximum": {"min_new_tokens": 8, "max_new_tokens": 3, "eos_token_id": EOS},
    "both lengths": {"max_new_tokens": 3, "max_length": 100},
    "top_p above 1": {"do_sample": True, "max_new_tokens": 3, "top_k": 1, "top_p": 1.5},
    "top_p 0": {"do_sample": True, "max_new_tokens": 3, "top_k": 0, "top_p": 0.0},
    "top_k 0": {"do_sample": True, "max_new_tokens": 3, "top_k": 0, "temperature": 1e-4},
    "sampling options of a greedy call": {"max_new_tokens": 3, "temperature": 0.6, "top_p": 0.9},
    "row of masked tokens": {
        **batch(prompt(3), prompt(3)), "max_new_tokens": 3,
        "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]]),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_error_is_transformers_own(model: Qwen3ForCausalLM, name: str) -> None:
    options: Options = {**ragged(), **REFUSED[name]}
    expected = outcome(model, options)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64):
        found = outcome(model, options)

    assert expected.error is not None
    assert found == expected


@pytest.mark.parametrize("name", RUNS)
def test_tokens_and_warnings_are_transformers_own(model: Qwen3ForCausalLM, name: str) -> None:
    options: Options = {**ragged(), **RUNS[name]}
    expected = outcome(model, options)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64):
        found = outcome(model, options)

    assert expected.error is None
    assert found == expected


def test_edited_model_config_is_refused_by_transformers(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    model.config.temperature = 0.5
    model.config.max_length = 30

    with pytest.raises(ValueError, match="modified the pretrained model configuration"):
        model.generate(**ragged())

    assert handle.counters.fast == 0


def forbid_all(model: Qwen3ForCausalLM) -> Options:
    """Every token is suppressed."""
    del model
    return {"suppress_tokens": list(range(VOCAB_SIZE))}


def make_nan(model: Qwen3ForCausalLM) -> Options:
    """The model computes no numbers."""
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    return {}


@pytest.mark.parametrize("spoil", [forbid_all, make_nan])
def test_greedy_row_without_a_best_token_takes_the_first(
    model: Qwen3ForCausalLM, spoil: Callable[[Qwen3ForCausalLM], Options]
) -> None:
    options = {**ragged(), "max_new_tokens": 3, **spoil(model)}
    expected = outcome(model, options)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle:
        found = outcome(model, options)

    assert found == expected
    assert handle.counters.fast == 1


@pytest.mark.parametrize("spoil", [forbid_all, make_nan])
def test_sampled_row_without_probabilities_fails_alone(
    model: Qwen3ForCausalLM, spoil: Callable[[Qwen3ForCausalLM], Options]
) -> None:
    options: dict[str, Any] = {**ragged(), **SAMPLED, "top_k": 0, **spoil(model)}
    expected = outcome(model, options)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle:
        with pytest.raises(RequestFailed) as caught:
            model.generate(**options)
        after = model.generate(**batch(prompt(4)), max_new_tokens=2)

    assert expected.error is not None
    assert issubclass(expected.error[0], RuntimeError)
    assert isinstance(caught.value, RuntimeError)
    assert after.shape == (1, 6)
    assert handle.counters.fast == 2
