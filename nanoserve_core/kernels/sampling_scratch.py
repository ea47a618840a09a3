"""Scratch of the sampling kernels, allocated once for the largest step: what one hands the next.

Its tile sizes are those of the kernels that write and read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

TILE = 4096
FILTER_TILE = 64
FILTER_GROUP = 64
FILTER_CAPACITY = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TileStatistics:
    """What `tile_statistics` finds in each tile of ``tile`` logits, for `pick_token`.

    All [rows, tiles]. Only what the row's kind needs is written.
    """

    tile: int
    maxima: Tensor
    """float32; NaN counts as +inf."""
    argmaxima: Tensor
    """int32: the first column of the maximum; of greedy rows."""
    sums: Tensor
    """float32: sum of exp(logit - maximum); of rows that want a log-probability."""
    weights: Tensor
    """float32: sum of exp((logit - maximum) / temperature) over logits that are not below the cut;
    of sampled rows. NaN where a logit is NaN or +inf."""

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_size: int, device: torch.device | str, *, tile: int = TILE
    ) -> TileStatistics:
        """Memory for steps of up to ``num_rows`` rows. ``tile``: a power of two."""
        shape = (num_rows, -(-vocab_size // tile))
        return cls(
            tile=tile,
            maxima=torch.zeros(shape, dtype=torch.float32, device=device),
            argmaxima=torch.zeros(shape, dtype=torch.int32, device=device),
            sums=torch.zeros(shape, dtype=torch.float32, device=device),
            weights=torch.zeros(shape, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterTiles:
    """What `filter_tiles` finds in each tile of ``tile`` logits, for `filter_cut`.

    ``group`` tiles that follow each other have one mass. The tiles of a row fill its groups: those
    behind the vocabulary hold -inf.
    """

    tile: int
    group: int
    maxima: Tensor
    """[rows, groups * group] float32."""
    masses: Tensor
    """[rows, groups] float32: sum of exp((logit - group's maximum) / temperature); of rows with
    top-p and without top-k."""
    chosen: Tensor
    """[rows, capacity] int32: scratch of `filter_cut`: the tiles it looks into."""

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str,
        *,
        tile: int = FILTER_TILE,
        group: int = FILTER_GROUP,
        capacity: int = FILTER_CAPACITY,
    ) -> FilterTiles:
        """Memory for steps of up to ``num_rows`` rows. All three sizes: powers of two.

        ``capacity``: a row whose kept tokens lie in more tiles is searched whole. top-k up to
        ``capacity`` never is.
        """
        num_groups = -(-vocab_size // (tile * group))
        return cls(
            tile=tile,
            group=group,
            maxima=torch.zeros(num_rows, num_groups * group, dtype=torch.float32, device=device),
            masses=torch.zeros(num_rows, num_groups, dtype=torch.float32, device=device),
            chosen=torch.zeros(num_rows, capacity, dtype=torch.int32, device=device),
        )
