"""`DecodeStep`: Qwen3's forward pass for rows of one token each, as it is captured.

The same arithmetic and rounding as `Qwen3Model`, in fewer launches: everything is written to memory
that stays, products of few rows are our own, and for a single row norms, activation and sums are
part of the products (0.81 ms a token instead of 1.48 with cuBLAS, 0.6B on an H200). It knows rows
on the device and no request.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoserve_core.layers.attention import ForwardBatch
from nanoserve_core.layers.linear import Linear
from nanoserve_core.layers.norm_rope import rotary_table

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.config import ModelSpec
    from nanoserve_core.kernels import TokenPlacement
    from nanoserve_core.kernels.slot_tables import StepRows
    from nanoserve_core.kernels.step_ops import StepOps
    from nanoserve_core.kv_cache import KVCache
    from nanoserve_core.layers.attention import AttentionBackend, AttentionPlan
    from nanoserve_core.layers.linear import Projection
    from nanoserve_core.models.qwen3 import LayerWeights, Qwen3Weights

MAX_SPLIT_ROWS = 64
"""Rows up to which our split product is faster than cuBLAS where the output is narrow (o, down)."""
MAX_SPLIT_ROWS_FP32 = 16
"""The same for float32, whose tiles for more rows would not fit the shared memory."""
MAX_SKINNY_ROWS = 16
"""Rows up to which our product is faster than cuBLAS, or level, whatever the shape."""
MAX_SPLITS = 4
MAX_SPLIT_ROWS_LONG = 16
"""The same where the inner dimension is the intermediate size (down): 0.6B, whole step, 32 rows
1,876 us with cuBLAS instead of 1,919, 64 rows 2,900 instead of 2,955."""
MIN_SKINNY_ROWS_WIDE = 9
"""Fewest rows for which our product is used where the output is wide (gate_up): 0.6B, 4 rows, whole
step 970 us with cuBLAS instead of 1,030; 16 rows 1,369 with ours, 1,379 with cuBLAS."""
MAX_PDL_ROWS = 8
"""Rows up to which overlapping launches gain: 0.6B 10 % at 1 row, 2 % at 8; at 16 they cost 7 %."""
_NOTHING = np.zeros(0, dtype=np.int32)


class DecodeStep:
    """The decode rows' way to their logits. Reads no host data but shapes: capturable."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Qwen3Weights,
        *,
        backend: AttentionBackend,
        ops: StepOps,
        max_num_rows: int,
        num_positions: int,
        use_pdl: bool = True,
    ) -> None:
        """Steps have at most ``max_num_rows`` rows, at positions below ``num_positions``."""
        self._spec = spec
        self._weights = weights
        self._backend = backend
        self._ops = ops
        self._use_pdl = use_pdl
        self._rotary_table = rotary_table(weights.rotary, num_positions=num_positions)
        self._has_plain_products = all(
            _is_plain(part)
            for layer in weights.layers
            for part in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )
        self._max_split_rows = MAX_SPLIT_ROWS if spec.dtype.itemsize == 2 else MAX_SPLIT_ROWS_FP32
        self._arena = _Arena(spec, max_num_rows, weights.embedding.device)

    @staticmethod
    def nbytes(spec: ModelSpec, max_num_rows: int) -> int:
        """Bytes of its memory on the device, without the rotary table."""
        return max_num_rows * sum(_widths(spec)) * spec.dtype.itemsize + 4 * _num_parts(spec)

    def of_one_layer(self) -> DecodeStep:
        """The same step and memory with the first layer only: it needs every kernel once."""
        one = copy(self)
        one._weights = replace(self._weights, layers=self._weights.layers[:1])  # noqa: SLF001  # its own
        return one

    def run(self, rows: StepRows, kv_cache: KVCache, logits: Tensor) -> None:
        """Fill ``logits`` [rows, vocab_size] for the inputs of ``rows``; K/V go to the cache."""
        x = self._arena.rows(rows.num_rows)
        batch = ForwardBatch(
            token_ids=rows.token_ids,
            positions=rows.positions,
            slot_mapping=rows.slot_mapping,
            query_start=rows.kv_lens,  # not read: every row has one token
            kv_lens=rows.kv_lens,
            block_tables=rows.block_tables,
            logits_indices=rows.slots,
            num_decode_seqs=rows.num_rows,
            host_query_start=_NOTHING,
            host_kv_lens=_NOTHING,
            host_block_tables=_NOTHING,
            row_leads=rows.leads,
            row_shared=rows.shared,
        )
        plan = self._backend.plan(batch, block_size=kv_cache.block_size)
        placement = self._ops.place_tokens(
            self._rotary_table, positions=rows.positions, slot_mapping=rows.slot_mapping
        )
        step = _Pass(self, x, plan, placement, kv_cache)
        if rows.num_rows == 1 and self._has_plain_products:
            step.run_one(rows.token_ids, logits)
        else:
            step.run_some(rows.token_ids, logits)


