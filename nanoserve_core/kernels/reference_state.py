"""Sampling and slot state of a decode step in plain torch: the oracles of the Triton kernels of the
same names, and the same ops for a CPU.

A step, on the device from beginning to end::

    apply_deltas(tables, deltas)          what the host has changed
    gather_rows(tables, rows)             the rows' inputs
    ... the model: logits [rows, vocab] ...
    filter_tiles, filter_cut              when a row filters
    tile_statistics, pick_token           the tokens
    advance_state                         tokens to the slots, rows to the next step

Arithmetic on logits is in float64. The ops of one row neither read nor write those of another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from nanoserve_core.kernels.slot_tables import FAILED, NO_TOKEN, NUM_PARAMETERS, SlotField
from nanoserve_core.philox import uniform

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.kernels.sampling_scratch import FilterTiles, TileStatistics
    from nanoserve_core.kernels.slot_tables import PickedTokens, SlotTables, StepRows, TokenRing

LOWEST_TEMPERATURE = 1e-30
"""Dividing by less overflows; the softmax is one-hot long before."""


def apply_deltas(tables: SlotTables, deltas: Tensor) -> None:
    """Write pairs of (offset in ``tables.storage``, value). deltas: [n + 1, 2] int32.

    The first pair is (number of pairs that follow and count, anything); its number is then 0. A
    pair with offset -1 writes nothing. No offset may come twice. `SlotDeltas` makes the pairs.
    """
    pairs = deltas[1 : 1 + int(deltas[0, 0])]
    offsets, values = pairs[pairs[:, 0] >= 0].unbind(1)
    tables.storage.index_copy_(0, offsets.long(), values)
    deltas[0, 0] = 0


def gather_rows(tables: SlotTables, rows: StepRows) -> None:
    """Fill ``rows`` for a step from the slots that ``rows.slots`` names.

    A row runs when it has a slot, the slot is active, and the block of its input's position is
    there; a row that does not run writes no K/V and yields no token. One that only lacks a block
    (it is *parked*) runs again after the gather that finds the block.
    """
    has_slot = rows.slots >= 0
    slots = rows.slots.clamp(min=0).long()
    fields = tables.fields[:, slots]
    rows.parameters.copy_(fields[:NUM_PARAMETERS] * has_slot)
    rows.block_tables.copy_(tables.block_tables[slots])
    is_active = has_slot & (fields[SlotField.IS_ACTIVE] != 0)
    _place_inputs(
        tables,
        rows,
        slots=slots,
        is_active=is_active,
        token_ids=fields[SlotField.LAST_TOKEN],
        positions=fields[SlotField.POSITION],
    )


def filter_tiles(logits: Tensor, rows: StepRows, *, tiles: FilterTiles) -> None:
    """Tile maxima of the rows that filter, and what `FilterTiles` says besides.

    logits: [rows, vocab] bfloat16, float16 or float32. Launch it before `filter_cut`.
    """
    num_rows, num_groups = logits.shape[0], tiles.masses.shape[1]
    grouped = _tiled(logits, num_groups, tiles.group * tiles.tile)
    tiles.maxima[:num_rows] = grouped.view(num_rows, -1, tiles.tile).amax(-1).float()
    maxima = grouped.amax(-1, keepdim=True)
    weights = _exp_difference(grouped, maxima, _temperature(rows)[:, None, None])
    tiles.masses[:num_rows] = weights.sum(-1).float()


def filter_cut(logits: Tensor, rows: StepRows, *, tiles: FilterTiles, cut: Tensor) -> None:
    """What top-k, top-p and min-p leave, as one bound per row. cut: [rows] float32.

    A row keeps the logits that are at least its cut; -inf when it does not filter or is greedy.
    Order and definitions are transformers' (temperature, top-k, top-p, min-p), except that all ties
    at the cut are kept. logits: as for `filter_tiles`.
    """
    del tiles
    values = logits.double().sort(-1, descending=True).values
    top_k = rows.parameter(SlotField.TOP_K).long()[:, None]
    top_p = rows.parameter(SlotField.TOP_P).double()[:, None]
    min_p = rows.parameter(SlotField.MIN_P).double()[:, None]
    temperature = _temperature(rows)[:, None]
    vocab_size = values.shape[1]
    kth = values.gather(1, torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size) - 1)
    weights = _exp_difference(values, values[:, :1], temperature) * (values >= kth)
    sums = weights.cumsum(-1)
    # A token stays in the nucleus while the mass of the likelier ones is below top_p.
    in_nucleus = (sums - weights < top_p * sums[:, -1:]) | (top_p >= 1)
    num_kept = ((values >= kth) & in_nucleus).sum(-1, keepdim=True).clamp(min=1)
    min_cut = values[:, :1] + temperature * min_p.log()
    found = torch.maximum(values.gather(1, num_kept - 1), min_cut).squeeze(1)
    is_filtered = ((top_k > 0) | (top_p < 1) | (min_p > 0)).squeeze(1)
    is_sampled = rows.parameter(SlotField.TEMPERATURE) > 0
    cut.copy_(torch.where(is_filtered & is_sampled, found, -torch.inf))


def tile_statistics(
    logits: Tensor, rows: StepRows, *, cut: Tensor | None, stats: TileStatistics
) -> None:
    """What `TileStatistics` says of each tile. logits: as for `filter_tiles`.

    cut: [rows] float32 of `filter_cut`, or None: nothing is cut.
    """
    num_rows, num_tiles = logits.shape[0], stats.maxima.shape[1]
    tiled = _tiled(logits, num_tiles, stats.tile)
    largest = torch.where(tiled.isnan(), torch.inf, tiled)
    maxima, indices = largest.max(-1)
    starts = torch.arange(num_tiles, device=logits.device) * stats.tile
    stats.maxima[:num_rows] = maxima.float()
    stats.argmaxima[:num_rows] = (indices + starts).int()
    maxima = maxima[:, :, None]
    stats.sums[:num_rows] = _exp_difference(tiled, maxima, tiled.new_ones(())).sum(-1).float()
    weights = _exp_difference(tiled, maxima, _temperature(rows)[:, None, None])
    if cut is not None:
        weights *= ~(tiled < cut[:, None, None])
    stats.weights[:num_rows] = weights.sum(-1).float()


def pick_token(
    logits: Tensor,
    rows: StepRows,
    *,
    cut: Tensor | None,
    stats: TileStatistics,
    picked: PickedTokens,
) -> None:
    """Draw the token at ``rows.positions + 1``: argmax at temperature 0, else the inverse CDF.

    The first index whose running sum in vocabulary order exceeds u times the whole, where u is
    `philox.uniform` of the row's seed and the token's position; a token of probability zero is
    never drawn. The argmax is the first of equal ones, and NaN counts as +inf. logits, cut
    and stats: of `tile_statistics`, whose last call this must follow.
    """
    del stats
    values = logits.double()
    largest = values.amax(-1, keepdim=True)
    weights = _exp_difference(values, largest, _temperature(rows)[:, None])
    if cut is not None:
        weights *= ~(values < cut[:, None])
    sums = weights.cumsum(-1)
    target = _draws(rows)[:, None] * sums[:, -1:]
    drawn = (sums <= target).sum(-1).clamp(max=values.shape[1] - 1)
    has_token = largest.isfinite().squeeze(1)
    is_greedy = rows.parameter(SlotField.TEMPERATURE) == 0
    first = torch.where(values.isnan(), torch.inf, values).argmax(-1)
    token_ids = torch.where(is_greedy, first, drawn)
    logprobs = values.log_softmax(-1).gather(1, token_ids[:, None]).squeeze(1)
    wanted = rows.parameter(SlotField.WANTS_LOGPROB) != 0
    picked.token_ids.copy_(torch.where(has_token | is_greedy, token_ids, FAILED))
    picked.logprobs.copy_(torch.where(wanted, logprobs, torch.nan))


def advance_state(
    tables: SlotTables, rows: StepRows, *, picked: PickedTokens, ring: TokenRing
) -> None:
    """Give the slots their tokens, the ring what the host wants to see, and the rows the next step.

    A row that ran gets its token as last token, one position further; it ends (its slot becomes
    inactive) when the token is a stop id that counts, when the sequence has all its tokens, or when
    there was none to draw. Rows are then what `gather_rows` would make of them, except that a row
    that did not run does not either in the next step. The ring's step is counted.
    """
    ran = (rows.slots >= 0) & (rows.kv_lens > 0)
    has_token = ran & (picked.token_ids >= 0)
    slots = rows.slots.clamp(min=0).long()
    positions = rows.positions + 1
    fields = tables.fields[:, slots]
    is_stop = (tables.stop_ids[slots] == picked.token_ids[:, None]).any(1)
    is_stop &= positions >= fields[SlotField.FIRST_STOP_POSITION]
    is_last = positions + 1 >= fields[SlotField.MAX_TOTAL_TOKENS]
    goes_on = has_token & ~is_stop & ~is_last
    _write_column(ring, picked, ran=ran, has_token=has_token)
    advanced = slots[has_token]
    tables.fields[SlotField.LAST_TOKEN, advanced] = picked.token_ids[has_token]
    tables.fields[SlotField.POSITION, advanced] = positions[has_token]
    tables.fields[SlotField.IS_ACTIVE, slots[ran & ~goes_on]] = 0
    _place_inputs(
        tables,
        rows,
        slots=slots,
        is_active=goes_on,
        token_ids=picked.token_ids,
        positions=positions,
    )


def _place_inputs(
    tables: SlotTables,
    rows: StepRows,
    *,
    slots: Tensor,
    is_active: Tensor,
    token_ids: Tensor,
    positions: Tensor,
) -> None:
    """The next input of each row, or none where it is not active or lacks the block."""
    block_size, max_num_blocks = tables.layout.block_size, tables.layout.max_num_blocks
    index = positions.long() // block_size
    runs = is_active & (index < tables.fields[SlotField.NUM_BLOCKS, slots])
    blocks = tables.block_tables[slots, index.clamp(max=max_num_blocks - 1)]
    runs &= blocks >= 0
    rows.token_ids.copy_(torch.where(runs, token_ids, 0))
    rows.positions.copy_(torch.where(runs, positions, 0))
    rows.kv_lens.copy_(torch.where(runs, positions + 1, 0))
    rows.slot_mapping.copy_(torch.where(runs, blocks * block_size + positions % block_size, -1))


def _write_column(ring: TokenRing, picked: PickedTokens, *, ran: Tensor, has_token: Tensor) -> None:
    length, num_rows = ring.token_ids.shape[0], ran.shape[0]
    at = int(ring.step) % length
    shown = torch.where(has_token, picked.token_ids, torch.where(ran, FAILED, NO_TOKEN))
    ring.token_ids[at, :num_rows] = shown.int()
    ring.logprobs[at, :num_rows] = picked.logprobs
    ring.step.add_(1)


def _tiled(logits: Tensor, num_tiles: int, tile: int) -> Tensor:
    """[rows, tiles, tile] float64, -inf behind the vocabulary."""
    missing = num_tiles * tile - logits.shape[1]
    padded: Tensor = pad(logits.double(), (0, missing), value=-torch.inf)
    return padded.view(-1, num_tiles, tile)


def _exp_difference(values: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """exp((value - largest) / temperature); 0 where all are -inf."""
    return torch.exp((values - largest.masked_fill(largest == -torch.inf, 0)) / temperature)


def _temperature(rows: StepRows) -> Tensor:
    """[rows] float64, never 0."""
    return rows.parameter(SlotField.TEMPERATURE).double().clamp(min=LOWEST_TEMPERATURE)


def _draws(rows: StepRows) -> Tensor:
    """[rows] float64 in (0, 1). Reads seeds and positions on the host."""
    low, high = (
        rows.parameters[field.value].cpu().numpy().view("uint32").astype("uint64")
        for field in (SlotField.SEED_LOW, SlotField.SEED_HIGH)
    )
    positions = rows.positions.cpu().numpy().astype("int64") + 1
    return torch.from_numpy(uniform(low | high << 32, positions)).to(rows.positions.device)
