"""One token per row from its tiles: the argmax, or the inverse of the cumulative distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels import slot_tables
from nanoserve_core.kernels.launch_errors import shape_error
from nanoserve_core.kernels.slot_tables import SlotField
from nanoserve_core.kernels.tile_statistics import (
    LOWEST_TEMPERATURE,
    check_logits,
    check_scratch,
    exp_difference,
    float_parameter,
)

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.kernels.sampling_scratch import TileStatistics
    from nanoserve_core.kernels.slot_tables import PickedTokens, StepRows

TEMPERATURE = tl.constexpr(SlotField.TEMPERATURE.value)
SEED_LOW = tl.constexpr(SlotField.SEED_LOW.value)
SEED_HIGH = tl.constexpr(SlotField.SEED_HIGH.value)
WANTS_LOGPROB = tl.constexpr(SlotField.WANTS_LOGPROB.value)
FAILED = tl.constexpr(slot_tables.FAILED)


@triton.jit
def uniform(seed_low, seed_high, position):
    """`philox.uniform` to the bit: a float64 strictly between 0 and 1. All arguments int32."""
    zero = position * 0
    low = seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = seed_high.to(tl.uint32, bitcast=True).to(tl.uint64)
    first, second, _, _ = tl.philox((high << 32) | low, position, zero, zero, zero)
    bits = (first.to(tl.uint64) << 20) | (second.to(tl.uint64) >> 12)
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52


@triton.jit
def draw(
    logits_ptrs,
    maxima,
    tile_weights,
    tiles,
    cut,
    inverse_temperature,
    u,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """The column where the running sum in vocabulary order first exceeds u times the whole; FAILED
    when nothing can be drawn. First the tile, in float64, then the column in it.
    """
    largest = tl.max(maxima, 0)
    scales = exp_difference(maxima, largest, inverse_temperature).to(tl.float64)
    sums = tl.cumsum(tile_weights.to(tl.float64) * scales, 0)
    total = tl.max(sums, 0)
    target = u * total
    # `target` may round up to the whole: stay at the last tile that has a weight.
    tile = tl.sum(((sums <= target) & (sums < total)).to(tl.int32), 0)
    # The sum before the tile as it was added up: a subtraction could leave a target below 0.
    before = tl.max(tl.where(tiles < tile, sums, 0.0), 0)
    scale = tl.sum(tl.where(tiles == tile, scales, 0.0), 0)
    tile_maximum = tl.max(tl.where(tiles == tile, maxima, float("-inf")), 0)
    columns = tl.arange(0, TILE)
    in_row = tile * TILE + columns < VOCAB
    x = tl.load(logits_ptrs + tile * TILE + columns, mask=in_row, other=float("-inf"))
    x = x.to(tl.float32)
    weights = tl.where(x < cut, 0.0, exp_difference(x, tile_maximum, inverse_temperature))
    rest = ((target - before) / scale).to(tl.float32)
    column = tl.sum((tl.cumsum(weights, 0) <= rest).to(tl.int32), 0)
    # The tile's own sum was rounded otherwise: stay at its last column that has a chance.
    last = tl.max(tl.where(weights > 0.0, columns, 0), 0)
    token = tile * TILE + tl.minimum(column, last)
    return tl.where((total > 0.0) & (largest < float("inf")), token, FAILED)


@triton.jit(do_not_specialize=["parameter_stride"], do_not_specialize_on_alignment=["position_ptr"])
def pick_token_kernel(
    logits_ptr,
    parameter_ptr,
    position_ptr,
    cut_ptr,
    maximum_ptr,
    argmaximum_ptr,
    sum_ptr,
    weight_ptr,
    token_ptr,
    logprob_ptr,
    logits_row_stride,
    parameter_stride,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    ALL_TILES: tl.constexpr,
    TILE: tl.constexpr,
    HAS_CUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (rows,)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, ALL_TILES)
    is_tile = tiles < NUM_TILES
    of_tiles = row * NUM_TILES + tiles
    maxima = tl.load(maximum_ptr + of_tiles, mask=is_tile, other=float("-inf"))
    largest = tl.max(maxima, 0)
    temperature = float_parameter(parameter_ptr, parameter_stride, row, TEMPERATURE)
    row_ptr = logits_ptr + row * logits_row_stride
    if temperature == 0.0:
        columns = tl.load(argmaximum_ptr + of_tiles, mask=is_tile, other=VOCAB)
        token = tl.min(tl.where(maxima == largest, columns, VOCAB), 0)
    else:
        cut = float("-inf")
        if HAS_CUT:
            cut = tl.load(cut_ptr + row)
        u = uniform(
            tl.load(parameter_ptr + SEED_LOW * parameter_stride + row),
            tl.load(parameter_ptr + SEED_HIGH * parameter_stride + row),
            tl.load(position_ptr + row) + 1,
        )
        token = draw(
            row_ptr,
            maxima,
            tl.load(weight_ptr + of_tiles, mask=is_tile, other=0.0),
            tiles,
            cut,
            1.0 / tl.maximum(temperature, LOWEST_TEMPERATURE),
            u,
            VOCAB,
            TILE,
        )
    tl.store(token_ptr + row, token)
    logprob = largest * float("nan")
    if tl.load(parameter_ptr + WANTS_LOGPROB * parameter_stride + row) != 0:
        sums = tl.load(sum_ptr + of_tiles, mask=is_tile, other=0.0)
        total = tl.sum(sums * exp_difference(maxima, largest, 1.0), 0)
        chosen = tl.load(row_ptr + tl.maximum(token, 0)).to(tl.float32)
        logprob = chosen - largest - tl.log(total)
    tl.store(logprob_ptr + row, logprob)


def pick_token(
    logits: Tensor,
    rows: StepRows,
    *,
    cut: Tensor | None,
    stats: TileStatistics,
    picked: PickedTokens,
    pdl: bool = False,
) -> None:
    """Draw the token at ``rows.positions + 1``: argmax at temperature 0, else the inverse CDF.

    The first index whose running sum in vocabulary order exceeds u times the whole, where u is
    `philox.uniform` of the row's seed and the token's position; a token of probability zero is
    never drawn. The argmax is the first of equal ones, and NaN counts as +inf. logits, cut
    and stats: of `tile_statistics`, whose last call this must follow. ``pdl``: see `rms_norm`.
    """
    op = "pick_token"
    check_logits(op, logits, rows, cut=cut)
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, stats.tile)
    check_scratch(op, "stats.maxima", stats.maxima, num_rows, num_tiles)
    for name in ("token_ids", "logprobs"):
        tensor = getattr(picked, name)
        if tensor.shape != (num_rows,) or not tensor.is_contiguous():
            raise shape_error(op, f"picked.{name}", tensor, (num_rows,))
    pick_token_kernel[(num_rows,)](
        logits,
        rows.parameters,
        rows.positions,
        logits if cut is None else cut,
        stats.maxima,
        stats.argmaxima,
        stats.sums,
        stats.weights,
        picked.token_ids,
        picked.logprobs,
        logits.stride(0),
        rows.parameters.stride(0),
        VOCAB=vocab_size,
        NUM_TILES=num_tiles,
        ALL_TILES=triton.next_power_of_2(num_tiles),
        TILE=stats.tile,
        HAS_CUT=cut is not None,
        PDL=pdl,
        num_warps=max(min(stats.tile // 512, 8), 1),
        launch_pdl=pdl,
    )
