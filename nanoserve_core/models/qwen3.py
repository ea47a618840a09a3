"""Qwen3 (dense), every size: what it computes, in one file.

transformers' ``Qwen3ForCausalLM`` is the reference, rounding points included. The model knows no
request and no scheduler: a `ForwardBatch` says which tokens, a `KVCache` holds the past, an
`AttentionBackend` attends.

    embed -> layers * [norm, qkv, qk-norm + rope + K/V write, attention, o,
                       add + norm, gate_up, silu * up, down, add] -> wanted rows -> norm -> lm_head
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from nanoserve_core.layers.embedding import embed
from nanoserve_core.layers.norm_rope import rotary_table

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.config import ModelSpec
    from nanoserve_core.kernels import KernelOps, QkViews
    from nanoserve_core.kv_cache import KVCache
    from nanoserve_core.layers.attention import AttentionBackend, AttentionPlan, ForwardBatch
    from nanoserve_core.layers.linear import Linear, Projection
    from nanoserve_core.layers.norm_rope import RotaryFrequencies


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer. Norm weights: [hidden_size], those of q and k: [head_dim]."""

    input_norm: Tensor
    qkv: Projection
    q_norm: Tensor
    k_norm: Tensor
    o: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Weights:
    """All weights, and what defines the rotation. Shared storage or own, fused or not: the model
    cannot tell.
    """

    embedding: Tensor
    """[vocab_size, hidden_size]."""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear
    rotary: RotaryFrequencies


