"""Residual add and RMSNorm in one pass; also where the parts of a split GEMM are added up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.launch_errors import dtype_error, shape_error, stride_error
from nanoserve_core.kernels.rms_norm import check_norm_arguments, normalize, num_warps_for

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    x_split_stride,
    x_row_stride,
    residual_row_stride,
    out_row_stride,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (rows,): one row per program, whole."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    in_row = columns < SIZE
    dtype = residual_ptr.dtype.element_ty
    x_ptrs = x_ptr + row * x_row_stride + columns
    residual_ptrs = residual_ptr + row * residual_row_stride + columns
    x = tl.load(x_ptrs, mask=in_row, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(x_ptrs + split * x_split_stride, mask=in_row, other=0.0)
    # A GEMM that is not split rounds its result; so does the sum of its parts.
    x = x.to(dtype).to(tl.float32)
    x += tl.load(residual_ptrs, mask=in_row, other=0.0).to(tl.float32)
    rounded = x.to(dtype)
    tl.store(residual_ptrs, rounded, mask=in_row)
    weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    y = normalize(rounded.to(tl.float32), eps, SIZE, dtype) * weight
    tl.store(out_ptr + row * out_row_stride + columns, y.to(dtype), mask=in_row)


def add_rms_norm(
    x: Tensor, residual: Tensor, *, weight: Tensor, eps: float, out: Tensor, pdl: bool = False
) -> None:
    """residual += x, rounded; out = rms_norm(residual).

    residual, out: [rows, size]; ``residual`` changes in place. x: the same shape, or
    [splits, rows, size] float32, the parts of a sum, which are added in order. ``pdl``: see
    `rms_norm`.
    """
    op = "add_rms_norm"
    check_norm_arguments(op, residual, weight=weight, out=out)
    if x.shape[-2:] != residual.shape or x.dim() > 3:
        raise shape_error(op, "x", x, residual.shape)
    if x.dim() == 3 and x.dtype != torch.float32:
        raise dtype_error(op, "x", x, torch.float32)
    if x.stride(-1) != 1:
        raise stride_error(op, "x", x, "1 in the last dimension")
    num_rows, size = residual.shape
    add_rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        eps,
        x.stride(0),
        x.stride(-2),
        residual.stride(0),
        out.stride(0),
        SPLITS=x.shape[0] if x.dim() == 3 else 1,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PDL=pdl,
        num_warps=num_warps_for(size),
        launch_pdl=pdl,
    )
