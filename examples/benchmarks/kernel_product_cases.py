"""Products of one row and of few rows, with the weights of a layer, against cuBLAS."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from kernel_case import (
    DTYPE,
    EPS,
    HEAD_DIM,
    SHAPES,
    Case,
    Run,
    copies_for,
    randn,
    relative_error,
)

from nanoserve_core.kernels import triton_ops as ops
from nanoserve_core.kernels.skinny_gemm import SKINNY_CONFIG, SkinnyConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

NUM_ROWS = (8, 16, 64)
SKINNY_TILES = [(16, 256, 4), (32, 128, 4), (64, 128, 4), (64, 64, 5)]
NORM, SILU_MUL, ADD = "norm", "silu_mul", "add"


def product_shapes() -> Iterator[tuple[str, int, int, set[str]]]:
    """Name, in and out size of the products of a model, and what belongs around each."""
    for name, shape in SHAPES.items():
        yield f"{name} qkv", shape.hidden, shape.qkv, {NORM}
        yield f"{name} o", shape.heads * HEAD_DIM, shape.hidden, {ADD}
        yield f"{name} gate_up", shape.hidden, 2 * shape.intermediate, {NORM, SILU_MUL}
        yield f"{name} down", shape.intermediate, shape.hidden, {ADD}
        yield f"{name} lm_head", shape.hidden, shape.vocab, {NORM}


class Gemv:
    """One row times rotating weights, with norm, SiLU or sum as in a layer."""

    def __init__(self, size: int, out_size: int, around: set[str], *, copies: int) -> None:
        self.weights = randn(copies, out_size, size, scale=size**-0.5)
        self.x, self.around = randn(1, size), around
        self.norm_weight = randn(size) if NORM in around else None
        self.product = randn(1, out_size)
        self.out = randn(1, out_size // 2 if SILU_MUL in around else out_size)

    def launch(self, rows: int | None, num_warps: int | None, copy: int) -> None:
        """Ours, with everything around it."""
        ops.gemv(
            self.x,
            self.weights[copy],
            out=self.out,
            norm_weight=self.norm_weight,
            eps=EPS,
            silu_mul=SILU_MUL in self.around,
            add=ADD in self.around,
            rows_per_program=rows,
            num_warps=num_warps,
        )

    def cublas(self, copy: int) -> None:
        """cuBLAS, the product alone."""
        torch.mm(self.x, self.weights[copy].T, out=self.product)

    def error(self) -> float:
        """Of the product alone, against float64."""
        weight = self.weights[0, :8192]
        found = self.product[:, : weight.shape[0]]
        ops.gemv(self.x, weight, out=found)
        return relative_error(found, self.x.double() @ weight.double().T)


def gemv_cases() -> Iterator[Case]:
    """One row: weights are read once, and nothing else matters."""
    for name, size, out_size, around in product_shapes():
        nbytes = 2.0 * size * out_size
        copies = copies_for(nbytes)
        product = Gemv(size, out_size, around, copies=copies)
        width = size * (2 if SILU_MUL in around else 1)
        variants: dict[str, Run] = {"table": partial(product.launch, None, None)}
        for rows in (1, 2, 4, 8, 16):
            for num_warps in (2, 4, 8):
                if 1024 <= rows * width / num_warps <= 4096:
                    variants[f"{rows} rows w{num_warps}"] = partial(product.launch, rows, num_warps)
        yield Case(
            name=f"gemv {name} {size} -> {out_size}",
            nbytes=nbytes,
            copies=copies,
            variants=variants,
            in_use="table",
            rivals={"cuBLAS": product.cublas},
            error=product.error,
        )


class Skinny:
    """Few rows times rotating weights; a sum that may be split is finished by add_rms_norm."""

    def __init__(self, rows: int, weights: Tensor, *, is_added: bool) -> None:
        _, out_size, size = weights.shape
        self.weights, self.is_added = weights, is_added
        self.x, self.residual, self.out = (randn(rows, n) for n in (size, out_size, out_size))
        self.norm_weight, self.product = randn(out_size), randn(rows, out_size)
        self.parts = torch.empty((8, rows, out_size), dtype=torch.float32, device="cuda")

    def launch(self, config: SkinnyConfig, splits: int, copy: int) -> None:
        """Ours."""
        out = self.product if splits == 1 else self.parts[:splits]
        ops.skinny_gemm(self.x, self.weights[copy], out=out, config=config)
        self._finish(out)

    def cublas(self, copy: int) -> None:
        """The same with cuBLAS."""
        torch.mm(self.x, self.weights[copy].T, out=self.product)
        self._finish(self.product)

    def error(self) -> float:
        """Of the table's product, against float64."""
        weight = self.weights[0, :8192]
        found = self.product[:, : weight.shape[0]]
        ops.skinny_gemm(self.x, weight, out=found)
        return relative_error(found, self.x.double() @ weight.double().T)

    def _finish(self, product: Tensor) -> None:
        if self.is_added:
            ops.add_rms_norm(product, self.residual, weight=self.norm_weight, eps=EPS, out=self.out)


def skinny_cases() -> Iterator[Case]:
    """Few rows; o and down with the add_rms_norm that follows them, on both sides."""
    for name, size, out_size, around in product_shapes():
        nbytes = 2.0 * size * out_size
        copies = copies_for(nbytes, most=32)
        weights = torch.empty((copies, out_size, size), dtype=DTYPE, device="cuda")
        weights.normal_(0, size**-0.5)
        for rows in NUM_ROWS:
            is_added = ADD in around
            product = Skinny(rows, weights, is_added=is_added)
            variants: dict[str, Run] = {}
            for n, k, num_stages in SKINNY_TILES:
                config = SkinnyConfig(block_n=n, block_k=k, num_warps=4, num_stages=num_stages)
                for splits in (1, 2, 4, 8) if is_added else (1,):
                    variants[f"{n}x{k}/{splits}"] = partial(product.launch, config, splits)
            splits = ops.num_splits(out_size, size) if is_added else 1
            yield Case(
                name=f"skinny {name} {rows} x {size} -> {out_size}",
                nbytes=nbytes,
                copies=copies,
                variants=variants,
                in_use=f"{SKINNY_CONFIG.block_n}x{SKINNY_CONFIG.block_k}/{splits}",
                rivals={"cuBLAS": product.cublas},
                error=product.error,
            )
