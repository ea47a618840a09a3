"""`PoolWatch`: says so once when a default thread pool, and not the engine, decides on the batch.

Sync calls inside async code, and branches of a `RunnableParallel` in a sync ``batch``, run on pools
with a few threads for each core. Users read that as "the engine does not batch".
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOG = logging.getLogger(__name__)
_MAX_POOLS = 64


@dataclass
class _Pool:
    """The threads of one executor that wait for the engine, or have."""

    num_waiting: int = 0
    num_threads: int = 0
    have_called: weakref.WeakSet[threading.Thread] = field(default_factory=weakref.WeakSet)


class PoolWatch:
    """Counts the calls that wait in threads of executors. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, _Pool] = {}
        self._has_spoken = False

    @contextmanager
    def call(self, max_num_seqs: int) -> Iterator[None]:
        """While the block runs, this thread waits for an engine that can run so many at a time."""
        thread = threading.current_thread()
        name, _, number = thread.name.rpartition("_")  # as executors name their threads
        if self._has_spoken or not number.isdigit():
            yield
            return
        self._enter(name, thread, int(number), max_num_seqs)
        try:
            yield
        finally:
            self._leave(name, thread)

    def _enter(self, name: str, thread: threading.Thread, number: int, max_num_seqs: int) -> None:
        size = default_pool_size()
        with self._lock:
            while len(self._pools) >= _MAX_POOLS and name not in self._pools:
                del self._pools[next(iter(self._pools))]  # LangChain makes a pool for each batch
            pool = self._pools.setdefault(name, _Pool())
            pool.num_waiting += 1
            pool.num_threads = max(pool.num_threads, number + 1)
            # A thread that calls a second time took the call from a queue: more may be in it.
            is_full = pool.num_waiting == pool.num_threads == size and thread in pool.have_called
            if not is_full or size >= max_num_seqs or self._has_spoken:
                return
            self._has_spoken = True
        _LOG.warning(
            "all %d threads of the pool %r wait for the engine, which could run %d at a time, and "
            "further calls queue for a thread: sync calls inside async code share a pool of so "
            "few. Use ainvoke, astream or abatch there; for a sync batch of parallel branches "
            "pass max_concurrency in the config.",
            size,
            name,
            max_num_seqs,
        )

    def _leave(self, name: str, thread: threading.Thread) -> None:
        with self._lock:
            if (pool := self._pools.get(name)) is not None:  # else it was the oldest of too many
                pool.num_waiting -= 1
                pool.have_called.add(thread)


def default_pool_size() -> int:
    """Threads of an executor for which no number was given (the documented default)."""
    count = getattr(os, "process_cpu_count", os.cpu_count)  # the former from Python 3.13 on
    return min(32, (count() or 1) + 4)
