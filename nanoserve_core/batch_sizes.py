"""`BatchSizes`: how large batches were, for whoever asks about the steps since one of them.

Each request is told the largest batch it ran in. It knows numbers only.
"""

from __future__ import annotations

from bisect import bisect_left


class BatchSizes:
    """The sizes of all steps so far, as far as they can still be a maximum. One thread.

    Only steps larger than every later one are kept, so there are never more than a batch has rows
    and adding one costs constant time on average.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._steps: list[int] = []
        self._sizes: list[int] = []

    def add(self, size: int) -> None:
        """A step of so many rows was launched."""
        while self._sizes and self._sizes[-1] <= size:
            self._sizes.pop()
            self._steps.pop()
        self._steps.append(self.num_steps)
        self._sizes.append(size)
        self.num_steps += 1

    def largest_since(self, step: int) -> int:
        """Rows of the largest step from number `step` (from 0) to now; 0 when there was none."""
        first = bisect_left(self._steps, step)
        return self._sizes[first] if first < len(self._sizes) else 0
