"""`LoopOutbox`: what the tasks of one event loop submit, handed to the engine once per loop pass.

A thousand tasks that start together submit in one pass of their loop. If each of them woke the
engine, its first step would begin with one row and then fight the loop for the interpreter lock
while the others still prepare their prompts.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nanoserve_adapters.engine_thread import EngineThread
    from nanoserve_adapters.sink import Sink
    from nanoserve_core.request import Request


class Outgoing(NamedTuple):
    """Requests that one task has submitted, and whether somebody still waits for them."""

    requests: Sequence[Request]
    sinks: Sequence[Sink]
    is_wanted: Callable[[], bool]


class LoopOutbox:
    """Collects for one event loop and one engine; its methods run in that loop's thread.

    It refers to neither, so that a table of outboxes keeps none of them alive.
    """

    def __init__(self) -> None:
        self._waiting: list[Outgoing] = []

    def add(self, thread: EngineThread, outgoing: Outgoing) -> None:
        """Have these requests queued when the loop has gone through what is ready now.

        Nobody waits for that. Requests whose reader has left by then are not queued at all.
        """
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush, thread)
        self._waiting.append(outgoing)

    def _flush(self, thread: EngineThread) -> None:
        waiting, self._waiting = self._waiting, []
        wanted = [outgoing for outgoing in waiting if outgoing.is_wanted()]
        requests = [request for outgoing in wanted for request in outgoing.requests]
        sinks = [sink for outgoing in wanted for sink in outgoing.sinks]
        if requests:
            thread.enqueue_late(requests, sinks)
