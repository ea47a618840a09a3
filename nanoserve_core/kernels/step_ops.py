"""`StepOps`: what a decode step runs that stays on the device from beginning to end.

More than `KernelOps`: the state of the sequences, sampling, and the products of few rows. A device
that brings all of it can have its steps captured. ``pdl``: see `rms_norm`; it never changes a
result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nanoserve_core.kernels import KernelOps

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.kernels import QkViews, TokenPlacement
    from nanoserve_core.kernels.sampling_scratch import FilterTiles, TileStatistics
    from nanoserve_core.kernels.slot_tables import PickedTokens, SlotTables, StepRows, TokenRing


class StepOps(KernelOps, Protocol):
    """Contracts are those of the functions of the same names: of `reference` and `reference_state`,
    and of the kernels' own files.
    """

    def apply_deltas(self, tables: SlotTables, deltas: Tensor, *, pdl: bool = False) -> None:
        """See `reference_state.apply_deltas`."""
        ...

    def gather_rows(self, tables: SlotTables, rows: StepRows, *, pdl: bool = False) -> None:
        """See `reference_state.gather_rows`."""
        ...

    def filter_tiles(
        self, logits: Tensor, rows: StepRows, *, tiles: FilterTiles, pdl: bool = False
    ) -> None:
        """See `reference_state.filter_tiles`."""
        ...

    def filter_cut(
        self,
        logits: Tensor,
        rows: StepRows,
        *,
        tiles: FilterTiles,
        cut: Tensor,
        pdl: bool = False,
    ) -> None:
        """See `reference_state.filter_cut`."""
        ...

    def tile_statistics(
        self,
        logits: Tensor,
        rows: StepRows,
        *,
        cut: Tensor | None,
        stats: TileStatistics,
        pdl: bool = False,
    ) -> None:
        """See `reference_state.tile_statistics`."""
        ...

    def pick_token(
        self,
        logits: Tensor,
        rows: StepRows,
        *,
        cut: Tensor | None,
        stats: TileStatistics,
        picked: PickedTokens,
        pdl: bool = False,
    ) -> None:
        """See `reference_state.pick_token`."""
        ...

    def advance_state(
        self,
        tables: SlotTables,
        rows: StepRows,
        *,
        picked: PickedTokens,
        ring: TokenRing,
        pdl: bool = False,
    ) -> None:
        """See `reference_state.advance_state`."""
        ...

    def embed_rms_norm(
        self,
        token_ids: Tensor,
        embedding: Tensor,
        *,
        weight: Tensor,
        eps: float,
        residual: Tensor,
        out: Tensor,
        pdl: bool = False,
    ) -> None:
        """See `embed_rms_norm.embed_rms_norm`."""
        ...

    def gemv(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        out: Tensor,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        silu_mul: bool = False,
        add: bool = False,
        pdl: bool = False,
    ) -> None:
        """See `gemv.gemv`."""
        ...

    def skinny_gemm(self, x: Tensor, weight: Tensor, *, out: Tensor, pdl: bool = False) -> None:
        """See `skinny_gemm.skinny_gemm`."""
        ...

    def num_splits(self, out_size: int, in_size: int) -> int:
        """See `skinny_gemm.num_splits`."""
        ...

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        weight: Tensor,
        eps: float,
        out: Tensor,
        pdl: bool = False,
    ) -> None:
        """See `reference.add_rms_norm`; ``x`` may also be the parts of a split sum."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor, *, out: Tensor, pdl: bool = False) -> None:
        """See `reference.silu_mul`."""
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
        pdl: bool = False,
    ) -> None:
        """See `reference.qk_norm_rope_write`."""
        ...
