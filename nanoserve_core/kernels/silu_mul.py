"""silu(gate) * up, the activation of a gated MLP (Shazeer, 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.launch_errors import shape_error, stride_error

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024


@triton.jit
def silu(x):
    """x * sigmoid(x), float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_mul_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_row_stride,
    up_row_stride,
    out_row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (tokens, pieces of a row)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < SIZE
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_row_stride + columns, mask=in_row, other=0.0)
    up = tl.load(up_ptr + row * up_row_stride + columns, mask=in_row, other=0.0).to(tl.float32)
    activated = silu(gate.to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * out_row_stride + columns, (activated * up).to(dtype), mask=in_row)


def silu_mul(gate: Tensor, up: Tensor, *, out: Tensor, pdl: bool = False) -> None:
    """out = round(silu(gate)) * up, all [tokens, size]; rows may be far apart. ``pdl``: see
    `rms_norm`.
    """
    if out.dim() != 2:
        raise shape_error("silu_mul", "out", out, ("tokens", "size"))
    for name, tensor in (("gate", gate), ("up", up), ("out", out)):
        if tensor.shape != out.shape:
            raise shape_error("silu_mul", name, tensor, out.shape)
        if tensor.stride(1) != 1:
            raise stride_error("silu_mul", name, tensor, "1 in the last dimension")
    num_tokens, size = out.shape
    silu_mul_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
        gate,
        up,
        out,
        gate.stride(0),
        up.stride(0),
        out.stride(0),
        SIZE=size,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
