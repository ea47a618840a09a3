"""`Turns`: the calls of `generate` that the engine cannot run among others, one at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")


class Turns:
    """One thread, started by the first call. Any thread may use it.

    Two of transformers' own loops at once would share the CPU and torch's generator.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held during each turn; who holds it keeps the next one from beginning."""
        self._start_lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, run: Callable[[], T]) -> Future[T]:
        """Queue a call; raises ``RuntimeError`` after `close`."""
        with self._start_lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="nanoserve-turns")
            return self._executor.submit(self._take, run)

    def close(self) -> None:
        """Take no more calls and drop those that wait; the one that runs goes on. Idempotent."""
        with self._start_lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1)
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _take(self, run: Callable[[], T]) -> T:
        with self.lock:
            return run()
