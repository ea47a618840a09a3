"""filter_tiles, filter_cut, tile_statistics and pick_token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from nanoserve_core.kernels import reference_sampling, reference_state, triton_ops
from nanoserve_core.kernels.pick_token import uniform
from nanoserve_core.kernels.sampling_scratch import FilterTiles, TileStatistics
from nanoserve_core.kernels.slot_tables import FAILED, PickedTokens
from nanoserve_core.philox import uniform as uniform_on_host
from tests.kernels.sampling_rows import Row, rows_of, sampled_on_cpu

DTYPES = [torch.float32, torch.float16]
MIXED = [
    Row(temperature=0.7, seed=1, position=3),
    Row(temperature=0, seed=2),
    Row(temperature=1.3, seed=2**63 + 9, position=1000, wants_logprob=False),
    Row(temperature=1e-30, seed=4),
    Row(temperature=0, wants_logprob=False),
]


def random_logits(
    num_rows: int, vocab: int, dtype: torch.dtype = torch.float32, *, seed: int = 0
) -> torch.Tensor:
    """[rows, vocab], a view with gaps between its rows."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab + 3, generator=generator) * 3).to(dtype)[:, :vocab]


def statistics_of(
    logits: torch.Tensor, rows: list[Row], *, tile: int, cut: torch.Tensor | None = None
) -> tuple[TileStatistics, TileStatistics]:
    """Those of the kernel, and those of plain torch."""
    found, expected = (
        TileStatistics.allocate(len(rows), logits.shape[1], "cpu", tile=tile) for _ in range(2)
    )
    triton_ops.tile_statistics(logits, rows_of(rows), cut=cut, stats=found)
    reference_state.tile_statistics(logits, rows_of(rows), cut=cut, stats=expected)
    return found, expected


def picked_from(
    logits: torch.Tensor, rows: list[Row], *, tile: int = 256, cut: torch.Tensor | None = None
) -> PickedTokens:
    """The tokens of the kernels."""
    step, picked = rows_of(rows), PickedTokens.allocate(len(rows), "cpu")
    stats = TileStatistics.allocate(len(rows), logits.shape[1], "cpu", tile=tile)
    triton_ops.tile_statistics(logits, step, cut=cut, stats=stats)
    triton_ops.pick_token(logits, step, cut=cut, stats=stats, picked=picked)
    return picked