class _Pass:
    """One call of `DecodeStep.run`."""

    def __init__(
        self,
        step: DecodeStep,
        x: _Rows,
        plan: AttentionPlan,
        placement: TokenPlacement,
        kv_cache: KVCache,
    ) -> None:
        self._x, self._plan, self._placement, self._kv_cache = x, plan, placement, kv_cache
        self._ops, self._weights = step._ops, step._weights  # noqa: SLF001  # its own pass
        self._backend, self._arena = step._backend, step._arena  # noqa: SLF001  # its own pass
        self._eps = step._spec.rms_norm_eps  # noqa: SLF001  # its own pass
        self._pdl = step._use_pdl and x.num_rows <= MAX_PDL_ROWS  # noqa: SLF001  # its own pass
        self._may_split = x.num_rows <= step._max_split_rows  # noqa: SLF001  # its own pass

    def run_one(self, token_ids: Tensor, logits: Tensor) -> None:
        """A single row: six launches a layer."""
        ops, x, eps, pdl = self._ops, self._x, self._eps, self._pdl
        self._embed(token_ids)
        for index, layer in enumerate(self._weights.layers):
            qkv, gate_up = _weight(layer.qkv), _weight(layer.gate_up)
            ops.gemv(x.residual, qkv, out=x.qkv, norm_weight=layer.input_norm, eps=eps, pdl=pdl)
            self._attend(index, layer)
            ops.gemv(x.attended, _weight(layer.o), out=x.residual, add=True, pdl=pdl)
            ops.gemv(
                x.residual,
                gate_up,
                out=x.activated,
                norm_weight=layer.post_norm,
                eps=eps,
                silu_mul=True,
                pdl=pdl,
            )
            ops.gemv(x.activated, _weight(layer.down), out=x.residual, add=True, pdl=pdl)
        head, norm = self._weights.lm_head.weight, self._weights.norm
        ops.gemv(x.residual, head, out=logits, norm_weight=norm, eps=eps, pdl=pdl)

    def run_some(self, token_ids: Tensor, logits: Tensor) -> None:
        """Any number of rows: nine launches a layer."""
        ops, x, layers = self._ops, self._x, self._weights.layers
        self._embed(token_ids)
        for index, layer in enumerate(layers):
            is_last = index + 1 == len(layers)
            self._project(layer.qkv, x.normed, x.qkv)
            self._attend(index, layer)
            self._add_norm(self._product(layer.o, x.attended), layer.post_norm)
            self._project(layer.gate_up, x.normed, x.gate_up, min_rows=MIN_SKINNY_ROWS_WIDE)
            ops.silu_mul(x.gate, x.up, out=x.activated, pdl=self._pdl)
            next_norm = self._weights.norm if is_last else layers[index + 1].input_norm
            down = self._product(layer.down, x.activated, max_rows=MAX_SPLIT_ROWS_LONG)
            self._add_norm(down, next_norm)
        self._project(self._weights.lm_head, x.normed, logits)

    def _embed(self, token_ids: Tensor) -> None:
        self._ops.embed_rms_norm(
            token_ids,
            self._weights.embedding,
            weight=self._weights.layers[0].input_norm,
            eps=self._eps,
            residual=self._x.residual,
            out=self._x.normed,
            pdl=self._pdl,
        )

    def _attend(self, index: int, layer: LayerWeights) -> None:
        x = self._x
        views = self._ops.qk_views(x.qkv_heads, num_kv_heads=x.num_kv_heads)
        self._ops.qk_norm_rope_write(
            views,
            self._placement,
            q_weight=layer.q_norm,
            k_weight=layer.k_norm,
            eps=self._eps,
            cache=self._kv_cache.slots[index],
            pdl=self._pdl,
        )
        key_cache, value_cache = self._kv_cache.blocks[index]
        self._backend.decode(
            x.query,
            key_cache=key_cache,
            value_cache=value_cache,
            plan=self._plan,
            out=x.attended_heads,
        )

    def _product(
        self, projection: Projection, x: Tensor, *, max_rows: int = MAX_SPLIT_ROWS
    ) -> Tensor:
        """[rows, hidden_size], or [splits, rows, hidden_size] float32: parts yet to be added."""
        hidden = self._x.hidden
        if self._may_split and x.shape[0] <= max_rows and _is_plain(projection):
            num_splits = self._ops.num_splits(hidden.shape[1], x.shape[1])
            if num_splits > 1:
                parts = self._arena.parts(num_splits, *hidden.shape)
                self._ops.skinny_gemm(x, _weight(projection), out=parts, pdl=self._pdl)
                return parts
        self._project(projection, x, hidden)
        return hidden

    def _project(
        self, projection: Projection, x: Tensor, out: Tensor, *, min_rows: int = 2
    ) -> None:
        if not 1 < x.shape[0] <= MAX_SKINNY_ROWS or not _is_plain(projection):
            projection(x, ops=self._ops, out=out)
        elif x.shape[0] >= min_rows:
            self._ops.skinny_gemm(x, _weight(projection), out=out, pdl=self._pdl)
        else:
            torch.mm(x, _weight(projection).t(), out=out)

    def _add_norm(self, x: Tensor, weight: Tensor) -> None:
        out, residual = self._x.normed, self._x.residual
        self._ops.add_rms_norm(x, residual, weight=weight, eps=self._eps, out=out, pdl=self._pdl)


