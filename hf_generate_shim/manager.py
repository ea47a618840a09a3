"""`BatchingManager`: what transformers calls a `ContinuousBatchingManager`, over a model's engine.

Its methods and their arguments are transformers'. What comes out is what one plain `generate` per
prompt gives: nothing of a config is dropped. What the engine does not do is run by transformers'
own loop, one request at a time, after a warning that names it, or refused with ``strict=True``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import weakref
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from hf_generate_shim.batch_prompts import read_prompt
from hf_generate_shim.dispatcher import Dispatcher, Work
from hf_generate_shim.open_request import CANCELLED, OpenRequest, RequestForm
from hf_generate_shim.outbox import Outbox
from nanoserve_core.errors import EngineClosed, InvalidRequest
from nanoserve_core.philox import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import nn

    from hf_generate_shim.batch_arguments import BatchArguments
    from hf_generate_shim.batching_options import BatchingOptions
    from hf_generate_shim.call import HFObject
    from hf_generate_shim.handle import Handle
    from hf_generate_shim.pause import EnginePause
    from hf_generate_shim.planner import Plan, Planner
    from hf_generate_shim.turns import Turns
    from nanoserve_adapters.unsupported import Unsupported

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ThreadStatus:
    """What code around transformers' manager reads of its background thread."""

    fatal_error: BaseException | None
    """Why the engine ended, or None."""


