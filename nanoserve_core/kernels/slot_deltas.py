"""`SlotDeltas`: what has changed in `SlotTables`, collected on the host for `apply_deltas`.

It knows where things are, not what they mean to a request. No torch: the pairs are written into
memory that the caller owns, pinned memory where a copy to a device follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nanoserve_core.kernels.slot_tables import FLOAT_FIELDS, MAX_STOP_IDS, SlotField

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from nanoserve_core.kernels.slot_tables import SlotLayout

    HostInts = NDArray[np.int32]


class SlotDeltas:
    """Changes since the last `take`; a later change of an entry replaces an earlier one."""

    def __init__(self, layout: SlotLayout) -> None:
        self._layout = layout
        self._changes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def set_fields(self, slot: int, fields: Mapping[SlotField, float]) -> None:
        """Set some fields of ``slot``."""
        for field, value in fields.items():
            bits = _float_bits(value) if field in FLOAT_FIELDS else int(value)
            self._changes[field.value * self._layout.num_slots + slot] = bits

    def set_seed(self, slot: int, seed: int) -> None:
        """Set both words of the seed, 0 <= seed < 2**64."""
        low, high = _signed(seed & 0xFFFFFFFF), _signed(seed >> 32)
        self.set_fields(slot, {SlotField.SEED_LOW: low, SlotField.SEED_HIGH: high})

    def set_stop_ids(self, slot: int, stop_ids: Sequence[int]) -> None:
        """Set all stop ids of ``slot``; those beyond `MAX_STOP_IDS` are left to the host."""
        start = self._layout.stop_ids_start + slot * MAX_STOP_IDS
        padded = [*stop_ids[:MAX_STOP_IDS], *[-1] * (MAX_STOP_IDS - len(stop_ids))]
        self._changes.update(zip(range(start, start + MAX_STOP_IDS), padded, strict=True))

    def set_blocks(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Write ``block_ids`` from entry ``first`` of the slot's block table on, and end it there.

        The table is as long as the last call says: entries before ``first`` stay.
        """
        end = first + len(block_ids)
        start = self._layout.block_tables_start + slot * self._layout.max_num_blocks
        self._changes.update(zip(range(start + first, start + end), block_ids, strict=True))
        self.set_fields(slot, {SlotField.NUM_BLOCKS: end})

    def deactivate(self, slot: int) -> None:
        """Let the slot's row do nothing any more: it writes no K/V and yields no token."""
        self.set_fields(slot, {SlotField.IS_ACTIVE: 0})

    def set_rows(self, slots: Sequence[int]) -> None:
        """Set the slots of the first rows of `SlotTables.row_slots`; -1 for padding."""
        start = self._layout.row_slots_start
        self._changes.update(zip(range(start, start + len(slots)), slots, strict=True))

    def set_groups(self, leads: Sequence[int], shared: Sequence[int]) -> None:
        """Set the groups of the first rows; equally long. See `SlotTables.row_groups`."""
        start = self._layout.row_groups_start
        for values in (leads, shared):
            self._changes.update(zip(range(start, start + len(values)), values, strict=True))
            start += self._layout.num_slots

    def take(self, out: HostInts) -> int:
        """Move the changes to ``out`` [capacity, 2] as `apply_deltas` takes them, their number
        first; gives how many pairs of ``out`` are filled.

        Raises ValueError when ``out`` is too short; then nothing is taken.
        """
        num_changes = len(self._changes)
        if num_changes >= len(out):
            raise ValueError(
                f"{num_changes} changes of slot tables, expected at most {len(out) - 1}. Take them "
                "in time, or make the buffer longer."
            )
        filled = out[: num_changes + 1]
        filled[0] = num_changes, 0
        filled[1:, 0] = np.fromiter(self._changes.keys(), np.int32, num_changes)
        filled[1:, 1] = np.fromiter(self._changes.values(), np.int32, num_changes)
        self._changes.clear()
        return num_changes + 1


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _signed(word: int) -> int:
    """The int32 with the bits of ``word``, 0 <= word < 2**32."""
    return word - (1 << 32) if word >= 1 << 31 else word
