"""The ops of a CUDA device: our Triton kernels, and cuBLAS where it is faster.

This module is what `for_device` returns for a GPU; only then is triton imported. Besides the ops of
`KernelOps` it has those that exist for a GPU alone: attention over a plan made on the device,
products of few rows, and sampling and slot state (oracles in `reference_state`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanoserve_core.kernels.add_rms_norm import add_rms_norm
from nanoserve_core.kernels.advance_state import advance_state
from nanoserve_core.kernels.apply_deltas import apply_deltas
from nanoserve_core.kernels.apply_token_bitmask import apply_token_bitmask
from nanoserve_core.kernels.copy_blocks import copy_blocks
from nanoserve_core.kernels.decode_attention import decode_attention
from nanoserve_core.kernels.decode_config import DecodeConfig, decode_config
from nanoserve_core.kernels.decode_plan import DecodePlan, decode_plan, pack_size
from nanoserve_core.kernels.embed_rms_norm import embed_rms_norm
from nanoserve_core.kernels.filter_cut import filter_cut
from nanoserve_core.kernels.filter_tiles import filter_tiles
from nanoserve_core.kernels.gather_rows import gather_rows
from nanoserve_core.kernels.gemv import gemv
from nanoserve_core.kernels.pick_token import pick_token
from nanoserve_core.kernels.prefill_attention import prefill_attention
from nanoserve_core.kernels.qk_norm_rope_write import (
    qk_norm_rope_write as launch_qk_norm_rope_write,
)
from nanoserve_core.kernels.rms_norm import rms_norm
from nanoserve_core.kernels.silu_mul import silu_mul
from nanoserve_core.kernels.skinny_gemm import num_splits, skinny_gemm
from nanoserve_core.kernels.tile_statistics import tile_statistics

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DecodeConfig",
    "DecodePlan",
    "add_rms_norm",
    "advance_state",
    "apply_deltas",
    "apply_token_bitmask",
    "copy_blocks",
    "decode_attention",
    "decode_config",
    "decode_plan",
    "embed_rms_norm",
    "filter_cut",
    "filter_tiles",
    "gather_rows",
    "gemv",
    "linear",
    "num_splits",
    "pack_size",
    "pick_token",
    "place_tokens",
    "prefill_attention",
    "qk_norm_rope_write",
    "qk_views",
    "rms_norm",
    "silu_mul",
    "skinny_gemm",
    "tile_statistics",
]

MAX_SKINNY_ROWS = 16
"""Rows up to which our product is faster than cuBLAS for every shape of Qwen3 (0.6B: 1.1 to 3.8
times at 1 row, level at 16)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlacement:
    """Where the tokens of a step sit: looked up by the kernel, in every layer."""

    rotary_table: Tensor
    positions: Tensor
    slot_mapping: Tensor


def qk_views(qkv: Tensor, *, num_kv_heads: int) -> Tensor:
    """See `reference.qk_views`: the kernel needs none, and takes the whole tensor."""
    del num_kv_heads
    return qkv


def place_tokens(
    rotary_table: Tensor, *, positions: Tensor, slot_mapping: Tensor
) -> TokenPlacement:
    """See `reference.place_tokens`. Launches nothing, and never waits to see which slots are -1."""
    return TokenPlacement(rotary_table=rotary_table, positions=positions, slot_mapping=slot_mapping)


def qk_norm_rope_write(
    views: Tensor,
    placement: TokenPlacement,
    *,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cache: Tensor,
    pdl: bool = False,
) -> None:
    """See `reference.qk_norm_rope_write`."""
    launch_qk_norm_rope_write(
        views,
        rotary_table=placement.rotary_table,
        positions=placement.positions,
        slot_mapping=placement.slot_mapping,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        cache=cache,
        pdl=pdl,
    )


def linear(x: Tensor, weight_t: Tensor, *, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ weight_t + bias; see `reference.linear`.

    ``out`` may also be [splits, rows, out_features] float32 (at most 64 rows, no bias): the parts
    of a sum that `add_rms_norm` finishes.
    """
    if bias is not None:
        torch.addmm(bias, x, weight_t, out=out)
    elif out.dim() == 3:
        skinny_gemm(x, weight_t.t(), out=out)
    elif x.shape[0] == 1:
        gemv(x, weight_t.t(), out=out)
    elif x.shape[0] <= MAX_SKINNY_ROWS:
        skinny_gemm(x, weight_t.t(), out=out)
    else:
        torch.mm(x, weight_t, out=out)
