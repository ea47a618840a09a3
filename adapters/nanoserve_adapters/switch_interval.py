"""The interpreter's switch interval while engines have work: one owner for the process.

`sys.setswitchinterval` is process-wide. A busy Python thread keeps the GIL for that long (5 ms by
default), so an engine thread that lets go of the GIL within a step waits for it. An engine may ask
for a shorter interval while it has work; two that ask for different ones must not fight.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class SwitchInterval:
    """Claims on the switch interval: the shortest one holds, the last release restores what was.

    The interval is never raised by a claim, and never restored when somebody else has changed it in
    the meantime. Any thread may call.
    """

    def __init__(
        self,
        read: Callable[[], float] = sys.getswitchinterval,
        write: Callable[[float], None] = sys.setswitchinterval,
    ) -> None:
        self._read = read
        self._write = write
        self._lock = threading.Lock()
        self._claims: dict[int, float] = {}
        self._original = 0.0
        self._applied = 0.0

    def claim(self, owner: object, seconds: float) -> None:
        """Ask for at most `seconds` on behalf of `owner` (by identity) until it releases."""
        with self._lock:
            if not self._claims:
                self._original = self._applied = self._read()
            self._claims[id(owner)] = seconds
            self._apply()

    def release(self, owner: object) -> None:
        """Take the claim of `owner` back; does nothing without one."""
        with self._lock:
            if self._claims.pop(id(owner), None) is not None:
                self._apply()

    def _apply(self) -> None:
        if self._read() != self._applied:
            return  # somebody else set it while we held it: theirs stands
        self._write(min([self._original, *self._claims.values()]))
        self._applied = self._read()  # the interpreter rounds to microseconds


PROCESS_SWITCH_INTERVAL = SwitchInterval()
"""The owner all engine threads share, because the setting it owns is process-wide."""
