"""Top-k, top-p and min-p of a row as one bound on its logits, exact and without a sort.

The k-th largest tile maximum bounds the k-th largest logit from below, so the tiles whose maximum
reaches it hold all that top-k keeps; likewise the tiles with the largest maxima hold a nucleus, if
it is small. They are read once into registers, and the cut is bisected there, on an integer that
orders the logits. A row whose cut lies deeper is bisected over the whole row, by the same program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.filter_tiles import row_filters
from nanoserve_core.kernels.tile_statistics import (
    LOWEST_TEMPERATURE,
    check_logits,
    check_scratch,
    exp_difference,
)

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.kernels.sampling_scratch import FilterTiles
    from nanoserve_core.kernels.slot_tables import StepRows

MAX_INT32 = tl.constexpr(0x7FFFFFFF)
MINUS_INFINITY_KEY = tl.constexpr(-0x7F800001)  # before its lowest bits are left out
WHOLE_ROW_BLOCK = 8192

# Low bits of a float32 that are always zero when it was one of these: keys leave them out.
UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def ordered_key(x, SHIFT: tl.constexpr):
    """An int32 that orders as the float32 does, without the SHIFT lowest bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ MAX_INT32, bits) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """The float32 that has this key, when its SHIFT lowest bits are zero."""
    bits = key << SHIFT
    bits = tl.where(key < 0, (bits | ((1 << SHIFT) - 1)) ^ MAX_INT32, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def middle_of(low, high):
    """Their mean, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def key_of_count(keys, count, low, high):
    """The largest key in [low, high) that ``count`` of ``keys`` reach; ``low`` if none is."""
    while low + 1 < high:
        middle = middle_of(low, high)
        is_reached = tl.sum((keys >= middle).to(tl.int32)) >= count
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low


@triton.jit
def key_of_mass(keys, weights, mass, low, high):
    """The largest key in [low, high) from which on the weights make ``mass``; ``low`` if none."""
    while low + 1 < high:
        middle = middle_of(low, high)
        is_reached = tl.sum(tl.where(keys >= middle, weights, 0.0)) >= mass
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low


@triton.jit
def row_count(row_ptr, key, VOCAB: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits of the row reach ``key``."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        in_row = columns < VOCAB
        x = tl.load(row_ptr + columns, mask=in_row, other=float("-inf")).to(tl.float32)
        counts += (in_row & (ordered_key(x, SHIFT) >= key)).to(tl.int32)
    return tl.sum(counts)


@triton.jit
def row_mass(
    row_ptr,
    key,
    largest,
    inverse_temperature,
    VOCAB: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weights of the row's logits that reach ``key``."""
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32)
        weights = exp_difference(x, largest, inverse_temperature)
        masses += tl.where(ordered_key(x, SHIFT) >= key, weights, 0.0)
    return tl.sum(masses)


@triton.jit
def key_of_row(
    row_ptr,
    top_k,
    top_p,
    total,
    largest,
    temperature,
    found_above,
    VOCAB: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The cut's key, searched in the whole row; what is at or above ``found_above`` is too little:
    not ``top_k`` logits, or not the mass of the nucleus. total: the row's mass, for top-p alone.
    """
    inverse_temperature = 1.0 / temperature
    high = found_above
    if top_k > 0:
        key = tl.full([], MINUS_INFINITY_KEY >> SHIFT, tl.int32)
        while key + 1 < high:
            middle = middle_of(key, high)
            is_reached = row_count(row_ptr, middle, VOCAB, SHIFT, BLOCK) >= top_k
            key = tl.where(is_reached, middle, key)
            high = tl.where(is_reached, high, middle)
        total = row_mass(row_ptr, key, largest, inverse_temperature, VOCAB, SHIFT, BLOCK)
        high = ordered_key(largest, SHIFT) + 1
    else:
        # All that is below it has at most the mass that top-p leaves out.
        bound = largest + temperature * tl.log((1.0 - top_p) * total / VOCAB)
        key = tl.minimum(ordered_key(bound, SHIFT), high - 1)
    if top_p < 1.0:
        mass = top_p * total
        while key + 1 < high:
            middle = middle_of(key, high)
            reached = row_mass(row_ptr, middle, largest, inverse_temperature, VOCAB, SHIFT, BLOCK)
            key = tl.where(reached >= mass, middle, key)
            high = tl.where(reached >= mass, high, middle)
    return key


@triton.jit
def find_cut(
    row_ptr,
    maxima,
    total,
    largest,
    chosen_ptr,
    temperature,
    top_k,
    top_p,
    min_cut,
    VOCAB: tl.constexpr,
    ALL_TILES: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The cut of top-k and top-p; something below ``min_cut`` where that decides. ::

    tile maxima   9 9 8 7 | 5 5 4 ...    low 7: tiles left of the bar are chosen, and what
                  chosen                 reaches 7 is in them and nowhere else
    """
    NUM_TILES: tl.constexpr = (VOCAB + TILE - 1) // TILE
    LOWEST: tl.constexpr = MINUS_INFINITY_KEY >> SHIFT
    high = ordered_key(largest, SHIFT) + 1
    tiles = tl.arange(0, ALL_TILES)
    is_tile = tiles < NUM_TILES
    tile_keys = tl.where(is_tile, ordered_key(maxima, SHIFT), LOWEST - 1)
    num_wanted = tl.where(top_k > 0, tl.minimum(top_k, CAPACITY), CAPACITY)
    low = tl.min(tl.where(is_tile, tile_keys, high), 0)
    low = key_of_count(tile_keys, num_wanted, low, high)
    low = tl.where(tl.sum((tile_keys >= low).to(tl.int32)) > CAPACITY, low + 1, low)
    is_chosen = tile_keys >= low
    num_chosen = tl.sum(is_chosen.to(tl.int32))
    low = tl.where(num_chosen == NUM_TILES, LOWEST, low)

    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen_ptr + place, tiles, mask=is_chosen)
    tl.debug_barrier()
    places = tl.arange(0, CAPACITY)
    chosen = tl.load(chosen_ptr + places, mask=places < num_chosen, other=0)
    columns = chosen[:, None] * TILE + tl.arange(0, TILE)[None, :]
    is_candidate = (places < num_chosen)[:, None] & (columns < VOCAB)
    x = tl.load(row_ptr + columns, mask=is_candidate, other=float("-inf")).to(tl.float32)
    keys = tl.where(is_candidate, ordered_key(x, SHIFT), LOWEST - 1)

    key = low
    is_found = True
    if top_k > 0:
        is_found = tl.sum((keys >= low).to(tl.int32)) >= top_k
        key = key_of_count(keys, top_k, low, high)
    if top_p < 1.0:
        weights = exp_difference(x, largest, 1.0 / temperature)
        weights = tl.where(keys >= key, weights, 0.0)
        reached = tl.sum(weights)
        mass = top_p * tl.where(top_k > 0, reached, total)
        is_found = is_found & (reached >= mass)
        key = key_of_mass(keys, weights, mass, key, high)
    # A cut below `low` is below `min_cut`; but top-p after a deep top-k may well be above.
    is_deep = (min_cut < value_of(low, SHIFT)) | ((top_k > 0) & (top_p < 1.0))
    if is_deep & (is_found == 0):
        key = key_of_row(
            row_ptr, top_k, top_p, total, largest, temperature, low, VOCAB, SHIFT, BLOCK
        )
    return value_of(key, SHIFT)


