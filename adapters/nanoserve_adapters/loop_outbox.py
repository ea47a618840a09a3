"""`LoopOutbox`: the way from one event loop's tasks to the engine, a few at a time, then together.

A thousand tasks that start together would prepare their prompts in one pass of their loop, and
nothing else would run there meanwhile: so they take turns. And if each of them woke the engine, its
first step would begin with one row and then fight the loop for the interpreter lock while the
others still prepare: so what they submit is handed over in one go.
"""

from __future__ import annotations

import asyncio
from collections import deque
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


TURNS_PER_PASS = 8
"""Preparations in one pass of a loop: about half a millisecond each."""
MAX_HELD = 64
"""Requests that wait for further tasks' preparations before the engine hears of them."""


class LoopOutbox:
    """Turns and submissions of one event loop for one engine; all methods run in its thread.

    It refers to neither, so that a table of outboxes keeps none of them alive.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_turns = 0
        self._num_granted = 0
        """Turns whose tasks have not run since."""
        self._held: list[Outgoing] = []

    async def turn(self) -> None:
        """Return when it is this task's turn to do some work: at once while few want to, else in a
        later pass of the loop, in order.
        """
        if self._num_turns < TURNS_PER_PASS and not self._waiting:
            self._count_turn()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        finally:
            self._num_granted -= turn.done() and not turn.cancelled()

    def _count_turn(self) -> None:
        if self._num_turns == 0:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self._num_turns += 1

    def _next_pass(self) -> None:
        self._num_turns = 0
        while self._waiting and self._num_turns < TURNS_PER_PASS:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._num_granted += 1
                self._count_turn()

    def add(self, thread: EngineThread, outgoing: Outgoing) -> None:
        """Have these requests queued when the loop has gone through what is ready now, and no task
        waits for its turn.

        Nobody waits for that. Requests whose reader has left by then are not queued at all.
        """
        if not self._held:
            asyncio.get_running_loop().call_soon(self._flush, thread)
        self._held.append(outgoing)

    def _flush(self, thread: EngineThread) -> None:
        if (self._waiting or self._num_granted) and len(self._held) < MAX_HELD:
            asyncio.get_running_loop().call_soon(self._flush, thread)
            return
        held, self._held = self._held, []
        wanted = [outgoing for outgoing in held if outgoing.is_wanted()]
        requests = [request for outgoing in wanted for request in outgoing.requests]
        sinks = [sink for outgoing in wanted for sink in outgoing.sinks]
        if requests:
            thread.enqueue_late(requests, sinks)
