"""Copies of whole cache blocks, K and V of every layer: a private copy of a shared prefix's end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from nanoserve_core.kernels.launch_errors import shape_error, stride_error

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 4096


@triton.jit(do_not_specialize_on_alignment=["source_ptr", "destination_ptr"])
def copy_blocks_kernel(
    cache_ptr,
    source_ptr,
    destination_ptr,
    half_stride,
    layer_stride,
    block_stride,
    NUM_LAYERS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (copies, 2 * layers, pieces of a block)."""
    copy = tl.program_id(0)
    half = (tl.program_id(1) // NUM_LAYERS).to(tl.int64)
    layer = (tl.program_id(1) % NUM_LAYERS).to(tl.int64)
    source = tl.load(source_ptr + copy).to(tl.int64)
    destination = tl.load(destination_ptr + copy).to(tl.int64)
    elements = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_block = elements < SIZE
    layer_ptrs = cache_ptr + half * half_stride + layer * layer_stride + elements
    if (source >= 0) & (destination >= 0):
        values = tl.load(layer_ptrs + source * block_stride, mask=in_block, other=0.0)
        tl.store(layer_ptrs + destination * block_stride, values, mask=in_block)


def copy_blocks(cache: Tensor, *, sources: Tensor, destinations: Tensor) -> None:
    """Copy whole blocks. cache: [2, layers, blocks, block_size, kv_heads, head_dim].

    sources, destinations: [n] integers; a pair with a negative id copies nothing. Copies are made
    at the same time, so no block may be a source and a destination of one call.
    """
    if cache.dim() != 6:
        expected = ("2", "layers", "blocks", "block_size", "kv_heads", "head_dim")
        raise shape_error("copy_blocks", "cache", cache, expected)
    if sources.dim() != 1 or not sources.is_contiguous():
        raise shape_error("copy_blocks", "sources", sources, ("copies",))
    if destinations.shape != sources.shape or not destinations.is_contiguous():
        raise shape_error("copy_blocks", "destinations", destinations, sources.shape)
    _, num_layers, _, block_size, num_kv_heads, head_dim = cache.shape
    size = block_size * num_kv_heads * head_dim
    if cache.stride()[3:] != (num_kv_heads * head_dim, head_dim, 1):
        raise stride_error("copy_blocks", "cache", cache, "every block in one piece")
    copy_blocks_kernel[(sources.shape[0], 2 * num_layers, triton.cdiv(size, BLOCK))](
        cache,
        sources,
        destinations,
        *cache.stride()[:3],
        NUM_LAYERS=num_layers,
        SIZE=size,
        BLOCK=BLOCK,
        num_warps=4,
    )
