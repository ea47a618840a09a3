"""Any mix of submissions, aborts, priorities, failures and weight changes, on any small pool, with
results up to two steps late: every request ends once, with the tokens of its solo run.

`SimulatedDevice` is the oracle: it reads K/V through the block tables, so it notices every stale,
foreign or missing slot, and knows nothing of the scheduler's books.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoserve_core.block_manager import BlockManager
from nanoserve_core.errors import RequestTooLong
from nanoserve_core.request import FinishReason, Sequence, SequenceStatus
from nanoserve_core.scheduler import Scheduler
from nanoserve_core.validation import RequestValidator
from tests.nanoserve_core.simulated_device import (
    EOS,
    VOCAB_SIZE,
    EngineLoop,
    RequestFactory,
    SimulatedModel,
)

if TYPE_CHECKING:
    from nanoserve_core.plan import StepPlan
    from nanoserve_core.request import Request
    from nanoserve_core.request_group import RequestGroup

FAMILIES = ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4], [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4])
WEAK_HASHES = {
    "xxh64": lambda data: bytes([sum(data) % 251]),
    "none": lambda _: b"",
}
"""Everything collides now and then, or always: hits may be lost, never be wrong."""

prompts = st.builds(
    lambda family, length, tail: [*FAMILIES[family][:length], *tail],
    family=st.sampled_from([0, 0, 1]),
    length=st.integers(0, 16),
    tail=st.lists(st.integers(1, 6), max_size=3),
).filter(bool)


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler with a simulated device; rules are what an engine and its callers may do."""

    @initialize(
        block_size=st.integers(1, 5),
        num_positions=st.sampled_from([12, 20, 24, 32, 64]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 24),
        max_in_flight=st.integers(1, 3),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        caching=st.sampled_from(["strong", "strong", "strong", "xxh64", "none", "off"]),
    )
    def start(
        self,
        block_size: int,
        num_positions: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_in_flight: int,
        watermark: float,
        caching: str,
    ) -> None:
        num_blocks = num_positions // block_size  # few: most runs are short of blocks
        self.blocks = make_block_manager(num_blocks, block_size, caching)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=64,
            eos_token_ids=frozenset({EOS}),
            watermark=watermark,
        )
        model = SimulatedModel(eos_every=20)
        self.loop = EngineLoop(self.scheduler, block_manager=self.blocks, model=model)
        self.device = self.loop.device
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_in_flight = max_in_flight
        self.new_request = RequestFactory()
        self.sequences: dict[int, Sequence] = {}
        self.mixed: set[int] = set()
        """Sequences whose tokens come from more than one set of weights."""
        self.logprob_positions: dict[int, set[int]] = {}
        """Positions of the prompt whose logprobs were reported."""
        self.num_ends: Counter[int] = Counter()
        self.num_admissions: Counter[int] = Counter()
        self.num_preemptions: Counter[int] = Counter()

    @rule(
        prompt=prompts,
        max_tokens=st.sampled_from([1, 4, 10, 20]),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        cache_salt=st.sampled_from([None, None, None, "a"]),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (), (5,)]),
        stop_after=st.sampled_from([None, None, 3]),
    )
    def submit(self, prompt: list[int], max_tokens: int, n: int, **options: object) -> None:
        self._add(self.new_request(prompt, max_tokens, n=n, **options))  # type: ignore[arg-type]  # as drawn

    @rule(
        some_prompts=st.lists(prompts, min_size=1, max_size=4),
        num_copies=st.sampled_from([1, 1, 2]),
        max_tokens=st.sampled_from([1, 4, 10]),
        priority=st.sampled_from([0, 0, 1]),
        ignore_eos=st.booleans(),
        stop_after=st.sampled_from([None, None, 3]),
        num_submitted=st.sampled_from([8, 8, 8, 1]),
    )
    def submit_group(
        self,
        some_prompts: list[list[int]],
        num_copies: int,
        max_tokens: int,
        num_submitted: int,
        **options: object,
    ) -> None:
        """``num_submitted``: sometimes a part only, which waits until it is aborted."""
        members = self.new_request.group(some_prompts * num_copies, max_tokens, **options)
        submitted = members[:num_submitted] if self._can_run(members[0][0].request) else []
        self.new_request.num_sequences -= len(members) - len(submitted)
        for (sequence,) in submitted:
            self.scheduler.add([sequence])
            self.sequences[sequence.sequence_id] = sequence

    @rule(prompt=prompts, max_tokens=st.integers(0, 3), n=st.sampled_from([1, 2]))
    def submit_with_prompt_logprobs(self, prompt: list[int], max_tokens: int, n: int) -> None:
        self._add(self.new_request(prompt, max_tokens, n=n, prompt_logprobs=1))

    @precondition(lambda self: self.sequences)
    @rule(number=st.integers(0), tail=st.lists(st.integers(1, 6), min_size=1, max_size=4))
    def submit_next_turn(self, number: int, tail: list[int]) -> None:
        earlier = self.sequences[number % len(self.sequences)]
        self._add(self.new_request([*earlier.token_ids, *tail], 4))

    @precondition(lambda self: self.sequences)
    @rule(number=st.integers(0), reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]))
    def abort(self, number: int, reason: FinishReason) -> None:
        sequence = self.sequences[number % len(self.sequences)]

        for ended in self.scheduler.abort(sequence.request.request_id, reason):
            assert ended.finish_reason is reason
            self._note_end(ended)

        assert self.scheduler.abort(sequence.request.request_id) == []

    @rule()
    def change_weights(self) -> None:
        for sequence in self.sequences.values():
            if sequence.status is SequenceStatus.RUNNING or sequence.num_output_tokens:
                self.mixed.add(sequence.sequence_id)
        self.device.change_weights(self.device.model.weights + 1)

        self.scheduler.weights_changed(self.device.model.weights)

        assert self.blocks.num_cached_blocks == 0
        assert all(self.blocks.prefix_hash(i) is None for i in range(self.blocks.num_blocks))

    @precondition(lambda self: len(self.device.in_flight) < self.max_in_flight)
    @rule()
    def launch(self) -> None:
        plan = self.loop.launch()

        if plan is None:
            assert self.device.in_flight or self._only_parts_of_groups_are_left(), "stuck"
        else:
            self._check_plan(plan)
        self._take_events()

    @precondition(lambda self: self.device.in_flight)
    @rule(failed=st.sampled_from([None, None, None, None, 0, 1]))
    def collect(self, failed: int | None) -> None:
        before = {i: s.num_output_tokens for i, s in self.sequences.items()}

        committed = self.loop.commit(failed=() if failed is None else (failed,))

        for sequence, token_id, row in committed:
            assert row != failed or sequence.finish_reason is FinishReason.ERROR
            num_new = sequence.num_output_tokens - before[sequence.sequence_id]
            assert num_new == (token_id is not None)
            if sequence.is_finished and sequence not in self.loop.aborted:
                self._note_end(sequence)
        for sequence in self.loop.aborted:
            self._note_end(sequence)
        self.loop.aborted.clear()
        self._take_events()

    @rule(num_steps=st.integers(1, 8))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while len(self.device.in_flight) < self.max_in_flight:
                num_in_flight = len(self.device.in_flight)
                self.launch()
                if len(self.device.in_flight) == num_in_flight:
                    break
            if self.device.in_flight:
                self.collect(None)
            self.books_agree()

    @invariant()
    def books_agree(self) -> None:
        self.scheduler.check()
        running = [s for s in self.sequences.values() if s.status is SequenceStatus.RUNNING]
        assert self.scheduler.num_running == len(running) <= self.max_num_seqs
        waiting = [s for s in self.sequences.values() if s.status is SequenceStatus.WAITING]
        assert self.scheduler.num_waiting == len(waiting)

    @invariant()
    def launched_steps_own_what_they_write(self) -> None:
        tables = Counter(chain.from_iterable(s.block_ids for s in self.sequences.values()))
        for launched in self.device.in_flight:
            for block_id, sequence_id in launched.written.items():
                assert block_id in self.sequences[sequence_id].block_ids, "written, but given away"
                assert tables[block_id] == 1, "written, but shared"
                assert self.blocks.prefix_hash(block_id) is None, "written, but registered"
            for source, _ in launched.plan.block_copies:
                assert self.blocks.ref_count(source) > 0, "copied, but free"

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for group in {s.request.group: s for s in self._parts_of_groups()}.values():
            self.abort(group.sequence_id, FinishReason.ABORT)
        for _ in range(3_000):
            if not self.scheduler.has_unfinished and not self.device.in_flight:
                break
            self.run(1)
        assert not self.scheduler.has_unfinished, "a request never ends"
        assert self.num_ends == Counter(self.sequences.keys()), "one end for each"
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        self.blocks.check([])
        for sequence in self.sequences.values():
            number = sequence.sequence_id
            assert self.num_preemptions[number] == sequence.num_preemptions
            assert self.num_admissions[number] <= 1

    def _add(self, samples: list[Sequence]) -> None:
        num_tokens = samples[0].max_total_tokens
        num_positions = max(samples[0].num_prompt_tokens, num_tokens - 1)
        if num_positions > self.blocks.num_blocks * self.blocks.block_size or num_tokens > 64:
            with pytest.raises(RequestTooLong):
                self.scheduler.add(samples)
            self.new_request.num_sequences -= len(samples)
            return
        self.scheduler.add(samples)
        self.sequences.update((s.sequence_id, s) for s in samples)

    def _can_run(self, request: Request) -> bool:
        validate = RequestValidator(
            vocab_size=VOCAB_SIZE,
            max_model_len=64,
            num_blocks=self.blocks.num_blocks,
            block_size=self.blocks.block_size,
            max_num_seqs=min(self.max_num_seqs, self.max_num_batched_tokens),
        )
        try:
            validate(request)
        except RequestTooLong:
            return False
        return True

    def _members(self, group: RequestGroup) -> list[Sequence]:
        """Unfinished members that were submitted."""
        return [s for s in self._unfinished() if s.request.group is group]

    def _unfinished(self) -> list[Sequence]:
        return [s for s in self.sequences.values() if not s.is_finished]

    def _parts_of_groups(self) -> list[Sequence]:
        """Unfinished members of groups of which not all was submitted."""
        counts = Counter(s.request.group for s in self.sequences.values())
        return [
            s
            for s in self._unfinished()
            if (group := s.request.group) and counts[group] < len(group.request_ids)
        ]

    def _only_parts_of_groups_are_left(self) -> bool:
        return len(self._parts_of_groups()) == len(self._unfinished())

    def _check_groups(self, plan: StepPlan) -> None:
        """A group samples with all its members or not at all, and one step at a time."""
        sampled = {row.sequence_id for row in plan.seqs if row.samples}
        for group in {self.sequences[i].request.group for i in sampled} - {None}:
            assert {s.sequence_id for s in self._members(group)} <= sampled, "one is left out"
            assert all(s.num_pending == 1 for s in self._members(group)), "a token is pending"

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.max_num_batched_tokens
        ids = [row.sequence_id for row in plan.seqs]
        assert len(set(ids)) == len(ids), "a sequence twice in a step"
        self._check_groups(plan)
        for row in plan.seqs:
            sequence = self.sequences[row.sequence_id]
            assert row.end <= sequence.max_total_tokens, "runs past its certain end"
            reported = self.logprob_positions.setdefault(row.sequence_id, set())
            reported.update(range(row.start, row.start + row.num_prompt_logprobs))

    def _take_events(self) -> None:
        events = self.scheduler.take_events()
        self.num_admissions.update(a.sequence.sequence_id for a in events.admitted)
        self.num_preemptions.update(s.sequence_id for s in events.preempted)

    def _note_end(self, sequence: Sequence) -> None:
        self.num_ends[sequence.sequence_id] += 1
        if sequence.sequence_id in self.mixed:
            return
        tokens, reason = self.device.model.solo_run(sequence)
        if sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert sequence.token_ids == tokens[: sequence.num_tokens]
        else:
            assert (sequence.token_ids, sequence.finish_reason) == (tokens, reason)
            self._check_prompt_logprobs(sequence)

    def _check_prompt_logprobs(self, sequence: Sequence) -> None:
        is_wanted = sequence.request.sampling.prompt_logprobs is not None and sequence.index == 0
        wanted = range(sequence.num_prompt_tokens - 1) if is_wanted else ()
        assert self.logprob_positions[sequence.sequence_id] == set(wanted)


