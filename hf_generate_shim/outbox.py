"""`Outbox`: results of continuous batching on their way to whoever asks for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterable

    from hf_generate_shim.call import HFObject

    ResultHandler = Callable[[HFObject], None]


class Outbox:
    """Outputs go to the handler of their request, on its event loop, else wait for `take`.

    Any thread; no method runs a handler itself.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[HFObject] = deque()
        self._handlers: dict[str, tuple[ResultHandler, asyncio.AbstractEventLoop]] = {}

    def deliver(self, outputs: Iterable[HFObject]) -> list[str]:
        """Hand on outputs: one call into each event loop, whatever their number.

        Returns the ids of requests whose loop is closed: nobody waits for them any more.
        """
        batches: dict[asyncio.AbstractEventLoop, list[tuple[ResultHandler, HFObject]]] = {}
        with self._changed:  # held to the end: outputs of a request must not overtake each other
            for output in outputs:
                found = self._handlers.get(output.request_id)
                if found is None:
                    self._waiting.append(output)
                    continue
                handler, loop = found
                batches.setdefault(loop, []).append((handler, output))
                if output.is_finished():
                    del self._handlers[output.request_id]
            self._changed.notify_all()
            return [
                output.request_id
                for loop, batch in batches.items()
                if not _posted(loop, batch)
                for _, output in batch
            ]

    def register(
        self, request_id: str, handler: ResultHandler, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Call ``handler`` on ``loop`` for each output of a request, those that wait included.

        It is forgotten after the last one.
        """
        with self._changed:
            self._handlers[request_id] = (handler, loop)
            earlier = [output for output in self._waiting if output.request_id == request_id]
            for output in earlier:
                self._waiting.remove(output)
        self.deliver(earlier)

    def take(
        self,
        request_ids: Collection[str] | None,
        *,
        timeout_seconds: float | None,
        is_over: Callable[[], bool],
    ) -> HFObject:
        """The oldest waiting output, of these requests or of any; None after the timeout.

        Also None as soon as ``is_over()``: nothing more will come. Whoever changes that calls
        `wake`.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._changed:
            while True:
                for output in self._waiting:
                    if request_ids is None or output.request_id in request_ids:
                        self._waiting.remove(output)
                        return output
                remaining = None if deadline is None else deadline - time.monotonic()
                if is_over() or (remaining is not None and remaining <= 0):
                    return None
                self._changed.wait(remaining)

    def is_empty(self) -> bool:
        """Whether no output waits."""
        with self._changed:
            return not self._waiting

    def wake(self) -> None:
        """Let waiting readers look again whether something more will come."""
        with self._changed:
            self._changed.notify_all()


def _posted(loop: asyncio.AbstractEventLoop, batch: list[tuple[ResultHandler, HFObject]]) -> bool:
    try:
        loop.call_soon_threadsafe(partial(_run, batch))
    except RuntimeError:  # the loop is closed
        return False
    return True


def _run(batch: list[tuple[ResultHandler, HFObject]]) -> None:
    for handler, output in batch:
        handler(output)
