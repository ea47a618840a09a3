"""Paged decode attention over a device-made work list: split K/V, persistent grid, fixed sum order.

Flash decoding (Dao et al., 2023) with three differences. The cuts are absolute multiples of a chunk
and the work list is planned on the device, so the grid is fixed and lengths may change under a
captured graph. The last program to finish a row adds up its chunks in chunk order, so the result
does not depend on who came when. Rows that share physical blocks ride in the idle rows of the
tensor-core tile of a chunk (16 rows, of which one sequence fills only its group of query heads).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.decode_plan import TILE_ROWS
from nanoserve_core.kernels.launch_errors import shape_error, stride_error, value_error

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.kernels.decode_config import DecodeConfig
    from nanoserve_core.kernels.decode_plan import DecodePlan

LOG2_E = 1.4426950408889634


@triton.jit
def attend_chunk(
    query,
    key_ptr,
    value_ptr,
    table_ptr,
    start,
    end,
    scale_log2,
    cache_block_stride,
    cache_token_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Online softmax of the rows of ``query`` over the K/V tokens [start, end) of one kv head.

    Returns the maximum of the scores (log2), the sum of weights below it, and the weighted values.
    The block of the next tile is looked up one tile ahead and carried through the loop: a look-up
    and the loads that need it in one iteration would halve the depth of the pipeline.
    """
    tokens = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    if BLOCK_SIZE >= BLOCK_N:
        next_block = tl.load(table_ptr + start // BLOCK_SIZE)
    else:
        is_first = start + tokens < end
        next_block = tl.load(table_ptr + (start + tokens) // BLOCK_SIZE, mask=is_first, other=0)
    score_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    score_sum = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for tile in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
        positions = tile + tokens
        is_token = positions < end
        block = next_block.to(tl.int64)
        if BLOCK_SIZE >= BLOCK_N:
            next_ptr = table_ptr + (tile + BLOCK_N) // BLOCK_SIZE
            next_block = tl.load(next_ptr, mask=tile + BLOCK_N < end, other=0)
            in_block = tile % BLOCK_SIZE + tokens
        else:
            next_ptrs = table_ptr + (positions + BLOCK_N) // BLOCK_SIZE
            next_block = tl.load(next_ptrs, mask=positions + BLOCK_N < end, other=0)
            in_block = positions % BLOCK_SIZE
        offsets = block * cache_block_stride + in_block * cache_token_stride
        offsets = offsets[:, None] + dims[None, :]
        keys = tl.load(key_ptr + offsets, mask=is_token[:, None], other=0.0)
        values = tl.load(value_ptr + offsets, mask=is_token[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale_log2
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        new_max = tl.maximum(score_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(score_max - new_max)
        score_sum = score_sum * rescale + tl.sum(weights, 1)
        weighted = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * rescale[:, None] + weighted
        score_max = new_max
    return score_max, score_sum, total


@triton.jit
def reduce_chunks(
    partial_out_ptr,
    partial_lse_ptr,
    first_partial,
    num_chunks,
    kv_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Add up the chunks of one row and kv head, AT_ONCE at a time, in chunk order.

    Returns [GROUP_PAD, HEAD_DIM] float32. Loads go past the L1 cache: other programs wrote this.
    """
    heads = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_DIM)
    is_head = heads < GROUP
    max_lse = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    weight_sum = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, HEAD_DIM], tl.float32)
    for start in range(0, num_chunks, AT_ONCE):
        chunks = start + tl.arange(0, AT_ONCE)
        is_chunk = chunks < num_chunks
        at = ((first_partial + chunks).to(tl.int64) * KV_HEADS + kv_head) * GROUP
        at = at[:, None] + heads[None, :]
        is_part = is_chunk[:, None] & is_head[None, :]
        lse = tl.load(partial_lse_ptr + at, mask=is_part, other=0.0, cache_modifier=".cg")
        lse = tl.where(is_chunk[:, None], lse, float("-inf"))
        part_ptrs = partial_out_ptr + at[:, :, None] * HEAD_DIM + dims[None, None, :]
        parts = tl.load(part_ptrs, mask=is_part[:, :, None], other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(max_lse, tl.max(lse, 0))
        rescale = tl.exp2(max_lse - new_max)
        weights = tl.exp2(lse - new_max[None, :])
        total = total * rescale[:, None] + tl.sum(parts * weights[:, :, None], 0)
        weight_sum = weight_sum * rescale + tl.sum(weights, 0)
        max_lse = new_max
    return total / weight_sum[:, None]


@triton.jit(do_not_specialize_on_alignment=["kv_len_ptr", "block_table_ptr"])
def decode_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    block_table_ptr,
    kv_len_ptr,
    item_ptr,
    header_ptr,
    first_partial_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    ticket_ptr,
    out_ptr,
    scale_log2,
    query_row_stride,
    query_head_stride,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    block_table_row_stride,
    out_row_stride,
    out_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (programs,), any number of them: items are dealt out in turn, kv heads innermost.

    A row of one chunk is written out at once. Of others each chunk leaves its part, and takes a
    ticket; who takes the last one of a row adds up its parts.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_work = tl.load(header_ptr) * KV_HEADS
    chunk_size = tl.load(header_ptr + 1)
    dtype = out_ptr.dtype.element_ty
    dims = tl.arange(0, HEAD_DIM)
    tile_rows = tl.arange(0, BLOCK_M)
    member = tile_rows // GROUP
    head_in_group = tile_rows % GROUP
    group_heads = tl.arange(0, GROUP_PAD)
    for work in tl.range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = work // KV_HEADS
        kv_head = work % KV_HEADS
        row_word = tl.load(item_ptr + 2 * item)
        chunk = tl.load(item_ptr + 2 * item + 1)
        row = row_word >> 16
        row_set = row_word & 0xFFFF
        kv_len = tl.load(kv_len_ptr + row)
        start = chunk * chunk_size
        end = tl.minimum(start + chunk_size, kv_len)
        is_query = ((row_set >> member) & 1) == 1
        rows = (row + member).to(tl.int64)
        heads = kv_head * GROUP + head_in_group
        query_ptrs = query_ptr + rows * query_row_stride + heads * query_head_stride
        query = tl.load(query_ptrs[:, None] + dims[None, :], mask=is_query[:, None], other=0.0)
        score_max, score_sum, total = attend_chunk(
            query,
            key_ptr + kv_head * cache_head_stride,
            value_ptr + kv_head * cache_head_stride,
            block_table_ptr + row.to(tl.int64) * block_table_row_stride,
            start,
            end,
            scale_log2,
            cache_block_stride,
            cache_token_stride,
            BLOCK_M,
            BLOCK_N,
            HEAD_DIM,
            BLOCK_SIZE,
            NUM_STAGES,
        )
        # Only a row of length 0 has no weight at all: its output is 0.
        result = total / tl.where(score_sum == 0.0, 1.0, score_sum)[:, None]
        if (row_set == 1) & (kv_len <= chunk_size):
            out_ptrs = out_ptr + rows * out_row_stride + heads * out_head_stride
            tl.store(out_ptrs[:, None] + dims[None, :], result.to(dtype), mask=is_query[:, None])
        else:
            partial = tl.load(first_partial_ptr + rows, mask=is_query, other=0) + chunk
            at = (partial.to(tl.int64) * KV_HEADS + kv_head) * GROUP + head_in_group
            part_ptrs = partial_out_ptr + at[:, None] * HEAD_DIM + dims[None, :]
            tl.store(part_ptrs, result, mask=is_query[:, None])
            tl.store(partial_lse_ptr + at, score_max + tl.log2(score_sum), mask=is_query)
            tl.debug_barrier()  # every thread has stored before one of them takes the ticket
            place = 0
            while (row_set >> place) > 0:
                if ((row_set >> place) & 1) != 0:
                    done_row = row + place
                    done_len = tl.load(kv_len_ptr + done_row)
                    num_chunks = (done_len + chunk_size - 1) // chunk_size
                    row_ticket_ptr = ticket_ptr + done_row * KV_HEADS + kv_head
                    if tl.atomic_add(row_ticket_ptr, 1, sem="acq_rel") == num_chunks - 1:
                        whole = reduce_chunks(
                            partial_out_ptr,
                            partial_lse_ptr,
                            tl.load(first_partial_ptr + done_row),
                            num_chunks,
                            kv_head,
                            KV_HEADS,
                            GROUP,
                            GROUP_PAD,
                            HEAD_DIM,
                            AT_ONCE,
                        )
                        whole_ptrs = out_ptr + done_row.to(tl.int64) * out_row_stride
                        whole_ptrs += (kv_head * GROUP + group_heads) * out_head_stride
                        is_head = group_heads < GROUP
                        tl.store(
                            whole_ptrs[:, None] + dims[None, :],
                            whole.to(dtype),
                            mask=is_head[:, None],
                        )
                        tl.store(row_ticket_ptr, 0)
                place += 1


def decode_attention(
    query: Tensor,
    *,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    plan: DecodePlan,
    config: DecodeConfig,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """Attention of one query token per row over its paged K/V; a row of length 0 gets zeros.

    query, out: [rows, heads, head_dim]; caches: [blocks, block_size, kv_heads, head_dim], strided
    as they like but dense in head_dim; block_tables: [rows, max_blocks] int32; kv_lens: [rows]
    int32. ``plan`` was filled by `decode_plan` from the same lengths and configuration. ``pdl``:
    see `rms_norm`.
    """
    _check(query, key_cache, value_cache, block_tables, kv_lens, plan, config, out)
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    group_pad = triton.next_power_of_2(group)
    decode_attention_kernel[(config.num_programs,)](
        query,
        key_cache,
        value_cache,
        block_tables,
        kv_lens,
        plan.items,
        plan.header,
        plan.first_partials,
        plan.partial_outs,
        plan.partial_lses,
        plan.tickets,
        out,
        LOG2_E / math.sqrt(head_dim),
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_tables.stride(0),
        *out.stride()[:2],
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=group_pad,
        BLOCK_M=max(TILE_ROWS, group_pad),
        BLOCK_N=config.block_n,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NUM_STAGES=config.num_stages,
        # 32 accumulators a thread: as many loads in flight as registers allow
        AT_ONCE=max(1024 * config.num_warps // (group_pad * head_dim), 1),
        PDL=pdl,
        num_warps=config.num_warps,
        launch_pdl=pdl,
    )


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    plan: DecodePlan,
    config: DecodeConfig,
    out: Tensor,
) -> None:
    op = "decode_attention"
    if query.dim() != 3 or query.stride(2) != 1:
        raise shape_error(op, "query", query, ("rows", "heads", "head_dim"))
    num_rows, num_heads, head_dim = query.shape
    if out.shape != query.shape or out.stride(2) != 1:
        raise shape_error(op, "out", out, query.shape)
    check_cache(op, key_cache, value_cache, num_heads=num_heads, head_dim=head_dim)
    num_kv_heads = key_cache.shape[2]
    if config.min_chunk % config.block_n:
        remedy = "Use a power of two."
        raise value_error(op, "block_n", config.block_n, "a divisor of min_chunk", remedy)
    expected = (plan.partial_outs.shape[0], num_kv_heads, num_heads // num_kv_heads, head_dim)
    if plan.partial_outs.shape != expected:
        raise shape_error(op, "plan.partial_outs", plan.partial_outs, expected)
    if block_tables.dim() != 2 or block_tables.shape[0] != num_rows or block_tables.stride(1) != 1:
        raise shape_error(op, "block_tables", block_tables, (num_rows, "max_blocks"))
    if kv_lens.shape != (num_rows,):
        raise shape_error(op, "kv_lens", kv_lens, (num_rows,))


def check_cache(
    op: str, key_cache: Tensor, value_cache: Tensor, *, num_heads: int, head_dim: int
) -> None:
    """Raise ValueError unless both are [blocks, block_size, kv_heads, head_dim], sized in powers of
    two where tiles are cut, and laid out alike.
    """
    if key_cache.dim() != 4 or key_cache.shape[3] != head_dim or num_heads % key_cache.shape[2]:
        expected = ("blocks", "block_size", f"a divisor of {num_heads}", head_dim)
        raise shape_error(op, "key_cache", key_cache, expected)
    if value_cache.shape != key_cache.shape:
        raise shape_error(op, "value_cache", value_cache, key_cache.shape)
    if key_cache.stride(3) != 1 or value_cache.stride() != key_cache.stride():
        raise stride_error(op, "value_cache", value_cache, "those of key_cache, ending in 1")
    block_size = key_cache.shape[1]
    if block_size & (block_size - 1):
        remedy = "Choose another block_size, or the torch backend."
        raise value_error(op, "block_size", block_size, "a power of two", remedy)
    if head_dim < 16 or head_dim & (head_dim - 1):
        remedy = "Use the torch backend for this model."
        raise value_error(op, "head_dim", head_dim, "a power of two from 16", remedy)
