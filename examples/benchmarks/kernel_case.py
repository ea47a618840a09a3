"""What the kernel benchmark measures: a case in several variants, and the sizes it is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

DTYPE = torch.bfloat16
EPS = 1e-6
HEAD_DIM = 128
ROTATED_NBYTES = 300_000_000
"""Data of one replay: several times the L2 cache."""

Run: TypeAlias = Callable[[int], object]
"""Launches the work on the copy of the data with this number."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a checkpoint."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    layers: int
    vocab: int = 151936

    @property
    def qkv(self) -> int:
        """Rows of the fused q, k and v weight."""
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM


SMALL = Shape(hidden=1024, heads=16, kv_heads=8, intermediate=3072, layers=28)
LARGE = Shape(hidden=4096, heads=32, kv_heads=8, intermediate=12288, layers=36)
SHAPES = {"0.6B": SMALL, "8B": LARGE}


@dataclass(kw_only=True)
class Case:
    """One row of the table."""

    name: str
    nbytes: float
    """What one run has to move, at least."""
    flops: float = 0.0
    copies: int = 1
    """Runs per replay, each on its own copy of the data."""
    variants: dict[str, Run]
    in_use: str
    """The variant that the library's tables choose."""
    rivals: dict[str, Run] = field(default_factory=dict)
    error: Callable[[], float] | None = None
    """Relative error of what the last run left."""


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    """Random numbers on the device."""
    return torch.empty(shape, dtype=DTYPE, device="cuda").normal_(0, scale)


def copies_for(nbytes: float, *, most: int = 64) -> int:
    """How many copies of so many bytes keep the L2 cache from helping."""
    return int(max(1, min(most, ROTATED_NBYTES // max(nbytes, 1))))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def num_multiprocessors() -> int:
    """Of the device in use."""
    return torch.cuda.get_device_properties(0).multi_processor_count
