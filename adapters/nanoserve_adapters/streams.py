"""Reading requests' outputs: in a thread (`RequestStream`) or coroutine (`AsyncRequestStream`).

A stream is what the consumer holds, its inbox is what the engine thread holds. An inbox never
refers to its stream, so that a dropped stream is collected and its requests are cancelled.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from nanoserve_core.errors import RequestFailed
from nanoserve_core.request import FinishReason, StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from nanoserve_adapters.engine_thread import EngineThread

News: TypeAlias = list[StepOutput] | BaseException
"""What arrives in an inbox: the outputs of a step, or why there will be no more."""


class RequestStream:
    """Iterator of ``list[StepOutput]``: everything that waited since the last read; made by
    `EngineThread.stream`. One reader at a time, in any thread.

    An exception in the wait (KeyboardInterrupt too), `close` and garbage collection cancel what is
    unfinished. Outputs that arrived before an error are handed out before it is raised.
    """

    def __init__(
        self, thread: EngineThread, request_ids: Iterable[str], timeout_seconds: float | None
    ) -> None:
        self.inbox = SyncInbox()
        self._thread = thread
        self._timeout_seconds = timeout_seconds
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._progress = StreamProgress(self, request_ids, thread.cancel)

    def __iter__(self) -> RequestStream:
        return self

    def __next__(self) -> list[StepOutput]:
        if self._progress.has_more():
            self._thread.require_own_process()
            try:
                outputs = self._progress.read(self._wait())
            except BaseException:
                self.close()
                raise
            if outputs:
                return outputs
            self._progress.raise_error()
        raise StopIteration

    def _wait(self) -> list[News]:
        if self._deadline is None:
            return self.inbox.take(None)
        news = self.inbox.take(max(0.0, self._deadline - time.monotonic()))
        if time.monotonic() >= self._deadline:
            news.append(timeout_error(self._progress.request_ids, self._timeout_seconds))
        return news

    def close(self) -> None:
        """Cancel what is unfinished and end the iteration; idempotent, any thread, never blocks."""
        self._progress.cancel()

    def discard(self) -> None:
        """Forget the requests without cancelling them: they were never submitted."""
        self._progress.settle()

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncRequestStream:
    """`RequestStream` for coroutines: an async iterator, bound to the event loop that made it; made
    by `EngineThread.astream`. One reader at a time.

    A cancelled reader, `aclose`, garbage collection and a closed loop cancel what is unfinished.
    """

    def __init__(
        self,
        thread: EngineThread,
        request_ids: Iterable[str],
        timeout_seconds: float | None,
        mailbox: LoopMailbox,
    ) -> None:
        self.inbox = AsyncInbox(mailbox)
        self._thread = thread  # an engine lives while somebody reads from it
        self._progress = progress = StreamProgress(self, request_ids, thread.cancel)
        self._timer: asyncio.TimerHandle | None = None
        if timeout_seconds is not None:
            error = timeout_error(progress.request_ids, timeout_seconds)
            self._timer = mailbox.loop.call_later(timeout_seconds, self.inbox.receive, error)

    def __aiter__(self) -> AsyncRequestStream:
        return self

    async def __anext__(self) -> list[StepOutput]:
        if self._progress.has_more():
            self._thread.require_own_process()
            self.inbox.require_one_reader()
            try:
                outputs = self._progress.read(await self.inbox.take())
            except BaseException:
                self.close()
                raise
            if not self._progress.unfinished:
                self._stop_timer()
            if outputs:
                return outputs
            self._progress.raise_error()
        raise StopAsyncIteration

    def is_open(self) -> bool:
        """False once nothing of it is unfinished: it was read to its end, closed or cancelled."""
        return bool(self._progress.unfinished)

    async def aclose(self) -> None:
        """Cancel what is unfinished and end the iteration; idempotent."""
        self._stop_timer()
        self.close()

    def close(self) -> None:
        """`aclose` for code that cannot await; any thread, never blocks."""
        self._progress.cancel()

    def discard(self) -> None:
        """Forget the requests without cancelling them: they were never submitted; loop's thread."""
        self._stop_timer()
        self._progress.settle()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None  # it holds the error, whose traceback leads back to this stream

    async def __aenter__(self) -> AsyncRequestStream:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class StreamProgress:
    """Which requests of a stream are unfinished, what ended it early; cancels when dropped."""

    def __init__(
        self, stream: object, request_ids: Iterable[str], cancel: Callable[[str], None]
    ) -> None:
        self.request_ids = tuple(request_ids)
        self.unfinished = set(self.request_ids)
        self._error: BaseException | None = None
        self._finalizer = weakref.finalize(stream, _cancel_all, cancel, self.unfinished)
        self._finalizer.atexit = False  # the engine's own exit hook ends everything

    def has_more(self) -> bool:
        """Whether a read can give something; raises the error that earlier outputs came before."""
        self.raise_error()
        return bool(self.unfinished)

    def raise_error(self) -> None:
        """Raise the error that ended the stream, once."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # this frame is in its traceback: a cycle would keep stream and engine

    def read(self, news: list[News]) -> list[StepOutput]:
        """The outputs to hand out. An error among the news ends the stream behind them."""
        outputs: list[StepOutput] = []
        for item in news:
            if not self.unfinished:
                break  # finished or closed: what comes later is not news
            if isinstance(item, BaseException):
                self._end(item)
            else:
                self._read_step(item, outputs)
        if not self.unfinished:
            self.settle()
        return outputs

    def _read_step(self, step: list[StepOutput], outputs: list[StepOutput]) -> None:
        for output in step:
            if output.finish_reason is FinishReason.ERROR:
                self.unfinished.discard(output.request_id)
                return self._end(_request_failed(output))
            outputs.append(output)
            if output.request_finished:
                self.unfinished.discard(output.request_id)

    def _end(self, error: BaseException) -> None:
        self._error = error
        self.cancel()

    def cancel(self) -> None:
        """Cancel what is unfinished; idempotent, any thread."""
        self._finalizer()

    def settle(self) -> None:
        """Nothing is left to cancel."""
        self.unfinished.clear()
        self._finalizer.detach()


class SyncInbox:
    """The sink of a `RequestStream`: a queue whose wait can be interrupted by a signal."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[News] = SimpleQueue()

    def deliver(self, outputs: list[StepOutput]) -> None:
        """Store the outputs of a step and wake the reader; engine thread."""
        self._queue.put(outputs)

    def fail(self, error: BaseException) -> None:
        """Store why the engine ended and wake the reader; engine thread."""
        self._queue.put(error)

    def take(self, seconds: float | None) -> list[News]:
        """Everything that waits; waits for the first, at most `seconds`: empty when they passed."""
        news: list[News] = []
        try:
            news.append(self._queue.get(timeout=seconds))
            while True:
                news.append(self._queue.get_nowait())
        except Empty:
            return news


