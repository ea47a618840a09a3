"""Paged attention of prefill chunks of any lengths, causal from the lower right.

Flash attention (Dao, 2023) over block tables. A tile holds BLOCK_M / group query tokens of one kv
head with all their query heads, so K and V are read once for the group. The grid is an upper bound
that follows from the shapes alone, and each program finds its row by bisection, so the launch can
be captured (after vllm-project/vllm, vllm/v1/attention/ops/triton_unified_attention.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from nanoserve_core.kernels.decode_attention import LOG2_E, check_cache
from nanoserve_core.kernels.launch_errors import shape_error, stride_error, value_error

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """Tile of the kernel; changes the result only by rounding."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(
    num_tokens: int, *, num_rows: int, group: int, element_nbytes: int = 2
) -> PrefillConfig:
    """Small tiles when rows have few query tokens, so that programs are many and not half empty.

    ``group``: query heads of a kv head. Numbers of four bytes have no tensor cores, and spill with
    larger tiles.
    """
    if element_nbytes > 2:
        return PrefillConfig(block_m=32, block_n=32, num_warps=8, num_stages=2)
    if num_tokens * group < 128 * num_rows:
        return PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)


@triton.jit
def find_row(query_start_ptr, tile, num_rows, BLOCK_Q: tl.constexpr):
    """The last row whose tiles begin at or before ``tile``; those of row s begin at
    start[s] // BLOCK_Q + s, which leaves each row as many as it can need.
    """
    base = tl.load(query_start_ptr)
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = (tl.load(query_start_ptr + middle) - base) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def attend(
    query,
    key_ptr,
    value_ptr,
    table_ptr,
    begin,
    end,
    query_positions,
    score_max,
    score_sum,
    total,
    scale_log2,
    cache_block_stride,
    cache_token_stride,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the K/V tokens [begin, end); with MASKED, only those a query may see."""
    tokens = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    if BLOCK_SIZE >= BLOCK_N:
        next_block = tl.load(table_ptr + begin // BLOCK_SIZE, mask=begin < end, other=0)
    else:
        is_token = begin + tokens < end
        next_block = tl.load(table_ptr + (begin + tokens) // BLOCK_SIZE, mask=is_token, other=0)
    for tile in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        positions = tile + tokens
        block = next_block.to(tl.int64)
        if BLOCK_SIZE >= BLOCK_N:
            has_next = tile + BLOCK_N < end
            next_block = tl.load(table_ptr + (tile + BLOCK_N) // BLOCK_SIZE, mask=has_next, other=0)
            in_block = tile % BLOCK_SIZE + tokens
        else:
            next_positions = positions + BLOCK_N
            next_block = tl.load(
                table_ptr + next_positions // BLOCK_SIZE, mask=next_positions < end, other=0
            )
            in_block = positions % BLOCK_SIZE
        offsets = block * cache_block_stride + in_block * cache_token_stride
        offsets = offsets[:, None] + dims[None, :]
        if MASKED:
            is_token = positions < end
            keys = tl.load(key_ptr + offsets, mask=is_token[:, None], other=0.0)
            values = tl.load(value_ptr + offsets, mask=is_token[:, None], other=0.0)
        else:
            keys = tl.load(key_ptr + offsets)
            values = tl.load(value_ptr + offsets)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale_log2
        if MASKED:
            is_seen = positions[None, :] <= query_positions[:, None]
            scores = tl.where(is_seen & is_token[None, :], scores, float("-inf"))
        new_max = tl.maximum(score_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(score_max - new_max)
        score_sum = score_sum * rescale + tl.sum(weights, 1)
        total = total * rescale[:, None]
        total = tl.dot(weights.to(values.dtype), values, total, input_precision="ieee")
        score_max = new_max
    return score_max, score_sum, total


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["query_start_ptr", "kv_len_ptr", "block_table_ptr"],
)
def prefill_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    block_table_ptr,
    query_start_ptr,
    kv_len_ptr,
    out_ptr,
    num_rows,
    scale_log2,
    query_token_stride,
    query_head_stride,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    block_table_row_stride,
    out_token_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """grid (upper bound of query tiles, kv heads).

    ::

        K/V tokens    0 ........ all queries of the tile see these ......|. masked .|
        loops         [==================== unmasked ===================][= masked =]
                                                                first query   last query
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Later tiles of a row see more tokens: they start first, so that no long one comes last.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = find_row(query_start_ptr, tile, num_rows, BLOCK_Q)
    base = tl.load(query_start_ptr)
    query_start = tl.load(query_start_ptr + row) - base
    query_len = tl.load(query_start_ptr + row + 1) - base - query_start
    first_query = (tile - (query_start // BLOCK_Q + row)) * BLOCK_Q
    if first_query >= query_len:
        return
    kv_len = tl.load(kv_len_ptr + row)
    tile_rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    queries = first_query + tile_rows // GROUP
    heads = kv_head * GROUP + tile_rows % GROUP
    is_query = (queries < query_len) & (tile_rows < BLOCK_Q * GROUP)
    query_tokens = (query_start + queries).to(tl.int64)
    query_ptrs = query_ptr + query_tokens * query_token_stride + heads * query_head_stride
    query = tl.load(query_ptrs[:, None] + dims[None, :], mask=is_query[:, None], other=0.0)
    query_positions = kv_len - query_len + queries
    first_position = kv_len - query_len + first_query
    seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(first_position + BLOCK_Q, kv_len)
    table_ptr = block_table_ptr + row.to(tl.int64) * block_table_row_stride
    key_ptr += kv_head * cache_head_stride
    value_ptr += kv_head * cache_head_stride
    score_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    score_sum = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    score_max, score_sum, total = attend(
        query,
        key_ptr,
        value_ptr,
        table_ptr,
        0,
        seen_by_all,
        query_positions,
        score_max,
        score_sum,
        total,
        scale_log2,
        cache_block_stride,
        cache_token_stride,
        BLOCK_N,
        HEAD_DIM,
        BLOCK_SIZE,
        NUM_STAGES,
        MASKED=False,
    )
    score_max, score_sum, total = attend(
        query,
        key_ptr,
        value_ptr,
        table_ptr,
        seen_by_all,
        end,
        query_positions,
        score_max,
        score_sum,
        total,
        scale_log2,
        cache_block_stride,
        cache_token_stride,
        BLOCK_N,
        HEAD_DIM,
        BLOCK_SIZE,
        NUM_STAGES,
        MASKED=True,
    )
    result = (total / score_sum[:, None]).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + query_tokens * out_token_stride + heads * out_head_stride
    tl.store(out_ptrs[:, None] + dims[None, :], result, mask=is_query[:, None])


def prefill_attention(
    query: Tensor,
    *,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    out: Tensor,
    config: PrefillConfig | None = None,
) -> None:
    """Attention of several query tokens per row; the last one of a row sees its whole K/V.

    query, out: [tokens, heads, head_dim]; caches: [blocks, block_size, kv_heads, head_dim], strided
    as they like but dense in head_dim; block_tables: [rows, max_blocks] int32; query_start:
    [rows + 1] int32, counted from its first entry (so it may be the tail of a longer one); kv_lens:
    [rows] int32, the chunk included. Tokens behind the last row are left as they are.
    """
    _check(query, key_cache, value_cache, block_tables, query_start, kv_lens, out)
    num_tokens, num_heads, head_dim = query.shape
    num_rows = kv_lens.shape[0]
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    config = config or prefill_config(
        num_tokens, num_rows=num_rows, group=group, element_nbytes=query.element_size()
    )
    block_q = config.block_m // group
    if block_q == 0:
        remedy = "Use a larger tile, or the torch backend for this model."
        raise value_error(
            "prefill_attention", "block_m", config.block_m, f"{group} or more", remedy
        )
    prefill_attention_kernel[(num_tokens // block_q + num_rows, num_kv_heads)](
        query,
        key_cache,
        value_cache,
        block_tables,
        query_start,
        kv_lens,
        out,
        num_rows,
        LOG2_E / math.sqrt(head_dim),
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_tables.stride(0),
        *out.stride()[:2],
        GROUP=group,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    out: Tensor,
) -> None:
    op = "prefill_attention"
    if query.dim() != 3:
        raise shape_error(op, "query", query, ("tokens", "heads", "head_dim"))
    if out.shape != query.shape:
        raise shape_error(op, "out", out, query.shape)
    for name, tensor in (("query", query), ("out", out)):
        if tensor.stride(2) != 1:
            raise stride_error(op, name, tensor, "1 in the last dimension")
    check_cache(op, key_cache, value_cache, num_heads=query.shape[1], head_dim=query.shape[2])
    num_rows = kv_lens.shape[0]
    if query_start.shape != (num_rows + 1,):
        raise shape_error(op, "query_start", query_start, (num_rows + 1,))
    if block_tables.dim() != 2 or block_tables.shape[0] != num_rows or block_tables.stride(1) != 1:
        raise shape_error(op, "block_tables", block_tables, (num_rows, "max_blocks"))
