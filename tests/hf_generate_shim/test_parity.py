"""The same call with and without the engine, over many combinations of arguments.

Oracle: transformers' own loop on the same float32 model, before anything was installed.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, Qwen3ForCausalLM
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
)

import hf_generate_shim
from hf_generate_shim import NanoserveFallbackWarning
from tests.hf_generate_shim.calls import (
    CACHE,
    EOS,
    PENALTY_SKIPS_PADS,
    Options,
    batch,
    new_model,
    prompt,
    ragged,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hf_generate_shim import Handle

Output: TypeAlias = Any
"""A tensor or a dict output."""

FEW = list(range(40))
"""Ids of which a row meets one after some six tokens."""
MANY = list(range(120))
DICT: Options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
SINGLE = batch(prompt(6))
EQUAL = batch(prompt(5, 1), prompt(5, 2), prompt(5, 3))
SAME = batch(prompt(4), prompt(7), prompt(4), prompt(4))


def holed() -> Options:
    """Left pads, and a masked token in the middle of three rows."""
    options = ragged()
    options["attention_mask"][1:, -3] = 0
    return options


class FifthColumn(StoppingCriteria):
    """Ends a row at its fifth token and looks at all of them."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """Done from column 13 on."""
        del scores, kwargs
        return torch.full((len(input_ids),), input_ids.shape[1] >= 13)


class NoThrees(hf.LogitsProcessor):
    """A user's own processor."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Forbid ids that three divides."""
        del input_ids
        scores[:, ::3] = -float("inf")
        return scores


FAST: dict[str, Options] = {
    "greedy": {},
    "single row": {**SINGLE},
    "equal lengths": {**EQUAL},
    "no mask": {"input_ids": EQUAL["input_ids"], "attention_mask": None},
    "repeated prompts": {**SAME},
    "holes in the mask": holed(),
    "int32 ids": {**SINGLE, "input_ids": SINGLE["input_ids"].int()},
    "bool mask": {"attention_mask": ragged()["attention_mask"].bool()},
    "float mask": {"attention_mask": ragged()["attention_mask"].float()},
    "one token": {"max_new_tokens": 1},
    "many tokens": {"max_new_tokens": 60},
    "max_length": {"max_new_tokens": None, "max_length": 15},
    "fraction of a token": {"max_new_tokens": 2.5},
    "eos": {"eos_token_id": 97},
    "eos list": {"eos_token_id": FEW, "max_new_tokens": 20},
    "eos list, pad in it": {"eos_token_id": FEW, "pad_token_id": 3, "max_new_tokens": 20},
    "eos list, other pad": {"eos_token_id": FEW, "pad_token_id": 200, "max_new_tokens": 20},
    "eos tensor": {"eos_token_id": torch.tensor(FEW), "max_new_tokens": 20},
    "eos beyond the vocabulary": {"eos_token_id": [5000, *FEW], "max_new_tokens": 20},
    "eos never": {"eos_token_id": -1},
    "eos at once": {"eos_token_id": list(range(256))},
    "min_length": {"eos_token_id": MANY, "min_length": 14, "max_new_tokens": 12},
    "min_new_tokens": {"eos_token_id": MANY, "min_new_tokens": 6, "max_new_tokens": 12},
    "min_new_tokens, no eos": {"min_new_tokens": 6},
    "max_time": {"max_time": 1000.0},
    "penalty": {**EQUAL, "repetition_penalty": 1.7, "max_new_tokens": 20},
    "reward": {**EQUAL, "repetition_penalty": 0.7},
    "penalty and min_new_tokens": {
        **EQUAL, "repetition_penalty": 1.3, "eos_token_id": MANY, "min_new_tokens": 4
    },
    "suppress_tokens": {"suppress_tokens": [*range(0, 256, 2), -1]},
    "bad words": {"bad_words_ids": [[97], [118], [56]]},
    "bad words of two tokens": {"bad_words_ids": [[97, 97], [118, 61], [157, 97]]},
    "sequence_bias": {"sequence_bias": [[[97], -9.0], [[20], 4.0]]},
    "bias that forbids, and penalty": {
        **EQUAL, "bad_words_ids": [[97]], "repetition_penalty": 1.3
    },
    "greedy with inherited filters": {
        "generation_config": GenerationConfig(max_new_tokens=8, do_sample=False),
    },
    "top_k 1": {"do_sample": True, "top_k": 1},
    "top_p almost 0": {"do_sample": True, "top_k": 0, "top_p": 1e-6},
    "min_p 1": {"do_sample": True, "top_k": 0, "min_p": 1.0},
    "almost no temperature": {"do_sample": True, "temperature": 1e-4},
    "all filters": {
        "do_sample": True, "temperature": 0.8, "top_k": 1, "top_p": 0.9, "min_p": 0.1
    },
    "several sequences": {"do_sample": True, "top_k": 1, "num_return_sequences": 3},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "dict": {"return_dict_in_generate": True},
    "dict with all": {**DICT},
    "dict, ended rows": {**DICT, "eos_token_id": FEW, "max_new_tokens": 20},
    "dict, scores only": {"return_dict_in_generate": True, "output_scores": True},
    "dict, processed scores": {**DICT, **EQUAL, "repetition_penalty": 1.5, "eos_token_id": MANY,
                               "min_new_tokens": 3},
    "dict, filtered scores": {**DICT, "do_sample": True, "top_k": 1, "temperature": 0.7},
    "dict, no cache": {**DICT, "use_cache": False},
    "forced eos": {"forced_eos_token_id": EOS, "eos_token_id": EOS},
    "forced eos list, other eos": {"forced_eos_token_id": [5, 7], "eos_token_id": FEW},
    "forced eos against minimum and bad words": {
        "forced_eos_token_id": EOS, "eos_token_id": EOS, "min_new_tokens": 8,
        "bad_words_ids": [[EOS], [97]],
    },
    "forced eos, fraction of a token": {"forced_eos_token_id": 5, "max_new_tokens": 2.5},
    "forced eos of which one is suppressed": {
        **DICT, "forced_eos_token_id": [9, 5], "suppress_tokens": [5, 97],
    },
    "forced bos": {**batch([65], [97]), "forced_bos_token_id": 77},
    "forced bos, longer prompt": {"forced_bos_token_id": 77},
    "begin_suppress_tokens": {"begin_suppress_tokens": [97, 118, -1, *range(0, 200, 2)]},
    "begin_suppress_tokens after forced bos": {
        **batch([65]), "forced_bos_token_id": 77, "begin_suppress_tokens": list(range(100))
    },
    "all rules for steps": {
        **DICT, "begin_suppress_tokens": list(range(60)), "forced_eos_token_id": 9,
        "suppress_tokens": list(range(100, 160)), "eos_token_id": [9, 61],
    },
    "renormalized": {"renormalize_logits": True},
    "dict, renormalized": {**DICT, "renormalize_logits": True, "eos_token_id": FEW},
    "dict, renormalized after filters": {
        **DICT, "renormalize_logits": True, "do_sample": True, "top_k": 1, "temperature": 0.7
    },
    "chunked prefill": {"prefill_chunk_size": 3},
    "no compilation": {"disable_compile": True, "compile_config": CompileConfig()},
    "sliding cache": {"cache_implementation": "sliding_window"},
    "hybrid cache": {"cache_implementation": "hybrid"},
    "dynamic cache": {"cache_implementation": "dynamic"},
    "dict, dynamic cache": {**DICT, "cache_implementation": "dynamic"},
    "logits to keep": {"logits_to_keep": 1},
    "own criteria of known classes": {
        "stopping_criteria": [MaxLengthCriteria(12), EosTokenCriteria(FEW)], "pad_token_id": 9,
    },
    "own processor of a known class": {
        "logits_processor": [hf.SuppressTokensLogitsProcessor([97, 118])],
    },
}  # fmt: skip