class AsyncInbox:
    """The sink of an `AsyncRequestStream`: what waits, in the hands of its loop's thread."""

    def __init__(self, mailbox: LoopMailbox) -> None:
        self._mailbox = mailbox
        self._news: list[News] = []
        self._reader: asyncio.Future[None] | None = None

    def deliver(self, outputs: list[StepOutput]) -> LoopMailbox:
        """Leave the outputs of a step in the loop's mailbox; engine thread."""
        return self._mailbox.post(self, outputs)

    def fail(self, error: BaseException) -> LoopMailbox:
        """Leave why the engine ended in the loop's mailbox; engine thread."""
        return self._mailbox.post(self, error)

    def receive(self, item: News) -> None:
        """Store one item and wake the reader; loop's thread."""
        self._news.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def require_one_reader(self) -> None:
        """Raise RuntimeError when another task waits, or when called in another event loop."""
        if self._reader is not None or self._mailbox.loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "a stream is read by two event loops or two tasks: expected one reader, in the "
                "loop that called astream(). Submit one request for each reader."
            )

    async def take(self) -> list[News]:
        """Everything that waits; waits for the first. Loop's thread."""
        if not self._news:
            self._reader = self._mailbox.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        news, self._news = self._news, []
        return news


class LoopMailbox:
    """All news of one step for one event loop, handed over by one ``call_soon_threadsafe``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: deque[tuple[AsyncInbox, News]] = deque()
        self._is_scheduled = False

    def post(self, inbox: AsyncInbox, item: News) -> LoopMailbox:
        """Add an item; the loop hears of it with the next `wake`. Engine thread."""
        self._posted.append((inbox, item))
        return self

    def wake(self) -> None:
        """Have the loop distribute what was posted; raises RuntimeError when it is closed."""
        if self.loop.is_closed():
            self._posted.clear()
            raise RuntimeError("the event loop of these streams is closed")
        # A loop that has not come to the previous step's news yet will find these beside them.
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon_threadsafe(self._distribute)

    def _distribute(self) -> None:
        self._is_scheduled = False  # before the first look: a post that is missed below wakes again
        while self._posted:
            inbox, item = self._posted.popleft()
            inbox.receive(item)


def timeout_error(request_ids: Iterable[str], seconds: float | None) -> TimeoutError:
    """The error of a stream whose requests did not finish in time."""
    return TimeoutError(
        f"{_names(request_ids)} did not finish within timeout_seconds={seconds} (waiting and "
        "running) and was cancelled. Allow more time or ask for fewer tokens."
    )


def _request_failed(output: StepOutput) -> RequestFailed:
    failed = RequestFailed(
        f"{_names([output.request_id])} failed: {output.error!r}. Other requests go on; the "
        "chained exception says where it failed."
    )
    failed.__cause__ = output.error
    return failed


def _names(request_ids: Iterable[str]) -> str:
    names = [repr(request_id) for request_id in request_ids]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"request {shown}" if len(names) == 1 else f"one of the requests {shown}"


def _cancel_all(cancel: Callable[[str], None], unfinished: set[str]) -> None:
    while unfinished:
        cancel(unfinished.pop())
