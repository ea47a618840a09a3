"""Maxima and masses of small tiles of logits: where `filter_cut` looks for the cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.slot_tables import SlotField
from nanoserve_core.kernels.tile_statistics import (
    LOWEST_TEMPERATURE,
    check_logits,
    check_scratch,
    exp_difference,
    float_parameter,
    num_warps_for,
)

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.kernels.sampling_scratch import FilterTiles
    from nanoserve_core.kernels.slot_tables import StepRows

TEMPERATURE = tl.constexpr(SlotField.TEMPERATURE.value)
TOP_K = tl.constexpr(SlotField.TOP_K.value)
TOP_P = tl.constexpr(SlotField.TOP_P.value)
MIN_P = tl.constexpr(SlotField.MIN_P.value)


@triton.jit
def row_filters(parameter_ptr, parameter_stride, row):
    """Temperature, top-k, top-p and min-p of a row; and whether it filters at all."""
    temperature = float_parameter(parameter_ptr, parameter_stride, row, TEMPERATURE)
    top_k = tl.load(parameter_ptr + TOP_K * parameter_stride + row)
    top_p = float_parameter(parameter_ptr, parameter_stride, row, TOP_P)
    min_p = float_parameter(parameter_ptr, parameter_stride, row, MIN_P)
    has_filter = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    return temperature, top_k, top_p, min_p, has_filter & (temperature > 0.0)


@triton.jit(do_not_specialize=["parameter_stride"])
def filter_tiles_kernel(
    logits_ptr,
    parameter_ptr,
    maximum_ptr,
    mass_ptr,
    logits_row_stride,
    parameter_stride,
    VOCAB: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (groups, rows)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    group = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    filters = row_filters(parameter_ptr, parameter_stride, row)
    temperature, top_k, top_p, _, is_filtered = filters
    if is_filtered:
        tiles = group * GROUP + tl.arange(0, GROUP)
        columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        logits_ptrs = logits_ptr + row * logits_row_stride + columns
        x = tl.load(logits_ptrs, mask=columns < VOCAB, other=float("-inf")).to(tl.float32)
        maxima = tl.max(x, 1)
        tl.store(maximum_ptr + row * (NUM_GROUPS * GROUP) + tiles, maxima)
        # With top-k, the mass of what it leaves counts, and `filter_cut` sees that itself.
        if (top_k == 0) & (top_p < 1.0):
            inverse_temperature = 1.0 / tl.maximum(temperature, LOWEST_TEMPERATURE)
            weights = exp_difference(x, tl.max(maxima, 0), inverse_temperature)
            tl.store(mass_ptr + row * NUM_GROUPS + group, tl.sum(weights))


def filter_tiles(logits: Tensor, rows: StepRows, *, tiles: FilterTiles, pdl: bool = False) -> None:
    """Tile maxima of the rows that filter, and what `FilterTiles` says besides.

    logits: [rows, vocab] bfloat16, float16 or float32, dense in a row. Launch it before
    `filter_cut`. ``pdl``: see `rms_norm`.
    """
    check_logits("filter_tiles", logits, rows, cut=None)
    num_rows, vocab_size = logits.shape
    num_groups = triton.cdiv(vocab_size, tiles.tile * tiles.group)
    check_scratch("filter_tiles", "tiles.masses", tiles.masses, num_rows, num_groups)
    filter_tiles_kernel[(num_groups, num_rows)](
        logits,
        rows.parameters,
        tiles.maxima,
        tiles.masses,
        logits.stride(0),
        rows.parameters.stride(0),
        VOCAB=vocab_size,
        NUM_GROUPS=num_groups,
        GROUP=tiles.group,
        TILE=tiles.tile,
        PDL=pdl,
        num_warps=num_warps_for(tiles.group * tiles.tile),
        launch_pdl=pdl,
    )
