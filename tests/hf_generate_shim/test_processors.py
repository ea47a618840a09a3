"""Logits processors come back as sampling options, each from its own attributes, or as reasons."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

from hf_generate_shim.processors import SamplingDraft, read_processors
from hf_generate_shim.prompts import Prompts
from hf_generate_shim.step_rules import StepRule
from tests.hf_generate_shim.calls import PENALTY_SKIPS_PADS

IDS = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]])
PADDED = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
HOLED = torch.tensor([[0, 0, 1, 0, 1], [1, 1, 1, 1, 1]])
VOCAB_SIZE = 50


class MyProcessor(hf.LogitsProcessor):
    """A user's own."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change nothing."""
        del input_ids
        return scores


class MyTemperature(hf.TemperatureLogitsWarper):
    """A subclass may do anything."""


def read(
    *processors: object, mask: torch.Tensor | None = None, do_sample: bool = True, **config: Any
) -> tuple[SamplingDraft, list[str]]:
    """The draft, and the options that were refused. Any: values of the generation config."""
    draft = SamplingDraft(
        prompts=Prompts.read(IDS, mask), vocab_size=VOCAB_SIZE, do_sample=do_sample
    )
    reasons = read_processors(processors, draft, SimpleNamespace(**config))
    return draft, [reason.option for reason in reasons]


def test_warpers_in_transformers_order_give_their_parameters() -> None:
    draft, refused = read(
        hf.TemperatureLogitsWarper(0.7),
        hf.TopKLogitsWarper(20),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.05),
    )

    assert refused == []
    assert draft.options == {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05}


@pytest.mark.parametrize(
    "processors",
    [
        [hf.TopKLogitsWarper(5), hf.TemperatureLogitsWarper(0.5)],
        [hf.TemperatureLogitsWarper(0.5), hf.TemperatureLogitsWarper(0.5)],
        [hf.MinPLogitsWarper(0.5), hf.TopPLogitsWarper(0.5)],
        [hf.TopKLogitsWarper(5), hf.SuppressTokensLogitsProcessor([3])],
        [hf.TopKLogitsWarper(5), hf.MinLengthLogitsProcessor(9, 3)],
        [hf.TemperatureLogitsWarper(0.5), hf.RepetitionPenaltyLogitsProcessor(1.5)],
        [hf.LogitNormalization(), hf.TopKLogitsWarper(5)],
        [hf.LogitNormalization(), hf.ForcedBOSTokenLogitsProcessor(3)],
        [hf.ForcedEOSTokenLogitsProcessor(9, 3), hf.RepetitionPenaltyLogitsProcessor(1.5)],
        [hf.ForcedEOSTokenLogitsProcessor(9, 3), hf.NoBadWordsLogitsProcessor([[3]])],
        [hf.SequenceBiasLogitsProcessor([[[3], 2.0]]), hf.RepetitionPenaltyLogitsProcessor(1.5)],
    ],
)
def test_another_order_than_the_engine_s_is_refused(processors: list[object]) -> None:
    _, refused = read(*processors)

    assert len(refused) == 1


@pytest.mark.parametrize(
    "warper",
    [
        hf.TopPLogitsWarper(0.0),
        hf.TopPLogitsWarper(0.5, min_tokens_to_keep=2),
        hf.MinPLogitsWarper(0.5, filter_value=-1e4),
        hf.TopKLogitsWarper(5, filter_value=0.0),
        MyTemperature(0.7),
        MyProcessor(),
        hf.TypicalLogitsWarper(0.5),
        hf.ForcedEOSTokenLogitsProcessor(9, VOCAB_SIZE),
    ],
)
def test_parameters_and_classes_without_counterpart_are_refused(warper: object) -> None:
    _, refused = read(warper)

    assert len(refused) == 1


def test_filters_of_a_greedy_search_are_refused() -> None:
    _, refused = read(hf.TopKLogitsWarper(5), do_sample=False)

    assert len(refused) == 1


def test_top_k_has_taken_the_tokens_to_keep_into_its_number() -> None:
    draft, refused = read(hf.TopKLogitsWarper(2, min_tokens_to_keep=4))

    assert (draft.options["top_k"], refused) == (4, [])


def test_penalty_without_pads_is_taken() -> None:
    draft, refused = read(hf.RepetitionPenaltyLogitsProcessor(1.5))

    assert (draft.options, refused) == ({"repetition_penalty": 1.5}, [])


