"""`Handle`: an installed model. Routes its calls, runs the fast ones on the engine, counts all."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
import weakref
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from hf_generate_shim.batching_options import CONFIG_ARGUMENT
from hf_generate_shim.call import CACHE_NAMES
from hf_generate_shim.call_options import given_options
from hf_generate_shim.continuous import ContinuousBatching
from hf_generate_shim.counters import CallCounter
from hf_generate_shim.live_engine import LiveEngine, wait_for_device
from hf_generate_shim.lockstep import LockstepSampler
from hf_generate_shim.modes import other_mode
from hf_generate_shim.outputs import assemble, assemble_lockstep
from hf_generate_shim.paged import is_paged, plain_arguments
from hf_generate_shim.pickers import RowPicker, pick_as_transformers, pick_largest
from hf_generate_shim.preparation import Preparation, Prepared, SilentStreamer
from hf_generate_shim.progress import RowProgress
from hf_generate_shim.results import CallSink, Results
from hf_generate_shim.route import Path, Route, decide
from hf_generate_shim.row_streamer import RowStreamer, stream_rows
from hf_generate_shim.scope import GenerateScope, current_scope, entered
from hf_generate_shim.seam import QWEN3
from hf_generate_shim.stream import feed_of
from hf_generate_shim.task import make_group, make_requests, row_seeds
from nanoserve_adapters.unsupported import Unsupported, UnsupportedPolicy
from nanoserve_core.errors import RequestFailed, UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from hf_generate_shim.call import HFObject, SampleCall
    from hf_generate_shim.counters import Counters
    from hf_generate_shim.explanation import Explanation
    from hf_generate_shim.pickers import TokenPicker
    from hf_generate_shim.row_streamer import RowEvent
    from hf_generate_shim.task import CallRequests, Task
    from nanoserve_adapters.engine_thread import EngineThread
    from nanoserve_core.engine_stats import EngineStats

OUTPUT_BUDGET_NBYTES = 2 * 2**30
"""Scores and logits of one call beyond which a warning says how much they will take."""

_FLOAT32_NBYTES = 4

_NONE: Mapping[str, object] = MappingProxyType({})

_OTHER_MODE = Unsupported(
    option="generate",
    value="(a mode of its own)",
    because="samples row by row, and this call used another decoding loop",
    way_out="Leave out what selects that loop.",
)

_PAUSED = Unsupported(
    option="pause",
    value=True,
    because="waits until this thread leaves the pause that it holds",
    way_out="Call generate outside of it.",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `install`."""

    tokenizer: HFObject
    strict: bool
    rng: str
    options: Mapping[str, Any]  # Any: checked by EngineConfig
    """Engine options as named, ``plugins`` among them."""
    progress_bar: bool = False


