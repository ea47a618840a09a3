"""`DeviceSampling`: logits to tokens to slots, on the device; and where in the ring they are.

It enqueues and never waits; which rows, and when, is the runner's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanoserve_core.device_rows import RING_LENGTH
from nanoserve_core.kernels.sampling_scratch import FilterTiles, TileStatistics
from nanoserve_core.kernels.slot_tables import PickedTokens

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.config import ModelSpec
    from nanoserve_core.device_rows import DeviceRows
    from nanoserve_core.kernels.slot_tables import StepRows
    from nanoserve_core.kernels.step_ops import StepOps


class DeviceSampling:
    """The scratch of sampling, the logits it reads, and the count of what the ring has got."""

    def __init__(
        self,
        max_num_rows: int,
        spec: ModelSpec,
        ops: StepOps,
        rows: DeviceRows,
        device: torch.device,
    ) -> None:
        self._ops = ops
        self._rows = rows
        vocab_size = spec.vocab_size
        self.logits = torch.zeros(max_num_rows, vocab_size, dtype=spec.dtype, device=device)
        self._cut = torch.zeros(max_num_rows, dtype=torch.float32, device=device)
        self._stats = TileStatistics.allocate(max_num_rows, vocab_size, device)
        self._tiles = FilterTiles.allocate(max_num_rows, vocab_size, device)
        self._picked = PickedTokens.allocate(max_num_rows, device)
        self._ring_entries = rows.ring.token_ids.unbind(0)
        self._num_advances = 0

    def run(self, logits: Tensor, rows: StepRows, *, has_filters: bool, pdl: bool = False) -> None:
        """Sample a token per row and advance. Enqueues only; capturable."""
        ops, num_rows, cut = self._ops, rows.num_rows, None
        if has_filters:
            cut = self._cut[:num_rows]
            ops.filter_tiles(logits, rows, tiles=self._tiles, pdl=pdl)
            ops.filter_cut(logits, rows, tiles=self._tiles, cut=cut, pdl=pdl)
        picked = self._picked.first(num_rows)
        ops.tile_statistics(logits, rows, cut=cut, stats=self._stats, pdl=pdl)
        ops.pick_token(logits, rows, cut=cut, stats=self._stats, picked=picked, pdl=pdl)
        ops.advance_state(self._rows.tables, rows, picked=picked, ring=self._rows.ring, pdl=pdl)

    def take(self, rows: StepRows, token_ids: Tensor) -> None:
        """Advance by tokens that the host's sampler drew."""
        picked = self._picked.first(rows.num_rows)
        picked.token_ids.copy_(token_ids)
        self._ops.advance_state(self._rows.tables, rows, picked=picked, ring=self._rows.ring)
        self.next_tokens()

    def next_tokens(self) -> Tensor:
        """[slots] int32: where the newest `run` or `take` left its tokens; once after each."""
        at = self._num_advances % RING_LENGTH
        self._num_advances += 1
        return self._ring_entries[at]
