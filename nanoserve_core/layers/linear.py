"""Linear layers as plain data: which weights, side by side or fused. The arithmetic is an op of
`kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.kernels import KernelOps


class Projection(Protocol):
    """What the model calls: ``out = x @ weight.T + bias`` for one or several weights."""

    def __call__(self, x: Tensor, *, ops: KernelOps, out: Tensor) -> None:
        """x: [tokens, in_features]; out: [tokens, out_features], overwritten."""
        ...


class Linear:
    """One weight [out_features, in_features], and a bias [out_features] or None."""

    __slots__ = ("bias", "weight", "weight_t")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.weight_t = weight.t()  # made once: a view costs a microsecond per call
        self.bias = bias

    def __call__(self, x: Tensor, *, ops: KernelOps, out: Tensor) -> None:
        """See `Projection`."""
        ops.linear(x, self.weight_t, bias=self.bias, out=out)


class SplitLinear:
    """Several `Linear` of one input, outputs side by side in one tensor, for weights that must stay
    where they are.
    """

    __slots__ = ("_parts", "_sizes")

    def __init__(self, *parts: Linear) -> None:
        self._parts = parts
        self._sizes = [part.weight.shape[0] for part in parts]

    def __call__(self, x: Tensor, *, ops: KernelOps, out: Tensor) -> None:
        """See `Projection`."""
        for part, piece in zip(self._parts, out.split_with_sizes(self._sizes, dim=1), strict=True):
            part(x, ops=ops, out=piece)
