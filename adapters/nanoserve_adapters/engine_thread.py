"""One daemon thread that owns one engine, and the ways in for every other thread and event loop.

``submit`` is an append and a wake. The thread takes what was queued, steps while there is work and
sleeps otherwise. News are handed to each consumer once per step, with everything that waits.
Consumers' code never runs here: it knows neither frameworks nor text.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar, cast

from nanoserve_adapters.engine_worker import EngineWorker, serve
from nanoserve_adapters.loop_outbox import LoopOutbox, Outgoing
from nanoserve_adapters.streams import AsyncRequestStream, LoopMailbox, RequestStream
from nanoserve_adapters.switch_interval import PROCESS_SWITCH_INTERVAL
from nanoserve_core.errors import EngineClosed, EngineDead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from nanoserve_adapters.sink import EngineLike, Sink
    from nanoserve_adapters.switch_interval import SwitchInterval
    from nanoserve_core.engine import Engine
    from nanoserve_core.engine_stats import EngineStats
    from nanoserve_core.request import Request

T = TypeVar("T")

_EXIT_JOIN_SECONDS = 10.0
"""How long interpreter exit waits for the step in progress: a hung device must not hang it."""


class EngineThread:
    """Runs `engine` on its own daemon thread. Every method may be called from any thread.

    An idle engine thread refers to its engine only through this object: when the last reference to
    it is gone, the thread closes the engine and ends. `close` does the same and waits for it.
    """

    def __init__(
        self, engine: EngineLike, *, switch_interval: SwitchInterval = PROCESS_SWITCH_INTERVAL
    ) -> None:
        self._engine = cast("Engine", engine)  # a test double has the engine's shape
        self._pid = os.getpid()
        self._mailboxes: weakref.WeakValueDictionary[int, LoopMailbox] = (
            weakref.WeakValueDictionary()
        )
        self._outboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopOutbox] = (
            weakref.WeakKeyDictionary()
        )
        self._worker = worker = EngineWorker(engine, switch_interval)
        self._thread = threading.Thread(
            target=serve, args=(worker.commands,), name="nanoserve-engine", daemon=True
        )
        self._exit_hook = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._exit_hook)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine; other threads may read its frozen facts (config, spec, limits), no more."""
        return self._engine

    @property
    def is_alive(self) -> bool:
        """True until the engine was closed or died; False in a forked child."""
        return self._pid == os.getpid() and self._worker.end is None

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the engine thread: it must not wait for the engine there."""
        return threading.current_thread() is self._thread

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue `request`; its outputs go to `sink`.

        Raises `InvalidRequest` (or `RequestTooLong`) for a bad request, `EngineClosed` or
        `EngineDead` when there is no engine any more, all in the calling thread.
        """
        self.submit_many([request], [sink])

    def submit_many(self, requests: Sequence[Request], sinks: Sequence[Sink]) -> None:
        """Queue all requests or none, so that they are admitted before the next step.

        One sink may appear several times: it gets one delivery per step for all its requests.
        """
        self._validate(requests)
        self.enqueue(requests, sinks)

    def submit_soon(
        self, requests: Sequence[Request], sinks: Sequence[Sink], is_wanted: Callable[[], bool]
    ) -> None:
        """`submit_many` for coroutines: validated now, queued at the end of the event loop's
        current pass, in one go with what its other tasks submit in it.

        ``is_wanted`` is asked then: False leaves them out, for their reader has gone. An engine
        that has ended by then is told to the sinks.
        """
        self._validate(requests)
        self._outbox().add(self, Outgoing(requests, sinks, is_wanted))

    async def turn(self) -> None:
        """For a coroutine that is about to prepare a request: returns when it may.

        Where many tasks start together, it lets the event loop's other callbacks run in between.
        """
        await self._outbox().turn()

    def enqueue(self, requests: Sequence[Request], sinks: Sequence[Sink]) -> None:
        """Where all ways in end: queue valid requests as one action of the engine thread."""
        pairs = list(zip(requests, sinks, strict=True))
        self._worker.submit(functools.partial(self._worker.add, pairs))

    def enqueue_late(self, requests: Sequence[Request], sinks: Sequence[Sink]) -> None:
        """`enqueue` when nobody is there to raise to: an engine that has ended tells the sinks."""
        try:
            self.enqueue(requests, sinks)
        except (EngineClosed, EngineDead):
            self._worker.add(zip(requests, sinks, strict=True))

    def stream(self, *requests: Request, timeout_seconds: float | None = None) -> RequestStream:
        """Submit and read: an iterator of ``list[StepOutput]``, everything that waited since the
        last read. Several requests share one stream and one wake-up per step.

        The stream raises `RequestFailed` when a request fails (the others of the stream are then
        cancelled), `TimeoutError` when they have not all finished ``timeout_seconds`` after the
        call, `EngineDead`, `EngineClosed`. Closing or dropping it cancels what is unfinished.
        """
        stream = RequestStream(self, [r.request_id for r in requests], timeout_seconds)
        self._start([stream], [requests])
        return stream

    def stream_many(
        self, requests: Iterable[Request], *, timeout_seconds: float | None = None
    ) -> list[RequestStream]:
        """One stream for each request; all are admitted before the next step."""
        groups = [(request,) for request in requests]
        streams = [RequestStream(self, [r.request_id], timeout_seconds) for (r,) in groups]
        self._start(streams, groups)
        return streams

    def astream(
        self, *requests: Request, timeout_seconds: float | None = None
    ) -> AsyncRequestStream:
        """`stream` for coroutines: an async iterator bound to the running event loop.

        All streams of a loop share one ``call_soon_threadsafe`` per step. A cancelled reader,
        ``aclose()``, garbage collection and a closed loop cancel what is unfinished. Raises
        ``RuntimeError`` when no event loop runs in the calling thread.
        """
        (stream,) = self._start_async([requests], timeout_seconds)
        return stream

    def astream_many(
        self, requests: Iterable[Request], *, timeout_seconds: float | None = None
    ) -> list[AsyncRequestStream]:
        """One async stream for each request; all are admitted before the next step."""
        return self._start_async([(request,) for request in requests], timeout_seconds)

    def mailbox(self) -> LoopMailbox:
        """The running event loop's mailbox, for sinks whose readers live there: it is a `Waker`
        that all sinks of a loop share. Raises ``RuntimeError`` outside a loop.
        """
        loop = asyncio.get_running_loop()
        # The mailbox keeps its loop alive, so an id in the table is never a dead loop's; entries of
        # one loop are only touched by its own thread.
        mailbox = self._mailboxes.get(id(loop))
        if mailbox is None:
            mailbox = self._mailboxes[id(loop)] = LoopMailbox(loop)
        return mailbox

    def cancel(self, request_id: str) -> None:
        """End a request at the next step boundary; its consumer sees reason ``abort``.

        Idempotent; unknown and finished ids are ignored. Never blocks, so finalizers may call it.
        """
        self._worker.post(functools.partial(self._worker.abort, request_id))

    def call(self, fn: Callable[[Engine], T]) -> T:
        """Run ``fn(engine)`` on the engine thread between two steps; its result or exception.

        On the engine thread itself `fn` runs at once.
        """
        self.require_own_process()
        if self.is_current:
            return fn(self._engine)
        future: Future[T] = Future()
        self._worker.submit(functools.partial(self._worker.call, fn, future))
        return future.result()

    def stats(self) -> EngineStats:
        """The engine's counters, read between two steps."""
        return self.call(lambda engine: engine.stats())

    def close(self, *, timeout_seconds: float | None = None) -> None:
        """Stop after the step in progress; waiting callers get `EngineClosed`; close the engine.

        Idempotent. Waits for the thread (at most ``timeout_seconds``), except when called on it.
        Raises what ``engine.close()`` raised, once. In a forked child it does nothing: the engine
        belongs to the parent.
        """
        atexit.unregister(self._exit_hook)
        if self._pid != os.getpid():
            return
        self._worker.post(self._worker.stop)
        if not self.is_current:
            self._thread.join(timeout_seconds)
            self._worker.raise_close_error()

    def __enter__(self) -> EngineThread:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Not weakref.finalize: its registry would keep the worker alive, and with it an adopted
        # model whose attribute leads back to this object. It never joins: the collector may run on
        # any thread, also on the engine's.
        if hasattr(self, "_exit_hook"):
            atexit.unregister(self._exit_hook)
            self._worker.post(self._worker.stop)

    def _start(self, streams: Sequence[RequestStream], groups: Sequence[Sequence[Request]]) -> None:
        requests = [request for group in groups for request in group]
        sinks = [stream.inbox for stream, group in zip(streams, groups, strict=True) for _ in group]
        try:
            self.submit_many(requests, sinks)
        except BaseException:
            for stream in streams:
                stream.discard()
            raise

    def _start_async(
        self, groups: Sequence[Sequence[Request]], timeout_seconds: float | None
    ) -> list[AsyncRequestStream]:
        self._validate([request for group in groups for request in group])
        mailbox, outbox = self.mailbox(), self._outbox()
        streams = []
        for group in groups:
            ids = [request.request_id for request in group]
            streams.append(AsyncRequestStream(self, ids, timeout_seconds, mailbox))
            sinks = [streams[-1].inbox] * len(group)
            outbox.add(self, Outgoing(group, sinks, streams[-1].is_open))
        return streams

    def _validate(self, requests: Iterable[Request]) -> None:
        self.require_own_process()
        if self._worker.end is not None:
            raise self._worker.end.error()
        for request in requests:
            self._engine.validate(request)

    def _outbox(self) -> LoopOutbox:
        loop = asyncio.get_running_loop()
        outbox = self._outboxes.get(loop)
        if outbox is None:
            outbox = self._outboxes[loop] = LoopOutbox()
        return outbox

    def require_own_process(self) -> None:
        """Raise `EngineClosed` in a forked child: the engine's thread did not come along."""
        if self._pid != os.getpid():
            raise EngineClosed(
                f"this engine belongs to process {self._pid}, but the call comes from its fork "
                f"{os.getpid()}: an engine thread does not survive a fork. Make the engine in the "
                "child process, or start children with the 'spawn' method."
            )


def _close_at_exit(reference: weakref.ref[EngineThread]) -> None:
    thread = reference()
    if thread is not None:
        thread.close(timeout_seconds=_EXIT_JOIN_SECONDS)
