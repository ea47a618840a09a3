"""What a served `generate` returns, warns about and draws at random."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.stopping_criteria import MaxTimeCriteria

import hf_generate_shim
from hf_generate_shim import NanoserveFallbackWarning, Path, TokenIdOutOfRange
from hf_generate_shim import handle as handle_module
from nanoserve_core.errors import InvalidRequest, UnsupportedOption
from tests.hf_generate_shim.calls import (
    CACHE,
    EOS,
    PAD,
    PENALTY_SKIPS_PADS,
    VOCAB_SIZE,
    Options,
    batch,
    new_model,
    new_tokens,
    prompt,
    ragged,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle

CALL: Options = {**ragged(), "max_new_tokens": 6}
UNTIL_TOO_LONG: Options = {"max_new_tokens": 255}
DICT: Options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def alone(model: Qwen3ForCausalLM, row: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens after one prompt by itself, by arg-maxing whole forwards: no `generate`."""
    ids = list(row)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(row) :]


def test_eight_left_padded_prompts_equal_their_single_runs(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    rows = [prompt(length) for length in (3, 11, 5, 17, 2, 8, 13, 1)]
    options = batch(*rows)

    output = model.generate(**options, max_new_tokens=32)

    assert new_tokens(output, options) == [alone(model, row, 32) for row in rows]
    assert output[:, :17].tolist() == options["input_ids"].tolist()
    assert handle.counters.fast == 1


def test_masked_token_in_the_middle_is_as_if_it_were_not_there(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    rows = [prompt(length) for length in (7, 9)]
    options = batch(*rows)
    options["attention_mask"][0, -2] = 0
    options["attention_mask"][1, 4] = 0

    output = model.generate(**options, max_new_tokens=12)

    without = [[*rows[0][:-2], rows[0][-1]], [*rows[1][:4], *rows[1][5:]]]
    assert new_tokens(output, options) == [alone(model, row, 12) for row in without]
    assert handle.counters.fast == 1


def test_right_padding_gives_the_text_of_the_unpadded_prompt(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    row = prompt(5)
    options = {
        "input_ids": torch.tensor([[*row, PAD, PAD], prompt(7)]),
        "attention_mask": torch.tensor([[1] * 5 + [0] * 2, [1] * 7]),
    }

    output = model.generate(**options, max_new_tokens=8)

    assert new_tokens(output, options)[0] == alone(model, row, 8)
    assert handle.counters.fast == 1


def rows_and_ends(
    model: Qwen3ForCausalLM,
) -> tuple[list[list[int]], list[list[int]], tuple[int, int]]:
    """Three prompts, their greedy tokens, and two ids: rows 0 and 1 meet one of them first at
    steps 2 and 5, row 2 never.
    """
    for seed in range(100):
        rows = [prompt(length, seed) for length in (4, 6, 9)]
        tokens = [alone(model, row, 12) for row in rows]
        a, b = tokens[0][1], tokens[1][4]
        if not {a, b} & {tokens[0][0], *tokens[1][:4], *tokens[2]}:
            return rows, tokens, (a, b)
    raise AssertionError("no such prompts: change the model's seed")


@pytest.mark.parametrize("pad", [None, "the first eos", 200])
def test_rows_end_at_their_eos_and_are_padded_to_the_longest(
    model: Qwen3ForCausalLM, pad: str | int | None
) -> None:
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    rows, tokens, (a, b) = rows_and_ends(model)
    options = {**batch(*rows), "eos_token_id": [a, b], "max_new_tokens": 12}
    options["pad_token_id"] = a if pad == "the first eos" else pad
    expected = model.generate(**options)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle:
        output = model.generate(**options)

    fill = options["pad_token_id"] or a
    assert output.tolist() == expected.tolist()
    assert new_tokens(output, options) == [
        [*tokens[0][:2], *[fill] * 10],
        [*tokens[1][:5], *[fill] * 7],
        tokens[2],
    ]
    assert handle.counters.fast == 1


def test_width_is_that_of_the_longest_row(model: Qwen3ForCausalLM, handle: Handle) -> None:
    options = {**ragged(), "max_new_tokens": 50, "eos_token_id": list(range(256))}

    output = model.generate(**options)

    assert output.shape[1] == options["input_ids"].shape[1] + 1
    assert handle.counters.fast == 1


def test_manual_seed_reproduces_a_sampled_call(model: Qwen3ForCausalLM, handle: Handle) -> None:
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model.generate(**CALL, do_sample=True).tolist())

    assert outputs[0] == outputs[1] != outputs[2]
    assert handle.counters.fast == 3


def test_sampled_calls_differ_and_draw_one_number_each(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    torch.manual_seed(0)
    first = model.generate(**CALL, do_sample=True).tolist()
    second = model.generate(**CALL, do_sample=True).tolist()
    after = torch.rand(())

    torch.manual_seed(0)
    for _ in range(2):
        torch.randint(2**63 - 1, ())
    expected = torch.rand(())

    assert first != second
    assert after == expected
    assert handle.counters.fast == 2


def test_greedy_call_draws_nothing(model: Qwen3ForCausalLM, handle: Handle) -> None:
    state = torch.get_rng_state()

    model.generate(**CALL)

    assert torch.equal(torch.get_rng_state(), state)
    assert handle.counters.fast == 1


def test_rows_with_one_prompt_are_sampled_apart(model: Qwen3ForCausalLM, handle: Handle) -> None:
    rows = [prompt(5), prompt(8), prompt(5)]
    options = {**batch(*rows), "do_sample": True, "max_new_tokens": 12, "top_k": 0}

    output = model.generate(**options, num_return_sequences=3)

    texts = {tuple(row) for row in new_tokens(output, options)}
    assert len(texts) == 9
    assert [row.tolist() for row in output[::3, :8]] == options["input_ids"].tolist()
    assert handle.stats().prompt_tokens_computed < 3 * (5 + 8)


def test_padding_and_neighbours_do_not_change_a_sampled_row(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    options = {"do_sample": True, "max_new_tokens": 12, "top_k": 0}
    single, padded = batch(prompt(5)), batch(prompt(5), prompt(9))

    torch.manual_seed(3)
    first = new_tokens(model.generate(**single, **options), single)
    torch.manual_seed(3)
    second = new_tokens(model.generate(**padded, **options), padded)

    assert first[0] == second[0]
    assert handle.counters.fast == 2


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_k": 0, "top_p": 0.6},
        {"top_k": 0, "min_p": 0.2},
        {"temperature": 0.4, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 0, "temperature": 2.0},
    ],
)
def test_tokens_come_from_what_transformers_filters_leave(
    model: Qwen3ForCausalLM, options: Options
) -> None:
    """The scores of the first step are transformers' own; each token has a finite score."""
    options = {**batch(prompt(6), prompt(9)), **DICT, **options, "do_sample": True}
    expected = model.generate(**options, max_new_tokens=1).scores[0]

    with hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle:
        output = model.generate(**options, max_new_tokens=8)

    torch.testing.assert_close(output.scores[0], expected, atol=1e-4, rtol=1e-4)
    for column, step in zip(output.sequences[:, -8:].unbind(1), output.scores, strict=True):
        assert torch.isfinite(step.gather(1, column[:, None])).all()
    assert handle.counters.fast == 1


def test_sampled_frequencies_are_those_of_the_softmax(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    options = {**batch(prompt(6)), "do_sample": True, "top_k": 0, "temperature": 2.0}
    with torch.no_grad():
        probabilities = (model(options["input_ids"]).logits[0, -1] / 2.0).softmax(-1)
    torch.manual_seed(0)

    output = model.generate(**options, max_new_tokens=1, num_return_sequences=400)

    counts = torch.bincount(output[:, -1], minlength=VOCAB_SIZE)
    top = probabilities.topk(5).indices
    expected = 400 * probabilities[top]
    sigma = (expected * (1 - probabilities[top])).sqrt()
    assert ((counts[top] - expected).abs() < 5 * sigma + 1).all()
    assert handle.counters.fast == 1


def test_transition_scores_can_be_computed_from_the_output(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    output = model.generate(**CALL, **DICT, eos_token_id=list(range(60)))

    scores = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)

    logits = torch.stack(output.logits, dim=1)
    columns = output.sequences[:, -len(output.scores) :]
    expected = logits.log_softmax(-1).gather(2, columns[:, :, None])[:, :, 0]
    torch.testing.assert_close(scores, expected)
    assert handle.counters.fast == 1


def test_scores_are_the_logits_when_nothing_processes_them(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    output = model.generate(**CALL, **DICT)

    assert all(a is b for a, b in zip(output.scores, output.logits, strict=True))
    assert handle.counters.fast == 1


def test_ended_rows_hold_zeros(model: Qwen3ForCausalLM, handle: Handle) -> None:
    tokens = alone(model, prompt(3), 1)
    options = {**ragged(2), **DICT, "eos_token_id": tokens, "max_new_tokens": 3}

    output = model.generate(**options)

    assert output.logits[0][0].any()
    assert not output.logits[1][0].any()
    assert output.logits[1][1].any()
    assert handle.counters.fast == 1


def test_cache_in_the_dict_continues_the_sequences(model: Qwen3ForCausalLM) -> None:
    options = {**CALL, "return_dict_in_generate": True}
    theirs = getattr(model.generate(**options), CACHE)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle:
        output = model.generate(**options)
        ours = getattr(output, CACHE)
        mask = torch.cat([CALL["attention_mask"], torch.ones(4, 6, dtype=torch.long)], dim=1)
        with pytest.warns(NanoserveFallbackWarning, match="past_key_values"):
            more = model.generate(
                output.sequences, attention_mask=mask, max_new_tokens=5, **{CACHE: ours}
            )

    assert isinstance(ours, DynamicCache)
    alive = mask[:, : theirs.get_seq_length()].bool()
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        kept = layer.keys[:, :, : alive.shape[1]].transpose(1, 2)[alive]
        torch.testing.assert_close(kept, expected.keys.transpose(1, 2)[alive])
    rows = [row.tolist() for row in more[:, -5:]]
    start = [[int(i) for i, m in zip(*pair, strict=True) if m]
             for pair in zip(output.sequences, mask, strict=True)]  # fmt: skip
    assert rows == [alone(model, row, 5) for row in start]
    assert (handle.counters.fast, handle.counters.fallback) == (1, 1)


def test_time_that_is_up_stops_after_one_token(model: Qwen3ForCausalLM, handle: Handle) -> None:
    expired = [MaxTimeCriteria(1.0, initial_timestamp=0.0)]

    output = model.generate(**ragged(), max_new_tokens=50, stopping_criteria=expired)

    assert output.shape[1] == ragged()["input_ids"].shape[1] + 1
    assert handle.counters.fast == 1


def test_fallback_warns_once_per_reason_and_names_the_option(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for options in (UNTIL_TOO_LONG, {"num_beams": 3}, {"num_beams": 2}):
            model.generate(**{**CALL, **options})

    assert {warning.category for warning in caught} == {NanoserveFallbackWarning}
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert texts[0].startswith("max_length=264 is not served by nanoserve: it holds at most")
    assert texts[1].startswith("num_beams=3 is not served by nanoserve: it samples one")
    assert {warning.filename for warning in caught} == {__file__}
    assert (handle.counters.fast, handle.counters.fallback) == (0, 3)
    assert sorted(handle.counters.reasons.values()) == [1, 2]


@pytest.mark.parametrize(
    ("option", "value"),
    [("num_beams", 4), ("output_attentions", True)],
)
def test_strict_refuses_with_option_value_and_way_out(
    model: Qwen3ForCausalLM,
    option: str,
    value: object,
) -> None:
    options = {**CALL, "return_dict_in_generate": True, option: value}

    with (
        hf_generate_shim.installed(model, strict=True) as handle,
        pytest.raises(UnsupportedOption, match=rf"{option}={value!r} .*\(strict=True\)"),
    ):
        model.generate(**options)

    assert (handle.counters.fast, handle.counters.fallback) == (0, 1)


def test_errors_of_transformers_stay_its_own(model: Qwen3ForCausalLM, handle: Handle) -> None:
    with pytest.raises(ValueError, match="temprature"):
        model.generate(**CALL, temprature=0.5)
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(**{**CALL, "max_new_tokens": 0})
    with pytest.raises(ValueError, match="num_return_sequences"):
        model.generate(**CALL, num_return_sequences=2)

    assert handle.counters == hf_generate_shim.Counters()


def test_ids_outside_the_vocabulary_and_empty_prompts_are_refused(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    with pytest.raises(TokenIdOutOfRange, match=r"input_ids\[0, 1\] is 263"):
        model.generate(torch.tensor([[1, VOCAB_SIZE]]), max_new_tokens=2)
    with pytest.raises(InvalidRequest, match="row 0 has no tokens"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=2)

    assert model.generate(**CALL).shape[0] == 4
    assert handle.counters.fast == 1


def test_row_too_long_for_the_pool_falls_back(model: Qwen3ForCausalLM) -> None:
    with hf_generate_shim.installed(model, num_kvcache_blocks=2) as handle:
        with pytest.warns(NanoserveFallbackWarning, match="max_length"):
            model.generate(**batch(prompt(30)), max_new_tokens=10)
        model.generate(**batch(prompt(10)), max_new_tokens=10)

    assert (handle.counters.fast, handle.counters.fallback) == (1, 1)


def test_default_length_is_that_of_the_model(model: Qwen3ForCausalLM, handle: Handle) -> None:
    output = model.generate(**batch(prompt(200)), max_new_tokens=56)

    assert output.shape == (1, 256)
    assert handle.counters.fast == 1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_grad_mode_of_the_caller_changes_no_token(
    model: Qwen3ForCausalLM, handle: Handle, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    expected = model.generate(**CALL, **DICT)

    with mode():
        output = model.generate(**CALL, **DICT)

    assert output.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(torch.stack(output.logits), torch.stack(expected.logits))
    assert output.sequences.is_inference() == (mode is torch.inference_mode)
    assert handle.counters.fast == 2


def test_large_outputs_are_announced_once(
    model: Qwen3ForCausalLM, handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_module, "OUTPUT_BUDGET_NBYTES", 1000)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.generate(**CALL, **DICT)

    assert len(caught) == 1
    assert "GiB" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert handle.counters.fast == 2


def test_options_of_the_caller_are_not_changed(model: Qwen3ForCausalLM, handle: Handle) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=4, eos_token_id=EOS, do_sample=True, top_k=3)
    before, ids = config.to_dict(), CALL["input_ids"].clone()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(CALL["input_ids"], config, attention_mask=CALL["attention_mask"])

    assert config.to_dict() == before
    assert torch.equal(CALL["input_ids"], ids)
    assert handle.counters.fast == 1


def test_explain_gives_the_path_and_every_reason(model: Qwen3ForCausalLM, handle: Handle) -> None:
    fast = hf_generate_shim.explain(model, **CALL)
    beams = hf_generate_shim.explain(model, **CALL, num_beams=2)
    two = hf_generate_shim.explain(
        model, **CALL, no_repeat_ngram_size=2, remove_invalid_values=True
    )

    assert (fast.path, fast.reasons, str(fast)) == (
        Path.FAST, (), "fast: the engine runs this call"
    )  # fmt: skip
    assert [reason.option for reason in beams.reasons] == ["num_beams"]
    assert [r.option for r in two.reasons] == ["no_repeat_ngram_size", "remove_invalid_values"]
    assert two.path is Path.LOCKSTEP
    assert str(two).startswith("lockstep: the engine runs all rows of this call step by step: ")
    assert "no_repeat_ngram_size=2: it has no" in str(two)
    assert handle.counters == hf_generate_shim.Counters()
    assert handle.stats().steps == 0


def test_explain_does_not_touch_the_streamer(model: Qwen3ForCausalLM, handle: Handle) -> None:
    explanation = hf_generate_shim.explain(model, **CALL, streamer=object())

    assert explanation.path is Path.FAST
    assert handle.stats().steps == 0


def test_explain_says_when_a_model_is_not_installed(model: Qwen3ForCausalLM) -> None:
    explanation = hf_generate_shim.explain(model, **CALL)

    assert explanation.path is Path.FALLBACK
    assert "install" in str(explanation)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[97], [118, 61]]},
        {"min_new_tokens": 5, "eos_token_id": list(range(90))},
    ],
)
def test_history_rules_on_ragged_rows_equal_transformers(options: Options) -> None:
    model = new_model()
    call = {**ragged(), "max_new_tokens": 12, **options}
    expected = model.generate(**call)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle:
        output = model.generate(**call)

    is_penalty = "repetition_penalty" in options
    is_fast = "no_repeat_ngram_size" not in options and (PENALTY_SKIPS_PADS or not is_penalty)
    assert output.tolist() == expected.tolist()
    assert (handle.counters.fast, handle.counters.lockstep) == (is_fast, not is_fast)
