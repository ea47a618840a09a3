"""`RequestState`: what the engine remembers of an unfinished request: times, counts, samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoserve_core.request import FinishReason, RequestMetrics

if TYPE_CHECKING:
    from collections.abc import Sequence as ListOf

    from nanoserve_core.batch_sizes import BatchSizes
    from nanoserve_core.request import PositionLogprobs, Request, Sequence


class RequestState:
    """One request between `Engine.add_request` and its last output; written by the engine only."""

    def __init__(self, request: Request, sequences: list[Sequence], *, arrival_time: float) -> None:
        self.request = request
        self.sequences = sequences
        self.arrival_time = arrival_time
        self.num_preemptions = 0
        self.first_step: int | None = None
        """Number of the first step that ran it, by `BatchSizes`' count."""
        self._num_cached_tokens = 0
        self._first_scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self._finish_reasons: dict[int, FinishReason] = {}
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        if request.sampling.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(request.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        """True when all samples have ended."""
        return len(self._finish_reasons) == len(self.sequences)

    @property
    def finish_reason(self) -> FinishReason:
        """How the request ended: an error or abort of any sample, else the end of sample 0."""
        reasons = self._finish_reasons.values()
        for reason in (FinishReason.ERROR, FinishReason.ABORT):
            if reason in reasons:
                return reason
        return self._finish_reasons[0]

    def is_open(self, index: int) -> bool:
        """True while sample ``index`` has not ended."""
        return index not in self._finish_reasons

    def note_admission(self, now: float, step: int, num_cached_tokens: int) -> None:
        """A sample was admitted for the first time."""
        if self._first_scheduled_time is None:
            self.first_step = step
            self._first_scheduled_time = now
            self._num_cached_tokens = num_cached_tokens

    def note_output(self, now: float, index: int, finish_reason: FinishReason | None) -> None:
        """A sample got a token, or ended."""
        if self._first_token_time is None and finish_reason not in _NO_TOKEN:
            self._first_token_time = now
        if finish_reason is not None:
            self._finish_reasons[index] = finish_reason

    def note_prompt_logprobs(self, start: int, logprobs: ListOf[PositionLogprobs]) -> None:
        """The logits at position p tell about the prompt token at p + 1; ``start`` is the first p.

        A prompt recomputed after a preemption writes the same entries again.
        """
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[start + 1 : start + 1 + len(logprobs)] = logprobs

    def take_prompt_logprobs(self) -> tuple[PositionLogprobs | None, ...] | None:
        """One entry per prompt token, the first time it is asked for."""
        if self._prompt_logprobs is None:
            return None
        taken, self._prompt_logprobs = tuple(self._prompt_logprobs), None
        return taken

    def metrics(self, now: float, sizes: BatchSizes) -> RequestMetrics:
        """Times and counts, for a request that ends now."""
        return RequestMetrics(
            arrival_time=self.arrival_time,
            first_scheduled_time=self._first_scheduled_time,
            first_token_time=self._first_token_time,
            finished_time=now,
            num_cached_tokens=self._num_cached_tokens,
            num_preemptions=self.num_preemptions,
            peak_batch=0 if self.first_step is None else sizes.largest_since(self.first_step),
        )


_NO_TOKEN = (FinishReason.ABORT, FinishReason.ERROR)
