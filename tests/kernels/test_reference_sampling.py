"""Ops of sampling against transformers' processors, float64 and torch's own ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanoserve_core.kernels import reference_sampling as ops
from nanoserve_core.philox import uniform

Filters = dict[str, float]

FILTERS: list[Filters] = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 50},
    {"top_k": 2_000},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.95},
    {"top_k": 20, "min_p": 0.2},
    {"top_p": 0.8, "min_p": 0.05},
    {"top_k": 2_000, "top_p": 0.9, "min_p": 0.01},
]
VOCAB_SIZES = [5, 300, 5_000, 20_000]


def random_scores(rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * scale


def draws_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(uniform(np.arange(rows, dtype=np.uint64), np.full(rows, seed)))


def sampled(scores: torch.Tensor, draws: torch.Tensor, **filters: float) -> ops.Sampled:
    """`sample_tokens` with the same filters for all rows, as the sampler would call it."""
    rows, vocab_size = scores.shape
    options: dict[str, Any] = {
        name: torch.full((rows,), value, dtype=torch.float64) for name, value in filters.items()
    }
    if "top_k" in filters:
        top_k = int(filters["top_k"]) if filters["top_k"] < vocab_size else 0
        options |= {"top_k": torch.full((rows,), top_k), "max_top_k": top_k}
    return ops.sample_tokens(scores, draws, **options)


def warped(scores: torch.Tensor, **filters: float) -> torch.Tensor:
    """What transformers keeps, in its order and in float64."""
    warpers = LogitsProcessorList()
    if "top_k" in filters:
        warpers.append(TopKLogitsWarper(int(filters["top_k"])))
    if "top_p" in filters:
        warpers.append(TopPLogitsWarper(filters["top_p"]))
    if "min_p" in filters:
        warpers.append(MinPLogitsWarper(filters["min_p"]))
    result: torch.Tensor = warpers(None, scores.double())
    return result


def kept_by(result: ops.Sampled, scores: torch.Tensor) -> torch.Tensor:
    assert result.cut is not None
    return (scores >= result.cut[:, None]) & (scores > -torch.inf)


def inverse_cdf(scores: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The token at each draw, in float64 and vocabulary order."""
    sums = scores.double().softmax(-1).cumsum(-1)
    return (sums <= draws[:, None] * sums[:, -1:]).sum(-1)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
def test_filters_keep_what_transformers_keeps(
    vocab_size: int, filters: Filters, scale: float
) -> None:
    scores = random_scores(4, vocab_size, scale)
    draws = draws_of(4)

    result = sampled(scores, draws, **filters)

    expected = warped(scores, **filters)
    assert torch.equal(kept_by(result, scores), expected > -torch.inf)
    assert result.token_ids.tolist() == inverse_cdf(expected, draws).tolist()


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_k": 50}, {"top_k": 300}], ids=str)
@pytest.mark.parametrize("vocab_size", [400, 20_000])
def test_top_k_keeps_all_ties_as_transformers_does(vocab_size: int, filters: Filters) -> None:
    scores = random_scores(6, vocab_size).round()

    result = sampled(scores, draws_of(6), **filters)

    assert torch.equal(kept_by(result, scores), warped(scores, **filters) > -torch.inf)


@pytest.mark.parametrize("top_k", [0, 30])
def test_top_p_keeps_all_ties_of_its_last_token(top_k: int) -> None:
    scores = random_scores(6, 400).round()
    filters = {"top_p": 0.9} | ({"top_k": top_k} if top_k else {})

    result = sampled(scores, draws_of(6), **filters)

    kept, expected = kept_by(result, scores), warped(scores, **filters) > -torch.inf
    assert (kept | ~expected).all()
    surplus = torch.where(kept & ~expected, scores, torch.nan)
    lowest = torch.where(expected, scores, torch.inf).amin(-1, keepdim=True)
    assert ((surplus == lowest) | surplus.isnan()).all()


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {}], ids=str)
def test_tokens_that_are_ruled_out_are_never_drawn(filters: Filters) -> None:
    scores = random_scores(500, 40)
    scores[:, ::3] = -torch.inf
    scores[:250, 1:37] = -torch.inf

    result = sampled(scores, draws_of(500), **filters)

    assert (scores.gather(1, result.token_ids[:, None]) > -torch.inf).all()
    assert not result.is_empty.any()


