"""reference_state: slots and rows by hand, sampling against the CPU's sampler."""

from __future__ import annotations

import pytest
import torch

from nanoserve_core.kernels import reference_sampling, reference_state
from nanoserve_core.kernels.sampling_scratch import FilterTiles, TileStatistics
from nanoserve_core.kernels.slot_tables import FAILED, PickedTokens, SlotField
from tests.kernels.sampling_rows import Row, rows_of, sampled_on_cpu
from tests.kernels.slot_state_contract import SlotStateContract

VOCAB = 1000


class TestReferenceState(SlotStateContract):
    """In plain torch."""

    ops = reference_state


def picked_from(logits: torch.Tensor, rows: list[Row]) -> PickedTokens:
    """A whole sampling step."""
    step, num_rows = rows_of(rows), len(rows)
    cut, picked = torch.empty(num_rows), PickedTokens.allocate(num_rows, "cpu")
    tiles = FilterTiles.allocate(num_rows, logits.shape[1], "cpu")
    stats = TileStatistics.allocate(num_rows, logits.shape[1], "cpu")
    reference_state.filter_tiles(logits, step, tiles=tiles)
    reference_state.filter_cut(logits, step, tiles=tiles, cut=cut)
    reference_state.tile_statistics(logits, step, cut=cut, stats=stats)
    reference_state.pick_token(logits, step, cut=cut, stats=stats, picked=picked)
    return picked


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7},
        {"top_k": VOCAB},
        {"top_k": VOCAB + 5, "top_p": 0.999, "temperature": 0.3},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_are_those_of_the_cpu_sampler(filters: dict[str, float], dtype: torch.dtype) -> None:
    logits = (torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    rows = [Row(seed=seed, position=7, **filters) for seed in range(64)]

    picked = picked_from(logits, rows)

    assert torch.equal(picked.token_ids.long(), sampled_on_cpu(logits, rows))


def test_greedy_and_sampled_rows_mix() -> None:
    logits = torch.randn(4, VOCAB) * 2
    rows = [Row(temperature=0), Row(top_k=1), Row(temperature=0, top_p=0.1), Row(top_p=1e-6)]

    picked = picked_from(logits, rows)

    assert torch.equal(picked.token_ids.long(), logits.argmax(-1))


def test_logprobs_are_those_of_the_models_logits() -> None:
    logits = torch.randn(3, VOCAB) * 2
    rows = [Row(top_k=5, temperature=0.2), Row(temperature=0), Row(wants_logprob=False)]

    picked = picked_from(logits, rows)

    logprobs = reference_sampling.gather_logprobs(logits, picked.token_ids.long(), 0).logprobs
    torch.testing.assert_close(picked.logprobs[:2], logprobs[:2, 0], atol=1e-6, rtol=0)
    assert picked.logprobs[2].isnan()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sampled_row_without_a_distribution_gets_no_token(value: float) -> None:
    logits = torch.randn(3, VOCAB)
    logits[0, 500] = value
    logits[1] = -torch.inf

    picked = picked_from(logits, [Row(), Row(), Row()])

    assert picked.token_ids[:2].tolist() == [FAILED, FAILED]
    assert picked.token_ids[2] >= 0


def test_the_argmax_is_the_first_of_equal_ones_and_nan_counts_as_inf() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1, [300, 700]] = 1
    logits[2, 400] = torch.nan
    logits[3] = -torch.inf

    picked = picked_from(logits, [Row(temperature=0)] * 4)

    assert picked.token_ids.tolist() == [0, 300, 400, 0]


def test_rows_without_filters_have_no_cut() -> None:
    logits, cut = torch.randn(3, VOCAB), torch.empty(3)
    step = rows_of([Row(), Row(temperature=0, top_k=3), Row(top_k=3)])

    reference_state.filter_cut(logits, step, tiles=FilterTiles.allocate(3, VOCAB, "cpu"), cut=cut)

    assert cut[:2].tolist() == [-torch.inf, -torch.inf]
    assert cut[2] == logits[2].topk(3).values[-1]


def test_tiles_add_up_to_the_row() -> None:
    logits = torch.randn(2, VOCAB) * 2
    step = rows_of([Row(temperature=0.7, top_p=0.5), Row(temperature=1.4, top_p=0.5)])
    stats = TileStatistics.allocate(2, VOCAB, "cpu", tile=64)
    tiles = FilterTiles.allocate(2, VOCAB, "cpu", tile=16, group=8)

    reference_state.tile_statistics(logits, step, cut=None, stats=stats)
    reference_state.filter_tiles(logits, step, tiles=tiles)

    temperature = step.parameter(SlotField.TEMPERATURE)[:, None]
    largest = logits.amax(-1, keepdim=True)
    expected = ((logits - largest) / temperature).exp().sum(-1)
    weights = stats.weights * ((stats.maxima - largest) / temperature).exp()
    group_maxima = tiles.maxima.unflatten(1, (-1, 8)).amax(-1)
    masses = tiles.masses * ((group_maxima - largest) / temperature).exp()
    torch.testing.assert_close(weights.sum(-1), expected, atol=0, rtol=1e-5)
    torch.testing.assert_close(masses.sum(-1), expected, atol=0, rtol=1e-5)
    sums = stats.sums * (stats.maxima - largest).exp()
    torch.testing.assert_close(
        largest.squeeze(1) + sums.sum(-1).log(), logits.logsumexp(-1), atol=1e-5, rtol=0
    )
    assert torch.equal(logits.gather(1, stats.argmaxima.long()), stats.maxima)
