"""Sampling and slot state on the card: the real vocabulary in bfloat16, and captured steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoserve_core.kernels import reference_state
from nanoserve_core.kernels import triton_ops as ops
from nanoserve_core.kernels.sampling_scratch import FilterTiles, TileStatistics
from nanoserve_core.kernels.slot_tables import (
    FAILED,
    PickedTokens,
    SlotField,
    SlotLayout,
    StepRows,
)
from tests.kernels.sampling_rows import Row, draws_of, rows_of, sampled_on_cpu
from tests.kernels.slot_cases import RING_LENGTH, Slot, slot_case
from tests.kernels.slot_state_contract import SlotStateContract

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

VOCAB = 151_936
CDF_ERROR = 2e-6
"""Of float32 sums over a row, in units of the whole."""


class TestStateOnTheCard(SlotStateContract):
    """On the device."""

    ops = ops
    device = "cuda"


class Sampling:
    """Scratch for some rows, and the sampling part of a step on it."""

    def __init__(self, num_rows: int, vocab: int = VOCAB) -> None:
        self.cut = torch.empty(num_rows, device="cuda")
        self.tiles = FilterTiles.allocate(num_rows, vocab, "cuda")
        self.stats = TileStatistics.allocate(num_rows, vocab, "cuda")
        self.picked = PickedTokens.allocate(num_rows, "cuda")

    def run(
        self, logits: torch.Tensor, rows: StepRows, *, is_filtered: bool, pdl: bool = False
    ) -> PickedTokens:
        """One token per row."""
        cut, stats = self.cut if is_filtered else None, self.stats
        if is_filtered:
            ops.filter_tiles(logits, rows, tiles=self.tiles, pdl=pdl)
            ops.filter_cut(logits, rows, tiles=self.tiles, cut=self.cut, pdl=pdl)
        ops.tile_statistics(logits, rows, cut=cut, stats=stats, pdl=pdl)
        ops.pick_token(logits, rows, cut=cut, stats=stats, picked=self.picked, pdl=pdl)
        return self.picked


def random_logits(num_rows: int, *, scale: float = 2.0, num_likely: int = 0) -> torch.Tensor:
    """[rows, VOCAB] bfloat16; a trained model has some likely tokens above the others."""
    generator = torch.Generator("cuda").manual_seed(num_rows)
    logits = torch.randn(num_rows, VOCAB, device="cuda", generator=generator) * scale
    places = torch.randint(VOCAB, (num_rows, num_likely), device="cuda", generator=generator)
    likely = torch.rand(places.shape, device="cuda", generator=generator) * 8 + 12
    return logits.scatter_(1, places, likely).bfloat16()


def weights_of(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """[rows, VOCAB] float64: probabilities before filters."""
    temperature = torch.tensor([row.temperature for row in rows], device="cuda")[:, None]
    return (logits.double() / temperature.double()).softmax(-1)


def assert_drawn_by_inversion(tokens: torch.Tensor, weights: torch.Tensor, rows: list[Row]) -> None:
    """Each row's random number lies in its token's piece of the cumulative distribution."""
    probabilities = weights / weights.sum(-1, keepdim=True)
    at = tokens.long()[:, None]
    after = probabilities.cumsum(-1).gather(1, at).squeeze(1)
    before = after - probabilities.gather(1, at).squeeze(1)
    draws = torch.from_numpy(draws_of(rows)).cuda()
    assert (before <= draws + CDF_ERROR).all()
    assert (after >= draws - CDF_ERROR).all()


@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_plain_tokens_are_drawn_by_inversion(num_rows: int) -> None:
    logits = random_logits(num_rows)
    rows = [
        Row(temperature=0.6 + 0.1 * (i % 7), seed=2**62 + i, position=i) for i in range(num_rows)
    ]

    picked = Sampling(num_rows).run(logits, rows_of(rows, "cuda"), is_filtered=False)

    assert_drawn_by_inversion(picked.token_ids, weights_of(logits, rows), rows)
    on_cpu = sampled_on_cpu(logits.cpu(), rows)
    assert (picked.token_ids.cpu() != on_cpu).sum() <= 2  # a sum's last bit may move a boundary
    logprobs = logits.double().log_softmax(-1).gather(1, picked.token_ids.long()[:, None])
    torch.testing.assert_close(picked.logprobs.double(), logprobs[:, 0], atol=5e-6, rtol=0)


def test_greedy_tokens_are_the_first_largest() -> None:
    logits = random_logits(64, scale=0.5)  # bfloat16 has many equal ones

    picked = Sampling(64).run(logits, rows_of([Row(temperature=0)] * 64, "cuda"), is_filtered=False)

    assert torch.equal(picked.token_ids.cpu().long(), logits.cpu().argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [2.0, 0.3])
def test_cuts_are_those_of_sorted_logits(dtype: torch.dtype, scale: float) -> None:
    kinds = [
        Row(top_k=20, top_p=0.95, temperature=0.6),
        Row(top_k=50),
        Row(top_k=1000),
        Row(top_k=1000, top_p=0.8),
        Row(top_p=0.9),
        Row(top_p=0.5, temperature=0.5),
        Row(min_p=0.05),
        Row(top_p=0.95, min_p=0.02, temperature=1.5),
    ]
    rows = [replace(kind, seed=i) for i, kind in enumerate(kinds * 2)]
    logits = random_logits(16, scale=scale, num_likely=40)
    logits[8:] = random_logits(8, scale=scale)
    logits = logits.to(dtype)
    step, sampling = rows_of(rows, "cuda"), Sampling(16)
    expected = torch.empty_like(sampling.cut)
    reference_state.filter_cut(logits, step, tiles=sampling.tiles, cut=expected)

    picked = sampling.run(logits, step, is_filtered=True)

    weights = weights_of(logits, rows)
    found, wanted = (
        (weights * (logits >= cut[:, None])).sum(-1) for cut in (sampling.cut, expected)
    )
    torch.testing.assert_close(found, wanted, atol=CDF_ERROR, rtol=1e-5)
    assert (sampling.cut == expected)[[0, 1, 2, 8, 9, 10]].all()
    assert_drawn_by_inversion(picked.token_ids, weights * (logits >= sampling.cut[:, None]), rows)


def test_frequencies_follow_the_probabilities() -> None:
    num_rows, vocab = 60_000, 64
    rows = StepRows.allocate(
        SlotLayout(num_slots=num_rows, max_num_blocks=1, block_size=16), "cuda"
    )
    rows.parameter(SlotField.TEMPERATURE).fill_(0.8)
    rows.parameter(SlotField.TOP_P).fill_(1)
    rows.parameter(SlotField.SEED_LOW).copy_(torch.arange(num_rows))
    rows.positions.fill_(11)
    logits = (torch.randn(1, vocab, device="cuda") * 1.5).bfloat16().expand(num_rows, vocab)

    picked = Sampling(num_rows, vocab).run(logits, rows, is_filtered=False)

    probabilities = (logits[0].double() / 0.8).softmax(-1)
    counts = torch.bincount(picked.token_ids.long(), minlength=vocab)
    expected = num_rows * probabilities
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5  # 63 degrees of freedom, five sigma


def test_rows_without_a_distribution_get_no_token() -> None:
    logits = random_logits(4)
    logits[0, 70_000] = torch.nan
    logits[1, 70_000] = torch.inf
    logits[2] = -torch.inf
    rows = rows_of([Row(top_k=20, top_p=0.9), Row(), Row(top_p=0.9), Row(top_k=5)], "cuda")

    picked = Sampling(4).run(logits, rows, is_filtered=True)

    tokens = picked.token_ids.tolist()
    assert tokens[:3] == [FAILED] * 3
    assert tokens[3] >= 0


def test_a_row_is_sampled_alike_alone_and_in_a_batch() -> None:
    kinds = [Row(), Row(top_k=20, top_p=0.95), Row(top_p=0.9), Row(temperature=0)]
    rows = [replace(kinds[i % 4], seed=i, position=i) for i in range(64)]
    logits = random_logits(64, num_likely=10)
    together = Sampling(64).run(logits, rows_of(rows, "cuda"), is_filtered=True)

    alone = [
        Sampling(1).run(logits[i : i + 1], rows_of(rows[i : i + 1], "cuda"), is_filtered=True)
        for i in range(64)
    ]

    assert torch.equal(together.token_ids, torch.cat([each.token_ids for each in alone]))
    same = torch.cat([each.logprobs for each in alone])
    assert torch.equal(together.logprobs.view(torch.int32), same.view(torch.int32))


@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_step_advances_as_launched_ones_do(pdl: bool) -> None:
    slots = [Slot(num_tokens=2 + i % 9, max_total_tokens=12) for i in range(32)]
    order = [*range(31, -1, -1), -1, -1]
    logits = random_logits(len(order), num_likely=10)
    launched, captured = (slot_case(ops, slots, order, device="cuda") for _ in range(2))
    sampling = Sampling(len(order))
    num_steps = 2 * RING_LENGTH

    def step() -> None:
        picked = sampling.run(logits, captured.rows, is_filtered=True, pdl=pdl)
        ops.advance_state(
            captured.tables, captured.rows, picked=picked, ring=captured.ring, pdl=pdl
        )

    for case in (launched, captured):
        case.gather()
    for _ in range(num_steps):
        picked = sampling.run(logits, launched.rows, is_filtered=True)
        ops.advance_state(launched.tables, launched.rows, picked=picked, ring=launched.ring)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(num_steps - 1):
        graph.replay()

    assert torch.equal(captured.tables.storage, launched.tables.storage)
    assert torch.equal(captured.ring.token_ids, launched.ring.token_ids)
    assert captured.ring.step.tolist() == [num_steps]
