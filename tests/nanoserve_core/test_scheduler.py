"""Admission, chunks, decoding, preemption, samples and endings, on examples checked by hand."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest

from nanoserve_core.block_manager import BlockManager
from nanoserve_core.errors import RequestTooLong
from nanoserve_core.request import FinishReason, SequenceStatus
from nanoserve_core.scheduler import Scheduler
from tests.nanoserve_core.simulated_device import (
    EOS,
    EngineLoop,
    RequestFactory,
    SimulatedModel,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanoserve_core.plan import StepPlan
    from nanoserve_core.request import Request, Sequence

WAITING, RUNNING, FINISHED = SequenceStatus


def make_loop(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    run_ahead: int = 0,
    caching: bool = True,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    watermark: float = 0.0,
    long_prefill: int = 0,
    eos_every: int = 7,
) -> EngineLoop:
    """A scheduler with a simulated device."""
    manager = BlockManager(num_blocks, block_size, enable_prefix_caching=caching)
    scheduler = Scheduler(
        manager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=128,
        eos_token_ids=frozenset({EOS}),
        watermark=watermark,
        long_prefill_token_threshold=long_prefill,
    )
    model = SimulatedModel(eos_every=eos_every)
    return EngineLoop(scheduler, block_manager=manager, model=model, run_ahead=run_ahead)


@pytest.fixture
def new_request() -> RequestFactory:
    """Makes requests, numbered from 0; they ignore end-of-sequence unless told otherwise."""
    return RequestFactory()


def add(loop: EngineLoop, *groups: list[Sequence]) -> None:
    """Queue requests."""
    for group in groups:
        loop.scheduler.add(group)


def step(loop: EngineLoop) -> StepPlan:
    """Launch and commit one step."""
    plan = loop.launch()
    assert plan is not None, "nothing to run"
    loop.commit()
    loop.scheduler.check()
    return plan


def ranges(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(sequence id, start, end) of each row."""
    assert plan is not None, "nothing to run"
    return [(row.sequence_id, row.start, row.end) for row in plan.seqs]


def num_free_blocks(loop: EngineLoop) -> int:
    """Blocks in no table of any sequence, counted by the manager."""
    return loop.block_manager.num_free_blocks


def assert_solo(loop: EngineLoop, sequences: Iterable[Sequence]) -> None:
    """Each sequence ended with the tokens, and for the reason, of a run alone."""
    for sequence in sequences:
        expected = loop.device.model.solo_run(sequence)
        assert (sequence.token_ids, sequence.finish_reason) == expected


def test_a_sequence_waits_runs_and_finishes(new_request: RequestFactory) -> None:
    loop, (sequence,) = make_loop(), new_request(range(6), max_tokens=2)
    seen = [sequence.status]
    add(loop, [sequence])
    seen.append(sequence.status)

    for _ in range(2):
        step(loop)
        seen.append(sequence.status)

    assert seen == [WAITING, WAITING, RUNNING, FINISHED]
    assert sequence.finish_reason is FinishReason.LENGTH
    assert not loop.scheduler.has_unfinished
    assert num_free_blocks(loop) == 64


def test_a_recomputed_sequence_fills_registers_and_grows_block_by_block(
    new_request: RequestFactory,
) -> None:
    # 8 prompt tokens and 2 that were generated before a preemption, in a pool of 5 blocks of 4.
    loop, (sequence,) = make_loop(5), new_request(range(8), max_tokens=12)
    sequence.token_ids.extend([8, 9])
    add(loop, [sequence])
    manager = loop.block_manager
    seen: dict[int, tuple[list[int], int]] = {}

    while sequence.num_tokens < 18:
        step(loop)
        seen[sequence.num_tokens] = (list(sequence.block_ids), manager.num_cached_blocks)

    assert seen == {
        11: ([0, 1, 2], 2),
        12: ([0, 1, 2], 2),
        13: ([0, 1, 2], 3),
        14: ([0, 1, 2, 3], 3),
        15: ([0, 1, 2, 3], 3),
        16: ([0, 1, 2, 3], 3),
        17: ([0, 1, 2, 3], 4),
        18: ([0, 1, 2, 3, 4], 4),
    }


