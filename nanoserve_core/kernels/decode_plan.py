"""The work list of a decode step, made on the device: once per step, shared by all layers.

The host needs to know no length for it, so a step can be captured as a CUDA graph and replayed
while the lengths grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.decode_config import max_items
from nanoserve_core.kernels.launch_errors import shape_error, value_error

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.kernels.decode_config import DecodeConfig

MAX_ROWS = 1 << 15
TILE_ROWS = 16
"""Rows of the smallest tensor-core tile: so many query heads ride on one K/V read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """The work list, and the memory its items hand partial results over in. One step at a time."""

    max_kv_len: int
    items: Tensor
    """[max_items, 2] int32: first row << 16 | set of rows from it on (a bit each), chunk number."""
    header: Tensor
    """[2] int32: number of items, tokens per chunk."""
    first_partials: Tensor
    """[max_rows] int32: where the partial results of a row begin."""
    partial_outs: Tensor
    """[max_items, kv_heads, group, head_dim] float32."""
    partial_lses: Tensor
    """[max_items, kv_heads, group] float32, log2 of the sum of exponentials."""
    tickets: Tensor
    """[max_rows, kv_heads] int32: chunks done; zero between launches."""

    @classmethod
    def allocate(
        cls,
        config: DecodeConfig,
        *,
        max_rows: int,
        max_kv_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> DecodePlan:
        """Memory for steps of up to ``max_rows`` rows of up to ``max_kv_len`` tokens.

        If steps differ in their configuration, pass the one with the most `max_items`.
        """
        num_items = max_items(
            config, num_rows=max_rows, max_kv_len=max_kv_len, num_kv_heads=num_kv_heads
        )
        group = num_heads // num_kv_heads
        partials = (num_items, num_kv_heads, group)
        return cls(
            max_kv_len=max_kv_len,
            items=torch.zeros((num_items, 2), dtype=torch.int32, device=device),
            header=torch.zeros(2, dtype=torch.int32, device=device),
            first_partials=torch.zeros(max_rows, dtype=torch.int32, device=device),
            partial_outs=torch.empty((*partials, head_dim), dtype=torch.float32, device=device),
            partial_lses=torch.empty(partials, dtype=torch.float32, device=device),
            tickets=torch.zeros((max_rows, num_kv_heads), dtype=torch.int32, device=device),
        )


@triton.jit(
    do_not_specialize=["num_rows", "min_chunk", "max_chunk", "target_items"],
    do_not_specialize_on_alignment=["kv_len_ptr", "lead_ptr", "shared_ptr"],
)
def decode_plan_kernel(
    kv_len_ptr,
    lead_ptr,
    shared_ptr,
    item_ptr,
    header_ptr,
    first_partial_ptr,
    num_rows,
    min_chunk,
    max_chunk,
    target_items,
    ROWS: tl.constexpr,
    PACK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (rows,): every program looks at all rows and lists the items of its own.

    Items are listed by row. The rows of one group inside an aligned run of PACK rows form a pack;
    the first live row of a pack lists the chunks that all of it share, once for all::

        rows         0   1   2   3     PACK 4, all of one group, row 1 ended (length 0)
        shared      [0           0 0]  listed by row 0 with the set 0b1101
        own         [0] [1] [2] [3]    listed by each row; an ended row lists one empty chunk
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    lens = tl.load(kv_len_ptr + rows, mask=is_row, other=0)
    num_tokens = tl.sum(lens, 0)
    chunk = min_chunk
    while (chunk < max_chunk) & (num_tokens > chunk * target_items):
        chunk *= 2
    # An ended row keeps one empty chunk, so that its output becomes zero and not what was there.
    num_chunks = tl.where(is_row, tl.maximum((lens + chunk - 1) // chunk, 1), 0)
    skipped = tl.zeros([ROWS], tl.int32)
    my_shared = 0
    my_members = 1
    if PACK > 1:
        lead = tl.load(lead_ptr + rows, mask=is_row, other=-1)
        pack_start = rows // PACK * PACK
        shared = tl.full([ROWS], 1 << 30, tl.int32)
        members = tl.zeros([ROWS], tl.int32)
        for i in tl.static_range(PACK):
            other = pack_start + i
            is_other = other < num_rows
            other_len = tl.load(kv_len_ptr + other, mask=is_other, other=0)
            other_lead = tl.load(lead_ptr + other, mask=is_other, other=-2)
            other_shared = tl.load(shared_ptr + other, mask=is_other, other=0)
            is_member = (other_len > 0) & (other_lead == lead)
            whole_chunks = tl.minimum(other_shared, other_len) // chunk
            shared = tl.where(is_member, tl.minimum(shared, whole_chunks), shared)
            members += tl.where(is_member, 1 << i, 0)
        place = rows - pack_start
        is_first = (members & ((1 << place) - 1)) == 0
        from_here = members >> place
        shared = tl.where((lens > 0) & is_row, shared, 0)
        skipped = tl.where(is_first, 0, shared)
        mine = rows == row
        my_shared = tl.sum(tl.where(mine & is_first, shared, 0), 0)
        my_members = tl.sum(tl.where(mine, from_here, 0), 0)
    num_items = num_chunks - skipped
    before = rows < row
    first_item = tl.sum(tl.where(before, num_items, 0), 0)
    my_skipped = tl.sum(tl.where(rows == row, skipped, 0), 0)
    my_num_items = tl.sum(tl.where(rows == row, num_items, 0), 0)
    tl.store(first_partial_ptr + row, tl.sum(tl.where(before, num_chunks, 0), 0))
    for start in range(0, my_num_items, CHUNKS):
        index = start + tl.arange(0, CHUNKS)
        chunk_number = my_skipped + index
        is_item = index < my_num_items
        row_set = tl.where(chunk_number < my_shared, my_members, 1)
        item_ptrs = item_ptr + 2 * (first_item + index)
        tl.store(item_ptrs, (row << 16) | row_set, mask=is_item)
        tl.store(item_ptrs + 1, chunk_number, mask=is_item)
    if row == 0:
        tl.store(header_ptr, tl.sum(num_items, 0))
        tl.store(header_ptr + 1, chunk)


def decode_plan(
    kv_lens: Tensor,
    *,
    plan: DecodePlan,
    config: DecodeConfig,
    lead: Tensor | None = None,
    shared: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """List the work of a decode step in ``plan``.

    kv_lens: [rows] int32, the new token included; a row of length 0 takes part but attends to
    nothing. lead, shared: [rows] int32 or both None. ``lead[row]`` names the row's group (a row
    of it, say) and ``shared[row]`` how many of the row's leading tokens lie in the same physical
    blocks as those of its group's other rows (rows that share less agree in what they share).
    Groups are best kept together, beginning at a multiple of `pack_size`. Results do not depend on
    groups. ``pdl``: see `rms_norm`.
    """
    num_rows = kv_lens.shape[0]
    _check(kv_lens, lead, shared, plan, config)
    _, num_kv_heads, group = plan.partial_lses.shape
    target = config.target_items // num_kv_heads
    decode_plan_kernel[(num_rows,)](
        kv_lens,
        kv_lens if lead is None else lead,
        kv_lens if shared is None else shared,
        plan.items,
        plan.header,
        plan.first_partials,
        num_rows,
        config.min_chunk,
        config.max_chunk,
        target,
        ROWS=max(triton.next_power_of_2(plan.first_partials.shape[0]), 16),
        PACK=1 if lead is None else pack_size(group),
        CHUNKS=32,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def pack_size(group: int) -> int:
    """Rows that fit one tile when ``group`` query heads share a kv head: a power of two."""
    return max(1 << (TILE_ROWS // group).bit_length() - 1, 1) if group <= TILE_ROWS else 1


def _check(
    kv_lens: Tensor,
    lead: Tensor | None,
    shared: Tensor | None,
    plan: DecodePlan,
    config: DecodeConfig,
) -> None:
    op = "decode_plan"
    num_rows, max_rows = kv_lens.shape[0], plan.first_partials.shape[0]
    if num_rows > min(max_rows, MAX_ROWS):
        remedy = "Allocate a plan for more rows."
        raise value_error(op, "rows", num_rows, f"at most {min(max_rows, MAX_ROWS)}", remedy)
    num_kv_heads, room = plan.tickets.shape[1], plan.items.shape[0]
    needed = max_items(
        config, num_rows=num_rows, max_kv_len=plan.max_kv_len, num_kv_heads=num_kv_heads
    )
    if needed > room:
        remedy = "Allocate it for this configuration."
        raise value_error(op, "plan", f"{room} items", f"room for {needed}", remedy)
    if (lead is None) != (shared is None):
        missing = "lead" if lead is None else "shared"
        raise value_error(op, missing, None, "lead and shared together", "Pass both or none.")
    for name, tensor in (("kv_lens", kv_lens), ("lead", lead), ("shared", shared)):
        if tensor is None:
            continue
        if tensor.shape != (num_rows,) or not tensor.is_contiguous():
            raise shape_error(op, name, tensor, (num_rows,))
