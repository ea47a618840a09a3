"""`StepGraphs`: functions that run on the device as CUDA graphs, captured when first used.

The host pays a captured step of 250 launches with one call of 5 us. A function is first run
eagerly, which is useful work, compiles its kernels and lets the libraries set themselves up; then
it is captured, without being run, and replayed from its second call on.

It knows no model: what a function reads and writes stays at its addresses, which is its maker's
business.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from nanoserve_core.cuda_calls import CudaCalls

BUCKETS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192),
    *range(224, 385, 32),
    *(448, 512),
)
"""Rows of the captured steps: below 184 rows padding costs no time, above it at worst 16 % of the
matrix products."""
BUCKET_STEP = 64
"""Distance of the buckets beyond the table."""


def buckets_for(max_num_rows: int) -> tuple[int, ...]:
    """The row counts to capture so that any step of up to ``max_num_rows`` fits; the last one is
    that number itself.
    """
    more = range(BUCKETS[-1] + BUCKET_STEP, max_num_rows, BUCKET_STEP)
    return (*(rows for rows in (*BUCKETS, *more) if rows < max_num_rows), max_num_rows)


def bucket_of(num_rows: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds so many rows."""
    return buckets[bisect_left(buckets, num_rows)]


class Replays(Protocol):
    """What the runner needs of graphs; without a device a function is simply called."""

    nbytes: int
    """Device memory that they took, as far as it can be told."""

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Do what ``function`` does, on the device, in the order of calls."""
        ...

    def clear(self) -> None:
        """Forget all of them: something they point to has moved."""
        ...


class PlainCalls:
    """`Replays` that calls every function each time (``enforce_eager``, and without a device)."""

    nbytes = 0

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """See `Replays`."""
        del key
        function()

    def clear(self) -> None:
        """See `Replays`: there is nothing to forget."""


class StepGraphs:
    """`Replays` on one stream. Used by one thread, the one that enqueues on that stream.

    Call `run` with the stream current. Tensors that a function makes live in one pool that all its
    graphs share: they follow each other on the stream, so nothing outlives a replay.
    """

    def __init__(self, stream: torch.cuda.Stream, calls: CudaCalls) -> None:
        self._stream = stream
        self._calls = calls
        self._pool: Any = None  # Any: torch's own type
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, int]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        """Graphs that were captured."""
        return len(self._graphs)

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """See `Replays`: the first call of a key runs and captures, later ones replay."""
        captured = self._graphs.get(key)
        if captured is not None:
            self._calls.launch_graph(captured[1], self._stream.cuda_stream)
            return
        function()
        before = self._free_nbytes()
        self._graphs[key] = self._capture(function)
        self.nbytes += max(before - self._free_nbytes(), 0)  # others may have given some back

    def clear(self) -> None:
        """See `Replays`; waits for the stream, because a graph may still be running."""
        self._stream.synchronize()
        for _, executable in self._graphs.values():
            self._calls.destroy_graph(executable)
        self._graphs.clear()
        self._pool = None
        self.nbytes = 0

    def _free_nbytes(self) -> int:
        return torch.cuda.mem_get_info(self._stream.device)[0]

    def _capture(self, function: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, int]:
        # Not torch.cuda.graph: on entry it waits for the device and gives the allocator's memory
        # back. thread_local: what other threads do with CUDA meanwhile is their own affair.
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            function()
        finally:
            graph.capture_end()
        executable = self._calls.instantiate(graph.raw_cuda_graph())
        self._calls.upload_graph(executable, self._stream.cuda_stream)
        return graph, executable
