"""Matrix products with few rows: the weights are the long side of the tensor-core tile.

With few rows and few columns there are too few tiles to keep all multiprocessors reading; the sum
over the inner dimension is then split, and whoever reads the result next (`add_rms_norm`) adds the
parts in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.launch_errors import (
    dtype_error,
    shape_error,
    stride_error,
    value_error,
)

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 64
PROGRAMS_WANTED = 128
"""About one per multiprocessor of an H200."""
MAX_SPLITS = 4


@dataclass(frozen=True, kw_only=True)
class SkinnyConfig:
    """Tile of the kernel."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Fills a warp group's tensor cores, which counts for more than many programs. At 8 and 16 rows, o
# and down with the sum behind them take 6.2 and 6.8 us instead of 6.6 and 7.4 with 16 x 256 (8B:
# 13.3 and 30.9 instead of 15.0 and 36.0), qkv 5.2 instead of 5.5, gate_up 5.9 instead of 6.2 with
# 32 x 128; at 64 rows o and down 7.1 and 7.9 instead of 10.2 and 11.6, cuBLAS 7.6 and 9.7.
SKINNY_CONFIG = SkinnyConfig(block_n=64, block_k=128, num_warps=4, num_stages=4)


def num_splits(out_size: int, in_size: int) -> int:
    """Into how many parts the sum is best split: 1 when there are tiles enough.

    8 parts of 1024 columns take 7.3 us where 4 take 6.8; 4 of 4096 columns, at 64 rows, 17.6 where
    2 take 14.5.
    """
    tiles = -(-out_size // SKINNY_CONFIG.block_n)
    steps = -(-in_size // SKINNY_CONFIG.block_k)
    return max(min(-(-PROGRAMS_WANTED // tiles), steps // 2, MAX_SPLITS), 1)


@triton.jit(do_not_specialize=["num_rows", "out_size"])
def skinny_gemm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    out_size,
    x_row_stride,
    weight_row_stride,
    out_split_stride,
    out_row_stride,
    size,
    split_size,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (tiles of columns, splits): one tile of BLOCK_N columns and all rows over split_size."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    split = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = split * split_size + tl.arange(0, BLOCK_K)
    is_row = rows < num_rows
    is_column = columns < out_size
    weight_ptrs = weight_ptr + columns[:, None] * weight_row_stride + inner[None, :]
    x_ptrs = x_ptr + rows[None, :] * x_row_stride + inner[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, split_size, BLOCK_K, num_stages=NUM_STAGES):
        weight_mask = is_column[:, None]
        x_mask = is_row[None, :]
        if not EVEN:
            is_inner = inner + start < size
            weight_mask = weight_mask & is_inner[None, :]
            x_mask = x_mask & is_inner[:, None]
        weight = tl.load(weight_ptrs + start, mask=weight_mask, other=0.0)
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        total = tl.dot(weight, x, total, input_precision="ieee")
    out_ptrs = out_ptr + split.to(tl.int64) * out_split_stride
    out_ptrs = out_ptrs + rows[None, :] * out_row_stride + columns[:, None]
    is_out = is_column[:, None] & is_row[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_out)


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    config: SkinnyConfig | None = None,
    pdl: bool = False,
) -> None:
    """out = x @ weight.T for at most 64 rows.

    x: [rows, in_size]; weight: [out_size, in_size]; out: [rows, out_size], or
    [splits, rows, out_size] float32: the parts of the sum, in order (how many: `num_splits`).
    ``pdl``: see `rms_norm`.
    """
    _check(x, weight, out)
    num_rows, size = x.shape
    out_size = weight.shape[0]
    config = config or SKINNY_CONFIG
    splits = out.shape[0] if out.dim() == 3 else 1
    split_size = triton.cdiv(triton.cdiv(size, config.block_k), splits) * config.block_k
    skinny_gemm_kernel[(triton.cdiv(out_size, config.block_n), splits)](
        x,
        weight,
        out,
        num_rows,
        out_size,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        out.stride(-2),
        size,
        split_size,
        BLOCK_M=max(triton.next_power_of_2(num_rows), 16),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages,
        EVEN=split_size * splits == size,
        PDL=pdl,
        num_warps=config.num_warps,
        launch_pdl=pdl,
    )


def _check(x: Tensor, weight: Tensor, out: Tensor) -> None:
    op = "skinny_gemm"
    if x.dim() != 2:
        raise shape_error(op, "x", x, ("rows", "in_size"))
    num_rows, size = x.shape
    if num_rows > MAX_ROWS:
        remedy = "Use torch.mm: cuBLAS is faster there."
        raise value_error(op, "rows", num_rows, f"at most {MAX_ROWS}", remedy)
    if weight.dim() != 2 or weight.shape[1] != size:
        raise shape_error(op, "weight", weight, ("out_size", size))
    if out.shape[-2:] != (num_rows, weight.shape[0]) or out.dim() > 3:
        raise shape_error(op, "out", out, (num_rows, weight.shape[0]))
    if out.dim() == 3 and out.dtype != torch.float32:
        raise dtype_error(op, "out", out, torch.float32)
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        if tensor.stride(-1) != 1:
            raise stride_error(op, name, tensor, "1 in the last dimension")
