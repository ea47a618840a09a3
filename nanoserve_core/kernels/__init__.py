"""The ops of a forward pass, behind one choice: `for_device`.

Every op exists in `reference` (plain torch: the CPU path, and the oracle of the device kernels). A
device brings its own for those it is faster at, under the same name and contract, and the model
never asks which one it calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

QkViews: TypeAlias = Any  # Any: each set of ops has its own type
TokenPlacement: TypeAlias = Any  # Any: as above


class KernelOps(Protocol):
    """What `for_device` returns: shapes, dtypes and rounding points are those of `reference`."""

    def qk_views(self, qkv: Tensor, *, num_kv_heads: int) -> QkViews:
        """See `reference.qk_views`."""
        ...

    def place_tokens(
        self, rotary_table: Tensor, *, positions: Tensor, slot_mapping: Tensor
    ) -> TokenPlacement:
        """See `reference.place_tokens`."""
        ...

    def qk_norm_rope_write(
        self,
        views: QkViews,
        placement: TokenPlacement,
        *,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        cache: Tensor,
    ) -> None:
        """See `reference.qk_norm_rope_write`."""
        ...

    def linear(self, x: Tensor, weight_t: Tensor, *, bias: Tensor | None, out: Tensor) -> None:
        """See `reference.linear`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> None:
        """See `reference.rms_norm`."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, *, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """See `reference.add_rms_norm`."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor, *, out: Tensor) -> None:
        """See `reference.silu_mul`."""
        ...

    def copy_blocks(self, cache: Tensor, *, sources: Tensor, destinations: Tensor) -> None:
        """See `reference.copy_blocks`."""
        ...


def for_device(device: torch.device) -> KernelOps:
    """The ops for ``device``: Triton's on an NVIDIA GPU, plain torch everywhere else."""
    import torch

    from nanoserve_core.kernels import reference

    if device.type != "cuda" or torch.version.cuda is None:
        return reference
    from nanoserve_core.kernels import triton_ops  # only here: no other machine needs triton

    return triton_ops
