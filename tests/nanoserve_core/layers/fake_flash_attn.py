"""The two functions of flash-attn 2.8 that we call, by the book, and as strict as the package."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import torch

from nanoserve_core.kernels import reference

if TYPE_CHECKING:
    from torch import Tensor


def fake_package() -> types.ModuleType:
    """What ``import flash_attn`` would give."""
    package = types.ModuleType("flash_attn")
    vars(package).update(
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        flash_attn_varlen_func=flash_attn_varlen_func,
    )
    return package


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    causal: bool,
    num_splits: int,
) -> Tensor:
    """q: [rows, 1, heads, head_dim]; the same comes back. A row of length 0 gets zeros."""
    num_rows, num_queries, num_heads, head_dim = q.shape
    assert (num_queries, causal) == (1, True)
    assert 1 <= num_splits <= 128, "a fixed number can be captured"
    _check_cache(q, k_cache, v_cache, block_table, num_rows)
    assert cache_seqlens.dtype is torch.int32
    assert cache_seqlens.is_contiguous()
    assert cache_seqlens.shape == (num_rows,)
    out = reference.paged_attention(
        q.reshape(num_rows, num_heads, head_dim),
        key_cache=k_cache,
        value_cache=v_cache,
        block_tables=block_table,
        query_start=torch.arange(num_rows + 1),
        kv_lens=cache_seqlens,
    )
    return out.masked_fill(cache_seqlens.view(-1, 1, 1) == 0, 0.0).unsqueeze(1)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    block_table: Tensor,
) -> Tensor:
    """q: [tokens, heads, head_dim]; the same comes back. Tokens behind the last row get NaN."""
    num_rows = cu_seqlens_q.shape[0] - 1
    assert causal
    assert type(max_seqlen_q) is type(max_seqlen_k) is int
    _check_cache(q, k, v, block_table, num_rows)
    for starts in (cu_seqlens_q, cu_seqlens_k):
        assert starts.dtype is torch.int32
        assert starts.is_contiguous()
        assert starts.shape == (num_rows + 1,)
        assert starts[0] == 0
    kv_lens = cu_seqlens_k.diff()
    assert cu_seqlens_q.diff().max() <= max_seqlen_q
    assert kv_lens.max() <= max_seqlen_k
    assert max_seqlen_q > 1, "it would take every row for one of a single token"
    num_tokens = int(cu_seqlens_q[-1])
    out = torch.full_like(q, torch.nan)
    out[:num_tokens] = reference.paged_attention(
        q[:num_tokens],
        key_cache=k,
        value_cache=v,
        block_tables=block_table,
        query_start=cu_seqlens_q,
        kv_lens=kv_lens,
    )
    return out


def _check_cache(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, num_rows: int) -> None:
    assert k.shape == v.shape
    assert k.shape[1] % 256 == 0
    assert k.shape[3] == q.shape[-1]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert block_table.dtype is torch.int32
    assert block_table.stride(-1) == 1
    assert block_table.shape[0] == num_rows