@triton.jit(do_not_specialize=["parameter_stride"])
def filter_cut_kernel(
    logits_ptr,
    parameter_ptr,
    maximum_ptr,
    mass_ptr,
    chosen_ptr,
    cut_ptr,
    logits_row_stride,
    parameter_stride,
    VOCAB: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (rows,)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    filters = row_filters(parameter_ptr, parameter_stride, row)
    temperature, top_k, top_p, min_p, is_filtered = filters
    if is_filtered:
        temperature = tl.maximum(temperature, LOWEST_TEMPERATURE)
        tiles = tl.arange(0, ALL_GROUPS * GROUP)
        maximum_ptrs = maximum_ptr + row * (NUM_GROUPS * GROUP) + tiles
        maxima = tl.load(maximum_ptrs, mask=tiles < NUM_GROUPS * GROUP, other=float("-inf"))
        largest = tl.max(maxima, 0)
        log_min_p = tl.log(tl.where(min_p > 0.0, min_p, 1.0))
        cut = tl.where(min_p > 0.0, largest + temperature * log_min_p, float("-inf"))
        if (top_k > 0) | (top_p < 1.0):
            groups = tl.arange(0, ALL_GROUPS)
            mass_ptrs = mass_ptr + row * NUM_GROUPS + groups
            masses = tl.load(mass_ptrs, mask=groups < NUM_GROUPS, other=0.0)
            group_maxima = tl.max(tl.reshape(maxima, [ALL_GROUPS, GROUP]), 1)
            scales = exp_difference(group_maxima, largest, 1.0 / temperature)
            found = find_cut(
                logits_ptr + row * logits_row_stride,
                maxima,
                tl.sum(masses * scales),
                largest,
                chosen_ptr + row * CAPACITY,
                temperature,
                tl.minimum(top_k, VOCAB),
                top_p,
                cut,
                VOCAB,
                ALL_GROUPS * GROUP,
                TILE,
                CAPACITY,
                SHIFT,
                BLOCK,
            )
            cut = tl.maximum(cut, found)
        tl.store(cut_ptr + row, cut)
    else:
        tl.store(cut_ptr + row, float("-inf"))


def filter_cut(
    logits: Tensor, rows: StepRows, *, tiles: FilterTiles, cut: Tensor, pdl: bool = False
) -> None:
    """What top-k, top-p and min-p leave, as one bound per row. cut: [rows] float32.

    A row keeps the logits that are at least its cut; -inf when it does not filter or is greedy.
    Order and definitions are transformers' (temperature, top-k, top-p, min-p), except that all ties
    at the cut are kept. logits and tiles: of `filter_tiles`, whose last call this must follow.
    ``pdl``: see `rms_norm`.
    """
    op = "filter_cut"
    check_logits(op, logits, rows, cut=cut)
    num_rows, vocab_size = logits.shape
    num_groups = triton.cdiv(vocab_size, tiles.tile * tiles.group)
    check_scratch(op, "tiles.masses", tiles.masses, num_rows, num_groups)
    capacity = tiles.chosen.shape[1]
    filter_cut_kernel[(num_rows,)](
        logits,
        rows.parameters,
        tiles.maxima,
        tiles.masses,
        tiles.chosen,
        cut,
        logits.stride(0),
        rows.parameters.stride(0),
        VOCAB=vocab_size,
        NUM_GROUPS=num_groups,
        ALL_GROUPS=triton.next_power_of_2(num_groups),
        GROUP=tiles.group,
        TILE=tiles.tile,
        CAPACITY=capacity,
        SHIFT=UNUSED_BITS[logits.dtype],
        BLOCK=WHOLE_ROW_BLOCK,
        PDL=pdl,
        num_warps=max(min(capacity * tiles.tile // 1024, 16), 4),
        launch_pdl=pdl,
    )
