"""QK-norm, RoPE and the K/V write of a step's tokens, in one launch."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.launch_errors import shape_error, stride_error, value_error

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADS_PER_PROGRAM = 4


@triton.jit(do_not_specialize_on_alignment=["position_ptr", "slot_ptr"])
def qk_norm_rope_write_kernel(
    qkv_ptr,
    rotary_ptr,
    position_ptr,
    slot_ptr,
    q_weight_ptr,
    k_weight_ptr,
    key_ptr,
    value_ptr,
    eps,
    qkv_token_stride,
    cache_token_stride,
    cache_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (tokens, heads of q, k and v / HEADS); a program's HEADS heads are all of one kind.

    A head is held as its two halves, which are rotated against each other:
    (low * cos - high * sin, high * cos + low * sin).
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    heads = first_head + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, HALF)[None, :]
    low_ptrs = qkv_ptr + token * qkv_token_stride + heads * HEAD_DIM + dims
    high_ptrs = low_ptrs + HALF
    low = tl.load(low_ptrs)
    high = tl.load(high_ptrs)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    cache_start = slot * cache_token_stride + dims
    if first_head < NUM_HEADS + NUM_KV_HEADS:
        dtype = qkv_ptr.dtype.element_ty
        weight_ptr = q_weight_ptr if first_head < NUM_HEADS else k_weight_ptr
        low_weight = tl.load(weight_ptr + dims).to(tl.float32)
        high_weight = tl.load(weight_ptr + HALF + dims).to(tl.float32)
        rotary_ptrs = rotary_ptr + tl.load(position_ptr + token).to(tl.int64) * HEAD_DIM + dims
        cos = tl.load(rotary_ptrs)
        sin = tl.load(rotary_ptrs + HALF)
        exact_low = low.to(tl.float32)
        exact_high = high.to(tl.float32)
        squares = tl.sum(exact_low * exact_low + exact_high * exact_high, 1)
        inverse_rms = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        # transformers' rounding points: after the norm, and after the weight product.
        normed_low = (exact_low * inverse_rms).to(dtype).to(tl.float32) * low_weight
        normed_high = (exact_high * inverse_rms).to(dtype).to(tl.float32) * high_weight
        normed_low = normed_low.to(dtype).to(tl.float32)
        normed_high = normed_high.to(dtype).to(tl.float32)
        new_low = (normed_low * cos - normed_high * sin).to(dtype)
        new_high = (normed_high * cos + normed_low * sin).to(dtype)
        tl.store(low_ptrs, new_low)
        tl.store(high_ptrs, new_high)
        if (first_head >= NUM_HEADS) & (slot >= 0):
            key_ptrs = key_ptr + cache_start + (heads - NUM_HEADS) * cache_head_stride
            tl.store(key_ptrs, new_low.to(key_ptr.dtype.element_ty))
            tl.store(key_ptrs + HALF, new_high.to(key_ptr.dtype.element_ty))
    elif slot >= 0:
        kv_heads = heads - NUM_HEADS - NUM_KV_HEADS
        value_ptrs = value_ptr + cache_start + kv_heads * cache_head_stride
        tl.store(value_ptrs, low.to(value_ptr.dtype.element_ty))
        tl.store(value_ptrs + HALF, high.to(value_ptr.dtype.element_ty))


def qk_norm_rope_write(
    qkv: Tensor,
    *,
    rotary_table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cache: Tensor,
    pdl: bool = False,
) -> None:
    """Normalise and rotate q and k where they are, then write k and v to the tokens' slots.

    qkv: [tokens, heads + 2 * kv_heads, head_dim], q heads first; rotary_table: [num_positions,
    head_dim] float32, cos then sin; positions, slot_mapping: [tokens] integers, a token whose slot
    is -1 is rotated but not written; weights: [head_dim]; cache: [2, blocks * block_size, kv_heads,
    head_dim], K and V of the layer. ``pdl``: see `rms_norm`.
    """
    _check(qkv, rotary_table, positions, slot_mapping, q_weight, k_weight, cache)
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads = cache.shape[2]
    num_heads = num_all_heads - 2 * num_kv_heads
    heads_per_program = gcd(num_heads, num_kv_heads, MAX_HEADS_PER_PROGRAM)
    keys, values = cache.unbind(0)
    qk_norm_rope_write_kernel[(num_tokens, num_all_heads // heads_per_program)](
        qkv,
        rotary_table,
        positions,
        slot_mapping,
        q_weight,
        k_weight,
        keys,
        values,
        eps,
        qkv.stride(0),
        *cache.stride()[1:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEADS=heads_per_program,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


def _check(
    qkv: Tensor,
    rotary_table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cache: Tensor,
) -> None:
    op = "qk_norm_rope_write"
    if qkv.dim() != 3:
        raise shape_error(op, "qkv", qkv, ("tokens", "heads + 2 * kv_heads", "head_dim"))
    num_tokens, num_all_heads, head_dim = qkv.shape
    if head_dim < 16 or head_dim & (head_dim - 1):
        remedy = "Use the torch ops (kernels.reference) for this model."
        raise value_error(op, "head_dim", head_dim, "a power of two from 16", remedy)
    if qkv.stride()[1:] != (head_dim, 1):
        raise stride_error(op, "qkv", qkv, f"({head_dim}, 1) in the last two dimensions")
    if cache.dim() != 4 or cache.shape[0] != 2 or cache.shape[3] != head_dim:
        raise shape_error(op, "cache", cache, (2, "slots", "kv_heads", head_dim))
    if num_all_heads <= 2 * cache.shape[2]:
        expected = (num_tokens, f"heads + {2 * cache.shape[2]}", head_dim)
        raise shape_error(op, "qkv", qkv, expected)
    if cache.stride(3) != 1:
        raise stride_error(op, "cache", cache, "1 in the last dimension")
    if rotary_table.shape[1:] != (head_dim,) or not rotary_table.is_contiguous():
        raise shape_error(op, "rotary_table", rotary_table, ("num_positions", head_dim))
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        if tensor.shape != (num_tokens,) or not tensor.is_contiguous():
            raise shape_error(op, name, tensor, (num_tokens,))
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.shape != (head_dim,):
            raise shape_error(op, name, weight, (head_dim,))
