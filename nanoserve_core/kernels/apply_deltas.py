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

BLOCK = 1024


@triton.jit
def apply_deltas_kernel(delta_ptr, storage_ptr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """grid (1,): one program has all deltas, so that it can reset their number after reading it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_deltas = tl.load(delta_ptr)
    for start in range(0, num_deltas, BLOCK):
        deltas = start + tl.arange(0, BLOCK)
        is_delta = deltas < num_deltas
        offset = tl.load(delta_ptr + 2 * deltas + 2, mask=is_delta, other=-1)
        value = tl.load(delta_ptr + 2 * deltas + 3, mask=is_delta, other=0)
        tl.store(storage_ptr + offset, value, mask=offset >= 0)
    tl.debug_barrier()
    tl.store(delta_ptr, 0)


def apply_deltas(tables: SlotTables, deltas: Tensor, *, pdl: bool = False) -> None:
    """Write pairs of (offset in ``tables.storage``, value). deltas: [n + 1, 2] int32.

    The first pair is (number of pairs that follow and count, anything). Its number is then 0: a
    captured launch whose deltas nobody has renewed writes nothing. A pair with offset -1 writes
    nothing. No offset may come twice: who writes last is not defined. `SlotDeltas` makes the pairs.
    ``pdl``: see `rms_norm`.
    """
    op = "apply_deltas"
    if deltas.dim() != 2 or deltas.shape[1] != 2 or not deltas.is_contiguous():
        raise shape_error(op, "deltas", deltas, ("n + 1", 2))
    if deltas.dtype != torch.int32:
        raise dtype_error(op, "deltas", deltas, torch.int32)
    apply_deltas_kernel[(1,)](
        deltas,
        tables.storage,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
