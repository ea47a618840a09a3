"""The end of a step on the device: tokens into slots and ring, stops, and the next step's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels import slot_tables
from nanoserve_core.kernels.gather_rows import check_rows, place_input
from nanoserve_core.kernels.launch_errors import shape_error
from nanoserve_core.kernels.slot_tables import SlotField

if TYPE_CHECKING:
    from nanoserve_core.kernels.slot_tables import PickedTokens, SlotTables, StepRows, TokenRing

BLOCK = 256

# Views of one piece of memory: how they are aligned depends on the number of slots.
VIEWS = [
    "slot_ptr",
    "stop_id_ptr",
    "slot_table_ptr",
    "token_ptr",
    "position_ptr",
    "kv_len_ptr",
    "slot_mapping_ptr",
]

LAST_TOKEN = tl.constexpr(SlotField.LAST_TOKEN.value)
POSITION = tl.constexpr(SlotField.POSITION.value)
IS_ACTIVE = tl.constexpr(SlotField.IS_ACTIVE.value)
MAX_TOTAL_TOKENS = tl.constexpr(SlotField.MAX_TOTAL_TOKENS.value)
FIRST_STOP_POSITION = tl.constexpr(SlotField.FIRST_STOP_POSITION.value)
MAX_STOP_IDS = tl.constexpr(slot_tables.MAX_STOP_IDS)
NO_TOKEN = tl.constexpr(slot_tables.NO_TOKEN)
FAILED = tl.constexpr(slot_tables.FAILED)


@triton.jit
def advance_rows(
    rows,
    in_step,
    slot_ptr,
    field_ptr,
    stop_id_ptr,
    slot_table_ptr,
    token_ptr,
    position_ptr,
    kv_len_ptr,
    slot_mapping_ptr,
    picked_ptr,
    logprob_ptr,
    ring_token_ptr,
    ring_logprob_ptr,
    num_slots,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
):
    """rows: [BLOCK]; the ring's pointers are at the step's column."""
    slot = tl.load(slot_ptr + rows, mask=in_step, other=-1)
    kv_len = tl.load(kv_len_ptr + rows, mask=in_step, other=0)
    token = tl.load(picked_ptr + rows, mask=in_step, other=-1)
    logprob = tl.load(logprob_ptr + rows, mask=in_step, other=0.0)
    ran = (slot >= 0) & (kv_len > 0)
    has_token = ran & (token >= 0)
    shown = tl.where(has_token, token, tl.where(ran, FAILED, NO_TOKEN))
    tl.store(ring_token_ptr + rows, shown, mask=in_step)
    tl.store(ring_logprob_ptr + rows, logprob, mask=in_step)
    # A row that ran has the length of its input's prefix: the new token's position.
    position = kv_len
    first_stop_ptr = field_ptr + FIRST_STOP_POSITION * num_slots + slot
    can_stop = position >= tl.load(first_stop_ptr, mask=has_token, other=0)
    max_total = tl.load(field_ptr + MAX_TOTAL_TOKENS * num_slots + slot, mask=has_token, other=0)
    ends = position + 1 >= max_total
    for i in tl.static_range(MAX_STOP_IDS):
        stop_id = tl.load(stop_id_ptr + slot * MAX_STOP_IDS + i, mask=has_token, other=-1)
        ends |= can_stop & (stop_id == token)
    goes_on = has_token & ~ends
    tl.store(field_ptr + LAST_TOKEN * num_slots + slot, token, mask=has_token)
    tl.store(field_ptr + POSITION * num_slots + slot, position, mask=has_token)
    tl.store(field_ptr + IS_ACTIVE * num_slots + slot, 0, mask=ran & ~goes_on)
    runs, slot_mapping = place_input(
        slot,
        goes_on,
        position,
        field_ptr,
        slot_table_ptr,
        num_slots,
        table_stride,
        BLOCK_SIZE,
    )
    tl.store(token_ptr + rows, tl.where(runs, token, 0), mask=in_step)
    tl.store(position_ptr + rows, tl.where(runs, position, 0), mask=in_step)
    tl.store(kv_len_ptr + rows, tl.where(runs, position + 1, 0), mask=in_step)
    tl.store(slot_mapping_ptr + rows, slot_mapping, mask=in_step)


@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "ring_length", "ring_stride", "table_stride"],
    do_not_specialize_on_alignment=VIEWS,
)
def advance_state_kernel(
    slot_ptr,
    field_ptr,
    stop_id_ptr,
    slot_table_ptr,
    token_ptr,
    position_ptr,
    kv_len_ptr,
    slot_mapping_ptr,
    picked_ptr,
    logprob_ptr,
    step_ptr,
    ring_token_ptr,
    ring_logprob_ptr,
    num_rows,
    num_slots,
    ring_length,
    ring_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (1,): one program has all rows, so that it can count the step after all have read it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    step = tl.load(step_ptr)
    column = (step % ring_length) * ring_stride
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        advance_rows(
            rows,
            rows < num_rows,
            slot_ptr,
            field_ptr,
            stop_id_ptr,
            slot_table_ptr,
            token_ptr,
            position_ptr,
            kv_len_ptr,
            slot_mapping_ptr,
            picked_ptr,
            logprob_ptr,
            ring_token_ptr + column,
            ring_logprob_ptr + column,
            num_slots,
            table_stride,
            BLOCK_SIZE,
        )
    tl.debug_barrier()
    tl.store(step_ptr, step + 1)


def advance_state(
    tables: SlotTables,
    rows: StepRows,
    *,
    picked: PickedTokens,
    ring: TokenRing,
    pdl: bool = False,
) -> None:
    """Give the slots their tokens, the ring what the host wants to see, and the rows the next step.

    A row that ran gets its token as last token, one position further; it ends (its slot becomes
    inactive) when the token is a stop id that counts, when the sequence has all its tokens, or when
    there was none to draw. Rows are then what `gather_rows` would make of them, except that a row
    that did not run does not either in the next step. The ring's step is counted. ``pdl``: see
    `rms_norm`.
    """
    op = "advance_state"
    check_rows(op, tables, rows)
    num_rows, layout = rows.num_rows, tables.layout
    for name in ("token_ids", "logprobs"):
        tensor = getattr(picked, name)
        if tensor.shape != (num_rows,) or not tensor.is_contiguous():
            raise shape_error(op, f"picked.{name}", tensor, (num_rows,))
    ring_length, max_num_rows = ring.token_ids.shape
    if max_num_rows < num_rows or ring.logprobs.shape != ring.token_ids.shape:
        raise shape_error(op, "ring.token_ids", ring.token_ids, ("steps", f"{num_rows} or more"))
    advance_state_kernel[(1,)](
        rows.slots,
        tables.fields,
        tables.stop_ids,
        tables.block_tables,
        rows.token_ids,
        rows.positions,
        rows.kv_lens,
        rows.slot_mapping,
        picked.token_ids,
        picked.logprobs,
        ring.step,
        ring.token_ids,
        ring.logprobs,
        num_rows,
        layout.num_slots,
        ring_length,
        max_num_rows,
        layout.max_num_blocks,
        BLOCK_SIZE=layout.block_size,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=BLOCK // 32,
        launch_pdl=pdl,
    )
