"""What an engine thread does: queued actions, engine steps, delivery to sinks, and the end.

All state here is touched by the engine thread only, except through the ways in that any thread may
use: `EngineWorker.submit`, `EngineWorker.post`, `EngineWorker.end`.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from nanoserve_core.errors import EngineClosed, EngineDead, InvalidRequest
from nanoserve_core.request import FinishReason, StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from nanoserve_adapters.sink import EngineLike, Sink, Waker
    from nanoserve_adapters.switch_interval import SwitchInterval
    from nanoserve_core.request import Request

T = TypeVar("T")
Action: TypeAlias = "Callable[[], None]"
CommandQueue: TypeAlias = "SimpleQueue[tuple[EngineWorker, Action]]"

_LOG = logging.getLogger(__name__)


def serve(commands: CommandQueue) -> None:
    """Main function of an engine thread.

    While idle it holds the queue and nothing else, so that an engine to which nobody refers can be
    collected (an adopted model, its engine and its handle often form a cycle).
    """
    is_alive = True
    while is_alive:
        worker, action = commands.get()
        is_alive = worker.work(action)
        del worker, action


@dataclass(frozen=True)
class EngineEnd:
    """Why there is no engine any more; makes a new exception for each caller."""

    kind: type[EngineClosed] | type[EngineDead]
    message: str
    cause: BaseException | None = None

    def error(self) -> EngineClosed | EngineDead:
        """The exception for one caller."""
        error = self.kind(self.message)
        error.__cause__ = self.cause
        return error


class EngineWorker:
    """The engine, the requests that are in it and the sinks that wait for them."""

    def __init__(self, engine: EngineLike, switch_interval: SwitchInterval) -> None:
        # No lock anywhere, and SimpleQueue.put is reentrant: a finalizer that the collector runs in
        # the middle of anything, also of a submit, may cancel requests and close the engine.
        self.commands: CommandQueue = SimpleQueue()
        self.end: EngineEnd | None = None
        """Set once, by the engine thread; any thread may read it."""
        self._engine = engine
        self._switch_interval = switch_interval
        self._sinks: dict[str, Sink] = {}
        self._is_stopping = False
        self._close_error: Exception | None = None

    # Ways in, for any thread.

    def submit(self, action: Action) -> None:
        """Queue an action on which somebody will wait; raises when the engine has ended."""
        if self.end is not None:
            raise self.end.error()
        self.commands.put((self, action))
        if self.end is not None:
            self._drain()  # the engine thread may have had its last look: what is queued fails here

    def post(self, action: Action) -> None:
        """Queue an action on which nobody waits; lost when the engine has ended. Never blocks."""
        if self.end is None:
            self.commands.put((self, action))

    def raise_close_error(self) -> None:
        """Raise what ``engine.close()`` raised, once; for whoever closes."""
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error

    # Actions, on the engine thread.

    def add(self, pairs: Iterable[tuple[Request, Sink]]) -> None:
        """Admit requests; one that the engine refuses ends with an error, the others go on."""
        for request, sink in pairs:
            if self.end is None:
                self._add_one(request, sink)
            else:
                self._notify([sink], functools.partial(_fail, self.end))

    def abort(self, request_id: str) -> None:
        """End a request if it is there."""
        if self.end is None:
            self._engine.abort(request_id)

    def call(self, fn: Callable[[Any], T], future: Future[T]) -> None:  # Any: the engine as given
        """Run ``fn(engine)`` for a waiting caller."""
        if self.end is not None:
            return future.set_exception(self.end.error())
        try:
            future.set_result(fn(self._engine))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            future.set_exception(error)

    def stop(self) -> None:
        """End after this action."""
        self._is_stopping = True

    def work(self, action: Action) -> bool:
        """Carry out `action`, step until nothing is left to do; False when the engine has ended."""
        interval = self._engine.config.switch_interval
        if interval is not None:
            self._switch_interval.claim(self, interval)
        try:
            self._run(action)
        except BaseException as error:  # noqa: BLE001 - the border: every waiting caller is told
            self._finish(_dead(error))
        finally:
            self._switch_interval.release(self)
        return self.end is None

    def _run(self, action: Action) -> None:
        action()
        self._drain()
        while not self._is_stopping and (self._sinks or self._engine.has_unfinished_requests()):
            self._step()
            self._drain()
        if self._is_stopping:
            self._finish(_closed())

    def _drain(self) -> None:
        try:
            while True:
                self.commands.get_nowait()[1]()
        except Empty:
            return

    def _step(self) -> None:
        outputs = self._engine.step()
        if outputs:
            self._deliver(outputs)
        elif self._sinks and not self._engine.has_unfinished_requests():
            raise AssertionError(f"the engine lost requests {sorted(self._sinks)}: no finish came")

    def _add_one(self, request: Request, sink: Sink) -> None:
        try:
            if request.request_id in self._sinks:
                raise InvalidRequest(
                    f"request_id={request.request_id!r} is in use by an unfinished request: "
                    "expected a new one. Give each request its own id."
                )
            self._engine.add_request(request)
        except Exception as error:  # noqa: BLE001 - told to the caller whose request it is
            refusal = StepOutput(
                request_id=request.request_id,
                finish_reason=FinishReason.ERROR,
                error=error,
                request_finished=True,
            )
            self._notify([sink], lambda sink: sink.deliver([refusal]))
        else:
            self._sinks[request.request_id] = sink

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """Hand each sink its outputs of this step, once; nobody waits for what has no sink."""
        mail: dict[int, list[StepOutput]] = {}
        sinks: dict[int, Sink] = {}
        for output in outputs:
            sink = self._sinks.get(output.request_id)
            if sink is None:
                continue
            key = id(sink)
            if key in sinks:
                mail[key].append(output)
            else:
                sinks[key], mail[key] = sink, [output]
            if output.request_finished:
                del self._sinks[output.request_id]
        self._notify(sinks.values(), lambda sink: sink.deliver(mail[id(sink)]))

    def _notify(self, sinks: Iterable[Sink], tell: Callable[[Sink], Waker | None]) -> None:
        """Tell each sink, then wake each waker once. Who cannot be told loses its requests."""
        wakers: dict[int, tuple[Waker, list[Sink]]] = {}
        for sink in sinks:
            try:
                waker = tell(sink)
            except Exception:  # noqa: BLE001 - logged; its requests end, others go on
                _LOG.exception("a sink raised; its requests are cancelled")
                self._drop([sink])
            else:
                if waker is not None:
                    wakers.setdefault(id(waker), (waker, []))[1].append(sink)
        for waker, sleepers in wakers.values():
            try:
                waker.wake()
            except Exception as error:  # noqa: BLE001 - the consumers are gone, see Waker
                _LOG.debug("consumers are gone, their requests are cancelled: %s", error)
                self._drop(sleepers)

    def _drop(self, sinks: list[Sink]) -> None:
        gone = {id(sink) for sink in sinks}
        for request_id in [r for r, sink in self._sinks.items() if id(sink) in gone]:
            del self._sinks[request_id]
            self.abort(request_id)

    def _finish(self, end: EngineEnd) -> None:
        """Tell every waiting caller, also those still queued; then close the engine."""
        self.end = end
        sinks = {id(sink): sink for sink in self._sinks.values()}
        self._sinks.clear()
        self._notify(sinks.values(), functools.partial(_fail, end))
        self._drain()
        try:
            self._engine.close()
        except Exception as error:  # noqa: BLE001 - raised by EngineThread.close
            self._close_error = error
            _LOG.exception("closing the engine failed")


def _fail(end: EngineEnd, sink: Sink) -> Waker | None:
    return sink.fail(end.error())


def _closed() -> EngineEnd:
    return EngineEnd(
        EngineClosed,
        "the engine was closed, before or while the request waited: expected an open engine. Make "
        "a new one, and close it after its last request.",
    )


def _dead(cause: BaseException) -> EngineEnd:
    _LOG.error("the engine died", exc_info=cause)
    return EngineEnd(
        EngineDead,
        f"the engine died of {cause!r}: its requests are lost. Make a new engine; the chained "
        "exception says where it died.",
        cause,
    )
