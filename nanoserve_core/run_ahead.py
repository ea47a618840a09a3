"""`RunAhead`: how many steps are launched before the oldest is read.

As few as keep the device busy, because what is launched cannot be taken back: a new request waits
behind it. A thread that runs pure Python gives the GIL up only every 5 ms, and meanwhile the
engine launches nothing; then more steps must be on their way (steps of 0.45 ms beside one such
thread, measured on an H200: one a visit keeps 0.10 of the device busy, sixteen keep 0.91).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SECONDS = 0.1
"""Never more launched work than this, if the least is not more already: a new request waits for it.
"""
PATIENCE = 64
"""Visits in a row that found the device in time, before fewer steps are tried."""


class RunAhead:
    """Doubles when the device ran dry, halves when the host was in time for a while. One thread."""

    def __init__(
        self, least: int, most: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._least = least
        self.most = most
        self._clock = clock
        self._last_visit = clock()
        self._num_in_time = 0
        self.depth = least
        """Steps that may be launched when the oldest is not read yet."""

    def note(self, *, num_done: int, is_dry: bool) -> None:
        """A visit with as many steps on their way as were allowed found ``num_done`` of them done.

        ``is_dry``: all of them.
        """
        now = self._clock()
        step_seconds = (now - self._last_visit) / num_done
        self._last_visit = now
        if is_dry and self._least > 0:
            self._num_in_time = 0
            affordable = int(MAX_SECONDS / max(step_seconds, 1e-6))
            self.depth = max(self._least, min(2 * self.depth, self.most, affordable))
            return
        self._num_in_time = self._num_in_time + 1 if num_done == 1 else 0
        if self._num_in_time >= PATIENCE and self.depth > self._least:
            self.depth = max(self.depth // 2, self._least)
            self._num_in_time = 0