LOCKSTEP: dict[str, Options] = {
    "n-grams": {"no_repeat_ngram_size": 2},
    "own processor": {"logits_processor": [NoThrees()]},
    "own processor beside known ones": {
        "logits_processor": [NoThrees()], "bad_words_ids": [[97]], "do_sample": True, "top_k": 1
    },
    "own criterion": {"stopping_criteria": [FifthColumn()]},
    "penalty over holes": {**holed(), "repetition_penalty": 1.5},
    "bias before penalty": {
        **EQUAL, "sequence_bias": [[[97], 4.0]], "repetition_penalty": 1.5
    },
    "long bad word": {"bad_words_ids": [[97, 1, 2, 3]]},
    "top_p 0": {"do_sample": True, "top_k": 0, "top_p": 0.0},
}  # fmt: skip

FALLBACK: dict[str, Options] = {
    "beams": {"num_beams": 2},
    "prompt lookup": {**SINGLE, "prompt_lookup_num_tokens": 2},
    "attentions": {"return_dict_in_generate": True, "output_hidden_states": True},
    "beyond the positions": {"max_new_tokens": 255, "eos_token_id": FEW},
}  # fmt: skip

PADDED_PENALTY: dict[str, Options] = {
    "penalty, padded": {"repetition_penalty": 1.7, "max_new_tokens": 20},
    "dict, penalty, padded": {**DICT, "repetition_penalty": 1.5},
}
CASES = {**FAST, **LOCKSTEP, **FALLBACK, **PADDED_PENALTY}


def options_of(name: str) -> Options:
    """One case, eight tokens unless it says otherwise."""
    options = {**ragged(), "max_new_tokens": 8, **CASES[name]}
    if "generation_config" in options:
        del options["max_new_tokens"]
    return options


def run(model: Qwen3ForCausalLM, name: str) -> Output:
    """Run one case, without the warning of a fallback."""
    options = options_of(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NanoserveFallbackWarning)
        return model.generate(**options)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    """One model for all cases."""
    model = new_model()
    model.generation_config.update(temperature=0.6, top_k=20)
    return model


@pytest.fixture(scope="module")
def expected(model: Qwen3ForCausalLM) -> dict[str, Output]:
    """Every case by transformers' own loop."""
    assert "_sample" not in vars(Qwen3ForCausalLM)
    return {name: run(model, name) for name in CASES}