def test_plans_carry_the_tokens_the_blocks_and_the_slot(new_request: RequestFactory) -> None:
    loop, (sequence,) = make_loop(), new_request(range(7), max_tokens=4)
    add(loop, [sequence])

    first, second, third = step(loop), step(loop), step(loop)

    assert first.seqs[0].token_ids == (0, 1, 2, 3, 4, 5, 6)
    assert first.seqs[0].new_block_ids == (0, 1)
    assert first.num_decode_seqs == 0
    assert [(a.slot, a.generation, a.token_ids) for a in first.assigned] == [
        (0, 0, tuple(range(7)))
    ]
    assert second.seqs[0].token_ids == (sequence.token_ids[7],)
    assert second.num_decode_seqs == 1
    assert [row.seqs[0].new_block_ids for row in (second, third)] == [(), (2,)]
    assert second.assigned == third.assigned == ()


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_any_block_size_gives_the_same_tokens(block_size: int, new_request: RequestFactory) -> None:
    loop = make_loop(32, block_size)
    groups = [new_request([1, 2, 3, 4, 5], 9) for _ in range(2)]
    add(loop, *groups)

    loop.run()

    assert_solo(loop, [group[0] for group in groups])


def test_a_sequence_ends_at_an_end_of_sequence_id_unless_it_ignores_it(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(eos_every=2)
    (ends,), (goes_on,) = new_request([1], 20, ignore_eos=False), new_request([1], 20)
    add(loop, [ends], [goes_on])

    loop.run()

    assert (ends.token_ids[-1], ends.finish_reason, ends.stop_reason) == (EOS, "stop", None)
    assert ends.num_output_tokens < 20
    assert (goes_on.num_output_tokens, goes_on.finish_reason) == (20, "length")
    assert EOS in goes_on.token_ids


def test_a_stop_id_ends_a_sequence_and_is_named(new_request: RequestFactory) -> None:
    loop = make_loop()
    (alone,) = new_request([1, 2], 20)
    stop = loop.device.model.solo_run(alone)[0][5]
    (sequence,) = new_request([1, 2], 20, stop_token_ids=(99, stop))
    add(loop, [sequence])

    loop.run()

    assert (sequence.token_ids[-1], sequence.finish_reason) == (stop, "stop")
    assert sequence.stop_reason == stop


def test_the_requests_own_check_ends_it(new_request: RequestFactory) -> None:
    loop = make_loop()
    (sequence,) = new_request([1, 2], 20, stop_after=3)
    add(loop, [sequence])

    loop.run()

    assert (sequence.num_output_tokens, sequence.finish_reason) == (3, "stop")


def test_a_failed_row_ends_its_sequence_alone(new_request: RequestFactory) -> None:
    loop = make_loop()
    first, second = new_request([1, 2], 3), new_request([3, 4], 3)
    add(loop, first, second)
    loop.launch()

    committed = loop.commit(failed={0})
    loop.run()

    assert [(c.sequence.sequence_id, c.row) for c in committed] == [(0, 0), (1, 1)]
    assert (committed[0].token_id, first[0].finish_reason) == (None, "error")
    assert first[0].num_output_tokens == 0
    assert_solo(loop, second)
    assert num_free_blocks(loop) == 64


def test_a_request_that_can_never_fit_is_refused_and_hinders_nobody(
    new_request: RequestFactory,
) -> None:
    loop, (short,) = make_loop(4), new_request([1, 2, 3], 2)

    with pytest.raises(RequestTooLong, match=r"need 10 blocks of 4: expected at most 4"):
        add(loop, new_request(range(40), 1))
    with pytest.raises(RequestTooLong, match="128 tokens"):
        add(loop, new_request([1], 128))
    short.sequence_id = 50
    add(loop, [short])
    loop.run()

    assert short.num_output_tokens == 2
    assert num_free_blocks(loop) == 4


def test_a_sequence_may_use_the_whole_pool_and_one_token_more(new_request: RequestFactory) -> None:
    loop, sequences = make_loop(4), new_request(range(10), 7)
    add(loop, sequences)

    loop.run()

    assert sequences[0].num_tokens == 17
    assert_solo(loop, sequences)


def test_admission_is_first_come_first_served_within_a_priority(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(max_num_seqs=1)
    priorities = [1, 0, 1, 0, -1]
    add(loop, *(new_request([i + 1], 2, priority=p) for i, p in enumerate(priorities)))

    finished = loop.run()

    assert [sequence.sequence_id for sequence in finished] == [4, 1, 3, 0, 2]


def test_a_head_that_does_not_fit_stops_admission(new_request: RequestFactory) -> None:
    loop = make_loop(5)
    running, head, small = new_request(range(9)), new_request(range(20, 31)), new_request([99])
    add(loop, running, head, small)

    plan = step(loop)

    assert ranges(plan) == [(0, 0, 9)]
    assert [s.status for s in (*head, *small)] == [WAITING, WAITING]


def test_no_more_than_max_num_seqs_run_and_they_end_in_order(new_request: RequestFactory) -> None:
    loop = make_loop(128, max_num_seqs=2)
    groups = [new_request([*range(8), i], 50) for i in range(6)]
    add(loop, *groups)
    num_running: list[int] = []

    while loop.scheduler.has_unfinished:
        step(loop)
        num_running.append(loop.scheduler.num_running)

    assert max(num_running) == 2
    assert [s.sequence_id for s in loop.finished] == [0, 1, 2, 3, 4, 5]
    assert [s.num_output_tokens for s in loop.finished] == [50] * 6


def test_no_more_run_than_can_advance_in_one_step(new_request: RequestFactory) -> None:
    loop = make_loop(max_num_seqs=8, max_num_batched_tokens=3)
    add(loop, *(new_request([i + 1], 5) for i in range(6)))

    loop.run()

    assert loop.scheduler.stats().peak_num_seqs == 3
    assert all(plan.num_tokens <= 3 for plan in loop.plans)


def test_admission_leaves_the_watermark_free_unless_nothing_runs(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(10, watermark=0.25)
    first, second, third = new_request(range(32), 2), new_request([40], 2), new_request([41], 2)
    add(loop, first)
    step(loop)  # 8 of 10 blocks: the watermark of 2 does not bind the first one
    add(loop, second, third)

    plan = step(loop)

    assert ranges(plan) == [(0, 32, 33)]
    assert first[0].is_finished
    assert ranges(step(loop)) == [(1, 0, 1), (2, 0, 1)]


def test_prompts_are_computed_in_chunks_within_the_budget(new_request: RequestFactory) -> None:
    loop = make_loop(max_num_batched_tokens=6)
    long, short = new_request(range(15), 1), new_request([0, 1, 2, 3, 99], 1)
    add(loop, long, short)

    plans = [step(loop) for _ in range(3)]

    assert [ranges(plan) for plan in plans] == [
        [(0, 0, 6)],
        [(0, 6, 12)],
        [(0, 12, 15), (1, 4, 5)],
    ]
    assert [[row.samples for row in plan.seqs] for plan in plans] == [[False], [False], [True] * 2]
    assert [s.num_output_tokens for s in (*long, *short)] == [1, 1]


def test_running_sequences_get_a_token_in_each_step_while_a_long_prompt_is_computed(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(max_num_batched_tokens=8)
    streams = [new_request([i], 20) for i in (1, 2, 3)]
    add(loop, *streams)
    step(loop)
    add(loop, new_request(range(10, 60), 1))

    plans = [step(loop) for _ in range(10)]

    assert [plan.num_decode_seqs for plan in plans] == [3] * 10
    assert [plan.num_tokens for plan in plans] == [8] * 10
    assert [stream[0].num_output_tokens for stream in streams] == [11] * 3
    assert [plan.seqs[3].samples for plan in plans] == [False] * 9 + [True]


def test_twins_in_one_step_are_computed_once(new_request: RequestFactory) -> None:
    loop = make_loop()
    groups = [new_request(range(41), 3) for _ in range(4)]
    add(loop, *groups)

    plans = [step(loop), step(loop)]

    assert ranges(plans[0]) == [(0, 0, 41)]
    assert ranges(plans[1])[1:] == [(1, 40, 41), (2, 40, 41), (3, 40, 41)]
    assert sum(plan.num_tokens - plan.num_decode_seqs for plan in plans) == 44
    loop.run()
    assert_solo(loop, [group[0] for group in groups])


def test_a_twin_that_waits_does_not_hinder_those_behind_it(new_request: RequestFactory) -> None:
    loop = make_loop()
    add(loop, new_request(range(8)), new_request(range(9)), new_request(range(20, 24)))

    plan = step(loop)

    assert ranges(plan) == [(0, 0, 8), (2, 0, 4)]
    assert loop.scheduler.num_waiting == 1


def test_a_twin_whose_forerunner_is_aborted_computes_the_rest_itself(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(max_num_batched_tokens=6)
    first, second = new_request(range(12)), new_request(range(12))
    add(loop, first, second)
    step(loop)
    loop.launch()

    loop.scheduler.abort("r0")
    loop.commit()
    plan = step(loop)

    assert ranges(plan) == [(1, 4, 10)]
    loop.run()
    assert_solo(loop, second)


def test_an_exact_repeat_computes_one_token(new_request: RequestFactory) -> None:
    loop = make_loop()
    first, again = new_request(range(8), 1), new_request(range(8), 1)
    add(loop, first)
    step(loop)
    add(loop, again)

    plan = step(loop)

    assert ranges(plan) == [(1, 7, 8)]
    assert plan.block_copies == ((1, 2),)
    assert again[0].num_cached_tokens == 7
    assert again[0].token_ids == first[0].token_ids


def test_an_exact_repeat_that_needs_the_whole_pool_does_without_the_copy(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(2)
    first, again = new_request(range(8), 1), new_request(range(8), 1)
    add(loop, first)
    step(loop)
    add(loop, again)

    plan = step(loop)

    assert ranges(plan) == [(1, 4, 8)]
    assert plan.block_copies == ()
    assert_solo(loop, again)


def test_the_source_of_a_copy_stays_taken_until_the_step_is_committed(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(4)
    add(loop, new_request(range(8), 1))
    step(loop)
    add(loop, new_request(range(8), 1))

    plan = loop.launch()

    assert plan is not None
    ((source, _),) = plan.block_copies
    assert loop.block_manager.ref_count(source) == 1
    loop.commit()
    assert loop.block_manager.ref_count(source) == 0


def test_a_finished_sequence_serves_later_prompts(new_request: RequestFactory) -> None:
    loop = make_loop()
    (turn,) = new_request(range(6), 9)
    add(loop, [turn])
    loop.run()
    add(loop, new_request([*turn.token_ids, 5], 1))

    plan = step(loop)

    assert ranges(plan) == [(1, 12, 16)]


def test_a_sharer_that_ends_takes_nothing_from_the_other(new_request: RequestFactory) -> None:
    loop = make_loop(12)
    first, second, third = (new_request([*range(8), 9], 20), new_request([*range(8), 9], 20), None)
    add(loop, first, second)
    for _ in range(4):
        step(loop)
    loop.scheduler.abort("r0")
    third = new_request(range(30, 42), 1)
    add(loop, third)

    loop.run()

    assert_solo(loop, [*second, *third])


def test_two_identical_prompts_survive_the_reuse_of_all_free_blocks(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(16)
    twins = [new_request(range(9), 21), new_request(range(9), 21)]
    add(loop, *twins)
    for _ in range(4):
        step(loop)
    third = new_request(range(30, 50), 4)
    add(loop, third)

    loop.run()

    assert twins[0][0].token_ids == twins[1][0].token_ids
    assert_solo(loop, [*twins[0], *twins[1], *third])


@pytest.mark.parametrize("caching", [True, False])
def test_the_prompt_of_several_samples_is_computed_once(
    caching: bool, new_request: RequestFactory
) -> None:
    loop, samples = make_loop(caching=caching), new_request(range(10), 6, n=3)
    add(loop, samples)

    plans = [step(loop), step(loop)]

    assert ranges(plans[0]) == [(0, 0, 10)]
    assert ranges(plans[1]) == [(0, 10, 11), (1, 9, 10), (2, 9, 10)]
    assert plans[1].block_copies == ((2, 3), (2, 4))
    assert [s.block_ids[:2] for s in samples] == [[0, 1]] * 3
    loop.run()
    assert_solo(loop, samples)
    assert len({tuple(s.token_ids) for s in samples}) == 3


def test_samples_share_whole_blocks_without_a_copy_where_the_prompt_allows(
    new_request: RequestFactory,
) -> None:
    loop, samples = make_loop(caching=False), new_request(range(9), 4, n=2)
    add(loop, samples)
    step(loop)

    plan = step(loop)

    assert plan.block_copies == ()
    assert samples[1].block_ids == [0, 1, 3]
    loop.run()
    assert_solo(loop, samples)


def test_samples_left_over_when_sample_0_has_ended_are_admitted_as_others_are(
    new_request: RequestFactory,
) -> None:
    loop, samples = make_loop(max_num_seqs=1), new_request(range(10), 2, n=3)
    add(loop, samples)

    loop.run()

    assert_solo(loop, samples)
    assert loop.scheduler.stats().num_prefill_tokens == 10 + 2 + 2  # whole blocks are found again


def test_the_sequence_with_the_least_work_to_lose_is_preempted(new_request: RequestFactory) -> None:
    loop = make_loop(9)
    long, short = new_request(range(15), 20), new_request(range(20, 25), 20)
    late = new_request(range(30, 36), 20)
    add(loop, long, short, late)
    step(loop)

    while loop.scheduler.stats().num_preemptions == 0:
        step(loop)

    assert loop.scheduler.take_events().preempted == (short[0],)
    assert (short[0].status, short[0].num_preemptions) == (WAITING, 1)
    loop.run()
    assert_solo(loop, [*long, *short, *late])


def test_of_equals_the_latest_is_preempted(new_request: RequestFactory) -> None:
    loop = make_loop(7)
    groups = [new_request(range(i, i + 7), 20) for i in (10, 20, 30)]
    add(loop, *groups)

    while loop.scheduler.stats().num_preemptions == 0:
        step(loop)

    assert loop.scheduler.take_events().preempted == (groups[2][0],)


def test_a_more_important_sequence_is_never_preempted_for_another(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(6)
    important, ordinary = new_request(range(3), 12), new_request(range(20, 31), 12, priority=1)
    add(loop, important, ordinary)

    loop.run()

    assert important[0].num_preemptions == 0
    assert ordinary[0].num_preemptions > 0
    assert_solo(loop, [*important, *ordinary])


def test_work_that_the_cache_supplied_does_not_count_as_lost(new_request: RequestFactory) -> None:
    loop = make_loop(14, max_num_seqs=3)
    samples, other = new_request(range(30), 20, n=2), new_request(range(40, 50), 20)
    add(loop, samples)
    step(loop)
    step(loop)
    add(loop, other)

    while loop.scheduler.stats().num_preemptions == 0:
        step(loop)

    assert loop.scheduler.take_events().preempted == (samples[1],)


def test_a_preempted_sequence_waits_ahead_of_later_arrivals(new_request: RequestFactory) -> None:
    loop = make_loop(6, max_num_seqs=2)
    first, second, third = new_request(range(9), 12), new_request([20], 20), new_request([30], 3)
    add(loop, first, second, third)
    while not second[0].num_preemptions:
        step(loop)
    statuses = [s.status for s in (*first, *second, *third)]

    loop.run()

    admitted = [a.request.request_id for plan in loop.plans for a in plan.assigned]
    assert statuses == [RUNNING, WAITING, WAITING]  # the third would fit, but it came later
    assert admitted == ["r0", "r1", "r1", "r2"]
    assert_solo(loop, [*first, *second, *third])


def test_a_preempted_sequence_comes_back_with_all_its_tokens_in_a_new_tenancy(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(5, caching=False)
    first, second = new_request(range(8), 8), new_request(range(20, 27), 8)
    add(loop, first, second)
    while not second[0].num_preemptions:
        step(loop)
    known = tuple(second[0].token_ids)

    while second[0].status is WAITING:
        plan = step(loop)

    assert plan.released == (0,)
    assert [(a.slot, a.generation, a.token_ids) for a in plan.assigned] == [(0, 1, known)]
    assert ranges(plan) == [(1, 0, len(known))]
    loop.run()
    assert_solo(loop, [*first, *second])


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("num_blocks", range(8, 24))
def test_no_pool_size_changes_a_token(
    num_blocks: int, run_ahead: int, new_request: RequestFactory
) -> None:
    loop = make_loop(num_blocks, run_ahead=run_ahead, max_num_batched_tokens=12)
    groups = [new_request([*range(5), i], 24) for i in range(4)]
    add(loop, *groups)

    loop.run()

    assert_solo(loop, [group[0] for group in groups])
    assert num_free_blocks(loop) == num_blocks


def test_nobody_is_admitted_in_a_step_that_is_short_of_blocks(new_request: RequestFactory) -> None:
    loop = make_loop(6, max_num_seqs=4)
    add(loop, new_request(range(8), 9), new_request(range(20, 28), 9))
    while loop.scheduler.stats().num_preemptions == 0:
        plan = step(loop)
        add(loop, new_request([loop.scheduler.stats().num_steps], 1, priority=-1))

    assert plan.assigned == ()


def test_shortage_waits_for_blocks_that_drain_before_it_preempts(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(6, run_ahead=1)
    ends, grows, third = (new_request(range(i, i + 7), 9) for i in (10, 20, 30))
    add(loop, ends, grows, third)
    loop.launch()
    loop.launch()  # all decode at the last position of their second block
    loop.scheduler.abort("r0")
    loop.commit()

    plan = loop.launch()

    assert plan is None
    loop.commit()
    assert ranges(loop.launch()) == [(1, 8, 9), (2, 8, 9)]
    assert loop.scheduler.stats().num_preemptions == 0


def test_a_step_made_before_the_last_is_committed_leaves_its_token_to_the_device(
    new_request: RequestFactory,
) -> None:
    loop = make_loop()
    add(loop, new_request(range(3), 9))

    plans = [loop.launch() for _ in range(3)]

    assert [ranges(plan) for plan in plans] == [[(0, 0, 3)], [(0, 3, 4)], [(0, 4, 5)]]
    assert [plan.seqs[0].token_ids for plan in plans if plan] == [(0, 1, 2), (), ()]
    assert [plan.seqs[0].new_block_ids for plan in plans if plan] == [(0,), (), (1,)]


def test_chunks_are_launched_ahead_one_after_another(new_request: RequestFactory) -> None:
    loop = make_loop(max_num_batched_tokens=4)
    add(loop, new_request(range(10), 9))

    plans = [loop.launch() for _ in range(4)]

    assert [ranges(plan)[0][1:] for plan in plans] == [(0, 4), (4, 8), (8, 10), (10, 11)]


def test_a_sequence_certain_to_end_is_not_run_past_its_end(new_request: RequestFactory) -> None:
    loop = make_loop()
    add(loop, new_request(range(3), 2))
    loop.launch()
    loop.launch()

    plan = loop.launch()

    assert plan is None
    assert loop.scheduler.has_unfinished


def test_tokens_after_a_stop_are_dropped_and_blocks_freed_when_their_steps_are_in(
    new_request: RequestFactory,
) -> None:
    loop, (sequence,) = make_loop(), new_request(range(3), 9, stop_after=1)
    add(loop, [sequence])
    for _ in range(3):
        loop.launch()

    num_free = []
    reported = []
    for _ in range(3):
        reported.append(len(loop.commit()))
        num_free.append(num_free_blocks(loop))
        loop.scheduler.check()

    assert reported == [1, 0, 0]
    assert num_free == [62, 62, 64]
    assert sequence.num_output_tokens == 1
    assert loop.scheduler.stats().num_generated_tokens == 1


def test_a_discarded_token_never_enters_the_index(new_request: RequestFactory) -> None:
    loop, (sequence,) = make_loop(), new_request(range(3), 9, stop_after=1)
    add(loop, [sequence])
    for _ in range(3):
        loop.launch()  # computes the block's last position with a token, and one more

    while loop.device.in_flight:
        loop.commit()

    assert loop.block_manager.num_cached_blocks == 0


def test_a_slot_is_used_again_at_once_by_another_generation(new_request: RequestFactory) -> None:
    loop = make_loop(max_num_seqs=1)
    first, second = new_request([1], 9), new_request([2], 2)
    add(loop, first, second)
    loop.launch()
    loop.launch()
    loop.scheduler.abort("r0")

    plan = loop.launch()

    assert plan is not None
    assert plan.released == (0,)
    assert [(a.slot, a.generation) for a in plan.assigned] == [(0, 1)]
    assert num_free_blocks(loop) == 62
    loop.run()
    assert_solo(loop, second)


def test_the_lowest_free_slot_is_taken(new_request: RequestFactory) -> None:
    loop = make_loop()
    add(loop, *(new_request([i], 9) for i in range(1, 5)))
    step(loop)
    loop.scheduler.abort("r2")
    loop.scheduler.abort("r1")
    add(loop, new_request([8], 1), new_request([9], 1))

    plan = step(loop)

    assert plan.released == (2, 1)
    assert [a.slot for a in plan.assigned] == [1, 2]


def test_a_victim_with_launched_steps_keeps_the_tokens_they_bring(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(4, run_ahead=1)
    first, second = new_request(range(7), 9), new_request(range(20, 27), 9)
    add(loop, first, second)
    loop.launch()
    loop.launch()

    plan = loop.launch()

    assert plan is None  # the victim's two steps must come in first
    assert second[0].is_preempting
    assert second[0].status is RUNNING
    loop.commit()
    loop.commit()
    assert (second[0].status, second[0].num_output_tokens) == (WAITING, 2)
    loop.run()
    assert_solo(loop, [*first, *second])


def test_an_abort_while_the_last_chunk_is_launched_delivers_nothing(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(max_num_batched_tokens=6)
    neighbour, aborted = new_request([1, 2], 12), new_request(range(10, 22), 9)
    add(loop, neighbour, aborted)
    plan = step(loop)
    while plan.seqs[-1].end < 12 or plan.seqs[-1].sequence_id != 1:
        if loop.device.in_flight:
            loop.commit()
        plan = loop.launch() or plan

    ended = loop.scheduler.abort("r1")
    committed = loop.commit()

    assert ended == aborted
    assert (aborted[0].finish_reason, aborted[0].num_output_tokens) == ("abort", 0)
    assert [c.sequence.sequence_id for c in committed] == [0]
    loop.run()
    assert_solo(loop, neighbour)
    assert num_free_blocks(loop) == 64


def test_an_abort_ends_all_samples_wherever_they_are(new_request: RequestFactory) -> None:
    loop, samples = make_loop(max_num_seqs=2), new_request(range(6), 9, n=3)
    add(loop, samples)
    step(loop)
    step(loop)
    statuses = [s.status for s in samples]

    ended = loop.scheduler.abort("r0")

    assert statuses == [RUNNING, RUNNING, WAITING]
    assert ended == samples
    assert loop.scheduler.abort("r0") == loop.scheduler.abort("never heard of") == []
    assert loop.scheduler.num_waiting == loop.scheduler.num_running == 0
    assert num_free_blocks(loop) == 64
    loop.scheduler.check()


def test_many_aborts_behind_a_blocked_head_leave_nothing_behind(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(max_num_seqs=1)
    running, last = new_request([1], 9), new_request([2], 1)
    add(loop, running, last)
    step(loop)
    requests: list[weakref.ref[Request]] = []

    for i in range(500):
        group = new_request([3, i], 1, n=2)
        add(loop, group)
        requests.append(weakref.ref(group[0].request))
        loop.scheduler.abort(group[0].request.request_id)

    assert sum(request() is not None for request in requests) < 100
    assert [s.sequence_id for s in loop.run()] == [0, 1]
    assert loop.scheduler.num_waiting == 0


def test_prompt_logprobs_are_computed_without_hits_for_all_positions_but_the_last(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(max_num_batched_tokens=5)
    add(loop, new_request(range(9), 1))
    loop.run()
    samples = new_request(range(9), 2, n=2, prompt_logprobs=1)
    add(loop, samples)
    loop.plans.clear()

    loop.run()

    rows = [row for plan in loop.plans for row in plan.seqs]
    shown = [(r.sequence_id, r.start, r.end, r.num_prompt_logprobs) for r in rows]
    assert shown[:2] == [(1, 0, 5, 5), (1, 5, 9, 3)]
    assert shown[3] == (2, 8, 9, 0)
    assert samples[0].num_cached_tokens == 0
    assert_solo(loop, samples)


def test_a_request_for_prompt_logprobs_alone_is_computed_and_its_token_dropped(
    new_request: RequestFactory,
) -> None:
    loop, (sequence,) = make_loop(), new_request(range(9), 0, prompt_logprobs=1)
    add(loop, [sequence])
    plan = loop.launch()

    committed = loop.commit()

    assert plan is not None
    assert [(row.samples, row.num_prompt_logprobs) for row in plan.seqs] == [(True, 8)]
    assert committed == [(sequence, None, 0)]
    assert (sequence.num_tokens, sequence.finish_reason) == (9, "length")
    assert not loop.scheduler.has_unfinished


def test_after_changed_weights_nothing_computed_before_is_found(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(max_num_seqs=2)
    running, old = new_request(range(8), 30), new_request(range(20, 28), 2)
    waits, new = new_request([*range(20, 28), 1], 3), new_request([*range(20, 28), 2], 3)
    add(loop, running, old)
    step(loop)
    add(loop, waits)
    step(loop)

    loop.device.change_weights(1)
    loop.scheduler.weights_changed(1)
    add(loop, new, new_request([*range(8), 9], 3))
    loop.run()

    assert (waits[0].num_cached_tokens, new[0].num_cached_tokens) == (0, 8)
    assert loop.finished[-2].num_cached_tokens == 0
    assert_solo(loop, [*waits, *new, loop.finished[-2]])


def test_events_and_counters_tell_first_admissions_and_preemptions_apart(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(5)
    first, second = new_request(range(8), 8), new_request([*range(4), 20, 21, 22], 8)
    add(loop, first)
    step(loop)
    add(loop, second)
    step(loop)
    events = loop.scheduler.take_events()

    loop.run()

    later, stats = loop.scheduler.take_events(), loop.scheduler.stats()
    assert [(a.sequence, a.num_cached_tokens) for a in events.admitted] == [
        (first[0], 0),
        (second[0], 4),
    ]
    assert events.num_cached_tokens == 4
    assert later.admitted == ()
    assert len(later.preempted) == stats.num_preemptions == second[0].num_preemptions > 0
    assert (stats.num_prefill_tokens, stats.num_cached_tokens) == (8 + 3, 4)
    assert stats.num_generated_tokens == 16
    assert stats.num_recached_tokens + stats.num_recomputed_tokens > 0
    num_tokens = sum(plan.num_tokens for plan in loop.plans)
    assert (
        stats.num_prefill_tokens + stats.num_recomputed_tokens + stats.num_decode_tokens
        == num_tokens
    )


def test_equal_calls_give_equal_plans() -> None:
    def plans() -> list[StepPlan]:
        loop, new_request = make_loop(9, run_ahead=1), RequestFactory()
        add(loop, *(new_request([*range(5), i], 12, n=2, priority=i % 2) for i in range(4)))
        loop.run()
        return loop.plans

    assert [p.seqs for p in plans()] == [p.seqs for p in plans()]
    assert [p.block_copies for p in plans()] == [p.block_copies for p in plans()]


def test_a_block_that_a_step_copies_to_is_not_copied_from_in_it(
    new_request: RequestFactory,
) -> None:
    # The leader is preempted with 8 tokens, of which another sequence has registered all: admitted
    # again it wants a copy of the last block, and its follower, who waited for a slot, a copy of
    # that copy.
    loop = make_loop(4, max_num_seqs=2)
    probe = RequestFactory()
    probe([0])
    leader_tokens, _ = loop.device.model.solo_run(probe(range(6), n=2)[0])
    (other,) = new_request(leader_tokens[:8], max_tokens=6)
    leader, follower = new_request(range(6), n=2)
    add(loop, [other])
    for _ in range(3):
        step(loop)
    add(loop, [leader, follower])
    while not other.is_finished:
        step(loop)
    assert (leader.num_preemptions, leader.num_tokens, follower.num_output_tokens) == (1, 8, 0)
    last_block = loop.block_manager.lookup(leader).copy_from

    plan = step(loop)

    assert [source for source, _ in plan.block_copies] == [last_block] * 2
    assert len({destination for _, destination in plan.block_copies} - {last_block}) == 2
    while loop.scheduler.has_unfinished:
        step(loop)
    assert_solo(loop, [other, leader, follower])


def test_a_long_prompt_is_cut_short_while_others_generate_and_only_then(
    new_request: RequestFactory,
) -> None:
    loop = make_loop(max_num_batched_tokens=40, long_prefill=10)
    (stream,) = new_request(range(30), max_tokens=3)
    (long,) = new_request(range(100, 170), max_tokens=2)
    (short,) = new_request(range(200, 206), max_tokens=2)
    add(loop, [stream], [long], [short])

    plans = [ranges(step(loop)) for _ in range(4)]

    assert plans == [
        [(0, 0, 30), (1, 0, 10)],
        [(0, 30, 31), (1, 10, 20), (2, 0, 6)],
        [(0, 31, 32), (2, 6, 7), (1, 20, 30)],
        [(1, 30, 70)],
    ]
    while loop.scheduler.has_unfinished:
        step(loop)
    assert_solo(loop, [stream, long, short])