@pytest.mark.parametrize("mask", [PADDED, HOLED])
def test_penalty_that_sees_the_pads_is_refused(mask: torch.Tensor) -> None:
    _, refused = read(hf.RepetitionPenaltyLogitsProcessor(1.5), mask=mask, repetition_penalty=1.5)

    assert refused == ["repetition_penalty"]


def test_penalty_that_ignores_a_part_of_the_prompt_is_refused() -> None:
    _, refused = read(hf.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2))

    assert refused == ["logits_processor"]


@pytest.mark.skipif(not PENALTY_SKIPS_PADS, reason="takes one number for all rows")
@pytest.mark.parametrize(("mask", "num_refused"), [(PADDED, 0), (HOLED, 1)])
def test_penalty_that_ignores_exactly_the_pads_is_taken(
    mask: torch.Tensor, num_refused: int
) -> None:
    ignored = torch.tensor([2, 0])

    _, refused = read(
        hf.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=ignored), mask=mask
    )

    assert len(refused) == num_refused


def test_finite_bias_after_the_penalty_is_the_engine_s_order() -> None:
    draft, refused = read(
        hf.RepetitionPenaltyLogitsProcessor(1.5), hf.SequenceBiasLogitsProcessor([[[3], 2.0]])
    )

    assert (draft.logit_bias, refused) == ({3: 2.0}, [])


def test_bad_words_become_biases_and_words() -> None:
    draft, refused = read(hf.NoBadWordsLogitsProcessor([[3], [4, 5], [6]], eos_token_id=6))

    assert refused == []
    assert draft.logit_bias == {3: -math.inf}
    assert draft.bad_words == [(4, 5)]


@pytest.mark.parametrize(("mask", "num_refused"), [(None, 0), (PADDED, 1), (HOLED, 1)])
def test_bad_words_that_could_match_masked_tokens_are_refused(
    mask: torch.Tensor | None, num_refused: int
) -> None:
    _, refused = read(hf.NoBadWordsLogitsProcessor([[4, 5, 6, 7]]), mask=mask)

    assert len(refused) == num_refused


@pytest.mark.parametrize(
    "bias", [[[3], math.inf], [[3], math.nan], [[3, 4], 1.0], [[VOCAB_SIZE], 1.0]]
)
def test_biases_without_counterpart_are_refused(bias: list[Any]) -> None:
    _, refused = read(hf.SequenceBiasLogitsProcessor([bias]), sequence_bias=[bias])

    assert refused == ["sequence_bias"]


def test_minimum_lengths_count_new_tokens() -> None:
    draft, refused = read(
        hf.MinLengthLogitsProcessor(8, 3), hf.MinNewTokensLengthLogitsProcessor(5, 2, [3, 4])
    )

    assert refused == []
    assert (draft.min_tokens, draft.min_tokens_ids) == (3, {3, 4})


def test_minimum_length_within_the_prompt_forbids_nothing() -> None:
    draft, _ = read(hf.MinLengthLogitsProcessor(4, 3))

    assert (draft.min_tokens, draft.min_tokens_ids) == (0, set())


def test_suppressed_tokens_outside_the_vocabulary_are_left_out() -> None:
    draft, refused = read(hf.SuppressTokensLogitsProcessor([3, -1, VOCAB_SIZE]))

    assert (draft.logit_bias, refused) == ({3: -math.inf}, [])


def test_forced_bos_acts_on_prompts_of_one_token_only() -> None:
    draft, refused = read(hf.ForcedBOSTokenLogitsProcessor(3))

    assert (draft.step_rules, refused) == ([], [])


def test_rules_for_single_steps_count_new_tokens() -> None:
    draft, refused = read(
        hf.ForcedEOSTokenLogitsProcessor(9, [3, 4]),
        hf.SuppressTokensLogitsProcessor([5]),
        hf.SuppressTokensAtBeginLogitsProcessor([6, VOCAB_SIZE], 5),
    )

    assert refused == []
    assert draft.step_rules == [
        StepRule(step=3, token_ids=(3, 4), is_forced=True),
        StepRule(step=0, token_ids=(6,), is_forced=False),
    ]


def test_reason_names_the_argument_that_made_the_processor() -> None:
    draft = SamplingDraft(prompts=Prompts.read(IDS, None), vocab_size=VOCAB_SIZE, do_sample=True)
    config = SimpleNamespace(typical_p=0.5)

    reasons = read_processors([hf.TypicalLogitsWarper(0.5), MyProcessor()], draft, config)

    assert [(reason.option, reason.value) for reason in reasons] == [
        ("typical_p", 0.5),
        ("logits_processor", "MyProcessor"),
    ]
