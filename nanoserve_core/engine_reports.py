"""`EngineReports`: what plugins hear of requests and steps, from the engine's books.

Only what somebody listens to is put together. It changes nothing but the notes of `RequestState`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from nanoserve_core.hookspecs import StepRow, StepStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nanoserve_core.block_manager import BlockManager
    from nanoserve_core.model_runner import InFlight
    from nanoserve_core.plan import StepPlan
    from nanoserve_core.plugins import PluginManager
    from nanoserve_core.request import Sequence, StepOutput
    from nanoserve_core.request_state import RequestState
    from nanoserve_core.scheduler import Scheduler, SchedulerEvents


class LaunchedStep(NamedTuple):
    """A launched step with what its report will need."""

    plan: StepPlan
    in_flight: InFlight
    start_time: float
    num_cached_tokens: int
    num_preemptions: int
    rows: tuple[StepRow, ...]
    """Only made when a plugin listens."""


class EngineReports:
    """The observers' hooks of one engine; reads the engine's books, on its thread."""

    def __init__(
        self,
        plugins: PluginManager,
        requests: Mapping[str, RequestState],
        sequences: Mapping[int, Sequence],
        scheduler: Scheduler,
        blocks: BlockManager,
    ) -> None:
        self._plugins = plugins
        self._requests = requests
        self._sequences = sequences
        self._scheduler = scheduler
        self._blocks = blocks

    def launched(
        self, plan: StepPlan, in_flight: InFlight, start_time: float, events: SchedulerEvents
    ) -> LaunchedStep:
        """A step that has just been launched."""
        is_heard = self._plugins.hooks.step_finished is not None
        return LaunchedStep(
            plan,
            in_flight,
            start_time,
            events.num_cached_tokens,
            len(events.preempted),
            self._step_rows(plan) if is_heard else (),
        )

    def note(self, events: SchedulerEvents, num_steps: int) -> None:
        """Admissions and preemptions, after so many steps."""
        if not events.admitted and not events.preempted:
            return
        now, hooks = time.monotonic(), self._plugins.hooks
        for sequence, num_cached_tokens in (
            (a.sequence, a.num_cached_tokens) for a in events.admitted
        ):
            state = self._requests[sequence.request.request_id]
            state.note_admission(now, num_steps, num_cached_tokens)
            if hooks.request_scheduled is not None:
                self._plugins.observe(
                    hooks.request_scheduled,
                    request=state.request,
                    index=sequence.index,
                    num_cached_tokens=num_cached_tokens,
                    queued_seconds=now - state.arrival_time,
                )
        for sequence in events.preempted:
            found = self._requests.get(sequence.request.request_id)
            if found is None:  # ended since: a victim with launched steps is told of late
                continue
            found.num_preemptions += 1
            if hooks.request_preempted is not None:
                self._plugins.observe(
                    hooks.request_preempted,
                    request=found.request,
                    index=sequence.index,
                    num_tokens=sequence.num_tokens,
                )

    def finished(self, outputs: list[StepOutput], steps: list[LaunchedStep]) -> None:
        """What came of one or several steps."""
        hooks = self._plugins.hooks
        if outputs and hooks.tokens is not None:
            self._plugins.observe(hooks.tokens, outputs=outputs)
        if hooks.step_finished is not None:
            for step in steps:
                self._plugins.observe(hooks.step_finished, stats=self._step_stats(step))

    def _step_stats(self, launched: LaunchedStep) -> StepStats:
        plan = launched.plan
        decode, prefill = plan.seqs[: plan.num_decode_seqs], plan.seqs[plan.num_decode_seqs :]
        return StepStats(
            step_id=plan.step_id,
            start_time=launched.start_time,
            duration_seconds=time.monotonic() - launched.start_time,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_blocks=self._blocks.num_free_blocks,
            num_blocks=self._blocks.num_blocks,
            num_prefill_tokens=sum(seq.num_tokens for seq in prefill),
            num_decode_tokens=len(decode),
            num_cached_tokens=launched.num_cached_tokens,
            num_preemptions=launched.num_preemptions,
            rows=launched.rows,
        )

    def _step_rows(self, plan: StepPlan) -> tuple[StepRow, ...]:
        rows = []
        for row, scheduled in enumerate(plan.seqs):
            sequence = self._sequences[scheduled.sequence_id]
            rows.append(
                StepRow(
                    request_id=sequence.request.request_id,
                    index=sequence.index,
                    start=scheduled.start,
                    num_tokens=scheduled.num_tokens,
                    is_prefill=row >= plan.num_decode_seqs,
                    samples=scheduled.samples,
                )
            )
        return tuple(rows)
