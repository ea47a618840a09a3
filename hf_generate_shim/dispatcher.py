"""`Dispatcher`: runs planned requests on the engine or by turns, and sends out what they give."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from hf_generate_shim.live_engine import wait_for_device
from hf_generate_shim.lockstep import LockstepSampler
from hf_generate_shim.open_request import CANCELLED, OpenRequest
from hf_generate_shim.pickers import RowPicker, pick_largest
from hf_generate_shim.route import Route
from hf_generate_shim.seam import QWEN3
from hf_generate_shim.solo_call import Cancelled, SoloCall
from hf_generate_shim.task import make_group, make_requests, row_seeds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from torch import nn

    from hf_generate_shim.call import HFObject
    from hf_generate_shim.handle import Handle
    from hf_generate_shim.outbox import Outbox
    from hf_generate_shim.pickers import TokenPicker
    from hf_generate_shim.planner import Plan, Planner
    from hf_generate_shim.solo_call import SoloResult
    from hf_generate_shim.task import CallRequests, Task
    from hf_generate_shim.turns import Turns
    from nanoserve_adapters.engine_thread import EngineThread
    from nanoserve_core.request import Request, StepOutput


@dataclass(eq=False, kw_only=True)
class Work:
    """One request with all that is needed to run it."""

    request: OpenRequest
    prompt: tuple[int, ...]
    planner: Planner
    plan: Plan
    seed: int | None
    """Of its random numbers; None for a turn that draws from torch's generators."""
    engine_ids: list[str] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def request_id(self) -> str:
        """The caller's."""
        return self.request.form.request_id


