"""Every op in plain torch: what a CPU runs, and what a device kernel of the same name is tested
against.

Rounding happens where transformers' Qwen3 rounds: the residual before its norm, the normalised
value before the weight product, SiLU before the product with ``up``. Rotation is computed in
float32 and rounded once. The accumulation dtype is float32, or float64 for float64 input, so that a
test can raise the precision of all of them by its input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import silu


@dataclass(frozen=True, kw_only=True, slots=True)
class QkViews:
    """Everything `qk_norm_rope_write` looks at in a q/k/v tensor, and its scratch.

    Made once per tensor: a view costs a microsecond, and a dozen of them per layer cost more than
    the arithmetic of one token.
    """

    qk: Tensor
    """[tokens, heads + kv_heads, head_dim]: read, and overwritten."""
    key_value: Tensor
    """[2, tokens, kv_heads, head_dim]: what is written to the cache."""
    normed: Tensor
    """Scratch of the shape of ``qk``; ``normed_q`` and ``normed_k`` are its parts."""
    normed_q: Tensor
    normed_k: Tensor
    exact: Tensor
    """``normed`` in the accumulation dtype: itself, or scratch. ``x1``, ``x2``: its halves."""
    x1: Tensor
    x2: Tensor
    rotated: Tensor
    """``qk`` in the accumulation dtype: itself, or scratch. ``y1``, ``y2``: its halves."""
    y1: Tensor
    y2: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlacement:
    """Where the tokens of a step sit: their rotation and their K/V slots."""

    cos: Tensor
    """[tokens, 1, head_dim / 2] float32, as ``sin``."""
    sin: Tensor
    slots: Tensor
    """[written tokens] int64: the cache slot of each token that is written."""
    rows: Tensor | None
    """[written tokens] int64: which tokens are written; None when all are."""


def qk_views(qkv: Tensor, *, num_kv_heads: int) -> QkViews:
    """Prepare a tensor for `qk_norm_rope_write`. qkv: [tokens, heads + 2 * kv_heads, head_dim], q
    heads first; the views stay good while its memory does.
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_heads = num_all_heads - 2 * num_kv_heads
    qk, dtype = qkv.narrow(1, 0, num_heads + num_kv_heads), _accumulation_dtype(qkv)
    pairs = qkv.narrow(1, num_heads, 2 * num_kv_heads).view(num_tokens, 2, num_kv_heads, head_dim)
    normed = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    normed_q, normed_k = normed.split_with_sizes((num_heads, num_kv_heads), dim=1)
    is_exact = qk.dtype == dtype
    exact = normed if is_exact else torch.empty(qk.shape, dtype=dtype, device=qk.device)
    rotated = qk if is_exact else torch.empty(qk.shape, dtype=dtype, device=qk.device)
    x1, x2 = exact.chunk(2, dim=-1)
    y1, y2 = rotated.chunk(2, dim=-1)
    return QkViews(
        qk=qk,
        key_value=pairs.transpose(0, 1),
        normed=normed,
        normed_q=normed_q,
        normed_k=normed_k,
        exact=exact,
        x1=x1,
        x2=x2,
        rotated=rotated,
        y1=y1,
        y2=y2,
    )


def place_tokens(
    rotary_table: Tensor, *, positions: Tensor, slot_mapping: Tensor
) -> TokenPlacement:
    """Look up what the layers of a step share. rotary_table: [num_positions, head_dim] float32, cos
    then sin; positions, slot_mapping: [tokens] int64. A token of slot -1 is rotated, not written.
    """
    cos, sin = rotary_table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    if int(slot_mapping.min()) >= 0:
        return TokenPlacement(cos=cos, sin=sin, slots=slot_mapping, rows=None)
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    return TokenPlacement(cos=cos, sin=sin, slots=slot_mapping[rows], rows=rows)