class Qwen3Model:
    """The forward pass of one engine. Owns its scratch memory, so one step at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Qwen3Weights,
        *,
        backend: AttentionBackend,
        ops: KernelOps,
        max_num_tokens: int,
        num_positions: int,
    ) -> None:
        """Steps have at most ``max_num_tokens`` tokens, at positions below ``num_positions``."""
        self._spec = spec
        self._backend = backend
        self._ops = ops
        self._weights = weights
        self._rotary_table = rotary_table(weights.rotary, num_positions=num_positions)
        self._scratch = _Scratch(spec, max_num_tokens, weights.embedding.device, ops)

    def of_one_layer(self) -> Qwen3Model:
        """The same model and memory with the first layer only: it needs every kernel once."""
        one = copy(self)
        one._weights = replace(self._weights, layers=self._weights.layers[:1])  # noqa: SLF001  # its own
        return one

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """The logits of the wanted tokens, [R, vocab_size] in the model's dtype; K and V of all go
        to the cache.
        """
        return self.logits(self.hidden_states(batch, kv_cache), batch.logits_indices)

    def hidden_states(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """The residual stream after the last layer, [tokens, hidden_size], valid until the next
        step.
        """
        ops, eps, layers = self._ops, self._spec.rms_norm_eps, self._weights.layers
        x = self._scratch.rows(batch.num_tokens)
        plan = self._backend.plan(batch, block_size=kv_cache.block_size)
        placement = ops.place_tokens(
            self._rotary_table, positions=batch.positions, slot_mapping=batch.slot_mapping
        )
        embed(self._weights.embedding, batch.token_ids, out=x.residual)
        ops.rms_norm(x.residual, layers[0].input_norm, eps=eps, out=x.normed)
        for index, layer in enumerate(layers):
            if index > 0:
                ops.add_rms_norm(
                    x.hidden, x.residual, weight=layer.input_norm, eps=eps, out=x.normed
                )
            layer.qkv(x.normed, ops=ops, out=x.qkv)
            ops.qk_norm_rope_write(
                x.qk_views,
                placement,
                q_weight=layer.q_norm,
                k_weight=layer.k_norm,
                eps=eps,
                cache=kv_cache.slots[index],
            )
            self._attend(x, batch.num_decode_seqs, kv_cache.blocks[index], plan)
            layer.o(x.attended, ops=ops, out=x.hidden)
            ops.add_rms_norm(x.hidden, x.residual, weight=layer.post_norm, eps=eps, out=x.normed)
            layer.gate_up(x.normed, ops=ops, out=x.gate_up)
            ops.silu_mul(x.gate, x.up, out=x.activated)
            layer.down(x.activated, ops=ops, out=x.hidden)
        return x.residual.add_(x.hidden)

    def logits(
        self, hidden_states: Tensor, indices: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Final norm and head of some rows: [tokens, hidden_size], [R] integers -> [R, vocab_size],
        in ``out`` or freshly allocated.
        """
        wanted = hidden_states.index_select(0, indices)
        self._ops.rms_norm(wanted, self._weights.norm, eps=self._spec.rms_norm_eps, out=wanted)
        if out is None:
            out = wanted.new_empty((wanted.shape[0], self._spec.vocab_size))
        self._weights.lm_head(wanted, ops=self._ops, out=out)
        return out

    def _attend(
        self,
        x: _Rows,
        num_decode_seqs: int,
        caches: tuple[Tensor, Tensor],
        plan: AttentionPlan,
    ) -> None:
        """Decode rows first, chunks behind them, each into its part of one output."""
        key_cache, value_cache = caches
        if num_decode_seqs > 0:
            self._backend.decode(
                x.query[:num_decode_seqs],
                key_cache=key_cache,
                value_cache=value_cache,
                plan=plan,
                out=x.attended_heads[:num_decode_seqs],
            )
        if num_decode_seqs < x.query.shape[0]:
            self._backend.prefill(
                x.query[num_decode_seqs:],
                key=x.key[num_decode_seqs:],
                value=x.value[num_decode_seqs:],
                key_cache=key_cache,
                value_cache=value_cache,
                plan=plan,
                out=x.attended_heads[num_decode_seqs:],
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """The intermediate results of one step, as views of the scratch; ``_heads`` ones are [tokens,
    heads, head_dim].
    """

    residual: Tensor
    normed: Tensor
    hidden: Tensor
    qkv: Tensor
    qk_views: QkViews
    query: Tensor
    key: Tensor
    value: Tensor
    attended: Tensor
    attended_heads: Tensor
    gate_up: Tensor
    gate: Tensor
    up: Tensor
    activated: Tensor


class _Scratch:
    """Memory of the intermediate results, made once: addresses stay, nothing is allocated in a
    step.

    Attention's and the MLP's tensors never live at the same time and share one part. What no step
    has used costs no memory on a CPU: untouched pages are not backed.
    """

    def __init__(
        self, spec: ModelSpec, max_num_tokens: int, device: torch.device, ops: KernelOps
    ) -> None:
        self._spec = spec
        self._ops = ops
        self._streams = torch.empty(
            (3, max_num_tokens, spec.hidden_size), dtype=spec.dtype, device=device
        )
        width = _shared_width(spec)
        self._shared = torch.empty(max_num_tokens * width, dtype=spec.dtype, device=device)
        self._last: tuple[int, _Rows] | None = None

    def rows(self, num_tokens: int) -> _Rows:
        """The views for a step of so many tokens; kept for the next step if it has as many."""
        if self._last is None or self._last[0] != num_tokens:
            self._last = (num_tokens, self._views(num_tokens))
        return self._last[1]

    def _views(self, num_tokens: int) -> _Rows:
        spec = self._spec
        heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        residual, normed, hidden = self._streams[:, :num_tokens].unbind(0)
        qkv, attended = self._side_by_side(
            num_tokens, (heads + 2 * kv_heads) * spec.head_dim, heads * spec.head_dim
        )
        gate_up, activated = self._side_by_side(
            num_tokens, 2 * spec.intermediate_size, spec.intermediate_size
        )
        qkv_heads = qkv.view(num_tokens, heads + 2 * kv_heads, spec.head_dim)
        query, key, value = qkv_heads.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        gate, up = gate_up.chunk(2, dim=1)
        return _Rows(
            residual=residual,
            normed=normed,
            hidden=hidden,
            qkv=qkv,
            qk_views=self._ops.qk_views(qkv_heads, num_kv_heads=kv_heads),
            query=query,
            key=key,
            value=value,
            attended=attended,
            attended_heads=attended.view(num_tokens, heads, spec.head_dim),
            gate_up=gate_up,
            gate=gate,
            up=up,
            activated=activated,
        )

    def _side_by_side(self, num_tokens: int, *widths: int) -> list[Tensor]:
        parts = self._shared[: num_tokens * sum(widths)].split_with_sizes(
            [num_tokens * w for w in widths]
        )
        return [part.view(num_tokens, width) for part, width in zip(parts, widths, strict=True)]


def scratch_nbytes(spec: ModelSpec, max_num_tokens: int) -> int:
    """Bytes of scratch memory of a model whose steps have at most ``max_num_tokens`` tokens."""
    return max_num_tokens * (3 * spec.hidden_size + _shared_width(spec)) * spec.dtype.itemsize


def _shared_width(spec: ModelSpec) -> int:
    num_qkv_heads = spec.num_attention_heads + 2 * spec.num_key_value_heads
    attention = (num_qkv_heads + spec.num_attention_heads) * spec.head_dim
    return max(attention, 3 * spec.intermediate_size)