def make_block_manager(num_blocks: int, block_size: int, caching: str) -> BlockManager:
    """A manager with a good hash, a weak one, or without prefix caching."""
    if caching in WEAK_HASHES:
        with patch("nanoserve_core.prefix_index.HASH_FUNCTIONS", WEAK_HASHES):
            return BlockManager(num_blocks, block_size, hash_algo=caching)
    return BlockManager(num_blocks, block_size, enable_prefix_caching=caching != "off")


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=50)


@dataclass(frozen=True)
class Load:
    """Requests that together need several times the pool, and how they are served."""

    requests: list[tuple[int, int, int, int, bool]]
    """(length of the prompt, max_tokens, n, priority, ignore_eos)"""
    block_size: int
    num_spare_blocks: int
    max_num_batched_tokens: int
    run_ahead: int
    abort_at: int
    """Step before which the first request is aborted."""


loads = st.builds(
    Load,
    requests=st.lists(
        st.tuples(
            st.integers(1, 7),
            st.sampled_from([5, 12, 16]),
            st.sampled_from([1, 1, 3]),
            st.sampled_from([0, 0, 0, 1]),
            st.booleans(),
        ),
        min_size=2,
        max_size=6,
    ),
    block_size=st.integers(1, 4),
    num_spare_blocks=st.integers(0, 4),
    max_num_batched_tokens=st.integers(3, 16),
    run_ahead=st.integers(0, 2),
    abort_at=st.integers(0, 40),
)


