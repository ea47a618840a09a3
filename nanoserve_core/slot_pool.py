"""The rows of the batch state: which are free, and how many tenants each has had. Knows no
sequence.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class SlotPool:
    """Gives out the lowest free slot, so that live slots stay dense."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        heapify(self._free)
        self._generations = [-1] * num_slots

    def acquire(self) -> tuple[int, int]:
        """The lowest free slot and the number of its new tenant, from 0: together they are never
        given out twice.
        """
        slot = heappop(self._free)
        self._generations[slot] += 1
        return slot, self._generations[slot]

    def release(self, slot: int) -> None:
        """Give back a slot that was acquired."""
        heappush(self._free, slot)

    @property
    def num_free(self) -> int:
        """Slots without a tenant."""
        return len(self._free)