@pytest.fixture(scope="module")
def handle(model: Qwen3ForCausalLM, expected: dict[str, Output]) -> Iterator[Handle]:
    """The model installed, its engine started."""
    assert expected
    with hf_generate_shim.installed(model, num_kvcache_blocks=256) as handle:
        assert handle.thread.is_alive
        yield handle


@pytest.mark.parametrize("name", FAST)
def test_fast_call_equals_transformers(
    model: Qwen3ForCausalLM, expected: dict[str, Output], handle: Handle, name: str
) -> None:
    before = handle.counters

    output = run(model, name)

    assert_equal(output, expected[name], eos_of(name))
    assert (handle.counters.fast, handle.counters.fallback) == (before.fast + 1, before.fallback)


@pytest.mark.parametrize("name", LOCKSTEP)
def test_lockstep_call_equals_transformers(
    model: Qwen3ForCausalLM, expected: dict[str, Output], handle: Handle, name: str
) -> None:
    before = handle.counters

    output = run(model, name)

    assert_equal(output, expected[name], eos_of(name))
    counters = handle.counters
    assert (counters.lockstep, counters.fallback) == (before.lockstep + 1, before.fallback)


@pytest.mark.parametrize("name", CASES)
def test_path_is_foretold(model: Qwen3ForCausalLM, handle: Handle, name: str) -> None:
    before = handle.counters

    explanation = hf_generate_shim.explain(model, **options_of(name))

    run(model, name)
    after = handle.counters
    paths = ("fast", "lockstep", "fallback")
    (taken,) = (path for path in paths if vars(after)[path] > vars(before)[path])
    assert explanation.path == taken
    assert bool(explanation.reasons) == (taken != "fast")


@pytest.mark.parametrize("name", FALLBACK)
def test_fallback_equals_transformers(
    model: Qwen3ForCausalLM, expected: dict[str, Output], handle: Handle, name: str
) -> None:
    before = handle.counters

    output = run(model, name)

    assert_equal(output, expected[name], eos_of(name))
    assert (handle.counters.fast, handle.counters.fallback) == (before.fast, before.fallback + 1)
    assert sum(handle.counters.reasons.values()) == handle.counters.fallback


@pytest.mark.parametrize("name", PADDED_PENALTY)
def test_penalty_on_padded_rows_equals_transformers(
    model: Qwen3ForCausalLM, expected: dict[str, Output], handle: Handle, name: str
) -> None:
    before = handle.counters

    output = run(model, name)

    assert_equal(output, expected[name], eos_of(name))
    assert handle.counters.fast == before.fast + PENALTY_SKIPS_PADS
    assert handle.counters.fallback == before.fallback


def test_nothing_was_left_in_the_engine(handle: Handle) -> None:
    stats = handle.stats()

    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks == stats.num_blocks


def eos_of(name: str) -> list[int]:
    """The ids that end a row in this case."""
    eos = CASES[name].get("eos_token_id", [])
    return list(eos) if isinstance(eos, list) else torch.as_tensor(eos).flatten().tolist()


def assert_equal(output: Output, expected: Output, eos: list[int]) -> None:
    """Same type, tokens, dtype and device; scores and logits close wherever a row was alive."""
    assert type(output) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert output.dtype == expected.dtype
        assert output.tolist() == expected.tolist()
        assert not output.is_inference()
        return
    assert isinstance(expected, GenerateDecoderOnlyOutput)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert set(output) == set(expected)
    for name in ("scores", "logits"):
        assert_close(getattr(output, name), getattr(expected, name), alive(expected, eos))
    cache, other = getattr(output, CACHE), getattr(expected, CACHE)
    assert (cache is None) == (other is None)
    assert cache is None or cache.get_seq_length() == other.get_seq_length()


def assert_close(
    output: tuple[torch.Tensor, ...] | None,
    expected: tuple[torch.Tensor, ...] | None,
    alive: list[torch.Tensor],
) -> None:
    """One float32 [num_rows, vocab_size] per step."""
    assert (output is None) == (expected is None)
    for ours, theirs, rows in zip(output or (), expected or (), alive, strict=False):
        assert ours.shape == theirs.shape
        assert ours.dtype == torch.float32
        assert not ours.is_inference()
        assert not ours.requires_grad
        assert not torch.isnan(ours[~rows]).any()
        torch.testing.assert_close(ours[rows], theirs[rows], atol=2e-5, rtol=2e-5)
    assert len(output or ()) == len(expected or ())


def alive(output: GenerateDecoderOnlyOutput, eos: list[int]) -> list[torch.Tensor]:
    """For each step which rows had not ended before it: [num_rows] bool."""
    num_steps = len(output.scores or output.logits or ())
    ended = torch.zeros(len(output.sequences), dtype=torch.bool)
    steps = []
    for column in output.sequences[:, output.sequences.shape[1] - num_steps :].unbind(1):
        steps.append(~ended)
        ended = ended | torch.isin(column, torch.tensor(eos))
    return steps