class Handle:
    """What `install` returns: numbers, and the way out. Any thread; holds the model weakly."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self._model = weakref.ref(model)
        self._engine = LiveEngine(model, tokenizer=settings.tokenizer, options=settings.options)
        self._policy = UnsupportedPolicy(strict=settings.strict, door="nanoserve")
        self._counter = CallCounter()
        self.continuous_batching = ContinuousBatching(self)
        """transformers' entry points for continuous batching, and the pause."""
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._warned_of_outputs = False

    @property
    def counters(self) -> Counters:
        """Calls by path, and the reasons of the fallbacks (a snapshot)."""
        return self._counter.snapshot(self._policy.counters)

    @property
    def thread(self) -> EngineThread:
        """The engine's thread, for what this handle does not wrap; starts the engine if need be.

        Raises `UnsupportedOption` for a model that cannot be served, `ConfigError` for options that
        cannot be met, `EngineClosed` after `close`.
        """
        return self._engine.start()

    @property
    def engine(self) -> LiveEngine:
        """The model's share in the engine, for the other parts of this package."""
        return self._engine

    def stats(self) -> EngineStats:
        """The engine's counters; all zero before the first fast call, which starts the engine."""
        if self.continuous_batching.pause.is_own:
            return self.thread.engine.stats()  # it stands still, and answers nobody
        return self._engine.stats()

    def stream(self, **arguments: HFObject) -> Iterator[RowEvent]:
        """``model.generate(**arguments)`` as (row, new text) of all rows, as they come; text needs
        the tokenizer of `install`, without one the events hold token ids.

        The call runs in a thread of its own from the first ``next`` on. Its error is raised here;
        closing the iterator cancels it.
        """
        model: HFObject = self._model()
        assert model is not None, "whoever generates holds the model"
        eos_token_id = arguments.get("eos_token_id", model.generation_config.eos_token_id)
        streamer = RowStreamer(self.settings.tokenizer, eos_token_id=eos_token_id)
        return stream_rows(model.generate, streamer, arguments)

    def cancel(self) -> None:
        """Cancel all calls that the engine runs for this model now: their callers get
        `RequestFailed`, requests of continuous batching an output that says so.
        """
        self.continuous_batching.cancel()
        with self._lock:
            running = list(self._running)
        for request_id in running:
            self._engine.start().cancel(request_id)

    def close(self) -> None:
        """Uninstall the model and give the engine back. Idempotent.

        Waiting calls get `EngineClosed`.
        """
        model = self._model()
        if model is not None and QWEN3.handle_of(model) is self:
            QWEN3.detach(model)
        self.continuous_batching.close()
        self._engine.close()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate(
        self,
        model: nn.Module,
        original: Callable[[], HFObject],
        arguments: Mapping[str, HFObject],
    ) -> HFObject:
        """One call of `generate`: transformers' own, which comes back through `sample`.

        A streamer is ended also when the call raises, wherever that was, so that nobody waits on it
        for ever.
        """
        scope = _scope(model, arguments)
        if is_paged(arguments):
            scope.seed = self.continuous_batching.options.read(arguments.get(CONFIG_ARGUMENT)).seed
            arguments = plain_arguments(arguments)
            original = functools.partial(QWEN3.original("generate"), model, **arguments)
        try:
            found = other_mode(model, arguments)
            if found is not None:
                self.fall_back(found, _own_options(model, arguments))
            with entered(scope):
                result = original()
            if found is None and not scope.reached_sample:
                self.fall_back(_OTHER_MODE, _own_options(model, arguments))
        except BaseException:
            streamer = arguments.get("streamer")
            if streamer is not None:
                streamer.end()
            raise
        return result

    def sample(self, call: SampleCall, original: Callable[[], HFObject]) -> HFObject:
        """One call of `_sample`, by the engine or by ``original``."""
        scope = current_scope(call.model)
        if scope is None:
            return original()  # called by itself, outside of generate
        scope.reached_sample = True
        route = self._route(call, scope)
        if scope.only_prepare:
            raise Prepared(Preparation(route=route, call=call))
        reasons = self._engine.start_reasons(route.task) if route.task else route.reasons
        if route.task is None or reasons:
            self.fall_back(reasons[0], given_options(call.generation_config))
            return original()
        self.count(route)
        return self._run(call, route.task)

    def explain(self, model: nn.Module, arguments: Mapping[str, HFObject]) -> Explanation:
        """The path of a call with these arguments: transformers prepares it, nothing is run."""
        return self.prepare(model, arguments).explanation

    def prepare(self, model: nn.Module, arguments: Mapping[str, HFObject]) -> Preparation:
        """Let transformers prepare a call, with its warnings and errors, and run nothing.

        ``arguments`` are those of `generate` by name.
        """
        if is_paged(arguments):
            arguments = plain_arguments(arguments)
        found = other_mode(model, arguments)
        if found is not None:
            return Preparation(route=Route.fallback([found]))
        if arguments.get("streamer") is not None:
            arguments = {**arguments, "streamer": SilentStreamer()}
        scope = _scope(model, arguments)
        scope.only_prepare = True
        try:
            with entered(scope):
                QWEN3.original("generate")(model, **arguments)
        except Prepared as prepared:
            return prepared.preparation
        return Preparation(route=Route.fallback([_OTHER_MODE]))

    def _route(self, call: SampleCall, scope: GenerateScope) -> Route:
        reasons = self._engine.reasons()
        if self.continuous_batching.pause.is_own:
            reasons.append(_PAUSED)
        limit = self._engine.max_model_len
        rng = self.settings.rng if scope.seed is None else "row"
        route = decide(call, max_model_len=limit, has_user_cache=scope.has_user_cache, rng=rng)
        if route.task is not None:
            reasons += self._engine.group_reasons(route.task)
        return Route.fallback((*reasons, *route.reasons)) if reasons else route

    def count(self, route: Route) -> None:
        """Count a call that the engine runs."""
        self._counter.add(route.path, route.reasons)

    def fall_back(self, found: Unsupported, own_options: Mapping[str, object] = _NONE) -> None:
        """Count a call for transformers' own loop and warn of it, once per reason.

        Raises `UnsupportedOption` when strict, or when the call has ``own_options`` of nanoserve.
        """
        self._counter.add(Path.FALLBACK)
        for name, value in own_options.items():
            raise UnsupportedOption(
                f"{name}={value!r} is served by the engine only, and transformers' own loop has to "
                f"run this call: {found.reason}. {found.way_out} Or leave {name} out."
            )
        self._policy.report(found, stacklevel=2 + _num_frames_to_user())

    def _run(self, call: SampleCall, task: Task) -> HFObject:
        thread = self.thread
        self._warn_of_outputs(call, task)
        wait_for_device(call.model)
        if task.is_lockstep:
            output = self._run_lockstep(call, task, thread)
        else:
            requests = make_requests(task, seed=_seed(call, task))
            output = assemble(call, task, self._collect(call, task, requests, thread))
        if call.streamer is not None:
            call.streamer.end()
        return output

    def _run_lockstep(self, call: SampleCall, task: Task, thread: EngineThread) -> HFObject:
        sampler = LockstepSampler(call, task.options, _picker(call, task))
        try:
            self._collect(call, task, make_group(task, sampler), thread)
        except RequestFailed:
            if sampler.error is None:
                raise
        if sampler.error is not None:
            error, sampler.error = sampler.error, None
            raise error  # what a processor or criterion raised, and nothing around it
        return assemble_lockstep(call, sampler)

    def _collect(
        self, call: SampleCall, task: Task, requests: CallRequests, thread: EngineThread
    ) -> Results:
        """The results of a call, which is cancelled if something raises."""
        request_ids = {request.request_id for request in requests.requests}
        with self._lock:
            self._running |= request_ids
        try:
            has_bar = self.settings.progress_bar and call.num_rows > 1
            return _collect(call, task, requests, thread, progress_bar=has_bar)
        except BaseException:  # also a streamer that raises, and Ctrl-C
            for request_id in request_ids:
                thread.cancel(request_id)
            raise
        finally:
            with self._lock:
                self._running -= request_ids

    def _warn_of_outputs(self, call: SampleCall, task: Task) -> None:
        nbytes = task.num_output_rows * call.vocab_size * _FLOAT32_NBYTES
        if nbytes <= OUTPUT_BUDGET_NBYTES:
            return
        with self._lock:
            is_first, self._warned_of_outputs = not self._warned_of_outputs, True
        if is_first:
            warnings.warn(
                f"output_scores and output_logits of this call may take {nbytes / 2**30:.1f} GiB: "
                "one float32 row of the vocabulary per token. Generate fewer tokens per call, or "
                "compute log-probabilities from the returned sequences.",
                stacklevel=1 + _num_frames_to_user(),
            )


