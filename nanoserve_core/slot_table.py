"""`SlotTable`: rows of a device table for those slots that need one.

Few requests need their history or token counts on the device, and a row of counts is as long as the
vocabulary: rows are made when asked for and the table is given back when its last row is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class SlotTable:
    """A table [rows, width] that grows as slots ask for rows; a row without owner holds zeros.

    ``data`` is another tensor after it has grown: a captured graph must not outlive `add`.
    """

    def __init__(
        self, max_num_slots: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.data = torch.zeros(0, width, dtype=dtype, device=device)
        self.rows = np.full(max_num_slots, -1, dtype=np.int64)
        """[max_num_slots], on the host: the row of each slot, -1 without one."""
        self._free: list[int] = []

    def add(self, slot: int) -> Tensor:
        """Give ``slot`` a row of zeros; returns it, [width], for writing."""
        if not self._free:
            self._grow()
        self.rows[slot] = self._free.pop()
        return self.data[self.rows[slot]]

    def remove(self, slot: int) -> None:
        """Take the row of ``slot`` back; nothing happens when it has none."""
        row = int(self.rows[slot])
        if row < 0:
            return
        self.rows[slot] = -1
        self.data[row].zero_()
        self._free.append(row)
        if len(self._free) == len(self.data):
            self.data, self._free = self.data.new_zeros(0, self.data.shape[1]), []

    def _grow(self) -> None:
        old = len(self.data)
        new = min(max(1, 2 * old), len(self.rows))
        assert new > old, f"all {old} rows are taken by other slots"
        self.data = torch.cat([self.data, self.data.new_zeros(new - old, self.data.shape[1])])
        self._free.extend(range(old, new))
