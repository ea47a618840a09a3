"""`OpenRequest`: one request of continuous batching from its prompt to its last result.

Turns news of the engine, or of a call of `generate`, into transformers' `GenerationOutput`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from nanoserve_core.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_generate_shim.criteria import TimeLimit
    from hf_generate_shim.task import CallRequests
    from nanoserve_core.request import RequestMetrics, StepOutput

CANCELLED = "the request was cancelled before it had all its tokens"
"""What `GenerationOutput.error` says then."""


@dataclass(eq=False)
class _Row:
    """One result of the request so far."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    error: str | None = None
    started: float = -1
    ended: float = -1
    is_told: bool = False
    """Its last output was handed out."""

    @property
    def is_over(self) -> bool:
        return bool(self.status >= RequestStatus.FINISHED)


@dataclass(frozen=True, kw_only=True)
class RequestForm:
    """What the caller asked for, besides the tokens."""

    request_id: str
    prompt_ids: list[int]
    num_rows: int = 1
    streaming: bool = False
    record_timestamps: bool = False

    @property
    def output_ids(self) -> list[str]:
        """The ids of the results in transformers' order: children first, then the request's."""
        children = [f"{self.request_id}__child#{i}" for i in range(self.num_rows - 1)]
        return [*children, self.request_id]


class OpenRequest:
    """The rows of one request. No lock: whoever calls makes sure that only one thread does."""

    def __init__(self, form: RequestForm) -> None:
        self.form = form
        self._created = time.perf_counter()
        self._rows = [_Row(request_id) for request_id in form.output_ids]
        self._by_sample: dict[tuple[str, int], list[_Row]] = {}
        self._time_limit: TimeLimit | None = None
        self._held: list[StepOutput] = []

    @property
    def is_over(self) -> bool:
        """Whether every row has its last token, or an error."""
        return all(row.is_over for row in self._rows)

    def expect(self, group: CallRequests, time_limit: TimeLimit | None) -> None:
        """The engine's requests that fill the rows, in the order of the rows."""
        self._time_limit = time_limit
        for row, source in zip(self._rows, group.sources, strict=True):
            self._by_sample.setdefault(source, []).append(row)

    def add(self, output: StepOutput) -> list[GenerationOutput]:
        """News from the engine; what the caller is to be told now.

        With ``streaming`` that is every row with a new token; else each row once, at its end.
        """
        self._held.append(output)
        is_at_once = self.form.streaming or self.form.record_timestamps
        if output.finish_reason is None and not output.request_finished and not is_at_once:
            return []  # most calls, on the engine's thread: the less the better
        held, self._held = self._held, []
        return self._take(held)

    def _take(self, outputs: list[StepOutput]) -> list[GenerationOutput]:
        now = time.perf_counter()
        touched: list[_Row] = []
        for output in outputs:
            rows = self._by_sample.get((output.request_id, output.index), [])
            touched += [row for row in rows if row not in touched]
            for row in rows:
                _extend(row, output, now)
            if output.request_finished:
                touched += [row for row in self._end(output, now) if row not in touched]
        return self._told(touched)

    def add_tokens(self, token_ids: Sequence[int]) -> list[GenerationOutput]:
        """The next token of each row from transformers' own loop; none for rows that are over."""
        now = time.perf_counter()
        for row, token_id in zip(self._rows, token_ids, strict=True):
            _start(row, now)
            row.token_ids.append(token_id)
            row.timestamps.append(now)
        return [self._snapshot(row) for row in self._rows] if self.form.streaming else []

    def finish(
        self, rows: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]] | None
    ) -> list[GenerationOutput]:
        """The results of transformers' own loop, whatever came by `add_tokens` before."""
        now = time.perf_counter()
        for place, (row, token_ids) in enumerate(zip(self._rows, rows, strict=True)):
            _start(row, now)
            row.token_ids = list(token_ids)
            row.timestamps = (row.timestamps + [now] * len(token_ids))[: len(token_ids)]
            row.logprobs = list(logprobs[place]) if logprobs is not None else []
            row.status, row.ended = RequestStatus.FINISHED, now
        return [self._snapshot(row) for row in self._rows]

    def fail(self, error: str) -> list[GenerationOutput]:
        """End what is not over with ``error``; the tokens so far are kept."""
        now = time.perf_counter()
        failed = [row for row in self._rows if not row.is_over]
        for row in failed:
            _fail(row, error, now)
        return [self._snapshot(row) for row in failed]

    def _end(self, output: StepOutput, now: float) -> list[_Row]:
        """The last news of one of the engine's requests: a failure may name one sample only."""
        samples = self._by_sample.items()
        rows = [row for (i, _), rows in samples if i == output.request_id for row in rows]
        for row in rows:
            if not row.is_over:
                _fail(row, _error_of(output), now)
            row.started = _started(output.metrics, row.started, now)
        return rows

    def _told(self, touched: list[_Row]) -> list[GenerationOutput]:
        if self._time_limit is not None and not self.form.streaming:
            return self._cut(self._time_limit) if self.is_over else []
        return [self._snapshot(row) for row in self._rows if self._is_news(row, touched)]

    def _is_news(self, row: _Row, touched: list[_Row]) -> bool:
        return not row.is_told and row in touched and (row.is_over or self.form.streaming)

    def _cut(self, time_limit: TimeLimit) -> list[GenerationOutput]:
        """transformers stops all rows of a call after the same step."""
        num_steps = time_limit.num_steps
        if math.isfinite(num_steps):
            for row in self._rows:
                for values in (row.token_ids, row.logprobs, row.timestamps):
                    del values[int(num_steps) :]
        return [self._snapshot(row) for row in self._rows]

    def _snapshot(self, row: _Row) -> GenerationOutput:
        row.is_told = row.is_over
        return GenerationOutput(
            request_id=row.request_id,
            prompt_ids=list(self.form.prompt_ids),
            generated_tokens=list(row.token_ids),
            logprobs=list(row.logprobs),
            error=row.error,
            status=row.status,
            created_time=self._created,
            lifespan=(row.started, row.ended),
            timestamps=list(row.timestamps) if self.form.record_timestamps else None,
        )


def _start(row: _Row, now: float) -> None:
    if row.status is RequestStatus.PENDING:
        row.status, row.started = RequestStatus.DECODING, now


def _extend(row: _Row, output: StepOutput, now: float) -> None:
    if row.is_over:
        return
    _start(row, now)
    row.token_ids += output.token_ids
    row.timestamps += [now] * len(output.token_ids)
    if output.logprobs is not None:
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        row.logprobs += [entries[token_id].logprob for token_id, entries in pairs]
    if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        _fail(row, _error_of(output), now)
    elif output.finish_reason is not None:
        row.status, row.ended = RequestStatus.FINISHED, now


def _fail(row: _Row, error: str, now: float) -> None:
    _start(row, now)
    row.status, row.error, row.ended = RequestStatus.FAILED, error, now


def _error_of(output: StepOutput) -> str:
    if output.error is None:
        return CANCELLED
    return f"{type(output.error).__name__}: {output.error}"


def _started(metrics: RequestMetrics | None, first_news: float, now: float) -> float:
    """When the engine took the request up, on the clock of `GenerationOutput`."""
    if metrics is None or metrics.first_scheduled_time is None:
        return first_news
    return now - (time.monotonic() - metrics.first_scheduled_time)
