"""Stopping criteria come back as rules, or as reasons."""

from __future__ import annotations

import time

import pytest
import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
)

from hf_generate_shim.criteria import StopRules, TimeLimit, read_criteria


class StopNow(StoppingCriteria):
    """A user's own criterion."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """Stop every row."""
        del scores, kwargs
        return torch.ones(len(input_ids), dtype=torch.bool)


class LongerThan(MaxLengthCriteria):
    """A subclass may do anything."""


def read(*criteria: object) -> tuple[StopRules, list[str]]:
    """The rules and the options that were refused."""
    rules = StopRules()
    reasons = read_criteria(criteria, rules)
    return rules, [reason.option for reason in reasons]


@pytest.mark.parametrize(("max_length", "expected"), [(15, 5), (12.5, 3), (10, 1), (3, 1)])
def test_max_length_counts_the_prompt_and_leaves_one_token(
    max_length: float, expected: int
) -> None:
    rules, refused = read(MaxLengthCriteria(max_length), MaxLengthCriteria(99))

    assert (rules.max_tokens(width=10), refused) == (expected, [])


def test_eos_ids_are_merged_and_minus_one_never_ends_a_row() -> None:
    rules, _ = read(MaxLengthCriteria(9), EosTokenCriteria([7, -1, 3]), EosTokenCriteria(500))

    assert rules.has_eos_criterion
    assert rules.known_eos_ids(vocab_size=100) == [3, 7]


@pytest.mark.parametrize(
    "criterion", [StopNow(), LongerThan(5), EosTokenCriteria(torch.tensor([2.0]))]
)
def test_foreign_criterion_is_refused_by_its_class(criterion: StoppingCriteria) -> None:
    rules = StopRules()

    (reason,) = read_criteria([MaxLengthCriteria(9), criterion], rules)

    assert (reason.option, reason.value) == ("stopping_criteria", type(criterion).__name__)


def test_max_time_becomes_a_time_limit_with_the_criterion_s_clock() -> None:
    rules, refused = read(MaxLengthCriteria(9), MaxTimeCriteria(5.0, initial_timestamp=0.0))

    assert refused == []
    assert rules.time_limit is not None
    assert rules.time_limit(0, [1, 2])


def test_time_limit_remembers_the_shortest_row_it_stopped() -> None:
    limit = TimeLimit(initial_timestamp=0.0, max_time=1.0)

    stops = [limit(0, [1, 2, 3]), limit(1, [1, 2]), limit(2, [1, 2, 3, 4])]

    assert stops == [True, True, True]
    assert limit.num_steps == 2


def test_time_limit_lets_rows_run_before_its_time() -> None:
    limit = TimeLimit(initial_timestamp=time.time(), max_time=1e6)

    assert not limit(0, [1])
    assert limit.num_steps == float("inf")
