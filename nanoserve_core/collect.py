"""`OutputCollector`: puts the step outputs of one request together into its `RequestOutput`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoserve_core.request import CompletionOutput, FinishReason, RequestOutput
from nanoserve_core.text import TextStream

if TYPE_CHECKING:
    from nanoserve_core.request import PositionLogprobs, Request, RequestMetrics, StepOutput
    from nanoserve_core.text import Tokenizer


class _Sample:
    """What has come of one sample so far."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        self.stream = TextStream(tokenizer, request.sampling) if tokenizer is not None else None
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = (
            [] if request.sampling.logprobs is not None else None
        )
        self.last: StepOutput | None = None

    def add(self, output: StepOutput) -> None:
        self.token_ids.extend(output.token_ids)
        if self.logprobs is not None and output.logprobs is not None:
            self.logprobs.extend(output.logprobs)
        if self.stream is not None:
            self.pieces.append(self.stream.feed(output))
        self.last = output

    def result(self, index: int) -> CompletionOutput:
        last = self.last
        assert last is not None, f"sample {index} has no output"
        assert last.finish_reason is not None, f"sample {index} has not finished"
        stopped = self.stream.stopped if self.stream is not None else None
        return CompletionOutput(
            index=index,
            text="".join(self.pieces),
            token_ids=self.token_ids,
            finish_reason=last.finish_reason,
            stop_reason=stopped if stopped is not None else last.stop_reason,
            logprobs=self.logprobs,
            cumulative_logprob=self._cumulative_logprob(),
        )

    def _cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        return sum(
            row[token_id].logprob
            for row, token_id in zip(self.logprobs, self.token_ids, strict=True)
        )


class OutputCollector:
    """Collects the outputs of one request; `result` gives the whole when the last has been added.

    ``tokenizer`` None: results have ids and empty text.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, *, prompt: str | None = None
    ) -> None:
        self._request = request
        self._prompt = prompt
        self._samples = [_Sample(tokenizer, request) for _ in range(request.sampling.n)]
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._metrics: RequestMetrics | None = None
        self._error: BaseException | None = None

    def add(self, output: StepOutput) -> None:
        """Take one step's news of one sample."""
        self._samples[output.index].add(output)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = list(output.prompt_logprobs)
        if output.metrics is not None:
            self._metrics = output.metrics
        if output.finish_reason is FinishReason.ERROR:
            self._error = self._error or output.error

    @property
    def error(self) -> BaseException | None:
        """Why the request failed, if it did."""
        return self._error

    def result(self) -> RequestOutput:
        """The finished request; only after its ``request_finished`` output was added."""
        assert self._metrics is not None, f"request {self._request.request_id} has not finished"
        return RequestOutput(
            request_id=self._request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self._request.prompt_token_ids),
            outputs=[sample.result(index) for index, sample in enumerate(self._samples)],
            metrics=self._metrics,
            prompt_logprobs=self._prompt_logprobs,
        )