class BatchingManager:
    """Takes requests, and gives their results to whoever asks. Any thread; holds the model weakly.

    Made by ``model.init_continuous_batching``. Ends a request that fails, or whose prompt is not
    one, with a `GenerationOutput` that has ``error`` and the status ``FAILED``; others go on.
    Unlike transformers' manager it changes neither the model's mode and attention nor a config.
    """

    def __init__(
        self,
        handle: Handle,
        model: nn.Module,
        arguments: BatchArguments,
        options: BatchingOptions,
        *,
        turns: Turns,
        pause: EnginePause,
    ) -> None:
        self.warmed_up = False
        self._handle = handle
        self._reference = weakref.ref(model)
        self._arguments = arguments
        self._options = options
        self._pause = pause
        self._outbox = Outbox()
        self._dispatcher = Dispatcher(
            handle, turns, self._outbox, return_logprobs=options.return_logprobs
        )
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._places = itertools.count()
        self._seed = options.seed
        self._waiting_for_start: list[Work] = []
        self._is_started = False
        self._is_stopping = False
        self._is_destroyed = False

    @property
    def model(self) -> HFObject:
        """The model; raises `EngineClosed` when it is gone."""
        model = self._reference()
        if model is None:
            raise EngineClosed(
                "the model of this manager was deleted: expected it to live as long as its "
                "requests. Keep a reference to it."
            )
        return model

    @property
    def generation_config(self) -> HFObject:
        """The config of all requests: a copy of what was given, else the model's own."""
        given = self._arguments.generation_config
        return self.model.generation_config if given is None else given

    @property
    def background_thread_status(self) -> ThreadStatus:
        """Whether the engine has ended (a snapshot)."""
        return ThreadStatus(self._dispatcher.fatal_error)

    def warmup(self) -> None:
        """Start the engine, without which the first request starts it."""
        self._dispatcher.start()
        self.warmed_up = True

    def is_running(self) -> bool:
        """Whether it was started and can still give results."""
        is_over = self._is_stopping and self._dispatcher.num_open == 0
        return self._is_started and not is_over and self._dispatcher.is_alive

    def start(self) -> None:
        """Begin what was added, and from now on whatever is added.

        Also after `stop`, and after the engine's death: there will be a new one. Raises
        `ConfigError` or `EngineClosed` when there can be none, `RuntimeError` after `destroy`.
        """
        if self._is_destroyed:
            raise RuntimeError("this manager was destroyed: expected a new one.")
        if self.is_running() and not self._is_stopping:
            _LOG.warning("the manager is already running")
            return
        self._dispatcher.start()
        with self._lock:
            self._is_started, self._is_stopping = True, False
            waiting, self._waiting_for_start = self._waiting_for_start, []
        self._begin(waiting)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests and finish those there are; with ``hard_stop`` cancel them.

        ``block`` waits for that, at most ``timeout`` seconds. Results stay readable. With
        ``keep_for_next_session`` the model's next `init_continuous_batching` gives this manager.
        Raises ``RuntimeError`` inside a `pause` of the same thread.
        """
        if not self._is_started:
            _LOG.warning("the manager was not started")
            return
        if self._pause.is_own:
            raise RuntimeError(
                "stop was called inside a pause of this manager: its requests cannot end there. "
                "Leave the pause first."
            )
        self._is_stopping = True
        if hard_stop:
            self.cancel_all()
        self._outbox.wake()
        if keep_for_next_session:
            self._handle.continuous_batching.keep(self)
        if block:
            self._join(timeout)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait until the requests have ended; transformers' first argument is not needed here."""
        del stop_trigger_time
        self._join(timeout)

    def destroy(self) -> None:
        """Stop for good. Idempotent."""
        if self.is_running():
            self.stop(block=True)
        self._is_destroyed = True

    @contextmanager
    def pause(self) -> Iterator[None]:
        """For the block, no request makes a step: the model may be used, or changed in place.

        Requests go on afterwards with the K/V they have. Any number of threads may pause. Inside,
        `generate` of the same thread runs in transformers' own loop. Raises ``RuntimeError`` when
        the manager does not run.
        """
        if not self.is_running():
            raise RuntimeError("pause was called while the manager does not run. Start it first.")
        device = next(self.model.parameters()).device
        with self._pause.hold(self._handle.engine.start(), device):
            yield

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **options: HFObject,
    ) -> str:
        """Queue one prompt; returns the request's id, ``req_<number>`` when none is given.

        ``options`` are any arguments of `generate`, for this request only. With ``streaming`` there
        is an output per step, each with all tokens so far. Raises what `generate` raises for
        arguments that are wrong for every prompt, `InvalidRequest` for an id in use, `EngineDead`
        and `EngineClosed`, and ``RuntimeError`` after `stop`.
        """
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id, **options}
        ids = [self._new_id() if request_id is None else request_id]
        self._add([input_ids], ids, given, streaming=streaming, record_timestamps=record_timestamps)
        return ids[0]

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: HFObject,
    ) -> list[str]:
        """`add_request` for each prompt; all are admitted before the engine's next step."""
        given = {"max_new_tokens": max_new_tokens, **options}
        ids = [self._new_id() for _ in inputs]
        self._add(inputs, ids, given, streaming=streaming, record_timestamps=record_timestamps)
        return ids

    def generate(
        self, inputs: Sequence[Sequence[int]], *, record_timestamps: bool, progress_bar: bool
    ) -> dict[str, HFObject]:
        """The results of all prompts by their ids, in order; for `generate_batch`.

        Raises `EngineDead` or `EngineClosed` when the engine ends before they are there.
        """
        ids = [self._new_id() for _ in inputs]
        forms = self._add(inputs, ids, {}, streaming=False, record_timestamps=record_timestamps)
        wanted = [output_id for form in forms for output_id in form.output_ids]
        results: dict[str, HFObject] = dict.fromkeys(wanted)
        missing = set(wanted)
        name = f"Solving {len(wanted)} requests"
        with tqdm(total=len(wanted), disable=not progress_bar, desc=name, unit="request") as bar:
            while missing:
                output = self._take(missing, None, self._is_over)
                self._raise_fatal_error()
                assert output is not None, "what is open has an output to come"
                results[output.request_id] = output
                missing.discard(output.request_id)
                bar.update()
        return results

    def cancel_request(self, request_id: str) -> None:
        """End a request, its children too; its last output has an ``error``. Idempotent.

        Ids that are not open are ignored, those of children too: they end with their request.
        """
        with self._lock:
            waiting = [w for w in self._waiting_for_start if w.request_id == request_id]
            self._waiting_for_start = [w for w in self._waiting_for_start if w not in waiting]
        for work in waiting:
            self._outbox.deliver(work.request.fail(CANCELLED))
        self._dispatcher.cancel(request_id)

    def cancel_all(self) -> None:
        """`cancel_request` for each request that has begun."""
        self._dispatcher.cancel_all()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> HFObject:
        """The next `GenerationOutput`, of any request or of one.

        None after ``timeout`` seconds, and when the manager does not run and nothing is left.
        Raises `EngineDead` or `EngineClosed` when the engine has ended and nothing is left.
        """
        return self._take(None if request_id is None else {request_id}, timeout, self._is_over)

    def __iter__(self) -> Iterator[HFObject]:
        """Results as they come, until the manager has stopped and nothing is left."""
        while (result := self.get_result()) is not None:
            yield result

    def request_id_iter(self, request_id: str) -> Iterator[HFObject]:
        """The outputs of one request, the last included; waits for them."""

        def is_over() -> bool:
            return self._is_over() or not self._dispatcher.is_open(request_id)

        while (result := self._take({request_id}, None, is_over)) is not None:
            yield result
            if result.is_finished():
                return

    def register_result_handler(
        self, request_id: str, callback: Callable[[HFObject], None]
    ) -> None:
        """Call ``callback`` with each output of a request on the running event loop.

        Outputs that wait already come first. Raises ``RuntimeError`` outside of a loop. A request
        whose loop is closed is cancelled.
        """
        self._outbox.register(request_id, callback, asyncio.get_running_loop())

    def has(self, arguments: BatchArguments, options: BatchingOptions) -> bool:
        """Whether it was made with equal ones, and is idle."""
        is_equal = self._options == options and self._arguments.are_equal(arguments)
        return is_equal and not self.is_running() and not self._is_destroyed

    def _add(
        self,
        inputs: Sequence[HFObject],
        ids: Sequence[str],
        given: Mapping[str, HFObject],
        *,
        streaming: bool,
        record_timestamps: bool,
    ) -> list[RequestForm]:
        self._require_open(ids)
        planner = self._arguments.planner(self._handle, self.model, given)
        forms = [
            RequestForm(
                request_id=request_id,
                prompt_ids=_shown(prompt),
                num_rows=planner.num_rows,
                streaming=streaming,
                record_timestamps=record_timestamps,
            )
            for prompt, request_id in zip(inputs, ids, strict=True)
        ]
        reasons = self._handle.engine.reasons()  # once: it costs more than all else of a request
        pairs = zip(inputs, map(OpenRequest, forms), strict=True)
        work = [self._planned(planner, prompt, request, reasons) for prompt, request in pairs]
        self._begin([item for item in work if item is not None])
        return forms

    def _planned(
        self,
        planner: Planner,
        prompt: HFObject,
        request: OpenRequest,
        model_reasons: Sequence[Unsupported],
    ) -> Work | None:
        """The request ready to run; None when it has failed already."""
        place = next(self._places)
        try:
            tokens = read_prompt(prompt, self.model.config.vocab_size)
            plan = planner.plan(tokens, model_reasons=model_reasons)
        except ValueError as error:
            if not isinstance(error, InvalidRequest) and planner.fails_for_any_prompt():
                raise
            self._outbox.deliver(request.fail(f"{type(error).__name__}: {error}"))
            return None
        seed = self._seed_of(place, plan)
        return Work(request=request, prompt=tokens, planner=planner, plan=plan, seed=seed)

    def _begin(self, work: list[Work]) -> None:
        with self._lock:
            if not self._is_started:
                self._waiting_for_start += work
                return
        self._dispatcher.settle_routes(work)
        self._dispatcher.run(self.model, work)

    def _seed_of(self, place: int, plan: Plan) -> int | None:
        """Of a request by its place among all, so that its neighbours do not matter."""
        if plan.task is None:
            return None if self._options.seed is None else derive_seed(self._options.seed, place)
        if plan.is_greedy or plan.task.options.row_seeds is not None:
            return None
        if plan.task.options.seed is not None:
            return plan.task.options.seed
        with self._lock:
            if self._seed is None:
                self._seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
            return derive_seed(self._seed, place)

    def _new_id(self) -> str:
        return f"req_{next(self._numbers)}"

    def _require_open(self, ids: Sequence[str]) -> None:
        self._raise_fatal_error()
        if self._is_stopping or self._is_destroyed:
            raise RuntimeError(
                "this manager is stopping and takes no more requests: expected a running one. "
                "Call start again, or make a new one."
            )
        if self._pause.is_own:
            raise RuntimeError(
                "a request was added inside a pause of the same thread, where none can end. "
                "Leave the pause first."
            )
        waiting = {work.request_id for work in self._waiting_for_start}
        taken = [i for i in ids if i in waiting or self._dispatcher.is_open(i)]
        if taken:
            raise InvalidRequest(
                f"request_id={taken[0]!r} is in use by an unfinished request: expected a new one. "
                "Leave it out, or give each request its own."
            )

    def _take(
        self, ids: Collection[str] | None, timeout: float | None, is_over: Callable[[], bool]
    ) -> HFObject:
        result = self._outbox.take(ids, timeout_seconds=timeout, is_over=is_over)
        if result is None:
            self._raise_fatal_error()
        return result

    def _is_over(self) -> bool:
        return not self.is_running()

    def _raise_fatal_error(self) -> None:
        """A new exception each time: several threads may raise it."""
        error = self._dispatcher.fatal_error
        if error is not None:
            raise type(error)(*error.args) from error.__cause__

    def _join(self, timeout: float | None) -> None:
        if not self._dispatcher.wait_until_idle(timeout):
            _LOG.warning("%d requests still run after %s s", self._dispatcher.num_open, timeout)


def _shown(prompt: HFObject) -> list[int]:
    """The prompt as outputs show it, also when it is none."""
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    return list(listed) if isinstance(listed, Iterable) else []
