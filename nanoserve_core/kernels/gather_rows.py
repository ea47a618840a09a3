"""The rows of a step from the slots they belong to: inputs, lengths, K/V slots, parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.launch_errors import shape_error
from nanoserve_core.kernels.slot_tables import NUM_PARAMETERS, SlotField

if TYPE_CHECKING:
    from nanoserve_core.kernels.slot_tables import SlotTables, StepRows

BLOCK = 256

# Views of one piece of memory: how they are aligned depends on the number of slots.
VIEWS = [
    "slot_ptr",
    "slot_table_ptr",
    "token_ptr",
    "position_ptr",
    "kv_len_ptr",
    "slot_mapping_ptr",
    "row_table_ptr",
]

LAST_TOKEN = tl.constexpr(SlotField.LAST_TOKEN.value)
POSITION = tl.constexpr(SlotField.POSITION.value)
IS_ACTIVE = tl.constexpr(SlotField.IS_ACTIVE.value)
NUM_BLOCKS = tl.constexpr(SlotField.NUM_BLOCKS.value)


@triton.jit
def place_input(
    slot,
    is_active,
    position,
    field_ptr,
    table_ptr,
    num_slots,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
):
    """Whether a slot has the K/V block of its next input, and that input's K/V slot (or -1).

    A scalar or a block of slots.
    """
    index = position // BLOCK_SIZE
    num_blocks = tl.load(field_ptr + NUM_BLOCKS * num_slots + slot, mask=is_active, other=0)
    has_entry = is_active & (index < num_blocks)
    entry_ptr = table_ptr + slot.to(tl.int64) * table_stride + index
    block = tl.load(entry_ptr, mask=has_entry, other=-1)
    runs = block >= 0
    return runs, tl.where(runs, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)


@triton.jit(
    do_not_specialize=["num_slots", "parameter_stride", "table_stride"],
    do_not_specialize_on_alignment=VIEWS,
)
def gather_rows_kernel(
    slot_ptr,
    field_ptr,
    slot_table_ptr,
    parameter_ptr,
    token_ptr,
    position_ptr,
    kv_len_ptr,
    slot_mapping_ptr,
    row_table_ptr,
    num_slots,
    parameter_stride,
    table_stride,
    NUM_PARAMETERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (rows,)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    has_slot = slot >= 0
    for i in tl.static_range(NUM_PARAMETERS):
        value = tl.load(field_ptr + i * num_slots + slot, mask=has_slot, other=0)
        tl.store(parameter_ptr + i * parameter_stride + row, value)
    token = tl.load(field_ptr + LAST_TOKEN * num_slots + slot, mask=has_slot, other=0)
    position = tl.load(field_ptr + POSITION * num_slots + slot, mask=has_slot, other=0)
    is_active = tl.load(field_ptr + IS_ACTIVE * num_slots + slot, mask=has_slot, other=0) != 0
    runs, slot_mapping = place_input(
        slot,
        is_active,
        position,
        field_ptr,
        slot_table_ptr,
        num_slots,
        table_stride,
        BLOCK_SIZE,
    )
    tl.store(token_ptr + row, tl.where(runs, token, 0))
    tl.store(position_ptr + row, tl.where(runs, position, 0))
    tl.store(kv_len_ptr + row, tl.where(runs, position + 1, 0))
    tl.store(slot_mapping_ptr + row, slot_mapping)
    num_blocks = tl.load(field_ptr + NUM_BLOCKS * num_slots + slot, mask=has_slot, other=0)
    from_ptr = slot_table_ptr + slot.to(tl.int64) * table_stride
    to_ptr = row_table_ptr + row.to(tl.int64) * table_stride
    for start in range(0, num_blocks, BLOCK):
        index = start + tl.arange(0, BLOCK)
        is_entry = index < num_blocks
        tl.store(to_ptr + index, tl.load(from_ptr + index, mask=is_entry), mask=is_entry)


def gather_rows(tables: SlotTables, rows: StepRows, *, pdl: bool = False) -> None:
    """Fill ``rows`` for a step from the slots that ``rows.slots`` names.

    A row runs when it has a slot, the slot is active, and the block of its input's position is
    there; a row that does not run writes no K/V and yields no token. One that only lacks a block
    (it is *parked*) runs again after the gather that finds the block. Of the block tables only what
    belongs to the sequence is written. ``pdl``: see `rms_norm`.
    """
    check_rows("gather_rows", tables, rows)
    layout = tables.layout
    gather_rows_kernel[(rows.num_rows,)](
        rows.slots,
        tables.fields,
        tables.block_tables,
        rows.parameters,
        rows.token_ids,
        rows.positions,
        rows.kv_lens,
        rows.slot_mapping,
        rows.block_tables,
        layout.num_slots,
        rows.parameters.stride(0),
        layout.max_num_blocks,
        NUM_PARAMETERS=NUM_PARAMETERS,
        BLOCK_SIZE=layout.block_size,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


def check_rows(op: str, tables: SlotTables, rows: StepRows) -> None:
    """What `gather_rows` and `advance_state` demand of their rows; raises for the first of it."""
    num_rows, width = rows.num_rows, tables.layout.max_num_blocks
    for name in ("slots", "token_ids", "positions", "kv_lens", "slot_mapping"):
        tensor = getattr(rows, name)
        if tensor.shape != (num_rows,) or not tensor.is_contiguous():
            raise shape_error(op, f"rows.{name}", tensor, (num_rows,))
    if rows.block_tables.shape != (num_rows, width) or not rows.block_tables.is_contiguous():
        raise shape_error(op, "rows.block_tables", rows.block_tables, (num_rows, width))
