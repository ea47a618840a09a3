"""What the engine sends back for one call: `CallSink` receives it, `Results` sorts it by row.

The engine's thread only stores and signals; everything else happens on the caller's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from nanoserve_core.errors import RequestFailed
from nanoserve_core.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from hf_generate_shim.task import CallRequests
    from nanoserve_core.request import StepOutput


class CallSink:
    """The sink of all requests of one call; `read` waits for their outputs on the caller's thread.

    The caller is woken after each step (for a streamer), when a sample has ended (to count them),
    or once, at the end: a wake-up costs the engine's thread a turn of the interpreter lock.
    """

    def __init__(
        self, num_requests: int, *, every_step: bool = False, every_end: bool = False
    ) -> None:
        self._num_requests = num_requests
        self._num_open = num_requests
        self._every_step = every_step
        self._every_end = every_end
        self._held: list[StepOutput] = []
        self._arrived: SimpleQueue[list[StepOutput] | BaseException] = SimpleQueue()

    def deliver(self, outputs: list[StepOutput]) -> None:
        """Store one step's outputs; on the engine's thread."""
        self._held += outputs
        self._num_open -= sum(output.request_finished for output in outputs)
        if self._every_step or self._num_open <= 0 or self._is_news(outputs):
            self._arrived.put(self._held)
            self._held = []

    def _is_news(self, outputs: list[StepOutput]) -> bool:
        reasons = {output.finish_reason for output in outputs} - {None}
        return bool(reasons) if self._every_end else FinishReason.ERROR in reasons

    def fail(self, error: BaseException) -> None:
        """The engine has ended; on its thread."""
        self._arrived.put(error)

    def read(self) -> Iterator[list[StepOutput]]:
        """Outputs as they arrive, until every request has finished; raises when the engine ends."""
        num_open = self._num_requests
        while num_open > 0:
            arrived = self._arrived.get()
            if isinstance(arrived, BaseException):
                raise arrived
            num_open -= sum(output.request_finished for output in arrived)
            yield arrived


@dataclass(slots=True)
class Sample:
    """One sample of one request so far."""

    token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    """Per token, float32 [vocab_size]."""
    scores: list[torch.Tensor] = field(default_factory=list)
    """As ``logits``."""
    logprobs: list[float] = field(default_factory=list)
    """Of each token, when asked for."""
    is_finished: bool = False


class Results:
    """The samples of a call in the order of its output rows."""

    def __init__(self, group: CallRequests) -> None:
        self._samples = {
            (request.request_id, index): Sample()
            for request in group.requests
            for index in range(request.sampling.n)
        }
        self.rows: Sequence[Sample] = [self._samples[source] for source in group.sources]

    @property
    def num_complete_steps(self) -> int:
        """Steps that are known for all rows; nothing more is expected of a row that has ended."""
        samples = self._samples.values()
        running = [len(sample.token_ids) for sample in samples if not sample.is_finished]
        return min(running) if running else max(len(sample.token_ids) for sample in samples)

    @property
    def num_finished_rows(self) -> int:
        """Rows of the output that have ended."""
        return sum(row.is_finished for row in self.rows)

    def add(self, outputs: Sequence[StepOutput]) -> None:
        """Sort in one delivery. Raises `RequestFailed` when a request failed or was cancelled."""
        for output in outputs:
            sample = self._samples[(output.request_id, output.index)]
            sample.token_ids += output.token_ids
            sample.logits += output.logits
            sample.scores += output.scores
            if output.logprobs is not None:
                pairs = zip(output.logprobs, output.token_ids, strict=True)
                sample.logprobs += [position[token].logprob for position, token in pairs]
            sample.is_finished |= output.finish_reason is not None
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise _failure(output) from output.error


def _failure(output: StepOutput) -> RequestFailed:
    if output.finish_reason is FinishReason.ABORT:
        return RequestFailed(
            f"request {output.request_id} was cancelled by another part of the program before it "
            "had all its tokens: expected it to run to its end. Call generate again."
        )
    error = output.error
    return RequestFailed(
        f"request {output.request_id} failed with {type(error).__name__}: {error}. Other calls are "
        "not affected. Remove the cause, or uninstall the model to use transformers' own loop."
    )
