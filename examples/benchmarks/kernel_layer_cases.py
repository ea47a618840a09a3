"""The small kernels of a layer, and all layers of the 0.6B model as one decode step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from kernel_attention_cases import PagedRows
from kernel_case import EPS, HEAD_DIM, SMALL, Case, Run, num_multiprocessors, randn

from nanoserve_core.kernels import triton_ops as ops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

NUM_COPIES = 16
NUM_TOKENS = (1, 256, 8192)
STACKS = [(1, 640), (8, 640), (16, 640), (64, 860), (256, 860)]
MAX_SPLIT_ROWS = 64
MAX_PDL_ROWS = 8


class SmallKernels:
    """Norm, activation and rotation of so many tokens, on rotating data."""

    def __init__(self, num_tokens: int) -> None:
        shape, copies = SMALL, NUM_COPIES
        streams = randn(3, copies, num_tokens, shape.hidden)
        self.x, self.residual, self.normed = streams.unbind(0)
        self.weight, self.head_weight = randn(shape.hidden), randn(HEAD_DIM)
        gate_up = randn(copies, num_tokens, 2 * shape.intermediate)
        self.gate, self.up = gate_up.chunk(2, dim=-1)
        self.activated = randn(num_tokens, shape.intermediate)
        self.qkv = randn(copies, num_tokens, shape.qkv // HEAD_DIM, HEAD_DIM)
        self.cache = randn(2, num_tokens, shape.kv_heads, HEAD_DIM)
        ids = torch.arange(num_tokens, device="cuda")
        table = torch.randn(num_tokens, HEAD_DIM, device="cuda")
        self.placement = ops.place_tokens(table, positions=ids, slot_mapping=ids)

    def add_rms_norm(self, copy: int) -> None:
        """Reads two rows, writes two."""
        x, residual, out = self.x[copy], self.residual[copy], self.normed[copy]
        ops.add_rms_norm(x, residual, weight=self.weight, eps=EPS, out=out)

    def silu_mul(self, copy: int) -> None:
        """Reads two rows, writes one."""
        ops.silu_mul(self.gate[copy], self.up[copy], out=self.activated)

    def qk_norm_rope_write(self, copy: int) -> None:
        """Reads all heads, writes those of q and k in place, and those of k and v to the cache."""
        ops.qk_norm_rope_write(
            self.qkv[copy],
            self.placement,
            q_weight=self.head_weight,
            k_weight=self.head_weight,
            eps=EPS,
            cache=self.cache,
        )


def small_cases() -> Iterator[Case]:
    """Bound by memory, or at few rows by the launch."""
    heads = SMALL.heads + 2 * SMALL.kv_heads
    token_nbytes = {
        "add_rms_norm": 8.0 * SMALL.hidden,
        "silu_mul": 6.0 * SMALL.intermediate,
        "qk_norm_rope_write": 2.0 * HEAD_DIM * (heads + heads + SMALL.kv_heads),
    }
    for num_tokens in NUM_TOKENS:
        kernels = SmallKernels(num_tokens)
        for name, nbytes in token_nbytes.items():
            yield Case(
                name=f"{name}, {num_tokens} tokens",
                nbytes=num_tokens * nbytes,
                copies=NUM_COPIES,
                variants={"table": getattr(kernels, name)},
                in_use="table",
            )


class Stack:
    """All layers and the head for one decode step of equally long rows, random weights."""

    def __init__(self, num_rows: int, length: int) -> None:
        shape = self.shape = SMALL
        hidden, layers = shape.hidden, shape.layers
        self.num_rows, self.length = num_rows, length
        self.qkv_weight = randn(layers, shape.qkv, hidden, scale=0.02)
        self.o_weight = randn(layers, hidden, shape.heads * HEAD_DIM, scale=0.02)
        self.up_weight = randn(layers, 2 * shape.intermediate, hidden, scale=0.02)
        self.down_weight = randn(layers, hidden, shape.intermediate, scale=0.02)
        self.embedding = randn(shape.vocab, hidden, scale=0.02)
        self.head_weight = randn(HEAD_DIM)
        self.rows = PagedRows([length] * num_rows, shape, layers=layers)
        self.qkv = randn(num_rows, shape.qkv)
        self.qkv_heads = self.qkv.view(num_rows, -1, HEAD_DIM)
        self.rows.query = self.qkv_heads[:, : shape.heads]
        self.residual, self.normed, self.hidden = randn(3, num_rows, hidden).unbind(0)
        self.parts = torch.empty((8, num_rows, hidden), dtype=torch.float32, device="cuda")
        self.gate_up = randn(num_rows, 2 * shape.intermediate)
        self.activated = randn(num_rows, shape.intermediate)
        self.logits = randn(num_rows, shape.vocab)
        self.tokens = torch.randint(0, shape.vocab, (num_rows,), device="cuda")
        last = self.rows.block_tables[:, -1].long() * 64 + (length - 1) % 64
        self.placement = ops.place_tokens(
            torch.randn(length, HEAD_DIM, device="cuda"),
            positions=torch.full((num_rows,), length - 1, device="cuda"),
            slot_mapping=last,
        )
        self.config = ops.decode_config(num_rows, num_multiprocessors=num_multiprocessors())
        self.plan = self.rows.memory_for(self.config)
        self.norm: dict[str, Any] = {  # Any: keyword arguments
            "weight": randn(hidden),
            "eps": EPS,
            "out": self.normed,
        }

    @property
    def nbytes(self) -> float:
        """Weights and K/V that one step reads."""
        shape = self.shape
        layer = shape.qkv + shape.heads * HEAD_DIM + 3 * shape.intermediate
        weights = 2.0 * shape.hidden * (shape.layers * layer + shape.vocab)
        token = 4.0 * shape.layers * shape.kv_heads * HEAD_DIM
        return weights + token * self.num_rows * self.length

    def begin(self, *, pdl: bool) -> None:
        """Planner, embedding, first norm."""
        ops.decode_plan(self.rows.kv_lens, plan=self.plan, config=self.config, pdl=pdl)
        ops.embed_rms_norm(
            self.tokens, self.embedding, residual=self.residual, pdl=pdl, **self.norm
        )

    def attend(self, layer: int, *, pdl: bool) -> Tensor:
        """QK-norm to attention of one layer."""
        rows = self.rows
        ops.qk_norm_rope_write(
            self.qkv_heads,
            self.placement,
            q_weight=self.head_weight,
            k_weight=self.head_weight,
            eps=EPS,
            cache=rows.cache[:, layer].flatten(1, 2),
            pdl=pdl,
        )
        ops.decode_attention(
            rows.query,
            key_cache=rows.cache[0, layer],
            value_cache=rows.cache[1, layer],
            block_tables=rows.block_tables,
            kv_lens=rows.kv_lens,
            plan=self.plan,
            config=self.config,
            out=rows.out,
            pdl=pdl,
        )
        return rows.out.view(self.num_rows, -1)

    def one_row(self, pdl: bool, _copy: int) -> None:
        """Matrix-vector products, with everything that surrounds them fused in."""
        self.begin(pdl=pdl)
        norm: dict[str, Any] = {  # Any: as above
            "norm_weight": self.norm["weight"],
            "eps": EPS,
            "pdl": pdl,
        }
        for layer in range(self.shape.layers):
            ops.gemv(self.residual, self.qkv_weight[layer], out=self.qkv, **norm)
            attended = self.attend(layer, pdl=pdl)
            ops.gemv(attended, self.o_weight[layer], out=self.residual, add=True, pdl=pdl)
            ops.gemv(
                self.residual, self.up_weight[layer], out=self.activated, silu_mul=True, **norm
            )
            ops.gemv(self.activated, self.down_weight[layer], out=self.residual, add=True, pdl=pdl)
        ops.gemv(self.residual, self.embedding, out=self.logits, **norm)

    def many_rows(self, pdl: bool, split: bool, _copy: int) -> None:
        """cuBLAS; with ``split``, our products for o and down, finished by the norm after them."""
        self.begin(pdl=pdl)
        gate, up = self.gate_up.chunk(2, dim=1)
        for layer in range(self.shape.layers):
            torch.mm(self.normed, self.qkv_weight[layer].T, out=self.qkv)
            attended = self.attend(layer, pdl=pdl)
            self._add(attended, self.o_weight[layer], pdl=pdl, split=split)
            torch.mm(self.normed, self.up_weight[layer].T, out=self.gate_up)
            ops.silu_mul(gate, up, out=self.activated, pdl=pdl)
            self._add(self.activated, self.down_weight[layer], pdl=pdl, split=split)
        torch.mm(self.normed, self.embedding.T, out=self.logits)

    def _add(self, x: Tensor, weight: Tensor, *, pdl: bool, split: bool) -> None:
        out = self.hidden
        if split:
            out = self.parts[: ops.num_splits(*weight.shape)]
            ops.skinny_gemm(x, weight, out=out, pdl=pdl)
        else:
            torch.mm(x, weight.T, out=out)
        ops.add_rms_norm(out, self.residual, pdl=pdl, **self.norm)


def stack_cases() -> Iterator[Case]:
    """A step without its sampler: what the kernels amount to."""
    for num_rows, length in STACKS:
        stack = Stack(num_rows, length)
        variants: dict[str, Run] = {}
        names = {False: "", True: " pdl"}
        for pdl in sorted(names, key=lambda pdl: pdl == (num_rows <= MAX_PDL_ROWS)):
            name = names[pdl]
            variants[f"cuBLAS{name}"] = partial(stack.many_rows, pdl, False)
            if num_rows <= MAX_SPLIT_ROWS:
                variants[f"split o, down{name}"] = partial(stack.many_rows, pdl, True)
            if num_rows == 1:
                variants[f"gemv{name}"] = partial(stack.one_row, pdl)
        yield Case(
            name=f"stack 0.6B, {num_rows} rows of {length}",
            nbytes=stack.nbytes,
            variants=variants,
            in_use=next(reversed(variants)),
        )
