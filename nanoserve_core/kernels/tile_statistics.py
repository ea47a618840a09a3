"""Statistics of tiles of logits: the pass over all logits that finds out what to draw from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.launch_errors import dtype_error, shape_error, stride_error
from nanoserve_core.kernels.slot_tables import SlotField

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.kernels.sampling_scratch import TileStatistics
    from nanoserve_core.kernels.slot_tables import StepRows

LOG2_E = tl.constexpr(1.4426950408889634)
# Dividing by less overflows; the softmax is one-hot long before.
LOWEST_TEMPERATURE = tl.constexpr(1e-30)
TEMPERATURE = tl.constexpr(SlotField.TEMPERATURE.value)
WANTS_LOGPROB = tl.constexpr(SlotField.WANTS_LOGPROB.value)

LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def float_parameter(parameter_ptr, parameter_stride, row, FIELD: tl.constexpr):
    """A float of the row's parameters."""
    bits = tl.load(parameter_ptr + FIELD * parameter_stride + row)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def exp_difference(x, largest, inverse_temperature):
    """exp((x - largest) / temperature), where -inf is no probability, also where all are -inf."""
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    return tl.exp2((x - reference) * (inverse_temperature * LOG2_E))


@triton.jit(do_not_specialize=["parameter_stride"])
def tile_statistics_kernel(
    logits_ptr,
    parameter_ptr,
    cut_ptr,
    maximum_ptr,
    argmaximum_ptr,
    sum_ptr,
    weight_ptr,
    logits_row_stride,
    parameter_stride,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    HAS_CUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (tiles, rows). An exponential costs as much as two bytes of bandwidth (16 a clock and
    multiprocessor), so each kind of row computes only what its token needs.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    columns = tile * TILE + tl.arange(0, TILE)
    in_row = columns < VOCAB
    logits_ptrs = logits_ptr + row * logits_row_stride + columns
    x = tl.load(logits_ptrs, mask=in_row, other=float("-inf")).to(tl.float32)
    temperature = float_parameter(parameter_ptr, parameter_stride, row, TEMPERATURE)
    wants_logprob = tl.load(parameter_ptr + WANTS_LOGPROB * parameter_stride + row)
    out = row * NUM_TILES + tile
    ordered = tl.where(x != x, float("inf"), x)
    maximum = tl.max(ordered, 0)
    tl.store(maximum_ptr + out, maximum)
    if temperature == 0.0:
        first = tl.min(tl.where(ordered == maximum, columns, VOCAB), 0)
        tl.store(argmaximum_ptr + out, first)
    else:
        inverse_temperature = 1.0 / tl.maximum(temperature, LOWEST_TEMPERATURE)
        weights = exp_difference(x, maximum, inverse_temperature)
        if HAS_CUT:
            weights = tl.where(x < tl.load(cut_ptr + row), 0.0, weights)
        tl.store(weight_ptr + out, tl.sum(weights, 0))
    if wants_logprob != 0:
        tl.store(sum_ptr + out, tl.sum(exp_difference(x, maximum, 1.0), 0))


def tile_statistics(
    logits: Tensor,
    rows: StepRows,
    *,
    cut: Tensor | None,
    stats: TileStatistics,
    pdl: bool = False,
) -> None:
    """What `TileStatistics` says of each tile.

    logits: [rows, vocab] bfloat16, float16 or float32, dense in a row. cut: [rows] float32 of
    `filter_cut`, or None: nothing is cut. ``pdl``: see `rms_norm`.
    """
    check_logits("tile_statistics", logits, rows, cut=cut)
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, stats.tile)
    check_scratch("tile_statistics", "stats.maxima", stats.maxima, num_rows, num_tiles)
    tile_statistics_kernel[(num_tiles, num_rows)](
        logits,
        rows.parameters,
        logits if cut is None else cut,
        stats.maxima,
        stats.argmaxima,
        stats.sums,
        stats.weights,
        logits.stride(0),
        rows.parameters.stride(0),
        VOCAB=vocab_size,
        NUM_TILES=num_tiles,
        TILE=stats.tile,
        HAS_CUT=cut is not None,
        PDL=pdl,
        num_warps=num_warps_for(stats.tile),
        launch_pdl=pdl,
    )


def num_warps_for(tile: int) -> int:
    """Warps for a tile: 32 logits a thread. With 16, reductions across threads are a third of the
    instructions.
    """
    return max(min(tile // 1024, 8), 1)


def check_logits(op: str, logits: Tensor, rows: StepRows, *, cut: Tensor | None) -> None:
    """What all ops on logits demand; raises for the first of it."""
    if logits.dim() != 2 or logits.shape[0] != rows.num_rows:
        raise shape_error(op, "logits", logits, (rows.num_rows, "vocab"))
    if logits.dtype not in LOGITS_DTYPES:
        raise dtype_error(op, "logits", logits, *LOGITS_DTYPES)
    if logits.stride(1) != 1:
        raise stride_error(op, "logits", logits, "1 in the last dimension")
    if cut is None:
        return
    if cut.shape != (rows.num_rows,) or not cut.is_contiguous():
        raise shape_error(op, "cut", cut, (rows.num_rows,))
    if cut.dtype != torch.float32:
        raise dtype_error(op, "cut", cut, torch.float32)


def check_scratch(op: str, name: str, scratch: Tensor, num_rows: int, num_tiles: int) -> None:
    """Whether ``scratch`` was allocated for at least so many rows, and for this vocabulary."""
    if scratch.shape[0] < num_rows or scratch.shape[1] != num_tiles:
        raise shape_error(op, name, scratch, (f"{num_rows} or more", num_tiles))
