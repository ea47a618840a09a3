"""`WholeInbox`: keeps a call's outputs on the engine's side until all is there, then wakes its
reader.

``invoke`` has no use for single tokens. Waking its thread or task at every step would cost the
engine the interpreter lock once for every caller and step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoserve_adapters.sink import Sink, Waker
    from nanoserve_core.request import StepOutput


class WholeInbox:
    """A sink in front of a stream's inbox, for ``num_requests`` requests. Engine thread only.

    A failed request is passed on at once, with what came before it.
    """

    def __init__(self, inbox: Sink, num_requests: int) -> None:
        self._inbox = inbox
        self._num_unfinished = num_requests
        self._held: list[StepOutput] = []

    def deliver(self, outputs: list[StepOutput]) -> Waker | None:
        """Keep the outputs, or pass all on when the last request has finished or one has failed."""
        self._held.extend(outputs)
        has_failed = False
        for output in outputs:
            self._num_unfinished -= output.request_finished
            has_failed = has_failed or output.error is not None
        if self._num_unfinished > 0 and not has_failed:
            return None
        held, self._held = self._held, []
        return self._inbox.deliver(held)

    def fail(self, error: BaseException) -> Waker | None:
        """Pass on why the engine ended."""
        return self._inbox.fail(error)