@pytest.mark.parametrize("draw", [2.0**-53, 1 - 2.0**-53])
@pytest.mark.parametrize("filters", [{"top_k": 4}, {"top_p": 0.99}, {}], ids=str)
@pytest.mark.parametrize("vocab_size", [10, 3_000])
def test_extreme_draws_give_the_first_and_the_last_possible_token(
    draw: float, filters: Filters, vocab_size: int
) -> None:
    scores = torch.full((1, vocab_size), -torch.inf)
    scores[0, 3], scores[0, vocab_size - 3] = 1.0, 0.5

    result = sampled(scores, torch.tensor([draw], dtype=torch.float64), **filters)

    assert result.token_ids.item() == (3 if draw < 0.5 else vocab_size - 3)


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {}], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_row_without_a_distribution_is_marked_and_harms_no_other(
    filters: Filters, value: float
) -> None:
    scores, draws = random_scores(3, 600), draws_of(3)
    expected = sampled(scores, draws, **filters).token_ids
    scores[1] = value if value == -torch.inf else scores[1]
    scores[1, 7] = value

    result = sampled(scores, draws, **filters)

    assert result.is_empty.tolist() == [False, True, False]
    assert result.token_ids[::2].tolist() == expected[::2].tolist()
    assert 0 <= int(result.token_ids[1]) < 600


@pytest.mark.parametrize("filters", [{}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.05}], ids=str)
@pytest.mark.parametrize("vocab_size", [16, 700])
def test_drawn_tokens_follow_the_exact_probabilities(filters: Filters, vocab_size: int) -> None:
    num_draws = 20_000
    scores = random_scores(1, vocab_size, 2.0)
    probabilities = warped(scores, **filters).softmax(-1)[0]

    result = sampled(scores.expand(num_draws, -1), draws_of(num_draws), **filters)

    # Rare tokens share a bin: chi-square wants at least 5 expected draws in each.
    bins = torch.where(probabilities * num_draws >= 5, torch.arange(vocab_size), vocab_size)
    expected = torch.zeros(vocab_size + 1).double().index_add_(0, bins, probabilities * num_draws)
    counts = bins[result.token_ids].bincount(minlength=vocab_size + 1)
    used = expected > 0
    chi_square = ((counts - expected) ** 2 / expected)[used].sum()
    freedom = int(used.sum()) - 1
    assert counts[~used].sum() == 0
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("vocab_size", [60, 5_000, 20_000])
def test_row_has_the_same_bits_alone_and_in_any_batch(vocab_size: int) -> None:
    scores, draws = random_scores(9, vocab_size), draws_of(9)
    scores[4:] = scores[4:].round()
    top_k = torch.tensor([3, 50, 900, 7, 1_500, 40, 1, 2, 20]).clamp(max=vocab_size - 1)
    top_p = torch.tensor([0.9, 0.5, 1.0, 0.99, 0.9, 0.3, 0.8, 1.0, 0.95]).double()

    together = ops.sample_tokens(scores, draws, top_k=top_k, top_p=top_p, max_top_k=1_500)

    for row in range(9):
        only = slice(row, row + 1)
        alone = ops.sample_tokens(
            scores[only], draws[only], top_k=top_k[only], top_p=top_p[only],
            max_top_k=int(top_k[row]),
        )  # fmt: skip
        assert alone.token_ids.item() == together.token_ids[row].item()
        assert alone.cut is not None
        assert together.cut is not None
        assert alone.cut.item() == together.cut[row].item()