@given(loads)
def test_requests_that_outgrow_the_pool_together_end_as_if_alone(load: Load) -> None:
    new_request = RequestFactory()
    groups = [
        new_request(FAMILIES[0][:length], max_tokens, n=n, priority=priority, ignore_eos=ignore_eos)
        for length, max_tokens, n, priority, ignore_eos in load.requests
    ]
    longest = max(group[0].max_total_tokens for group in groups)
    num_blocks = -(-(longest - 1) // load.block_size) + load.num_spare_blocks
    manager = make_block_manager(num_blocks, load.block_size, "strong")
    scheduler = Scheduler(
        manager,
        max_num_seqs=6,
        max_num_batched_tokens=load.max_num_batched_tokens,
        max_model_len=64,
        eos_token_ids=frozenset({EOS}),
    )
    model = SimulatedModel(eos_every=20)
    loop = EngineLoop(scheduler, block_manager=manager, model=model, run_ahead=load.run_ahead)
    for group in groups:
        scheduler.add(group)

    for _ in range(load.abort_at):
        loop.step()
        scheduler.check()
    aborted = scheduler.abort(groups[0][0].request.request_id)
    loop.run()

    for sequence in chain.from_iterable(groups):
        tokens, reason = model.solo_run(sequence)
        if sequence in aborted:
            assert sequence.token_ids == tokens[: sequence.num_tokens]
        else:
            assert (sequence.token_ids, sequence.finish_reason) == (tokens, reason)


@dataclass(frozen=True)
class GroupLoad:
    """Groups, and requests of their own, that together need several times the pool."""

    sizes: list[tuple[int, int, int, int, bool]]
    """(members, length of the first prompt, max_tokens, priority, equal prompts); no group if 0."""
    block_size: int
    num_spare_blocks: int
    max_num_batched_tokens: int
    run_ahead: int
    abort_at: int
    """Step before which a member of the first is aborted."""
    caching: str
    watermark: float


group_loads = st.builds(
    GroupLoad,
    sizes=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 1, 2, 3, 5]),
            st.integers(1, 7),
            st.sampled_from([1, 5, 9]),
            st.sampled_from([0, 0, 0, 1]),
            st.booleans(),
        ),
        min_size=2,
        max_size=6,
    ),
    block_size=st.integers(1, 4),
    num_spare_blocks=st.integers(0, 4),
    max_num_batched_tokens=st.integers(5, 16),
    run_ahead=st.integers(0, 2),
    abort_at=st.integers(0, 40),
    caching=st.sampled_from(["strong", "strong", "xxh64", "off"]),
    watermark=st.sampled_from([0.01, 0.3]),
)


