"""RMSNorm of rows (Zhang and Sennrich, 2019), with transformers' rounding points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.launch_errors import shape_error, stride_error

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def normalize(x, eps, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """x / rms(x), rounded to DTYPE and back. x: [BLOCK] float32, zero beyond SIZE."""
    inverse_rms = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    return (x * inverse_rms).to(DTYPE).to(tl.float32)


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    eps,
    x_row_stride,
    out_row_stride,
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
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=in_row, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    y = normalize(x, eps, SIZE, dtype) * weight
    tl.store(out_ptr + row * out_row_stride + columns, y.to(dtype), mask=in_row)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor, pdl: bool = False) -> None:
    """out = round(x / rms(x)) * weight. x, out: [rows, size], may be the same; weight: [size].

    ``pdl``: start while the previous kernel of the stream ends (programmatic dependent launch).
    """
    check_norm_arguments("rms_norm", x, weight=weight, out=out)
    num_rows, size = x.shape
    rms_norm_kernel[(num_rows,)](
        x,
        weight,
        out,
        eps,
        x.stride(0),
        out.stride(0),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PDL=pdl,
        num_warps=num_warps_for(size),
        launch_pdl=pdl,
    )


def check_norm_arguments(op: str, x: Tensor, *, weight: Tensor, out: Tensor) -> None:
    """Raise ValueError unless x and out are [rows, size] with dense rows, and weight [size]."""
    if x.dim() != 2:
        raise shape_error(op, "x", x, ("rows", "size"))
    if out.shape != x.shape:
        raise shape_error(op, "out", out, x.shape)
    if weight.shape != x.shape[1:]:
        raise shape_error(op, "weight", weight, x.shape[1:])
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        if tensor.stride(-1) != 1:
            raise stride_error(op, name, tensor, "1 in the last dimension")


def num_warps_for(size: int) -> int:
    """Warps of a program that holds a row of ``size`` elements: 8 to 16 elements a thread."""
    block: int = triton.next_power_of_2(size)
    return min(max(block // 512, 1), 8)