class _Rows:
    """Views of the arena for a step of so many rows; all [rows, size]."""

    def __init__(self, spec: ModelSpec, streams: list[Tensor]) -> None:
        self.residual, self.normed, self.hidden = streams[:3]
        self.qkv, self.attended, self.gate_up, self.activated = streams[3:]
        self.num_rows = self.residual.shape[0]
        self.num_kv_heads = spec.num_key_value_heads
        self.qkv_heads = self.qkv.view(self.num_rows, -1, spec.head_dim)
        self.query = self.qkv_heads[:, : spec.num_attention_heads]
        self.attended_heads = self.attended.view(self.num_rows, -1, spec.head_dim)
        self.gate, self.up = self.gate_up.chunk(2, dim=1)


class _Arena:
    """Memory of the intermediate results of the largest step; every step uses its beginning."""

    def __init__(self, spec: ModelSpec, max_num_rows: int, device: torch.device) -> None:
        self._spec = spec
        self._streams = [
            torch.zeros(max_num_rows, width, dtype=spec.dtype, device=device)
            for width in _widths(spec)
        ]
        self._parts = torch.zeros(_num_parts(spec), dtype=torch.float32, device=device)

    def rows(self, num_rows: int) -> _Rows:
        """The views of a step."""
        return _Rows(self._spec, [stream[:num_rows] for stream in self._streams])

    def parts(self, *shape: int) -> Tensor:
        """[splits, rows, hidden_size] float32, until the next call."""
        return self._parts[: int(np.prod(shape))].view(shape)


def _is_plain(projection: Projection) -> bool:
    return isinstance(projection, Linear) and projection.bias is None


def _weight(projection: Projection) -> Tensor:
    assert isinstance(projection, Linear), "checked when the step was made"
    return projection.weight


def _widths(spec: ModelSpec) -> tuple[int, ...]:
    heads = spec.num_attention_heads * spec.head_dim
    qkv = heads + 2 * spec.num_key_value_heads * spec.head_dim
    intermediate = spec.intermediate_size
    return (*[spec.hidden_size] * 3, qkv, heads, 2 * intermediate, intermediate)


def _num_parts(spec: ModelSpec) -> int:
    return MAX_SPLITS * MAX_SPLIT_ROWS * spec.hidden_size
