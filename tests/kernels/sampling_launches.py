"""Launches of the sampling and slot state kernels on meta tensors, for the cross-compile check."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from nanoserve_core.kernels import triton_ops as ops
from nanoserve_core.kernels.sampling_scratch import FilterTiles, TileStatistics
from nanoserve_core.kernels.slot_tables import (
    PickedTokens,
    SlotLayout,
    SlotTables,
    StepRows,
    TokenRing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEVICE = torch.device("meta")
NUM_ROWS = 256
VOCAB = 151936
LAYOUT = SlotLayout(num_slots=NUM_ROWS, max_num_blocks=64, block_size=64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sampling_launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Everything between logits and the next step's rows, at the vocabulary of Qwen3."""
    rows = StepRows.allocate(
        SlotLayout(num_slots=NUM_ROWS, max_num_blocks=64, block_size=64), DEVICE
    )
    cut = torch.empty(NUM_ROWS, device=DEVICE)
    stats = TileStatistics.allocate(NUM_ROWS, VOCAB, DEVICE)
    tiles = FilterTiles.allocate(NUM_ROWS, VOCAB, DEVICE)
    picked = PickedTokens.allocate(NUM_ROWS, DEVICE)
    for dtype in DTYPES:
        logits = torch.empty(NUM_ROWS, VOCAB, dtype=dtype, device=DEVICE)
        filters = {"logits": logits, "rows": rows, "tiles": tiles, "pdl": True}
        tokens = {"logits": logits, "rows": rows, "stats": stats, "pdl": True}
        name = str(dtype).removeprefix("torch.")
        masks = torch.empty(NUM_ROWS, VOCAB // 32, dtype=torch.int32, device=DEVICE)
        ids = torch.empty(NUM_ROWS, dtype=torch.int64, device=DEVICE)
        yield f"apply_token_bitmask, {name}", partial(ops.apply_token_bitmask, logits, masks, ids)
        yield f"filter_tiles, {name}", partial(ops.filter_tiles, **filters)
        yield f"filter_cut, {name}", partial(ops.filter_cut, cut=cut, **filters)
        yield f"tile_statistics, {name}", partial(ops.tile_statistics, cut=None, **tokens)
        yield f"pick_token, {name}", partial(ops.pick_token, cut=None, picked=picked, **tokens)
        if dtype == torch.bfloat16:
            yield "tile_statistics, cut", partial(ops.tile_statistics, cut=cut, **tokens)
            yield "pick_token, cut", partial(ops.pick_token, cut=cut, picked=picked, **tokens)


def state_launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """What moves between slots and rows."""
    tables = SlotTables.allocate(LAYOUT, DEVICE)
    rows = StepRows.allocate(LAYOUT, DEVICE, slots=tables.row_slots)
    picked = PickedTokens.allocate(NUM_ROWS, DEVICE)
    ring = TokenRing.allocate(64, NUM_ROWS, DEVICE)
    deltas = torch.empty(513, 2, dtype=torch.int32, device=DEVICE)
    yield "apply_deltas", partial(ops.apply_deltas, tables, deltas, pdl=True)
    yield "gather_rows", partial(ops.gather_rows, tables, rows, pdl=True)
    yield (
        "advance_state",
        partial(ops.advance_state, tables, rows, picked=picked, ring=ring, pdl=True),
    )
