"""Matrix times one vector, with its surroundings in a layer: norm before, SiLU or sum after.

One token is bound by reading weights. They do not depend on the previous kernel, so with
programmatic dependent launch they are on their way before that kernel has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.launch_errors import shape_error, stride_error
from nanoserve_core.kernels.silu_mul import silu

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GemvConfig:
    """What a program does, and with how many threads."""

    rows_per_program: int
    num_warps: int


@triton.jit
def dot_rows(low_weight, high_weight, low_x, high_x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Row sums of weight * x over both parts of a row: [ROWS] float32."""
    low = low_weight.to(tl.float32) * low_x[None, :]
    high = high_weight.to(tl.float32) * high_x[None, :]
    # Parts of one length need one reduction over the warps, not two.
    return tl.sum(low + high, 1) if LOW == HIGH else tl.sum(low, 1) + tl.sum(high, 1)


@triton.jit(do_not_specialize=["out_size"])
def gemv_kernel(
    x_ptr,
    weight_ptr,
    norm_weight_ptr,
    out_ptr,
    eps,
    out_size,
    weight_row_stride,
    SIZE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    SILU_MUL: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (out_size / ROWS,): ROWS whole weight rows per program, each in two parts, LOW and HIGH
    elements long (powers of two), all of them loaded before the first is used.
    """
    if PDL:
        gdc_launch_dependents()
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = rows < out_size
    low = tl.arange(0, LOW)
    high = LOW + tl.arange(0, HIGH)
    is_high = high < SIZE
    low_mask = is_row[:, None]
    high_mask = is_row[:, None] & is_high[None, :]
    weight_ptrs = weight_ptr + rows[:, None] * weight_row_stride
    low_weight = tl.load(weight_ptrs + low[None, :], mask=low_mask, other=0.0)
    high_weight = tl.load(weight_ptrs + high[None, :], mask=high_mask, other=0.0)
    if SILU_MUL:
        up_ptrs = weight_ptrs + out_size.to(tl.int64) * weight_row_stride
        low_up = tl.load(up_ptrs + low[None, :], mask=low_mask, other=0.0)
        high_up = tl.load(up_ptrs + high[None, :], mask=high_mask, other=0.0)
    if PDL:
        gdc_wait()  # what is read from here on, the previous kernel may have written
    dtype = out_ptr.dtype.element_ty
    low_x = tl.load(x_ptr + low).to(tl.float32)
    high_x = tl.load(x_ptr + high, mask=is_high, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low_x * low_x, 0) + tl.sum(high_x * high_x, 0)
        inverse_rms = tl.rsqrt(squares / SIZE + eps)
        low_norm = tl.load(norm_weight_ptr + low).to(tl.float32)
        high_norm = tl.load(norm_weight_ptr + high, mask=is_high, other=0.0).to(tl.float32)
        low_x = (low_x * inverse_rms).to(dtype).to(tl.float32) * low_norm
        high_x = (high_x * inverse_rms).to(dtype).to(tl.float32) * high_norm
        low_x = low_x.to(dtype).to(tl.float32)
        high_x = high_x.to(dtype).to(tl.float32)
    result = dot_rows(low_weight, high_weight, low_x, high_x, LOW, HIGH)
    if SILU_MUL:
        up = dot_rows(low_up, high_up, low_x, high_x, LOW, HIGH).to(dtype).to(tl.float32)
        result = silu(result.to(dtype).to(tl.float32)).to(dtype).to(tl.float32) * up
    if ADD:
        old = tl.load(out_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
        result = result.to(dtype).to(tl.float32) + old
    tl.store(out_ptr + rows, result.to(dtype), mask=is_row)


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    silu_mul: bool = False,
    add: bool = False,
    rows_per_program: int | None = None,
    num_warps: int | None = None,
    pdl: bool = False,
) -> None:
    """out = x @ weight.T for one row, rounded wherever the ops it replaces would round.

    x: [1, in_size]; weight: [out_size, in_size]; out: [1, out_size]. With ``norm_weight`` [in_size]
    x is first RMS-normed with ``eps``; with ``silu_mul`` the weight has 2 * out_size rows, gate
    first, and out = silu(gate) * up; with ``add`` the result is added to what ``out`` holds.
    ``pdl``: see `rms_norm`; the weights may not be written by any kernel still running.
    """
    _check(x, weight, out, norm_weight, silu_mul=silu_mul)
    size, out_size = x.shape[1], out.shape[1]
    low = 1 << (size - 1).bit_length() - 1
    config = gemv_config(size, silu_mul=silu_mul)
    rows = rows_per_program or config.rows_per_program
    gemv_kernel[(triton.cdiv(out_size, rows),)](
        x,
        weight,
        x if norm_weight is None else norm_weight,
        out,
        eps,
        out_size,
        weight.stride(0),
        SIZE=size,
        LOW=low,
        HIGH=triton.next_power_of_2(size - low),
        ROWS=rows,
        NORM=norm_weight is not None,
        SILU_MUL=silu_mul,
        ADD=add,
        PDL=pdl,
        num_warps=num_warps or config.num_warps,
        launch_pdl=pdl,
    )


def gemv_config(size: int, *, silu_mul: bool = False) -> GemvConfig:
    """For weight rows of ``size`` elements: enough in flight, and many programs.

    Chosen within the whole step, where a product that leaves registers free lets the next one's
    weights come earlier: 0.6B, 691 us a step instead of 775 with the best of each kernel alone.
    """
    if size <= 1024:
        return GemvConfig(rows_per_program=16 if silu_mul else 8, num_warps=8 if silu_mul else 4)
    if size < 4096:
        return GemvConfig(rows_per_program=4 if size <= 2048 else 2, num_warps=4)
    # 8B o: 10.6 us instead of 11.1 with 2 rows and 4 warps, its other products the same.
    # 8B down: 28.8 us instead of 31.5 with 1 row and 4 warps. Longer rows are not measured.
    rows = 4 if size <= 8192 else 2 if size <= 12288 else 1
    return GemvConfig(rows_per_program=rows, num_warps=8)


def _check(
    x: Tensor, weight: Tensor, out: Tensor, norm_weight: Tensor | None, *, silu_mul: bool
) -> None:
    if x.dim() != 2 or x.shape[0] != 1 or x.shape[1] < 2:
        raise shape_error("gemv", "x", x, (1, "in_size"))
    if out.dim() != 2 or out.shape[0] != 1:
        raise shape_error("gemv", "out", out, (1, "out_size"))
    expected = ((2 if silu_mul else 1) * out.shape[1], x.shape[1])
    if weight.shape != expected:
        raise shape_error("gemv", "weight", weight, expected)
    if norm_weight is not None and norm_weight.shape != x.shape[1:]:
        raise shape_error("gemv", "norm_weight", norm_weight, x.shape[1:])
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        if tensor.stride(1) != 1:
            raise stride_error("gemv", name, tensor, "1 in the last dimension")