def qk_norm_rope_write(
    views: QkViews,
    placement: TokenPlacement,
    *,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cache: Tensor,
) -> None:
    """Normalise and rotate q and k where they are, then write k and v at the tokens' slots.

    cache: [2, blocks * block_size, kv_heads, head_dim], K and V of the layer; weights: [head_dim].
    The two halves of a head are rotated against each other (not neighbouring pairs).
    """
    torch.mul(views.qk, _inverse_rms(views.qk, eps), out=views.normed)
    views.normed_q.mul_(q_weight)
    views.normed_k.mul_(k_weight)
    if views.exact is not views.normed:
        views.exact.copy_(views.normed)
    torch.mul(views.x1, placement.cos, out=views.y1)
    views.y1.addcmul_(views.x2, placement.sin, value=-1)
    torch.mul(views.x2, placement.cos, out=views.y2)
    views.y2.addcmul_(views.x1, placement.sin)
    if views.rotated is not views.qk:
        views.qk.copy_(views.rotated)
    rows = placement.rows
    written = views.key_value if rows is None else views.key_value[:, rows]
    cache.index_copy_(1, placement.slots, written)


def linear(x: Tensor, weight_t: Tensor, *, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ weight_t + bias. x: [tokens, in], weight_t: [in, out] (a transposed view), out:
    [tokens, out].
    """
    if bias is None:
        torch.mm(x, weight_t, out=out)
    else:
        torch.addmm(bias, x, weight_t, out=out)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> None:
    """out = round(x / rms(x)) * weight over the last dimension. x, out: [..., size]; weight:
    [size].
    """
    torch.mul(x, _inverse_rms(x, eps), out=out)
    out.mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, *, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += x, rounded; out = rms_norm(residual). All [tokens, hidden_size]; ``residual``
    changes in place.
    """
    residual.add_(x)
    rms_norm(residual, weight, eps=eps, out=out)


def silu_mul(gate: Tensor, up: Tensor, *, out: Tensor) -> None:
    """out = round(silu(gate)) * up, all [tokens, size]; rows of gate and up may lie apart."""
    torch.mul(silu(gate), up, out=out)


def copy_blocks(cache: Tensor, *, sources: Tensor, destinations: Tensor) -> None:
    """Copy whole blocks, K and V of every layer. cache: [2, layers, blocks, ...]; sources,
    destinations: [n] int64.

    All sources are read before anything is written, so a block may be both.
    """
    cache.index_copy_(2, destinations, cache.index_select(2, sources))


def paged_attention(
    query: Tensor,
    *,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
) -> Tensor:
    """Causal attention by the book, one row and one head at a time: slow, for any float dtype, for
    tests only.

    query: [tokens, heads, head_dim]; caches: [blocks, block_size, kv_heads, head_dim];
    block_tables: [S, max_blocks]; query_start: [S + 1]; kv_lens: [S]. The last query token of a row
    sees its whole K/V. Returns [tokens, heads, head_dim].
    """
    out = torch.empty_like(query)
    group = query.shape[1] // key_cache.shape[2]
    for row, kv_len in enumerate(kv_lens.tolist()):
        start, end = int(query_start[row]), int(query_start[row + 1])
        seen = torch.ones(end - start, kv_len, dtype=torch.bool, device=query.device)
        seen = seen.tril(kv_len - (end - start))
        blocks = block_tables[row].long()
        blocks = blocks[: -(-kv_len // key_cache.shape[1])]
        keys, values = (c[blocks].flatten(0, 1)[:kv_len] for c in (key_cache, value_cache))
        for head in range(query.shape[1]):
            scores = query[start:end, head] @ keys[:, head // group].T / math.sqrt(query.shape[2])
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            out[start:end, head] = weights @ values[:, head // group]
    return out


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, kept, in the accumulation dtype.

    Three calls on the small result, none with a Python number as operand, which would become a
    tensor first (4 us): at one token two thirds of the time of the textbook form.
    """
    dtype = _accumulation_dtype(x)
    norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=dtype)
    return torch.addcmul(
        _constant(eps, dtype, x.device), norm, norm, value=1 / x.shape[-1]
    ).rsqrt_()


@lru_cache(maxsize=16)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor [1] that nobody writes to."""
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=dtype, device=device)


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