@given(group_loads)
def test_groups_that_outgrow_the_pool_run_in_lockstep_and_end_as_if_alone(load: GroupLoad) -> None:
    new_request = RequestFactory()
    requests = [
        new_request.group(
            [FAMILIES[0][: length + (0 if equal else i)] for i in range(max(size, 1))],
            max_tokens,
            priority=priority,
            ignore_eos=False,
        )
        if size
        else [new_request(FAMILIES[0][:length], max_tokens, priority=priority)]
        for size, length, max_tokens, priority, equal in load.sizes
    ]
    num_blocks = load.num_spare_blocks + max(
        sum(-(-max(s.max_total_tokens - 1, s.num_prompt_tokens) // load.block_size) for (s,) in r)
        for r in requests
    )
    manager = make_block_manager(num_blocks, load.block_size, load.caching)
    scheduler = Scheduler(
        manager,
        max_num_seqs=5,
        max_num_batched_tokens=load.max_num_batched_tokens,
        max_model_len=64,
        eos_token_ids=frozenset({EOS}),
        watermark=load.watermark,
    )
    model = SimulatedModel(eos_every=20)
    loop = EngineLoop(scheduler, block_manager=manager, model=model, run_ahead=load.run_ahead)
    for samples in chain.from_iterable(requests):
        scheduler.add(samples)

    for _ in range(load.abort_at):
        loop.step()
        scheduler.check()
    aborted = scheduler.abort(requests[0][-1][0].request.request_id)
    loop.run()

    assert manager.num_free_blocks == num_blocks
    for (sequence,) in chain.from_iterable(requests):
        tokens, reason = model.solo_run(sequence)
        if sequence in aborted:
            assert sequence.token_ids == tokens[: sequence.num_tokens]
        else:
            assert (sequence.token_ids, sequence.finish_reason) == (tokens, reason)
    for members in requests:
        if members[0][0].request.group is not None:
            assert_in_lockstep(loop, [sequence for (sequence,) in members])


def assert_in_lockstep(loop: EngineLoop, members: list[Sequence]) -> None:
    """Token number k of all members was sampled in the same step."""
    ids = {s.sequence_id: s for s in members}
    samplings = [
        {row.sequence_id: row.end for row in plan.seqs if row.samples and row.sequence_id in ids}
        for plan in loop.plans
    ]
    steps = [step for step in samplings if step]
    for number, step in enumerate(steps):
        for sequence_id, end in step.items():
            assert end - ids[sequence_id].num_prompt_tokens == number, "a token in another step"
        alive = {s.sequence_id for s in members if s.num_output_tokens > number}
        assert alive <= step.keys(), "one is left out"
