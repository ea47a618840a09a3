"""`FakeEngine`: the engine's shape without a model, for tests of what surrounds an engine.

It needs no torch, keeps no K/V (a running sample holds one "block") and calls no logits processors.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from nanoserve_core.config import EngineConfig, ModelSpec
from nanoserve_core.engine_stats import EngineStats
from nanoserve_core.errors import EngineClosed, InvalidRequest
from nanoserve_core.request import FinishReason, Request, RequestMetrics, StepOutput
from nanoserve_core.validation import RequestValidator

if TYPE_CHECKING:
    from collections.abc import Iterable

NextToken: TypeAlias = Callable[[Request, int, Sequence[int]], int]
"""``(request, sample index, its tokens: prompt and output) -> the next token``. What it raises is
the failure of this request."""


def hashed_token(request: Request, index: int, token_ids: Sequence[int]) -> int:
    """A token below 256 that depends on all tokens before it and on the sample's index."""
    del request
    return zlib.crc32(array("q", token_ids).tobytes(), index) % 256


def scripted(token_ids: Iterable[int], *, then: int = 0) -> NextToken:
    """The i-th new token of every sample is the i-th of `token_ids`, and `then` after them."""
    script = tuple(token_ids)

    def next_token(request: Request, index: int, token_ids: Sequence[int]) -> int:
        del index
        position = len(token_ids) - len(request.prompt_token_ids)
        return script[position] if position < len(script) else then

    return next_token


@dataclass(eq=False)
class _Sample:
    request: Request
    index: int
    token_ids: list[int]
    arrival_time: float
    first_step: int | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    def note_step(self, number: int) -> None:
        if self.first_step is None:
            self.first_step, self.first_scheduled_time = number, time.monotonic()

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]