@pytest.mark.parametrize("vocab_size", [60, 20_000])
def test_rows_with_and_without_top_k_share_a_call(vocab_size: int) -> None:
    scores, draws = random_scores(4, vocab_size), draws_of(4)
    top_k, top_p = torch.tensor([0, 5, 0, 30]), torch.tensor([0.5, 1.0, 0.999, 0.9]).double()

    result = ops.sample_tokens(scores, draws, top_k=top_k, top_p=top_p, max_top_k=30)

    for row in range(4):
        only = slice(row, row + 1)
        filters = {"top_p": float(top_p[row])} | ({"top_k": int(k)} if (k := top_k[row]) else {})
        expected = sampled(scores[only], draws[only], **filters)
        assert result.token_ids[row].item() == expected.token_ids.item()


@pytest.mark.parametrize("vocab_size", [3, 64, 100, 16_384, 20_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_torchs(vocab_size: int, dtype: torch.dtype) -> None:
    logits = random_scores(700 if vocab_size < 100 else 5, vocab_size).round().to(dtype)
    logits[1] = -torch.inf
    logits[2, 1] = torch.nan
    logits[3, -1] = torch.inf

    tokens = ops.argmax(logits)

    assert torch.equal(tokens, logits.argmax(-1))


def test_repetition_penalty_is_that_of_transformers() -> None:
    scores = random_scores(3, 40)
    tokens = torch.tensor([[1, 5, 5, 7], [0, 39, 2, 0], [4, 4, 4, 4]])
    penalties = [1.3, 0.5, 1.0]
    expected = torch.cat(
        [
            RepetitionPenaltyLogitsProcessor(penalty)(tokens[row, None], scores[row, None])
            for row, penalty in enumerate(penalties)
        ]
    )

    ops.apply_penalties(
        scores, tokens, counts=None, repetition=torch.tensor(penalties),
        presence=torch.zeros(3), frequency=torch.zeros(3),
    )  # fmt: skip

    assert torch.equal(scores, expected)


def test_presence_and_frequency_penalties_count_the_output() -> None:
    scores = torch.zeros(1, 6)
    tokens, counts = torch.tensor([[1, 2, 3, 2]]), torch.tensor([[0, 2, 1, 2]])

    ops.apply_penalties(
        scores, tokens, counts=counts, repetition=torch.ones(1),
        presence=torch.tensor([0.5]), frequency=torch.tensor([0.25]),
    )  # fmt: skip

    assert scores.tolist() == [[0.0, 0.0, -1.0, -0.75, 0.0, 0.0]]


def test_logprobs_are_those_of_log_softmax_with_ranks() -> None:
    scores = torch.tensor([[2.0, 1.0, 1.0, -1.0]])

    gathered = ops.gather_logprobs(scores, torch.tensor([3]), 3)

    exact = scores.double().log_softmax(-1)[0]
    ids = gathered.token_ids[0].tolist()
    assert ids[0] == 3
    assert ids[1] == 0
    assert set(ids[2:]) == {1, 2}
    assert gathered.ranks.tolist() == [[4, 1, 2, 2]]
    assert gathered.logprobs[0].double() == pytest.approx(exact[ids], abs=1e-6)


def test_no_most_likely_tokens_are_given_when_none_are_asked_for() -> None:
    gathered = ops.gather_logprobs(random_scores(2, 9), torch.tensor([0, 8]), 0)

    assert gathered.token_ids.tolist() == [[0], [8]]
    assert gathered.ranks.shape == (2, 1)


def test_mask_sets_what_is_below_the_cut_to_minus_infinity() -> None:
    scores = torch.tensor([[3.0, 1.0, -torch.inf, 2.0], [0.0, -5.0, 4.0, -torch.inf]])

    ops.mask_below(scores, torch.tensor([2.0, -torch.inf]))

    assert scores.tolist() == [[3.0, -np.inf, -np.inf, 2.0], [0.0, -5.0, 4.0, -np.inf]]
