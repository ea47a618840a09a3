"""Holding an engine thread, letting it come to rest, and looking for what was left behind."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from nanoserve_adapters.engine_thread import EngineThread
    from nanoserve_adapters.sink import EngineLike, Sink
    from nanoserve_core.request import Request, StepOutput

PATIENCE_SECONDS = 30.0


class AdmissionGate:
    """Holds an engine between two steps until ``num_requests`` more requests were submitted.

    ::

        with AdmissionGate(thread, 8):
            callers = [executor.submit(adapter_call, prompt) for prompt in prompts]

    then all of them are admitted before the next step, however slowly the callers start. Leaving
    the block waits for them; it fails when they do not come.
    """

    def __init__(self, thread: EngineThread, num_requests: int) -> None:
        self._thread = thread
        self._missing = num_requests
        self._lock = threading.Lock()
        self._is_holding = threading.Event()
        self._is_open = threading.Event()
        self._holder = threading.Thread(target=lambda: thread.call(self._hold), name="gate")
        self._enqueue = thread.enqueue

    def __enter__(self) -> AdmissionGate:
        self._thread.enqueue = self._count  # type: ignore[method-assign]  # undone at exit
        self._holder.start()
        self._is_holding.wait(PATIENCE_SECONDS)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self._is_open.set()
        came = self._is_open.wait(PATIENCE_SECONDS)
        self._is_open.set()
        self._holder.join()
        del self._thread.enqueue  # the instance's, set above
        assert came, f"{self._missing} requests less were submitted than the gate waits for"

    def _hold(self, engine: EngineLike) -> None:
        del engine
        self._is_holding.set()
        self._is_open.wait()

    def _count(self, requests: Sequence[Request], sinks: Sequence[Sink]) -> None:
        self._enqueue(requests, sinks)
        with self._lock:
            self._missing -= len(requests)
            if self._missing <= 0:
                self._is_open.set()


class StepGate:
    """Holds an engine at the start of its ``at_step``-th step from now (the first is 1).

    ::

        with StepGate(thread, at_step=4):
            stream = adapter_stream(prompt)
            next(stream)
            stream.close()          # surely before the request has ended by itself
    """

    def __init__(self, thread: EngineThread, *, at_step: int) -> None:
        self._thread = thread
        self._num_left = at_step
        self._is_open = threading.Event()

    def __enter__(self) -> StepGate:
        self._thread.call(self._install)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open.set()

    def _install(self, engine: EngineLike) -> None:
        step = engine.step

        def held_step() -> list[StepOutput]:
            self._num_left -= 1
            if self._num_left <= 0:
                self._is_open.wait()
                del engine.step  # the instance's, set below: the gate is used up
            return step()

        engine.step = held_step  # type: ignore[method-assign]  # undone above


def settle(thread: EngineThread, *, max_steps: int = 100_000) -> None:
    """Return when the engine has nothing to do; AssertionError after `max_steps` further steps.

    Every look is a call between two steps, so that it takes no time that the engine does not take.
    """
    for _ in range(max_steps):
        if not thread.call(lambda engine: engine.has_unfinished_requests()):
            return
    raise AssertionError(f"the engine is still busy after {max_steps} steps: {thread.stats()}")


def leak_check(engine: EngineLike) -> None:
    """Raise AssertionError when an idle engine still runs something or holds a block.

    Blocks of the prefix cache count as free. For a thread: ``settle(thread)``, then
    ``thread.call(leak_check)``.
    """
    stats = engine.stats()
    assert not engine.has_unfinished_requests(), f"the engine is not idle: {stats}"
    assert (stats.running, stats.waiting) == (0, 0), f"requests are left: {stats}"
    assert stats.free_blocks == stats.num_blocks, f"blocks are left: {stats}"
    engine.check()
