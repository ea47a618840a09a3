"""Which sequences run in the next step, and what its tokens mean for them.

One step: a token for each running sequence whose prompt is computed, then chunks of prompts already
begun, then admissions, all within ``max_num_batched_tokens``. When blocks run short, the running
sequence that loses the least computed work goes back to waiting; it keeps its tokens and computes
their K/V again later.

A plan may be made before earlier ones are committed (run-ahead)::

    known tokens    |#########################|..pending..|   sampled by launched steps, not known
    computed        |##############|                          K/V exists and the step is committed
    in flight                      |######################|   positions that launched steps compute

The members of a group (`RequestGroup`) are admitted all or none, run their last known token in one
step or in none, never while one of theirs is pending, and are preempted together.

So a sequence can end, or be chosen as a victim, while launched steps still write into its blocks.
It then drains: it gives its blocks back when the last of these steps is committed.

This file knows no tensor, no text, no clock and no random number: equal calls give equal plans.
One thread at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from nanoserve_core.errors import RequestTooLong
from nanoserve_core.lockstep import Lockstep, num_blocks_together
from nanoserve_core.plan import CachedPrefix, ScheduledSeq
from nanoserve_core.request import FinishReason, SequenceStatus
from nanoserve_core.scheduled_row import assignment_of, row_of, wants_prompt_logprobs
from nanoserve_core.scheduler_events import Admission, Committed, SchedulerEvents, SchedulerStats
from nanoserve_core.slot_pool import SlotPool
from nanoserve_core.step_draft import StepDraft
from nanoserve_core.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from collections.abc import Sequence as ListOf

    from nanoserve_core.block_manager import BlockManager
    from nanoserve_core.plan import StepPlan
    from nanoserve_core.request import Sequence

__all__ = ["Admission", "Committed", "Scheduler", "SchedulerEvents", "SchedulerStats"]


class _Launched(NamedTuple):
    plan: StepPlan
    sequences: list[Sequence]


class Scheduler:
    """Only writer of the progress of sequences, as `BlockManager` is of their blocks."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        watermark: float = 0.01,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        """``watermark``: share of the blocks that admission leaves for running sequences to grow.
        ``long_prefill_token_threshold``: see `EngineConfig`.

        No more than ``max_num_batched_tokens`` sequences run, so that each advances in every step.
        """
        self._block_manager = block_manager
        self._block_size = block_manager.block_size
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._long_prefill = long_prefill_token_threshold or max_num_batched_tokens
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._num_watermark_blocks = int(watermark * block_manager.num_blocks)
        self._slots = SlotPool(self._max_num_seqs)
        self._requests: dict[str, list[Sequence]] = {}
        self._waiting = WaitingQueue()
        self._prefilling: dict[int, Sequence] = {}
        self._decoding: dict[int, Sequence] = {}
        self._draining: dict[int, Sequence] = {}
        self._lockstep = Lockstep()
        self._launched: deque[_Launched] = deque()
        self._num_running = 0
        self._num_copy_sources = 0
        self._blocked_id = -1  # a head that did not fit, while nothing has changed that could help
        self._last_sequence_id = -1
        self._released_slots: list[int] = []
        self._admitted: list[Admission] = []
        self._preempted: list[Sequence] = []
        self._stats = SchedulerStats()

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot; at most ``max_num_seqs``."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that are not admitted yet, or not again after a preemption."""
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._requests)

    def stats(self) -> SchedulerStats:
        """A copy of the counters, with the state now."""
        return replace(self._stats, num_running=self.num_running, num_waiting=self.num_waiting)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue the n samples of one request, in the order of their index, all WAITING.

        Raises `RequestTooLong` before anything has changed when they could not even run alone.
        Sequence ids must increase from call to call.
        """
        leader, *followers = sequences
        self._check_length(leader)
        request_id = leader.request.request_id
        assert request_id not in self._requests, f"request {request_id!r} is unfinished"
        for sequence in (leader, *followers):
            assert sequence.sequence_id > self._last_sequence_id, "sequence ids must increase"
            self._last_sequence_id = sequence.sequence_id
        if leader.request.group is None:
            self._requests[request_id] = [leader, *followers]
            self._waiting.push(leader)
            self._waiting.push_followers(leader, followers)
        else:
            self._requests[request_id] = members = self._lockstep.add(leader)
            self._waiting.hold(1)
            if len(members) == len(leader.request.group.request_ids):
                self._waiting.push_group(members)

    def schedule(self) -> StepPlan | None:
        """The next step; None when nothing can be launched before a commit, or at all.

        May be called before earlier plans are committed. Every plan must be launched, and committed
        in this order.
        """
        manager = self._block_manager
        num_running = len(self._decoding) + len(self._lockstep.ready)
        has_room = manager.num_free_blocks >= num_running or self._grow_tables()
        draft = StepDraft(self._max_num_batched_tokens)
        self._add_decode_rows(draft)
        for sequence in list(self._prefilling.values()):
            if draft.budget > 0:
                self._add_prefill_row(draft, sequence)
        if has_room:
            self._admit(draft)
        return self._launch(draft) if draft.rows or draft.assigned else None

    def commit(
        self,
        plan: StepPlan,
        token_ids: ListOf[int],
        *,
        should_stop: Callable[[Sequence], bool] | None = None,
        failed: Collection[int] = (),
    ) -> list[Committed]:
        """Take in the oldest launched plan's result: a token per row with ``samples``, in order.

        ``should_stop`` is asked for each new token that did not end its sequence otherwise, and may
        set ``sequence.stop_reason``; None: nobody has such a check. ``failed``: indices into
        ``token_ids`` whose sequence ends with ERROR instead. What comes for sequences that ended
        before (stop, abort) is dropped and not reported.
        """
        launched = self._launched.popleft()
        assert launched.plan is plan, "plans must be committed in the order of their launch"
        committed: list[Committed] = []
        num_sampled, block_size = 0, self._block_size
        running = SequenceStatus.RUNNING  # an Enum member is slow to look up
        for row, sequence in zip(plan.seqs, launched.sequences, strict=True):
            sequence.num_in_flight -= row.num_tokens
            sequence.num_pending -= row.samples
            if sequence.status is running:
                end = row.start + row.num_tokens
                if end // block_size > sequence.num_computed_tokens // block_size:
                    self._block_manager.commit(sequence, end)
                sequence.num_computed_tokens = end
                if row.samples:
                    token = None if num_sampled in failed else token_ids[num_sampled]
                    token = self._take_token(sequence, token, should_stop)
                    committed.append(Committed(sequence, token, num_sampled))
            num_sampled += row.samples
        assert num_sampled == len(token_ids), f"{len(token_ids)} tokens for {num_sampled} rows"
        self._finish_step(launched)
        return committed

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Sequence]:
        """End the unfinished samples of a request now, with reason ABORT or ERROR; returns them.

        Those of its group end with it. An unknown or finished request gives []. What launched steps
        still bring is dropped.
        """
        samples = self._requests.get(request_id, ())
        unfinished = [sequence for sequence in samples if not sequence.is_finished]
        for sequence in unfinished:
            self._end(sequence, reason)
        return unfinished

    def weights_changed(self, epoch: int) -> None:
        """Drop the prefix index; ``epoch`` numbers the new weights.

        Running sequences go on with the K/V they have, which nobody else can find any more.
        """
        self._block_manager.reset_prefix_cache(epoch)
        self._waiting.wake(self._block_manager.is_computing)

    def take_events(self) -> SchedulerEvents:
        """What happened since the last call, for hooks."""
        events = SchedulerEvents(tuple(self._admitted), tuple(self._preempted))
        self._admitted.clear()
        self._preempted.clear()
        return events

    def check(self) -> None:
        """Raise AssertionError when the books contradict each other. For tests."""
        holders = {**self._prefilling, **self._decoding, **self._draining, **self._lockstep.ready}
        sources = [source for step in self._launched for source, _ in step.plan.block_copies]
        self._block_manager.check(holders.values(), sources)
        assert self._num_copy_sources == len(sources), f"{self._num_copy_sources=} {sources=}"
        live = {s for samples in self._requests.values() for s in samples if not s.is_finished}
        slots = {s.slot for s in live if s.status is SequenceStatus.RUNNING}
        assert len(slots) == self._num_running <= self._max_num_seqs, f"{slots=}"
        assert len(slots) + self._slots.num_free == self._max_num_seqs, f"{slots=}"
        assert len(slots) + len(self._waiting) == len(live), f"{len(live)} live"
        assert self._waiting.leader_ids <= {s.sequence_id for s in live}, "waits for one that ended"
        for s in holders.values():
            rows = [r for step in self._launched for r in step.plan.seqs if r[0] == s.sequence_id]
            assert s.num_in_flight == sum(r.num_tokens for r in rows), f"{s.num_in_flight=}"
            assert s.num_pending == sum(r.samples for r in rows), f"{s.num_pending=}"

    # Planning: blocks for those that run, their rows, admissions.

    def _grow_tables(self) -> bool:
        """Give each decoding sequence the block of its next position, by preemption if need be.

        False when blocks were short: then nobody is admitted in this step.
        """
        has_room, manager = True, self._block_manager
        for sequence in [*self._decoding.values(), *self._lockstep.ready.values()]:
            running = self._decoding if sequence.request.group is None else self._lockstep.ready
            num_tokens = len(sequence.token_ids) + sequence.num_pending
            if (
                num_tokens <= len(sequence.block_ids) * self._block_size
                or num_tokens >= sequence.max_total_tokens
                or sequence.sequence_id not in running  # a victim by now
            ):
                continue
            if not manager.can_append(sequence, num_tokens):
                has_room = False
                self._make_room(sequence, num_tokens)
            if sequence.sequence_id in running and manager.can_append(sequence, num_tokens):
                manager.append(sequence, num_tokens)
        return has_room

    def _make_room(self, sequence: Sequence, num_tokens: int) -> None:
        """Preempt until the sequence can grow or is a victim itself, but wait for what drains."""
        while not self._block_manager.can_append(sequence, num_tokens):
            if self._draining or self._num_copy_sources:
                return
            victims = self._lockstep.together(self._choose_victim(sequence))
            self._preempt([s for s in victims if s.status is SequenceStatus.RUNNING])
            if sequence in victims:
                return

    def _choose_victim(self, needer: Sequence) -> Sequence:
        """The least important; of those the one with the least work to lose; of those the latest.

        The needer is a candidate, so nobody more important is chosen for it. The one with the most
        to lose is never chosen while another runs, so it gets through.
        """
        manager = self._block_manager
        running = (self._prefilling, self._decoding, self._lockstep.ready)
        candidates = [
            s
            for s in chain.from_iterable(sequences.values() for sequences in running)
            if s is needer or manager.has_private_blocks(s)
        ]
        work = {s: sum(map(_lost_work, self._lockstep.together(s))) for s in candidates}
        return max(
            candidates, key=lambda s: (s.request.priority, -work[s], s.arrival, s.sequence_id)
        )

    def _preempt(self, victims: list[Sequence]) -> None:
        """Take one sequence, or the running members of a group, out of the running ones."""
        is_in_flight = any(victim.num_in_flight for victim in victims)
        for victim in victims:
            self._remove(victim)
            if is_in_flight:
                victim.is_preempting = True
                self._draining[victim.sequence_id] = victim
        if not is_in_flight:
            self._requeue(victims)

    def _remove(self, sequence: Sequence) -> None:
        for running in (self._prefilling, self._decoding, self._lockstep.ready):
            running.pop(sequence.sequence_id, None)

    def _add_decode_rows(self, draft: StepDraft) -> None:
        """One token for each decoding sequence, unless it is certain to end first or lacks a block.

        Written for speed: with 256 rows this loop is most of the cost of a step.
        """
        rows, sequences, block_size = draft.rows, draft.sequences, self._block_size
        for sequence in self._decoding.values():
            tokens, block_ids = sequence.token_ids, sequence.block_ids
            pending = sequence.num_pending
            num_tokens = len(tokens) + pending
            if num_tokens >= sequence.max_total_tokens:
                continue
            if pending and sequence.grammar is not None:
                continue  # what may come next depends on the token that is not known yet
            if num_tokens > len(block_ids) * block_size:
                if not self._block_manager.can_append(sequence, num_tokens):
                    continue
                self._block_manager.append(sequence, num_tokens)
            new_block_ids: tuple[int, ...] = ()
            if sequence.num_sent_blocks != len(block_ids):
                new_block_ids = tuple(block_ids[sequence.num_sent_blocks :])
                sequence.num_sent_blocks = len(block_ids)
            sequence.num_in_flight += 1
            sequence.num_pending = pending + 1
            sequences.append(sequence)
            rows.append(
                ScheduledSeq(
                    sequence.sequence_id,
                    sequence.slot,
                    sequence.generation,
                    num_tokens - 1,
                    1,
                    () if pending else (tokens[-1],),
                    True,
                    new_block_ids,
                )
            )
        self._add_group_rows(draft)
        draft.num_decode_seqs = len(rows)
        draft.budget -= len(rows)

    def _add_group_rows(self, draft: StepDraft) -> None:
        """One token for each member of the groups that are complete and have the blocks for it."""
        manager = self._block_manager
        for members in self._lockstep.complete_groups():
            for sequence in members:
                if manager.can_append(sequence, sequence.num_tokens):
                    manager.append(sequence, sequence.num_tokens)
            num_covered = sum(len(s.block_ids) * self._block_size >= s.num_tokens for s in members)
            if num_covered == len(members):
                draft.rows += [row_of(s, s.num_tokens - 1, s.num_tokens) for s in members]
                draft.sequences += members

    def _add_prefill_row(self, draft: StepDraft, sequence: Sequence) -> None:
        """The next chunk of a sequence; after the last one it decodes.

        A member of a group keeps its last token for the step that all run together.
        """
        is_member = sequence.request.group is not None
        start, last = sequence.num_computed_tokens + sequence.num_in_flight, sequence.num_tokens
        last -= is_member
        most = self._long_prefill if draft.num_decode_seqs else draft.budget
        end = min(start + min(most, draft.budget), last)
        if end == last:
            del self._prefilling[sequence.sequence_id]
            decoding = self._lockstep.ready if is_member else self._decoding
            decoding[sequence.sequence_id] = sequence
        if start == end:
            return
        self._block_manager.mark_computing(sequence, start, end)
        draft.rows.append(row_of(sequence, start, end))
        draft.sequences.append(sequence)
        draft.budget -= end - start
        if sequence.num_preemptions:
            self._stats.num_recomputed_tokens += end - start
        else:
            self._stats.num_prefill_tokens += end - start

    def _admit(self, draft: StepDraft) -> None:
        """Start waiting sequences in their order until one does not fit.

        Those whose next block a launched step is computing are put aside, and hinder nobody; but
        for a group that has begun to join everybody waits.
        """
        while draft.budget > 0 and self._num_running < self._max_num_seqs:
            sequence = self._waiting.peek()
            if sequence is None or sequence.sequence_id == self._blocked_id:
                return
            prefix = draft.original(self._find_prefix(sequence))
            if prefix.is_computing and self._waiting.is_joining:
                return
            if prefix.is_computing:
                self._waiting.park(sequence.block_hashes[len(prefix.block_ids)])
                continue
            if not self._fits(sequence, prefix):
                # The source of the copy may itself be the last free block: do without.
                num_shared_tokens = len(prefix.block_ids) * self._block_size
                prefix = replace(prefix, copy_from=None, num_tokens=num_shared_tokens)
                if not self._fits(sequence, prefix):
                    self._blocked_id = sequence.sequence_id
                    return
            self._waiting.pop()
            self._start(draft, sequence, prefix)
            self._add_prefill_row(draft, sequence)

    def _find_prefix(self, sequence: Sequence) -> CachedPrefix:
        """What need not be computed: known from sample 0 of the request, or from the index."""
        if wants_prompt_logprobs(sequence):
            return CachedPrefix()
        if sequence.index > 0 and sequence.num_output_tokens == 0:
            leader = self._requests[sequence.request.request_id][0]
            prefix = self._block_manager.fork_prefix(leader, sequence.num_prompt_tokens - 1)
            if prefix is not None:
                return prefix
        return self._block_manager.lookup(sequence)

    def _fits(self, sequence: Sequence, prefix: CachedPrefix) -> bool:
        manager, is_joining = self._block_manager, self._waiting.is_joining
        num_needed = manager.num_new_blocks(sequence, prefix, sequence.num_tokens)
        if sequence.request.group is not None and not is_joining:  # all of it or none
            members = self._lockstep.together(sequence)
            if self._num_running + len(members) > self._max_num_seqs:
                return False
            num_needed = max(num_needed, num_blocks_together(members, manager))
        num_reserved = self._num_watermark_blocks if self._num_running and not is_joining else 0
        return num_needed + num_reserved <= manager.num_free_blocks

    def _start(self, draft: StepDraft, sequence: Sequence, prefix: CachedPrefix) -> None:
        block_copy = self._block_manager.allocate(sequence, prefix, sequence.num_tokens)
        if block_copy is not None:
            draft.block_copies.append(block_copy)
            self._num_copy_sources += 1
        sequence.status = SequenceStatus.RUNNING
        sequence.slot, sequence.generation = self._slots.acquire()
        sequence.num_cached_tokens = sequence.num_computed_tokens = prefix.num_tokens
        self._num_running += 1
        self._prefilling[sequence.sequence_id] = sequence
        if sequence.num_preemptions:
            self._stats.num_recached_tokens += prefix.num_tokens
        else:
            self._stats.num_cached_tokens += prefix.num_tokens
            self._admitted.append(Admission(sequence, prefix.num_tokens))
        draft.assigned.append(assignment_of(sequence))

    def _launch(self, draft: StepDraft) -> StepPlan:
        stats = self._stats
        plan = draft.plan(stats.num_steps, self._released_slots)
        self._released_slots.clear()
        self._launched.append(_Launched(plan, draft.sequences))
        stats.num_steps += 1
        stats.num_decode_tokens += plan.num_decode_seqs
        stats.peak_num_seqs = max(stats.peak_num_seqs, len(plan.seqs))
        return plan

    # Committing: progress, tokens, endings.

    def _take_token(
        self,
        sequence: Sequence,
        token: int | None,
        should_stop: Callable[[Sequence], bool] | None,
    ) -> int | None:
        """Append a token and end the sequence if that was its last; gives what was appended.

        None stands for a row that failed.
        """
        if token is None:
            self._end(sequence, FinishReason.ERROR)
            return None
        if len(sequence.token_ids) >= sequence.max_total_tokens:
            self._end(sequence, FinishReason.LENGTH)  # only logprobs of its prompt were wanted
            return None
        sequence.token_ids.append(token)
        self._stats.num_generated_tokens += 1
        sampling = sequence.request.sampling
        if token in self._eos_token_ids and not sampling.ignore_eos:
            self._end(sequence, FinishReason.STOP)
        elif token in sampling.stop_token_ids:
            sequence.stop_reason = token
            self._end(sequence, FinishReason.STOP)
        elif should_stop is not None and should_stop(sequence):
            self._end(sequence, FinishReason.STOP)
        elif len(sequence.token_ids) >= sequence.max_total_tokens:
            self._end(sequence, FinishReason.LENGTH)
        return token

    def _finish_step(self, launched: _Launched) -> None:
        """What the whole step kept from others: marked blocks, prompts of samples, copy sources."""
        plan, sequences = launched
        manager, num_decode = self._block_manager, plan.num_decode_seqs
        for row, sequence in zip(plan.seqs[num_decode:], sequences[num_decode:], strict=True):
            manager.unmark_computing(sequence, row.start, row.end)
            if sequence.index == 0 and row.end >= sequence.num_prompt_tokens - 1:
                self._waiting.release_followers(sequence)
        for source, _ in plan.block_copies:
            manager.unhold(source)
            self._blocked_id = -1
            self._num_copy_sources -= 1
        if self._draining:
            for sequence in sequences:
                if sequence.num_in_flight == 0 and sequence.sequence_id in self._draining:
                    self._end_draining(sequence)
        self._waiting.wake(manager.is_computing)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """The sequence is finished; what launched steps still bring for it will be dropped."""
        was_waiting = sequence.status is SequenceStatus.WAITING
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        if was_waiting:
            self._waiting.discard()
        else:
            self._stop_running(sequence)
        self._waiting.release_followers(sequence)
        samples = self._requests[sequence.request.request_id]
        if all(sample.is_finished for sample in samples):
            self._lockstep.forget(sequence.request.group)
            for sample in samples:
                self._requests.pop(sample.request.request_id, None)

    def _stop_running(self, sequence: Sequence) -> None:
        """Take the slot back at once, and the blocks when no launched step can write them."""
        self._remove(sequence)
        self._slots.release(sequence.slot)
        self._released_slots.append(sequence.slot)
        self._num_running -= 1
        sequence.is_preempting = False
        self._blocked_id = -1
        if sequence.num_in_flight:
            self._draining[sequence.sequence_id] = sequence
        else:
            self._draining.pop(sequence.sequence_id, None)
            self._block_manager.free(sequence)

    def _requeue(self, victims: list[Sequence]) -> None:
        """Victims without launched steps wait again, in the order of their arrival."""
        for victim in victims:
            self._stop_running(victim)
            victim.status = SequenceStatus.WAITING
            victim.slot = victim.generation = -1
            victim.num_computed_tokens = victim.num_cached_tokens = victim.num_sent_blocks = 0
            victim.num_preemptions += 1
            self._stats.num_preemptions += 1
            self._preempted.append(victim)
        if victims[0].request.group is None:
            self._waiting.push(victims[0])
        else:
            self._waiting.hold(len(victims))
            self._waiting.push_group(self._lockstep.together(victims[0]))

    def _end_draining(self, sequence: Sequence) -> None:
        if sequence.is_preempting:
            together = self._lockstep.together(sequence)
            victims = [s for s in together if s.status is SequenceStatus.RUNNING]
            if not any(victim.num_in_flight for victim in victims):
                self._requeue(victims)
        else:
            self._blocked_id = -1
            del self._draining[sequence.sequence_id]
            self._block_manager.free(sequence)

    def _check_length(self, sequence: Sequence) -> None:
        num_total, manager = sequence.max_total_tokens, self._block_manager
        # K/V of the last token is never computed, unless it belongs to the prompt.
        num_blocks = manager.num_blocks_for(max(num_total - 1, sequence.num_prompt_tokens))
        if num_blocks > manager.num_blocks or num_total > self._max_model_len:
            raise RequestTooLong(
                f"request {sequence.request.request_id}: {num_total} tokens need {num_blocks} "
                f"blocks of {self._block_size}: expected at most {manager.num_blocks} blocks and "
                f"{self._max_model_len} tokens. Shorten the prompt or lower max_tokens."
            )


def _lost_work(sequence: Sequence) -> int:
    """Positions that a preemption throws away; what was cached before is likely to be so again."""
    return sequence.num_computed_tokens + sequence.num_in_flight - sequence.num_cached_tokens
