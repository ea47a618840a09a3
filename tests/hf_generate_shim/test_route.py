"""The path of a call is decided from what transformers prepared for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, StoppingCriteria

from hf_generate_shim import Path, TokenIdOutOfRange
from hf_generate_shim.route import Route, decide
from nanoserve_core.errors import InvalidRequest
from nanoserve_core.sampling_params import SamplingParams
from tests.hf_generate_shim.calls import (
    CACHE,
    EOS,
    PAD,
    PENALTY_SKIPS_PADS,
    VOCAB_SIZE,
    batch,
    capture,
    prompt,
    ragged,
)

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


def route(model: Qwen3ForCausalLM, **options: Any) -> Route:  # Any: arguments of generate
    """The route of `ragged` with these options."""
    call = capture(model, **{**ragged(), "max_new_tokens": 6, **options})
    return decide(call, max_model_len=256, has_user_cache=False)


def sampling(model: Qwen3ForCausalLM, **options: Any) -> SamplingParams:  # Any: as above
    """The sampling options of a fast call."""
    task = route(model, **options).task
    assert task is not None
    return task.sampling


def test_greedy_call_is_fast_whatever_temperature_the_checkpoint_recommends(
    model: Qwen3ForCausalLM,
) -> None:
    model.generation_config.update(temperature=0.6, top_k=20, top_p=0.95)

    params = sampling(model, do_sample=False)

    assert params == SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False
    )


def test_sampled_call_inherits_what_is_unset(model: Qwen3ForCausalLM) -> None:
    model.generation_config.update(temperature=0.6, top_k=20, top_p=0.95)

    params = sampling(model, do_sample=True, temperature=1.0, min_p=0.1)

    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 20, 0.95, 0.1)


def test_prompts_lose_their_pads(model: Qwen3ForCausalLM) -> None:
    rows = [prompt(3), prompt(7)]

    task = route(model, **batch(*rows)).task

    assert task is not None
    assert [list(row) for row in task.rows] == rows


def test_eos_list_becomes_stop_ids_and_the_first_is_the_pad(model: Qwen3ForCausalLM) -> None:
    task = route(model, eos_token_id=[40, EOS], pad_token_id=None, min_new_tokens=2).task

    assert task is not None
    assert (task.sampling.stop_token_ids, task.sampling.min_tokens) == ((40, EOS), 2)
    assert task.pad_token_id in (40, PAD)  # the model's config has a pad id of its own


def test_eos_of_minus_one_never_stops(model: Qwen3ForCausalLM) -> None:
    assert sampling(model, eos_token_id=-1).stop_token_ids == ()


def test_lengths_count_padded_columns(model: Qwen3ForCausalLM) -> None:
    width = ragged()["input_ids"].shape[1]

    params = sampling(
        model, max_new_tokens=None, max_length=width + 9, min_length=width + 3, eos_token_id=EOS
    )

    assert (params.max_tokens, params.min_tokens) == (9, 3)


def test_minimum_above_the_maximum_is_cut(model: Qwen3ForCausalLM) -> None:
    with pytest.warns(UserWarning, match="Unfeasible length"):
        params = sampling(model, max_new_tokens=3, min_new_tokens=8, eos_token_id=EOS)

    assert (params.max_tokens, params.min_tokens) == (3, 3)


@pytest.mark.parametrize(
    ("wanted", "logits", "scores"),
    [
        ({"output_logits": True}, True, False),
        ({"output_scores": True}, True, False),  # without processors they are the same
        ({"output_scores": True, "suppress_tokens": [3]}, False, True),
        ({"output_scores": True, "output_logits": True, "suppress_tokens": [3]}, True, True),
        ({}, False, False),
    ],
)
def test_outputs_that_are_asked_for_are_kept(
    model: Qwen3ForCausalLM, wanted: dict[str, Any], logits: bool, scores: bool
) -> None:
    task = route(model, return_dict_in_generate=True, **wanted).task

    assert task is not None
    assert (task.output_logits, task.output_scores) == (logits, scores)


def test_outputs_are_not_kept_without_a_dict(model: Qwen3ForCausalLM) -> None:
    task = route(model, output_scores=True).task

    assert task is not None
    assert not task.output_scores
    assert not task.output_logits


FAST = {
    "use_cache": False,
    "cache_implementation": "static",
    "max_time": 100.0,
    "logits_to_keep": 1,
    "prefill_chunk_size": 4,
    "disable_compile": True,
    "num_return_sequences": 1,
    "suppress_tokens": [3, 4],
    "bad_words_ids": [[3], [4]],
    "sequence_bias": [[[3], -5.0]],
    "forced_bos_token_id": 3,
    "forced_eos_token_id": EOS,
    "begin_suppress_tokens": [3],
    "renormalize_logits": True,
    "compile_config": CompileConfig(),
}


@pytest.mark.parametrize("name", FAST)
def test_option_is_fast(model: Qwen3ForCausalLM, name: str) -> None:
    found = route(model, **{name: FAST[name]})

    assert (found.path, found.reasons) == (Path.FAST, ())


LOCKSTEP = {
    "no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.5),
    "guidance_scale": 1.5,
    "prefix_allowed_tokens_fn": lambda *_: [1, 2],
    "logits_processor": [LogitsProcessor()],
    "stopping_criteria": [StoppingCriteria()],
}


@pytest.mark.parametrize("name", LOCKSTEP)
def test_option_goes_in_lockstep_and_is_named(model: Qwen3ForCausalLM, name: str) -> None:
    found = route(model, eos_token_id=EOS, return_dict_in_generate=True, **{name: LOCKSTEP[name]})

    assert found.path is Path.LOCKSTEP
    assert [reason.option for reason in found.reasons] == [name]
    assert found.task is not None
    assert found.task.is_lockstep


def test_random_numbers_of_transformers_are_drawn_in_lockstep(model: Qwen3ForCausalLM) -> None:
    call = capture(model, **ragged(), max_new_tokens=4, do_sample=True)
    greedy = capture(model, **ragged(), max_new_tokens=4, do_sample=False)

    found = decide(call, max_model_len=256, has_user_cache=False, rng="hf")

    assert (found.path, [r.option for r in found.reasons]) == (Path.LOCKSTEP, ["rng"])
    assert decide(greedy, max_model_len=256, has_user_cache=False, rng="hf").path is Path.FAST


def test_missing_upper_limit_falls_back(model: Qwen3ForCausalLM) -> None:
    call = capture(model, **ragged(), max_new_tokens=4)
    call.stopping_criteria.clear()

    found = decide(call, max_model_len=256, has_user_cache=False)

    assert [reason.option for reason in found.reasons] == ["max_length"]


FALLBACK = {
    "output_attentions": True,
    "output_hidden_states": True,
    "is_assistant": True,
}


@pytest.mark.parametrize("name", FALLBACK)
def test_option_falls_back_and_is_named(model: Qwen3ForCausalLM, name: str) -> None:
    found = route(model, eos_token_id=EOS, return_dict_in_generate=True, **{name: FALLBACK[name]})

    assert found.path is Path.FALLBACK
    assert name in [reason.option for reason in found.reasons]


def test_penalty_on_padded_rows_depends_on_the_version(model: Qwen3ForCausalLM) -> None:
    found = route(model, repetition_penalty=1.5)

    assert (found.path is Path.FAST) == PENALTY_SKIPS_PADS


def test_static_cache_in_a_dict_falls_back(model: Qwen3ForCausalLM) -> None:
    found = route(model, cache_implementation="static", return_dict_in_generate=True)

    assert [reason.option for reason in found.reasons] == ["cache_implementation"]


def test_chunks_without_a_cache_are_left_to_transformers_to_refuse(
    model: Qwen3ForCausalLM,
) -> None:
    without = route(model, prefill_chunk_size=2, use_cache=False)
    with_cache = route(model, prefill_chunk_size=2)

    assert [reason.option for reason in without.reasons] == ["prefill_chunk_size"]
    assert with_cache.path is Path.FAST


def test_cache_of_the_caller_falls_back(model: Qwen3ForCausalLM) -> None:
    call = capture(model, **ragged(), max_new_tokens=4, **{CACHE: DynamicCache()})

    found = decide(call, max_model_len=256, has_user_cache=True)

    assert [reason.option for reason in found.reasons] == ["past_key_values"]


def test_embeddings_fall_back(model: Qwen3ForCausalLM) -> None:
    call = capture(model, inputs_embeds=torch.zeros(1, 3, 64), max_new_tokens=4)

    found = decide(call, max_model_len=256, has_user_cache=False)

    assert "inputs_embeds" in [reason.option for reason in found.reasons]


def test_row_without_tokens_falls_back(model: Qwen3ForCausalLM) -> None:
    options = ragged()
    options["attention_mask"][1] = 0

    found = route(model, **options)

    assert [reason.option for reason in found.reasons] == ["attention_mask"]


def test_positions_other_than_the_default_fall_back(model: Qwen3ForCausalLM) -> None:
    options = ragged()
    width = options["input_ids"].shape[1]
    default = (options["attention_mask"].cumsum(-1) - 1).clamp(min=0)

    same = route(model, **options, position_ids=default)
    other = route(model, **options, position_ids=torch.arange(width).expand(4, -1))

    assert same.path is Path.FAST
    assert [reason.option for reason in other.reasons] == ["position_ids"]


def test_length_beyond_the_engine_s_falls_back(model: Qwen3ForCausalLM) -> None:
    found = route(model, max_new_tokens=250)

    assert [reason.option for reason in found.reasons] == ["max_length"]


def test_eos_criterion_without_a_pad_falls_back() -> None:
    from tests.hf_generate_shim.calls import new_model

    model = new_model(pad_token_id=None)

    found = route(model, stopping_criteria=[EosTokenCriteria(EOS)])

    assert [reason.option for reason in found.reasons] == ["pad_token_id"]


def test_minimum_that_forbids_other_ids_falls_back(model: Qwen3ForCausalLM) -> None:
    found = route(
        model, eos_token_id=EOS, min_new_tokens=2, stopping_criteria=[EosTokenCriteria([3, 4])]
    )

    assert [reason.option for reason in found.reasons] == ["min_new_tokens"]


def test_autocast_falls_back(model: Qwen3ForCausalLM) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = route(model)

    assert [reason.option for reason in found.reasons] == ["autocast"]


def test_all_reasons_are_found_not_only_the_first(model: Qwen3ForCausalLM) -> None:
    found = route(model, no_repeat_ngram_size=2, remove_invalid_values=True)

    assert [reason.option for reason in found.reasons] == [
        "no_repeat_ngram_size",
        "remove_invalid_values",
    ]


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1])
def test_id_outside_the_vocabulary_is_refused_before_anything_runs(
    model: Qwen3ForCausalLM, token_id: int
) -> None:
    options = ragged()
    options["input_ids"][2, -1] = token_id

    with pytest.raises(TokenIdOutOfRange, match=rf"input_ids\[2, 8\] is {token_id}") as caught:
        route(model, **options)

    assert isinstance(caught.value, IndexError)
    assert isinstance(caught.value, ValueError)


def test_masked_id_outside_the_vocabulary_does_not_matter(model: Qwen3ForCausalLM) -> None:
    found = route(model, **batch(prompt(3), prompt(5), pad=VOCAB_SIZE + 5))

    assert found.path is Path.FAST


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_empty_prompt_is_refused(model: Qwen3ForCausalLM, shape: tuple[int, int]) -> None:
    call = capture(model, **ragged(), max_new_tokens=4)
    empty = torch.zeros(shape, dtype=torch.long)
    call = type(call)(**{**vars(call), "input_ids": empty, "model_kwargs": {}})

    with pytest.raises(InvalidRequest, match="at least one token"):
        decide(call, max_model_len=256, has_user_cache=False)