@dataclass(kw_only=True, eq=False)
class FakeEngine:
    """One token for each of the first ``max_num_seqs`` samples per step; not thread-safe.

    Finishes at ``eos_token_ids``, stop ids, ``should_stop``, ``max_tokens`` and ``max_model_len``
    as the engine does, and refuses what it refuses.
    """

    next_token: NextToken = hashed_token
    before_step: Callable[[int], None] | None = None
    """Called with the step's number, from 1, at its start. May wait on an event, to hold the
    engine; what it raises breaks the engine."""
    seconds_per_step: float = 0.0
    """How long a step takes at least, whatever its batch; for demonstrations of throughput."""
    config: EngineConfig = field(default_factory=EngineConfig)
    vocab_size: int = 1024
    max_model_len: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    is_closed: bool = False
    num_closes: int = 0
    requests: list[Request] = field(default_factory=list)
    """Every request that was admitted, in order."""
    batch_sizes: list[int] = field(default_factory=list)
    """Samples that each step ran."""

    def __post_init__(self) -> None:
        self.validate = RequestValidator(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_blocks=self.max_model_len,
            block_size=1,
            max_num_seqs=0,  # it runs no groups
        )
        self._samples: list[_Sample] = []
        self._ready: list[StepOutput] = []
        self._finished: Counter[str] = Counter()
        self._generated_tokens = 0
        self._weights_epoch = 0

    @cached_property
    def spec(self) -> ModelSpec:
        """Shape facts of a model there is not; loads torch for its dtype."""
        import torch

        return ModelSpec(
            architecture="Qwen3ForCausalLM",
            vocab_size=self.vocab_size,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=8,
            rms_norm_eps=1e-6,
            max_position_embeddings=self.max_model_len,
            tie_word_embeddings=True,
            attention_bias=False,
            dtype=torch.float32,
            eos_token_ids=self.eos_token_ids,
        )

    def add_request(self, request: Request) -> None:
        """Queue a request; raises as the engine does."""
        self._require_open()
        self.validate(request)
        if any(sample.request.request_id == request.request_id for sample in self._samples):
            raise InvalidRequest(f"request_id={request.request_id!r} is in use")
        self.requests.append(request)
        samples = [
            _Sample(request, index, list(request.prompt_token_ids), time.monotonic())
            for index in range(request.sampling.n)
        ]
        self._samples += samples
        if request.sampling.max_tokens == 0:
            for sample in samples:
                self._finish(sample, FinishReason.LENGTH, self._ready)

    def abort(self, request_id: str) -> None:
        """End a request; idempotent; its ABORT comes with the next step."""
        for sample in self._samples_of(request_id):
            self._finish(sample, FinishReason.ABORT, self._ready)

    def has_unfinished_requests(self) -> bool:
        """True while `step` has something to do or to hand out."""
        return bool(self._samples or self._ready)

    def step(self) -> list[StepOutput]:
        """One new token for each running sample."""
        self._require_open()
        batch = self._samples[: self.config.max_num_seqs]
        for sample in batch:
            sample.note_step(len(self.batch_sizes))
        self.batch_sizes.append(len(batch))
        if self.before_step is not None:
            self.before_step(len(self.batch_sizes))
        if self.seconds_per_step:
            time.sleep(self.seconds_per_step)
        outputs, self._ready = self._ready, []
        for sample in batch:
            if sample in self._samples:  # else another sample of its request has just failed
                self._advance(sample, outputs)
        return outputs

    def warmup(self) -> int:
        """Nothing to make ready."""
        self._require_open()
        return 0

    def weights_changed(self) -> None:
        """Count it."""
        self._weights_epoch += 1

    def check(self) -> None:
        """No invariant to break."""

    def stats(self) -> EngineStats:
        """The engine's statistics, as far as they mean something here."""
        running = min(len(self._samples), self.config.max_num_seqs)
        return EngineStats(
            running=running,
            waiting=len(self._samples) - running,
            peak_batch=max(self.batch_sizes, default=0),
            free_blocks=self.max_model_len - running,
            num_blocks=self.max_model_len,
            prompt_tokens_computed=sum(len(r.prompt_token_ids) for r in self.requests),
            prompt_tokens_cached=0,
            tokens_recomputed=0,
            generated_tokens=self._generated_tokens,
            preemptions=0,
            steps=len(self.batch_sizes),
            backends={"engine": "fake"},
            weights_epoch=self._weights_epoch,
            finished_requests=dict(self._finished),
        )

    def close(self) -> None:
        """Refuse everything from now on."""
        self.is_closed = True
        self.num_closes += 1

    def _require_open(self) -> None:
        if self.is_closed:
            raise EngineClosed("this engine was closed: expected an open one. Make a new engine.")

    def _samples_of(self, request_id: str) -> list[_Sample]:
        return [sample for sample in self._samples if sample.request.request_id == request_id]

    def _advance(self, sample: _Sample, outputs: list[StepOutput]) -> None:
        try:
            token = self.next_token(sample.request, sample.index, sample.token_ids)
            sample.token_ids.append(token)
            sample.first_token_time = sample.first_token_time or time.monotonic()
            self._generated_tokens += 1
            reason = self._finish_reason(sample, token)
        except Exception as error:  # noqa: BLE001 - as in the engine: the failure of one request
            for failed in self._samples_of(sample.request.request_id):
                self._finish(failed, FinishReason.ERROR, outputs, error=error)
            return
        if reason is not None:
            self._finish(sample, reason, outputs, token_ids=(token,))
        else:
            output = StepOutput(
                request_id=sample.request.request_id, index=sample.index, token_ids=(token,)
            )
            outputs.append(output)

    def _finish_reason(self, sample: _Sample, token: int) -> FinishReason | None:
        sampling, should_stop = sample.request.sampling, sample.request.should_stop
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
        if token in self.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if should_stop is not None and should_stop(sample.index, sample.output_token_ids):
            return FinishReason.STOP
        num_output = len(sample.token_ids) - len(sample.request.prompt_token_ids)
        is_full = len(sample.token_ids) == self.max_model_len
        return FinishReason.LENGTH if is_full or num_output == sampling.max_tokens else None

    def _finish(
        self,
        sample: _Sample,
        reason: FinishReason,
        outputs: list[StepOutput],
        *,
        token_ids: tuple[int, ...] = (),
        error: Exception | None = None,
    ) -> None:
        self._samples.remove(sample)
        request_id = sample.request.request_id
        is_last = not self._samples_of(request_id)
        if is_last:
            self._finished[str(reason)] += 1
        now = time.monotonic()
        sizes = [] if sample.first_step is None else self.batch_sizes[sample.first_step :]
        metrics = RequestMetrics(
            arrival_time=sample.arrival_time,
            first_scheduled_time=sample.first_scheduled_time,
            first_token_time=sample.first_token_time,
            finished_time=now,
            peak_batch=max(sizes, default=0),
        )
        outputs.append(
            StepOutput(
                request_id=request_id,
                index=sample.index,
                token_ids=token_ids,
                finish_reason=reason,
                error=error,
                request_finished=is_last,
                metrics=metrics if is_last else None,
            )
        )