class Dispatcher:
    """The open requests of one manager. A `Sink` of the engine; any thread may call the rest."""

    def __init__(
        self, handle: Handle, turns: Turns, outbox: Outbox, *, return_logprobs: bool
    ) -> None:
        self._handle = handle
        self._turns = turns
        self._outbox = outbox
        self._return_logprobs = return_logprobs
        self._changed = threading.Condition()
        self._open: dict[str, Work] = {}
        self._by_engine_id: dict[str, Work] = {}
        self._thread: EngineThread | None = None
        self.fatal_error: BaseException | None = None
        """Why the engine ended, when it did so while this manager had requests there."""

    @property
    def is_alive(self) -> bool:
        """False when the engine that it used has ended."""
        thread = self._thread
        return self.fatal_error is None and (thread is None or thread.is_alive)

    @property
    def num_open(self) -> int:
        """Requests that have not had their last output."""
        return len(self._open)

    def is_open(self, request_id: str) -> bool:
        """Whether the request, or its child of that id, may still get an output."""
        return request_id.partition("__child#")[0] in self._open

    def start(self) -> None:
        """Start the engine, if the model is one that it can serve."""
        if not self._handle.engine.reasons():
            self._thread = self._handle.engine.start()
        self.fatal_error = None

    def settle_routes(self, work: Iterable[Work]) -> None:
        """Ask the engine about each plan and report those that transformers' own loop will run.

        Raises `UnsupportedOption` in strict mode; then nothing of ``work`` has begun.
        """
        for item in work:
            task = item.plan.task
            reasons = self._handle.engine.start_reasons(task) if task is not None else []
            if reasons:
                item.plan = replace(item.plan, route=Route.fallback(reasons), takes_turns=True)
            elif task is not None and task.is_lockstep and self._return_logprobs:
                item.plan = replace(item.plan, takes_turns=True)  # its call returns the scores
            if item.plan.route.task is None:
                self._handle.fall_back(item.plan.route.reasons[0], item.planner.own_options)
            elif item.plan.task is not None:
                self._handle.count(item.plan.route)

    def run(self, model: nn.Module, work: Sequence[Work]) -> None:
        """Begin all of it: what the engine runs is admitted before its next step."""
        with self._changed:
            self._open.update({item.request_id: item for item in work})
        wait_for_device(model)
        self._submit([item for item in work if item.plan.task is not None])
        for item in work:
            if item.plan.task is None:
                self._take_turn(model, item)

    def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are ignored. Its last output says so."""
        work = self._open.get(request_id)
        if work is None:
            return
        work.cancelled.set()
        thread = self._thread
        for engine_id in work.engine_ids:
            if thread is not None:
                thread.cancel(engine_id)

    def cancel_all(self) -> None:
        """`cancel` for every open request."""
        for request_id in list(self._open):
            self.cancel(request_id)

    def wait_until_idle(self, timeout_seconds: float | None) -> bool:
        """Wait for the last output of every open request; False when the time was not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_seconds)

    def deliver(self, outputs: list[StepOutput]) -> None:
        """One step's news; on the engine's thread."""
        told: list[HFObject] = []
        over: list[Work] = []
        for output in outputs:
            work = self._by_engine_id.get(output.request_id)
            if work is None:
                continue
            told += work.request.add(output)
            if output.request_finished and work.request.is_over:
                over.append(work)
        if told or over:
            self._send(told, over)

    def fail(self, error: BaseException) -> None:
        """The engine has ended; on its thread, or on one that was submitting."""
        self.fatal_error = error
        work = [item for item in list(self._open.values()) if item.engine_ids]
        message = f"{type(error).__name__}: {error}"
        self._send([output for item in work for output in item.request.fail(message)], work)

    def _submit(self, work: list[Work]) -> None:
        if not work:
            return
        thread = self._thread = self._handle.engine.start()
        requests: list[Request] = []
        for item in work:
            assert item.plan.task is not None, "the caller chose these"
            group = self._requests(item.plan, item.plan.task, item.seed)
            item.request.expect(group, item.plan.task.time_limit)
            item.engine_ids = [request.request_id for request in group.requests]
            self._by_engine_id.update(dict.fromkeys(item.engine_ids, item))
            requests += group.requests
        try:
            thread.submit_many(requests, [self] * len(requests))
        except BaseException:
            self._forget(work)
            raise

    def _requests(self, plan: Plan, task: Task, seed: int | None) -> CallRequests:
        if task.is_lockstep:
            assert plan.call is not None, "lockstep is found in the prompt's own preparation"
            return make_group(task, LockstepSampler(plan.call, task.options, _picker(plan, seed)))
        if self._return_logprobs:
            mode = {"logprobs": 0, "logprobs_mode": "processed_logprobs"}
            task = replace(task, sampling=task.sampling.replace(**mode))
        return make_requests(task, seed=seed)

    def _take_turn(self, model: nn.Module, work: Work) -> None:
        call = SoloCall(
            model=model,
            generate=_generate(work.plan),
            arguments=work.planner.call_arguments(work.prompt),
            eos_token_ids=work.planner.eos_token_ids,
            on_tokens=lambda token_ids: self._send(work.request.add_tokens(token_ids), []),
            can_stream=work.plan.can_stream,
            return_logprobs=self._return_logprobs,
            seed=work.seed,
            cancelled=work.cancelled,
        )
        self._turns.submit(call.run).add_done_callback(partial(self._end_turn, work))

    def _end_turn(self, work: Work, future: Future[SoloResult]) -> None:
        """On the thread of the turns, or on the one that closes them."""
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or isinstance(error, Cancelled):
            outputs = work.request.fail(CANCELLED)
        elif error is not None:
            outputs = work.request.fail(f"{type(error).__name__}: {error}")
        else:
            result = future.result()
            outputs = work.request.finish(result.rows, result.logprobs)
        self._send(outputs, [work])

    def _send(self, outputs: list[HFObject], over: list[Work]) -> None:
        """Send outputs, and only then take those that had their last one from the open ones."""
        for request_id in self._outbox.deliver(outputs) if outputs else ():
            self.cancel(request_id)
        if over:
            self._forget(over)
            self._outbox.wake()

    def _forget(self, work: Iterable[Work]) -> None:
        with self._changed:
            for item in work:
                self._open.pop(item.request_id, None)
                for engine_id in item.engine_ids:
                    self._by_engine_id.pop(engine_id, None)
            self._changed.notify_all()


def _picker(plan: Plan, seed: int | None) -> TokenPicker:
    task = plan.route.task
    if plan.is_greedy or task is None:
        return pick_largest
    return RowPicker(row_seeds(task, seed), [len(prompt) for prompt in task.rows])


def _generate(plan: Plan) -> Callable[..., HFObject]:
    """transformers' own when the engine does not run the call, else the patched one."""
    if plan.route.task is None:
        return QWEN3.original("generate")

    def generate(model: HFObject, **arguments: HFObject) -> HFObject:
        return model.generate(**arguments)

    return generate
