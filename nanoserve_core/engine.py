"""`Engine`: requests in, `StepOutput`s out, one step at a time; the only caller of hooks (those of
a request are in `request_hooks`).

    add_request -> Scheduler.schedule -> StepPlan -> ModelRunner.launch -> InFlight.wait
                -> Scheduler.commit -> StepOutput

The engine owns no thread: whoever owns it calls `step` (``EngineThread``, or the caller of `LLM`).
Up to ``runner.run_ahead`` further steps (more where others keep the GIL) are launched before the
oldest is read, so that the device never waits for the host. It knows token ids only; text belongs
to the doors.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from nanoserve_core.batch_sizes import BatchSizes
from nanoserve_core.block_manager import BlockManager
from nanoserve_core.config import EngineConfig
from nanoserve_core.engine_reports import EngineReports, LaunchedStep
from nanoserve_core.engine_stats import EngineStats
from nanoserve_core.errors import ConfigError, EngineClosed, InvalidRequest, NanoserveError
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.philox import derive_seed
from nanoserve_core.plugins import PluginManager
from nanoserve_core.request import FinishReason, Request, Sequence, StepOutput
from nanoserve_core.request_hooks import with_hooks
from nanoserve_core.request_state import RequestState
from nanoserve_core.run_ahead import RunAhead
from nanoserve_core.sample_grammar import SampleGrammar
from nanoserve_core.scheduler import Scheduler
from nanoserve_core.validation import RequestValidator

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from torch import nn

    from nanoserve_core.config import ModelSpec
    from nanoserve_core.model_runner import StepResult
    from nanoserve_core.plan import StepPlan
    from nanoserve_core.request import RequestMetrics
    from nanoserve_core.scheduler import Committed


class Engine:
    """Runs requests on one model. Not thread-safe: one thread owns it, except for `validate`.

    ``model``: a local directory, a hub id, or a live ``Qwen3ForCausalLM``, whose weights are then
    shared, not copied. Raises `ConfigError` or `UnsupportedOption` when that cannot be served.
    """

    def __init__(self, model: str | Path | nn.Module, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        if config.tensor_parallel_size > 1:
            raise ConfigError(
                f"tensor_parallel_size={config.tensor_parallel_size} is not served yet: expected "
                "1. Run one engine per device."
            )
        plugins = PluginManager(config.plugins, config.allowed_plugins)
        self._start(ModelRunner.create(model, config, plugins), config, plugins)

    @classmethod
    def from_runner(
        cls, runner: ModelRunner, config: EngineConfig, plugins: PluginManager | None = None
    ) -> Engine:
        """An engine on a runner that was made elsewhere; ``plugins`` are those given to it."""
        engine = cls.__new__(cls)
        engine._start(  # noqa: SLF001  # a second constructor
            runner, config, plugins or PluginManager(config.plugins, config.allowed_plugins)
        )
        return engine

    def _start(self, runner: ModelRunner, config: EngineConfig, plugins: PluginManager) -> None:
        self._runner = runner
        self._plugins = plugins
        self._blocks = BlockManager(
            runner.num_blocks,
            runner.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_algo=config.prefix_caching_hash_algo,
        )
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=runner.max_model_len,
            eos_token_ids=frozenset(runner.spec.eos_token_ids),
            watermark=config.watermark,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
        )
        self.config = config
        self.spec: ModelSpec = runner.spec
        self.max_model_len: int = runner.max_model_len
        self.eos_token_ids: tuple[int, ...] = runner.spec.eos_token_ids
        self.validate = RequestValidator(
            vocab_size=runner.spec.vocab_size,
            max_model_len=runner.max_model_len,
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        )
        """Raises `InvalidRequest` for a request that can never run; pure, any thread may call."""
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[int, Sequence] = {}
        self._num_stop_checks = 0  # unfinished requests with one; without any, no row is asked
        self._in_flight: deque[LaunchedStep] = deque()
        self._num_done = 0  # of them, as far as somebody has looked
        self._run_ahead = RunAhead(runner.run_ahead, runner.max_run_ahead)
        self._ready: list[StepOutput] = []
        self._tokens: dict[int, list[int]] = {}  # by sequence: of this visit, not delivered yet
        self._batch_sizes = BatchSizes()
        self._seeds = random.Random(config.seed)
        self._sequence_ids, self._arrivals = count(), count()
        self._finished_requests: Counter[FinishReason] = Counter()
        self._runner_epoch = runner.weights_epoch()
        self._weights_epoch = 0
        self._must_check_weights = False
        self._is_closed = False
        self._reports = EngineReports(
            plugins, self._requests, self._sequences, self._scheduler, self._blocks
        )
        plugins.configure(config, runner.spec)

    def add_request(self, request: Request) -> None:
        """Queue a request; its outputs come from `step`.

        Raises `InvalidRequest`, `RequestTooLong`, a plugin's refusal, or `EngineClosed`; then
        nothing has changed.
        """
        self._check_open()
        self.validate(request)
        if request.request_id in self._requests:
            raise InvalidRequest(
                f"request_id={request.request_id!r} is in use by an unfinished request: "
                "expected a new one. Number your requests."
            )
        request = with_hooks(request, self._plugins, spec=self.spec, validate=self.validate)
        state = RequestState(request, self._new_sequences(request), arrival_time=time.monotonic())
        if self._is_empty(request):
            self._finish_empty(state)
            return
        self._scheduler.add(state.sequences)
        self._requests[request.request_id] = state
        self._num_stop_checks += _has_stop_check(request)
        self._sequences.update((sequence.sequence_id, sequence) for sequence in state.sequences)
        self._must_check_weights = True

    def abort(self, request_id: str) -> None:
        """End a request with reason ``abort``; its last `StepOutput` comes from the next `step`.

        Idempotent; an unknown or finished id is ignored. No token arrives after this call.
        """
        self._end(request_id, FinishReason.ABORT)

    def has_unfinished_requests(self) -> bool:
        """True while `step` has something to do or to deliver."""
        return bool(self._requests or self._ready or self._in_flight)

    def step(self) -> list[StepOutput]:
        """Launch what can be launched, wait for the oldest launched step, return its news and those
        of the steps that are done by then.

        An empty list is normal: a prefill chunk yields no token. An exception out of here is a
        failure of the engine itself, not of a request.
        """
        self._check_open()
        self._refresh_weights()
        self._launch_ahead()
        steps = self._commit_done() if self._in_flight else []
        outputs, self._ready = self._ready, []
        self._reports.finished(outputs, steps)
        return outputs

    def warmup(self, *, max_num_seqs: int | None = None, max_prompt_tokens: int = 512) -> int:
        """Compile and capture now what steps would compile and capture when they first come.

        On a CUDA device: for up to ``max_num_seqs`` decoding sequences (None: the config's), and
        for steps of up to ``max_prompt_tokens`` tokens of prompts. It may be called at any time
        between steps, changes no result, and returns when the device is ready. Gives the number of
        step sizes made ready: 0 on a CPU, where there is nothing to do.
        """
        self._check_open()
        most = self.config.max_num_seqs if max_num_seqs is None else max_num_seqs
        if most < 1 or max_prompt_tokens < 0:
            raise ConfigError(
                f"max_num_seqs={most}, max_prompt_tokens={max_prompt_tokens} cannot be made ready: "
                "expected at least 1 sequence and 0 tokens. Leave them out for the usual sizes."
            )
        return self._runner.warmup(max_num_seqs=most, max_prompt_tokens=max_prompt_tokens)

    def weights_changed(self) -> None:
        """Tell that the weights were changed: nothing cached before is used for new requests.

        Running requests go on with the K/V they have. Changes that the runner can see (versions,
        storage, optimizer steps) need no call.
        """
        self._check_open()
        self._runner_epoch = self._runner.weights_epoch()
        self._advance_epoch()

    def stats(self) -> EngineStats:
        """Counters since the start, and the state now. Any thread may call it for a rough view."""
        counted = self._scheduler.stats()
        return EngineStats(
            running=counted.num_running,
            waiting=counted.num_waiting,
            peak_batch=counted.peak_num_seqs,
            free_blocks=self._blocks.num_free_blocks,
            num_blocks=self._blocks.num_blocks,
            prompt_tokens_computed=counted.num_prefill_tokens,
            prompt_tokens_cached=counted.num_cached_tokens,
            tokens_recomputed=counted.num_recomputed_tokens,
            generated_tokens=counted.num_generated_tokens,
            preemptions=counted.num_preemptions,
            steps=counted.num_steps,
            backends=dict(self._runner.backend_names),
            weights_epoch=self._weights_epoch,
            finished_requests={str(reason): n for reason, n in self._finished_requests.items()},
            memory=self._runner.memory_nbytes(),
        )

    def close(self) -> None:
        """Give the device memory back; unfinished requests end with ``abort``. Idempotent."""
        if self._is_closed:
            return
        for request_id in list(self._requests):
            self.abort(request_id)
        if (hooks := self._plugins.hooks.shutdown) is not None:
            self._plugins.observe(hooks, stats=self.stats())
        self._is_closed = True
        while self._in_flight:
            self._in_flight.popleft().in_flight.wait()
        self._runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def plugins(self) -> PluginManager:
        """The engine's plugins; observers may be registered and unregistered between steps."""
        return self._plugins

    def check(self) -> None:
        """Raise AssertionError when an invariant of scheduler or blocks is broken (for tests)."""
        self._scheduler.check()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("this engine was closed: expected an open one. Make a new engine.")

    def _new_sequences(self, request: Request) -> list[Sequence]:
        sampling = request.sampling
        seed = self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed
        return [
            Sequence(
                sequence_id=next(self._sequence_ids),
                request=request,
                index=index,
                seed=derive_seed(seed, index),
                arrival=next(self._arrivals),
                max_total_tokens=self.validate.max_total_tokens(request),
                token_ids=list(request.prompt_token_ids),
                num_prompt_tokens=len(request.prompt_token_ids),
                grammar=SampleGrammar.of(
                    request,
                    max_total_tokens=self.validate.max_total_tokens(request),
                    eos_token_ids=self.eos_token_ids,
                ),
            )
            for index in range(sampling.n)
        ]

    @staticmethod
    def _is_empty(request: Request) -> bool:
        return request.sampling.max_tokens == 0 and request.sampling.prompt_logprobs is None

    def _finish_empty(self, state: RequestState) -> None:
        for index in range(len(state.sequences)):
            self._deliver(state, index, finish_reason=FinishReason.LENGTH)

    def _refresh_weights(self) -> None:
        """Before new requests are scheduled: what was cached under other weights must not hit."""
        if not self._must_check_weights:
            return
        self._must_check_weights = False
        try:
            epoch = self._runner.weights_epoch()
        except NanoserveError as error:  # the adopted module can no longer be served as it is
            self._fail_all(error)
            return
        if epoch != self._runner_epoch:
            self._runner_epoch = epoch
            self._advance_epoch()

    def _advance_epoch(self) -> None:
        self._weights_epoch += 1
        self._scheduler.weights_changed(self._weights_epoch)
        if (hooks := self._plugins.hooks.weights_changed) is not None:
            old, new = self._weights_epoch - 1, self._weights_epoch
            self._plugins.observe(hooks, old_epoch=old, new_epoch=new)

    def _launch_ahead(self) -> None:
        """Launch until as many steps are unfinished as may be, or there is nothing to launch."""
        depth, limit = self._run_ahead.depth, self._run_ahead.most + 1
        while len(self._in_flight) - self._num_done <= depth and len(self._in_flight) <= limit:
            plan = self._scheduler.schedule()
            events = self._scheduler.take_events()
            self._reports.note(events, self._batch_sizes.num_steps)
            if plan is None:
                return
            self._batch_sizes.add(len(plan.seqs))
            start_time = time.monotonic()
            in_flight = self._runner.launch(plan)
            launched = self._reports.launched(plan, in_flight, start_time, events)
            self._in_flight.append(launched)

    def _commit_done(self) -> list[LaunchedStep]:
        """Wait for the oldest launched step; commit it, and those that are done by then.

        Beside busy Python threads the wait ends late (they keep the GIL), perhaps after the device
        has run dry: `RunAhead` hears of it. Before each commit the device gets its next step.
        """
        is_full = len(self._in_flight) - self._num_done > self._run_ahead.depth
        self._in_flight[0].in_flight.wait()
        num_done = self._count_done()
        if is_full:
            self._run_ahead.note(num_done=num_done, is_dry=num_done == len(self._in_flight))
        steps = []
        for _ in range(num_done):
            if self._run_ahead.depth > 0:
                self._launch_ahead()
            steps.append(self._commit_oldest())
        self._deliver_tokens()
        return steps

    def _count_done(self) -> int:
        """How many of the launched steps are done; they end in the order of their launch."""
        in_flight = self._in_flight
        while self._num_done < len(in_flight) and in_flight[self._num_done].in_flight.is_done():
            self._num_done += 1
        return self._num_done

    def _commit_oldest(self) -> LaunchedStep:
        launched = self._in_flight.popleft()
        self._num_done -= 1
        result = launched.in_flight.wait()  # it is done
        self._take_in_prompt_logprobs(launched.plan, result)
        stop_errors: dict[int, BaseException] = {}
        is_plain = not (result.errors or result.logits or result.scores)
        for done in self._scheduler.commit(
            launched.plan,
            result.token_ids.tolist(),
            should_stop=partial(self._should_stop, stop_errors) if self._num_stop_checks else None,
            failed=result.errors.keys(),
        ):
            sequence, token_id, row = done
            if is_plain and sequence.finish_reason is None and result.logprobs[row] is None:
                # With 256 rows this is most of the cost of a step: no StepOutput yet.
                if token_id is not None:
                    self._tokens.setdefault(sequence.sequence_id, []).append(token_id)
                continue
            error = result.errors.get(done.row) or stop_errors.get(done.sequence.sequence_id)
            self._take_in(result, done, error)
        return launched

    def _should_stop(self, errors: dict[int, BaseException], sequence: Sequence) -> bool:
        check, grammar = sequence.request.should_stop, sequence.grammar
        try:
            is_complete = grammar is not None and grammar.accept(sequence.token_ids[-1])
            if check is None:
                return is_complete
            return check(sequence.index, sequence.output_token_ids) or is_complete
        except Exception as error:  # noqa: BLE001  # a caller's or plugin's code: fails its request only
            errors[sequence.sequence_id] = error
            return True

    def _take_in(self, result: StepResult, done: Committed, error: BaseException | None) -> None:
        sequence = done.sequence
        state = self._requests.get(sequence.request.request_id)
        if state is None or not state.is_open(sequence.index):
            return  # a sibling that failed in this very step ended it
        if error is not None:
            self._fail(state, sequence.index, error)
            return
        logprobs = result.logprobs[done.row]
        row_logits, row_scores = result.logits.get(done.row), result.scores.get(done.row)
        has_token = done.token_id is not None
        self._deliver(
            state,
            sequence.index,
            token_ids=(done.token_id,) if done.token_id is not None else (),
            logprobs=(logprobs,) if has_token and logprobs is not None else None,
            prompt_logprobs=state.take_prompt_logprobs() if sequence.index == 0 else None,
            logits=(row_logits,) if has_token and row_logits is not None else (),
            scores=(row_scores,) if has_token and row_scores is not None else (),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            ends_with_stop_token=has_token and self._ends_with_stop_token(sequence),
        )

    def _take_in_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        for row, logprobs in result.prompt_logprobs.items():
            scheduled = plan.seqs[row]
            sequence = self._sequences.get(scheduled.sequence_id)
            if sequence is not None:  # None: aborted while the step ran
                state = self._requests[sequence.request.request_id]
                state.note_prompt_logprobs(scheduled.start, logprobs)

    def _ends_with_stop_token(self, sequence: Sequence) -> bool:
        if sequence.finish_reason is not FinishReason.STOP:
            return False
        sampling, token_id = sequence.request.sampling, sequence.token_ids[-1]
        is_eos = token_id in self.eos_token_ids and not sampling.ignore_eos
        return is_eos or token_id in sampling.stop_token_ids

    def _deliver_tokens(self) -> None:
        """Tokens of samples that go on and want nothing but tokens, all of a visit at once."""
        now, sequences, requests = time.monotonic(), self._sequences, self._requests
        for sequence_id, token_ids in self._tokens.items():
            sequence = sequences.get(sequence_id)
            if sequence is None:  # a sibling that failed has ended the request
                continue
            request_id, index = sequence.request.request_id, sequence.index
            state = requests[request_id]
            state.note_output(now, index, None)
            self._ready.append(
                StepOutput(
                    request_id=request_id,
                    index=index,
                    token_ids=tuple(token_ids),
                    prompt_logprobs=None if index else state.take_prompt_logprobs(),
                )
            )
        self._tokens.clear()

    def _fail(self, state: RequestState, index: int, error: BaseException) -> None:
        """End a request with reason ``error``: the sample that failed and all that still run."""
        self._deliver(state, index, finish_reason=FinishReason.ERROR, error=error)
        self._end(state.request.request_id, FinishReason.ERROR, error)

    def _fail_all(self, error: BaseException) -> None:
        for request_id in list(self._requests):
            self._end(request_id, FinishReason.ERROR, error)

    def _end(
        self, request_id: str, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        for sequence in self._scheduler.abort(request_id, reason):
            state = self._requests[sequence.request.request_id]
            if state.is_open(sequence.index):
                self._deliver(state, sequence.index, finish_reason=reason, error=error)

    def _deliver(
        self,
        state: RequestState,
        index: int,
        *,
        token_ids: tuple[int, ...] = (),
        finish_reason: FinishReason | None = None,
        error: BaseException | None = None,
        **news: Any,  # Any: fields of StepOutput, checked by its constructor
    ) -> None:
        """``token_ids`` come behind those of this visit that were not delivered yet."""
        earlier = self._tokens.pop(state.sequences[index].sequence_id, ())
        now = time.monotonic()
        state.note_output(now, index, finish_reason)
        is_last = state.is_finished
        metrics = state.metrics(now, self._batch_sizes) if is_last else None
        self._ready.append(
            StepOutput(
                request_id=state.request.request_id,
                index=index,
                token_ids=(*earlier, *token_ids),
                finish_reason=finish_reason,
                error=error,
                request_finished=is_last,
                metrics=metrics,
                **news,
            )
        )
        if metrics is not None:
            self._finish(state, metrics, error)

    def _finish(
        self, state: RequestState, metrics: RequestMetrics, error: BaseException | None
    ) -> None:
        if self._requests.pop(state.request.request_id, None) is not None:
            self._num_stop_checks -= _has_stop_check(state.request)
        for sequence in state.sequences:
            self._sequences.pop(sequence.sequence_id, None)
        reason = state.finish_reason
        self._finished_requests[reason] += 1
        if (hooks := self._plugins.hooks.request_finished) is not None:
            self._plugins.observe(
                hooks, request=state.request, finish_reason=reason, metrics=metrics, error=error
            )


def _has_stop_check(request: Request) -> bool:
    return request.should_stop is not None or request.grammar is not None
