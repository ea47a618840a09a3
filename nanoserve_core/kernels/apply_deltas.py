"""Scatter of what the host has changed into the slot tables, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve_core.kernels.launch_errors import dtype_error, shape_error

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.kernels.slot_tables import SlotTables

BLOCK = 256


@triton.jit(do_not_specialize=["num_deltas"], do_not_specialize_on_alignment=["delta_ptr"])
def apply_deltas_kernel(
    delta_ptr,
    storage_ptr,
    num_deltas,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (pieces of the deltas,)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    deltas = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_delta = deltas < num_deltas
    offset = tl.load(delta_ptr + 2 * deltas, mask=is_delta, other=-1)
    value = tl.load(delta_ptr + 2 * deltas + 1, mask=is_delta, other=0)
    tl.store(storage_ptr + offset, value, mask=offset >= 0)


def apply_deltas(tables: SlotTables, deltas: Tensor, *, pdl: bool = False) -> None:
    """Write pairs of (offset in ``tables.storage``, value). deltas: [n, 2] int32.

    A pair with offset -1 writes nothing, so that a buffer of fixed length can be filled up. No
    offset may come twice: who writes last is not defined. `SlotDeltas` makes the pairs. ``pdl``:
    see `rms_norm`.
    """
    op = "apply_deltas"
    if deltas.dim() != 2 or deltas.shape[1] != 2 or not deltas.is_contiguous():
        raise shape_error(op, "deltas", deltas, ("n", 2))
    if deltas.dtype != torch.int32:
        raise dtype_error(op, "deltas", deltas, torch.int32)
    num_deltas = deltas.shape[0]
    apply_deltas_kernel[(triton.cdiv(num_deltas, BLOCK),)](
        deltas,
        tables.storage,
        num_deltas,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