def _collect(
    call: SampleCall,
    task: Task,
    group: CallRequests,
    thread: EngineThread,
    *,
    progress_bar: bool,
) -> Results:
    """Submit all requests of the call and wait for the last token, feeding the streamer."""
    results = Results(group)
    feed = feed_of(call.streamer, results, task)
    sink = CallSink(len(group.requests), every_step=feed is not None, every_end=progress_bar)
    with RowProgress(call.num_rows, is_shown=progress_bar) as progress:
        thread.submit_many(group.requests, [sink] * len(group.requests))
        for outputs in sink.read():
            results.add(outputs)
            progress.update(results)
            if feed is not None:
                feed.push()
    return results


def _scope(model: nn.Module, arguments: Mapping[str, HFObject]) -> GenerateScope:
    has_user_cache = any(arguments.get(name) is not None for name in CACHE_NAMES)
    return GenerateScope(model=model, has_user_cache=has_user_cache)


def _own_options(model: nn.Module, arguments: Mapping[str, HFObject]) -> dict[str, object]:
    """nanoserve's own options of a call that transformers has not prepared."""
    configs = (getattr(model, "generation_config", None), arguments.get("generation_config"))
    return {name: value for each in configs for name, value in given_options(each).items()}


def _seed(call: SampleCall, task: Task) -> int | None:
    """The call's seed: None when nothing depends on it, else as given, or one number from torch's
    default generator, so that `torch.manual_seed` reproduces the call.
    """
    if not call.generation_config.do_sample or task.options.row_seeds is not None:
        return None
    if task.options.seed is not None:
        return task.options.seed
    scope = current_scope(call.model)
    if scope is not None and scope.seed is not None:
        return scope.seed
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))


def _picker(call: SampleCall, task: Task) -> TokenPicker:
    if not call.generation_config.do_sample:
        return pick_largest
    if task.draws_one_block:
        return pick_as_transformers
    return RowPicker(row_seeds(task, _seed(call, task)), [len(prompt) for prompt in task.rows])


def _num_frames_to_user() -> int:
    """Frames of this package, transformers and torch between the caller of this and the user."""
    frame = inspect.currentframe()
    frame = frame.f_back if frame is not None else None
    count = 0
    while frame is not None and _package(frame.f_globals) in _FRAMES_OF_OTHERS:
        frame, count = frame.f_back, count + 1
    return count


_FRAMES_OF_OTHERS = {"hf_generate_shim", "transformers", "torch"}


def _package(names: Mapping[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