def cuts_of(
    logits: torch.Tensor, rows: list[Row], *, tile: int = 16, group: int = 8, capacity: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the kernels, and those of plain torch."""
    step, num_rows = rows_of(rows), len(rows)
    tiles = FilterTiles.allocate(
        num_rows, logits.shape[1], "cpu", tile=tile, group=group, capacity=capacity
    )
    found, expected = torch.empty(num_rows), torch.empty(num_rows)
    triton_ops.filter_tiles(logits, step, tiles=tiles)
    triton_ops.filter_cut(logits, step, tiles=tiles, cut=found)
    reference_state.filter_cut(logits, step, tiles=tiles, cut=expected)
    return found, expected


def kept(logits: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] bool."""
    return logits.float() >= cut[:, None]


@triton.jit
def uniform_kernel(
    seed_low_ptr: torch.Tensor,
    seed_high_ptr: torch.Tensor,
    position_ptr: torch.Tensor,
    out_ptr: torch.Tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One number per lane."""
    lanes = tl.arange(0, BLOCK)
    low, high = tl.load(seed_low_ptr + lanes), tl.load(seed_high_ptr + lanes)
    tl.store(out_ptr + lanes, uniform(low, high, tl.load(position_ptr + lanes)))


def test_random_numbers_are_the_hosts_to_the_bit() -> None:
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**64, 4096, dtype=np.uint64)
    seeds[:4] = 0, 1, 2**32, 2**64 - 1
    positions = generator.integers(0, 2**31, 4096)
    halves = torch.from_numpy(seeds.view(np.int32).reshape(-1, 2).copy())
    out = torch.empty(4096, dtype=torch.float64)

    uniform_kernel[(1,)](
        halves[:, 0].contiguous(),
        halves[:, 1].contiguous(),
        torch.from_numpy(positions).int(),
        out,
        BLOCK=4096,
    )

    assert np.array_equal(out.numpy(), uniform_on_host(seeds, positions))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "tile"), [(1000, 256), (4097, 4096)])
def test_statistics_are_those_of_float64(vocab: int, tile: int, dtype: torch.dtype) -> None:
    logits = random_logits(5, vocab, dtype)
    cut = torch.tensor([-torch.inf, -torch.inf, 0.5, -1.0, 2.0])

    found, expected = statistics_of(logits, MIXED, tile=tile, cut=cut)

    greedy, sampled, reported = [1, 4], [0, 2, 3], [0, 1, 3]
    assert torch.equal(found.maxima, expected.maxima)
    assert torch.equal(found.argmaxima[greedy], expected.argmaxima[greedy])
    torch.testing.assert_close(
        found.weights[sampled], expected.weights[sampled], atol=1e-6, rtol=1e-5
    )
    torch.testing.assert_close(found.sums[reported], expected.sums[reported], atol=1e-6, rtol=1e-5)


def test_statistics_of_tiles_of_minus_infinity_are_zero() -> None:
    logits = random_logits(2, 600)
    logits[:, 256:512] = -torch.inf
    rows = [Row(), Row(temperature=0)]

    found, _ = statistics_of(logits, rows, tile=256)

    assert found.maxima[:, 1].tolist() == [-torch.inf, -torch.inf]
    assert found.weights[0, 1] == 0
    assert found.sums[:, 1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("num_rows", "vocab", "tile", "dtype"),
    [
        (5, 1000, 256, torch.float32),
        (4, 4097, 4096, torch.float16),
        (3, 1000, 1024, torch.float16),
        (2, 4097, 4096, torch.float32),
        (1, 7, 256, torch.float32),
    ],
)
def test_tokens_are_those_of_the_cpu_sampler(
    num_rows: int, vocab: int, tile: int, dtype: torch.dtype
) -> None:
    logits, rows = random_logits(num_rows, vocab, dtype), MIXED[:num_rows]

    picked = picked_from(logits, rows, tile=tile)

    assert torch.equal(picked.token_ids.long(), sampled_on_cpu(logits, rows))
    expected = reference_sampling.gather_logprobs(logits.float(), picked.token_ids.long(), 0)
    wanted = torch.tensor([row.wants_logprob for row in rows])
    torch.testing.assert_close(
        picked.logprobs[wanted], expected.logprobs[wanted, 0], atol=5e-6, rtol=0
    )
    assert picked.logprobs[~wanted].isnan().all()


def test_tokens_follow_the_seed_and_the_position() -> None:
    logits = torch.zeros(1, 64).expand(9, 64)
    rows = [Row(seed=seed, position=position) for seed in range(3) for position in range(3)]

    picked = picked_from(logits, rows, tile=16)

    assert picked.token_ids.tolist() == sampled_on_cpu(logits, rows).tolist()
    assert len(picked.token_ids.unique()) > 6


def test_a_token_below_the_cut_or_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((5, 40), -torch.inf)
    logits[:, [3, 17, 18, 33]] = torch.tensor([0.0, 1.0, -200.0, 0.5])
    rows = [Row(seed=seed) for seed in range(5)]

    picked = picked_from(logits, rows, tile=16, cut=torch.full((5,), 0.25))

    assert set(picked.token_ids.tolist()) == {17, 33}


def test_the_argmax_is_the_first_of_equal_ones_and_nan_counts_as_inf() -> None:
    logits = torch.zeros(4, 600)
    logits[1, [300, 301, 550]] = 1
    logits[2, 400] = torch.nan
    logits[3] = -torch.inf

    picked = picked_from(logits, [Row(temperature=0, wants_logprob=False)] * 4)

    assert picked.token_ids.tolist() == [0, 300, 400, 0]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.5}])
def test_a_sampled_row_without_a_distribution_gets_no_token(filters: dict[str, float]) -> None:
    logits = random_logits(4, 600, torch.float16)
    logits[0, 300] = torch.nan
    logits[1, 300] = torch.inf
    logits[2] = -torch.inf
    rows = [Row(wants_logprob=False, **filters)] * 4
    cut, _ = cuts_of(logits, rows)

    picked = picked_from(logits, rows, cut=cut)

    assert picked.token_ids[:3].tolist() == [FAILED] * 3
    assert picked.token_ids[3] >= 0


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([Row(top_k=1), Row(top_k=20, temperature=0.6), Row(top_k=32)], torch.float32),
        ([Row(top_p=0.3, temperature=0.5), Row(top_p=0.6), Row(top_p=1e-6)], torch.float16),
        ([Row(top_k=20, top_p=0.9), Row(top_k=8, top_p=0.5, temperature=2)], torch.float16),
        ([Row(min_p=0.2), Row(min_p=0.05, temperature=1.5), Row(min_p=1)], torch.float32),
        ([Row(top_k=20, min_p=0.3), Row(top_k=9, top_p=0.95, min_p=0.01)], torch.float16),
        ([Row(), Row(temperature=0, top_k=5, top_p=0.5, min_p=0.5), Row(top_k=5)], torch.float32),
    ],
)
def test_the_cut_leaves_what_sorting_leaves(rows: list[Row], dtype: torch.dtype) -> None:
    logits = random_logits(len(rows), 1000, dtype)

    found, expected = cuts_of(logits, rows)

    assert torch.equal(kept(logits, found), kept(logits, expected))
    assert (kept(logits, found).sum(-1) > 0).all()


@pytest.mark.parametrize(
    "row",
    [
        Row(top_k=300),
        Row(top_k=300, top_p=0.5),
        Row(top_k=300, top_p=0.99, min_p=1e-4),
        Row(top_p=0.999, temperature=2),
        Row(top_p=0.9999, min_p=0.001),
        Row(top_p=0.9999, min_p=0.5),
        Row(top_k=5000, top_p=0.999),
        Row(top_k=1000),
    ],
)
def test_a_cut_that_lies_deeper_than_the_candidates_is_found_too(row: Row) -> None:
    logits = random_logits(1, 1000, torch.float16)

    found, expected = cuts_of(logits, [row], tile=8, capacity=8)

    assert torch.equal(kept(logits, found), kept(logits, expected))


def test_ties_at_the_cut_are_kept() -> None:
    logits = torch.zeros(3, 600)
    logits[:, 5] = 2
    logits[:, [100, 200, 300]] = 1
    rows = [Row(top_k=2), Row(top_p=0.02), Row(top_k=7)]

    found, _ = cuts_of(logits, rows, capacity=4)

    assert found.tolist() == [1, 1, 0]


def test_a_row_of_equal_logits_keeps_all() -> None:
    logits = torch.full((2, 600), -1.5)

    found, _ = cuts_of(logits, [Row(top_k=5, top_p=0.5), Row(top_p=0.5)], capacity=4)

    assert found.tolist() == [-1.5, -1.5]


def test_most_of_a_row_may_be_minus_infinity() -> None:
    logits = torch.full((3, 600), -torch.inf)
    logits[:, [7, 400]] = torch.tensor([-1.0, -2.0])
    rows = [Row(top_k=5), Row(top_p=0.7), Row(top_k=1, top_p=0.99)]

    found, expected = cuts_of(logits, rows)

    assert torch.equal(found, expected)
    assert found.tolist() == [-torch.inf, -1, -1]


def test_filtered_tokens_are_those_of_the_cpu_sampler() -> None:
    rows = [Row(top_k=20, top_p=0.95, temperature=0.6, seed=seed) for seed in range(4)]
    logits = random_logits(4, 4097, torch.float16)
    cut, _ = cuts_of(logits, rows, tile=64, group=64, capacity=64)

    picked = picked_from(logits, rows, tile=4096, cut=cut)

    assert torch.equal(picked.token_ids.long(), sampled_on_cpu(logits, rows))


def test_no_row_is_fine() -> None:
    picked = picked_from(torch.zeros(0, 600), [], cut=torch.zeros(0))

    assert picked.token_ids.shape == (0,)


def test_they_name_the_argument_that_does_not_fit() -> None:
    rows, cut = rows_of([Row(), Row()]), torch.zeros(2)
    logits, stats = torch.zeros(2, 600), TileStatistics.allocate(2, 600, "cpu")
    tiles, picked = FilterTiles.allocate(2, 600, "cpu"), PickedTokens.allocate(2, "cpu")

    with pytest.raises(ValueError, match=r"logits has shape \[1, 600\], expected \[2, vocab\]"):
        triton_ops.tile_statistics(logits[:1], rows, cut=None, stats=stats)
    with pytest.raises(TypeError, match=r"logits has dtype torch.float64"):
        triton_ops.tile_statistics(logits.double(), rows, cut=None, stats=stats)
    with pytest.raises(ValueError, match=r"logits has strides \[1, 2\]"):
        triton_ops.filter_tiles(torch.zeros(600, 2).t(), rows, tiles=tiles)
    with pytest.raises(ValueError, match=r"stats.maxima has shape \[2, 1\]"):
        triton_ops.tile_statistics(torch.zeros(2, 5000), rows, cut=None, stats=stats)
    with pytest.raises(ValueError, match=r"tiles.masses has shape \[2, 1\]"):
        triton_ops.filter_cut(torch.zeros(2, 5000), rows, tiles=tiles, cut=cut)
    with pytest.raises(ValueError, match=r"cut has shape \[1\], expected \[2\]"):
        triton_ops.filter_cut(logits, rows, tiles=tiles, cut=cut[:1])
    with pytest.raises(TypeError, match=r"cut has dtype torch.float64"):
        triton_ops.tile_statistics(logits, rows, cut=cut.double(), stats=stats)
    with pytest.raises(ValueError, match=r"picked.token_ids has shape \[1\], expected \[2\]"):
        triton_ops.pick_token(logits, rows, cut=None, stats=stats, picked=picked.first(1))
