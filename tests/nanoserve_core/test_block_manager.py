"""Blocks, hashes, hits, growth and release, on examples small enough to check by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from nanoserve_core.block_manager import BlockManager
from nanoserve_core.plan import CachedPrefix
from tests.nanoserve_core.simulated_device import RequestFactory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nanoserve_core.request import Sequence

    NewSequence = Callable[..., Sequence]

# Made with xxhash alone: xxh64 of the tokens as int64, then of the first hash followed by tokens.
FIRST_HASH, SECOND_HASH = 0xD5FE80BD05F87C8E, 0xC0476E835832C588


@pytest.fixture
def new_sequence() -> NewSequence:
    """Makes a sequence of these tokens, numbered from 0."""
    new_request = RequestFactory()

    def make(tokens: Iterable[int], **options: object) -> Sequence:
        return new_request(tokens, **options)[0]  # type: ignore[arg-type]  # options of a request

    return make


def allocate(manager: BlockManager, sequence: Sequence) -> CachedPrefix:
    """Look up and allocate a sequence, as the scheduler does when it admits one."""
    prefix = manager.lookup(sequence)
    manager.allocate(sequence, prefix, sequence.num_tokens)
    sequence.num_computed_tokens = prefix.num_tokens
    return prefix


def compute(manager: BlockManager, sequence: Sequence, end: int | None = None) -> None:
    """A step that computed the sequence up to ``end`` (all known tokens) is committed."""
    end = sequence.num_tokens if end is None else end
    manager.commit(sequence, end)
    sequence.num_computed_tokens = end


def run(manager: BlockManager, sequence: Sequence) -> CachedPrefix:
    """Allocate and compute a sequence."""
    prefix = allocate(manager, sequence)
    compute(manager, sequence)
    return prefix


def refs(manager: BlockManager, sequence: Sequence) -> list[int]:
    """Reference counts along a table."""
    return [manager.ref_count(block_id) for block_id in sequence.block_ids]


def test_a_fresh_pool_is_free_in_order_without_references_or_content() -> None:
    manager = BlockManager(5, 4)

    assert manager.free_block_ids() == [0, 1, 2, 3, 4]
    assert [manager.ref_count(i) for i in range(5)] == [0] * 5
    assert [manager.prefix_hash(i) for i in range(5)] == [None] * 5
    manager.check([])


def test_blocks_are_taken_at_the_head_and_given_back_at_the_tail_last_block_first(
    new_sequence: NewSequence,
) -> None:
    manager = BlockManager(6, 4)
    sequence = new_sequence(range(10))
    run(manager, sequence)
    taken = list(sequence.block_ids)

    manager.free(sequence)

    assert taken == [0, 1, 2]
    assert manager.free_block_ids() == [3, 4, 5, 2, 1, 0]
    assert sequence.block_ids == []
    manager.check([])


def test_the_end_of_a_freed_prefix_is_evicted_before_its_beginning(
    new_sequence: NewSequence,
) -> None:
    manager = BlockManager(4, 4)
    first, other = new_sequence(range(12)), new_sequence(range(50, 58))
    run(manager, first)
    manager.free(first)

    run(manager, other)

    assert other.block_ids == [3, 2]
    assert manager.lookup(new_sequence(range(12))).block_ids == (0, 1)


def test_freeing_twice_frees_once_and_releasing_a_free_block_is_refused(
    new_sequence: NewSequence,
) -> None:
    manager = BlockManager(3, 4)
    sequence = new_sequence(range(4))
    run(manager, sequence)

    manager.free(sequence)
    manager.free(sequence)

    manager.check([])
    with pytest.raises(AssertionError, match="more often than"):
        manager.unhold(0)


def test_hashes_equal_those_of_nano_vllm_for_an_empty_root(new_sequence: NewSequence) -> None:
    manager = BlockManager(4, 4, hash_algo="xxh64", root=b"")
    sequence = new_sequence(range(8))

    run(manager, sequence)

    hashes = [int.from_bytes(h, "little") for h in sequence.block_hashes]
    assert hashes == [FIRST_HASH, SECOND_HASH]
    assert manager.cached_block(sequence.block_hashes[1]) == 1


@pytest.mark.parametrize(("algo", "num_bytes"), [("xxh64", 8), ("xxh128", 16), ("sha256", 32)])
def test_each_algorithm_finds_what_it_registered(
    algo: str, num_bytes: int, new_sequence: NewSequence
) -> None:
    manager = BlockManager(4, 4, hash_algo=algo)
    first, second = new_sequence(range(9)), new_sequence(range(9))
    run(manager, first)

    prefix = manager.lookup(second)

    assert prefix.block_ids == (0, 1)
    assert {len(h) for h in second.block_hashes} == {num_bytes}


def test_the_root_is_random_unless_it_is_given(new_sequence: NewSequence) -> None:
    def hashes(root: bytes | None) -> list[bytes]:
        sequence = new_sequence(range(4))
        run(BlockManager(2, 4, root=root), sequence)
        return sequence.block_hashes

    assert hashes(None) != hashes(None)
    assert hashes(b"mine") == hashes(b"mine") != hashes(b"")


def test_a_sequence_is_hashed_once_however_often_it_is_looked_up(new_sequence: NewSequence) -> None:
    hashed: list[bytes] = []

    def counting(data: bytes) -> bytes:
        hashed.append(data)
        return data[-8:]

    with patch("nanoserve_core.prefix_index.HASH_FUNCTIONS", {"xxh64": counting}):
        manager = BlockManager(8, 4, root=b"")
    run(manager, new_sequence(range(9)))
    sequence = new_sequence(range(11))
    hashed.clear()

    for _ in range(5):
        manager.lookup(sequence)
    run(manager, sequence)

    assert len(hashed) == 2


def test_only_full_blocks_are_registered(new_sequence: NewSequence) -> None:
    manager = BlockManager(4, 4)
    sequence = new_sequence(range(10))

    run(manager, sequence)

    assert manager.num_cached_blocks == 2
    assert manager.prefix_hash(2) is None


def test_equal_tokens_after_another_prefix_do_not_hit(new_sequence: NewSequence) -> None:
    manager = BlockManager(8, 4)
    run(manager, new_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))

    prefix = manager.lookup(new_sequence([0, 0, 0, 0, 5, 6, 7, 8, 9]))

    assert prefix == CachedPrefix()


def test_an_equal_hash_with_other_tokens_does_not_hit(new_sequence: NewSequence) -> None:
    with patch("nanoserve_core.prefix_index.HASH_FUNCTIONS", {"xxh64": lambda _: b"same"}):
        manager = BlockManager(8, 4)
    run(manager, new_sequence([1, 2, 3, 4, 5]))

    prefix = manager.lookup(new_sequence([6, 7, 8, 9, 5]))

    assert prefix == CachedPrefix()


def test_chains_that_collide_do_not_cross(new_sequence: NewSequence) -> None:
    # The hash leaves the prefix out, so [a][d] finds the registered [d] of the chain [b][d].
    a, b, c, d = [1] * 4, [2] * 4, [3] * 4, [4] * 4
    with patch("nanoserve_core.prefix_index.HASH_FUNCTIONS", {"xxh64": lambda data: data[-32:]}):
        manager = BlockManager(8, 4)
    run(manager, new_sequence(a + c))
    run(manager, new_sequence(b + d))

    prefix = manager.lookup(new_sequence([*a, *d, 0]))

    assert prefix.block_ids == (0,)


def test_another_salt_does_not_hit(new_sequence: NewSequence) -> None:
    manager = BlockManager(8, 4)
    run(manager, new_sequence(range(9), cache_salt="one"))

    found = {
        salt: manager.lookup(new_sequence(range(9), cache_salt=salt)).num_tokens
        for salt in ("one", "two", "", None)
    }

    assert found == {"one": 8, "two": 0, "": 0, None: 0}


def test_lookup_stops_at_the_first_missing_block(new_sequence: NewSequence) -> None:
    manager = BlockManager(3, 4)
    first, other = new_sequence(range(12)), new_sequence([9])
    run(manager, first)
    manager.free(first)
    manager.hold(2)
    run(manager, other)
    manager.unhold(2)
    assert other.block_ids == [1]

    prefix = manager.lookup(new_sequence(range(13)))

    assert prefix.block_ids == (0,)


def test_lookup_changes_no_count_and_no_order(new_sequence: NewSequence) -> None:
    manager = BlockManager(6, 4)
    first = new_sequence(range(12))
    run(manager, first)
    manager.free(first)
    before = manager.free_block_ids()

    manager.lookup(new_sequence(range(13)))

    assert manager.free_block_ids() == before
    manager.check([])


def test_an_exact_repeat_copies_the_last_block_and_computes_one_token(
    new_sequence: NewSequence,
) -> None:
    manager = BlockManager(8, 4)
    run(manager, new_sequence(range(8)))
    repeat = new_sequence(range(8))

    prefix = manager.lookup(repeat)
    block_copy = manager.allocate(repeat, prefix, 8)

    assert prefix == CachedPrefix((0,), copy_from=1, num_tokens=7)
    assert block_copy == (1, 2)
    assert repeat.block_ids == [0, 2]
    manager.check([repeat], held=[0, 1, 1])  # the first sequence's table, and the source's hold


def test_blocks_of_one_token_need_no_copy(new_sequence: NewSequence) -> None:
    manager = BlockManager(8, 1)
    run(manager, new_sequence(range(5)))

    prefix = manager.lookup(new_sequence(range(5)))

    assert prefix == CachedPrefix((0, 1, 2, 3), num_tokens=4)


def test_a_manager_without_prefix_caching_finds_and_registers_nothing(
    new_sequence: NewSequence,
) -> None:
    manager = BlockManager(8, 4, enable_prefix_caching=False)
    run(manager, new_sequence(range(8)))

    assert manager.lookup(new_sequence(range(9))) == CachedPrefix()
    assert manager.num_cached_blocks == 0


def test_hits_in_use_cost_no_free_block(new_sequence: NewSequence) -> None:
    manager = BlockManager(4, 4)
    first, second = new_sequence(range(10)), new_sequence(range(10))
    run(manager, first)
    prefix = manager.lookup(second)
    num_new_blocks = manager.num_new_blocks(second, prefix, 10)

    run(manager, second)

    assert num_new_blocks == 1
    assert refs(manager, first) == [2, 2, 1]
    assert second.block_ids == [0, 1, 3]
    assert manager.num_free_blocks == 0


def test_hits_that_are_free_leave_the_queue_and_keep_their_content(
    new_sequence: NewSequence,
) -> None:
    manager = BlockManager(5, 4)
    first, second = new_sequence(range(10)), new_sequence(range(10))
    run(manager, first)
    manager.free(first)
    content = manager.prefix_hash(0)
    num_new_blocks = manager.num_new_blocks(second, manager.lookup(second), 10)

    prefix = allocate(manager, second)

    assert num_new_blocks == 3
    assert second.block_ids[:2] == [0, 1]
    assert second.num_tokens - prefix.num_tokens == 2
    assert manager.prefix_hash(0) == content
    assert manager.num_cached_blocks == 2


def test_a_request_never_evicts_its_own_hits(new_sequence: NewSequence) -> None:
    manager = BlockManager(3, 4)
    first, second = new_sequence(range(8)), new_sequence(range(12))
    run(manager, first)
    manager.free(first)
    manager.hold(2)
    manager.unhold(2)  # the cached blocks are the next to be taken now

    prefix = allocate(manager, second)

    assert prefix.block_ids == (0, 1)
    assert second.block_ids == [0, 1, 2]


def test_needing_no_block_and_not_fitting_are_told_apart(new_sequence: NewSequence) -> None:
    manager = BlockManager(3, 4)
    run(manager, new_sequence(range(12)))
    shares, needs = new_sequence(range(12)), new_sequence(range(20, 24))
    prefix = CachedPrefix((0, 1, 2), num_tokens=12)

    assert manager.num_new_blocks(shares, prefix, 12) == 0 == manager.num_free_blocks
    assert manager.num_new_blocks(needs, manager.lookup(needs), 4) == 1


def test_allocating_twice_is_refused(new_sequence: NewSequence) -> None:
    manager = BlockManager(4, 4)
    sequence = new_sequence(range(4))
    run(manager, sequence)

    with pytest.raises(AssertionError, match="has blocks already"):
        manager.allocate(sequence, CachedPrefix(), 4)


def test_a_long_shared_prompt_is_computed_once(new_sequence: NewSequence) -> None:
    manager = BlockManager(16, 256)
    first, second = new_sequence(range(800)), new_sequence([*range(800), *range(30)])
    run(manager, first)

    prefix = run(manager, second)

    assert second.num_tokens - prefix.num_tokens == 62
    assert refs(manager, second) == [2, 2, 2, 1]


def test_taking_a_block_drops_its_entry_unless_that_names_a_twin(
    new_sequence: NewSequence,
) -> None:
    manager = BlockManager(3, 4)
    twins = [new_sequence(range(4)), new_sequence(range(4))]
    for twin in twins:
        allocate(manager, twin)
    for twin in twins:
        compute(manager, twin)
    prefix_hash = twins[0].block_hashes[0]
    manager.free(twins[1])
    other = new_sequence(range(20, 28))

    allocate(manager, other)
    entry_without_twin = manager.cached_block(prefix_hash)
    manager.free(twins[0])
    manager.append(other, 12)

    assert other.block_ids == [2, 1, 0]
    assert entry_without_twin == 0
    assert manager.cached_block(prefix_hash) is None


def test_a_table_grows_only_when_the_next_position_needs_a_block(new_sequence: NewSequence) -> None:
    manager = BlockManager(2, 4)
    sequence = new_sequence(range(3))
    allocate(manager, sequence)
    free_after: dict[int, int] = {}

    for num_tokens in (4, 5, 6):
        sequence.token_ids.append(0)
        assert manager.can_append(sequence, num_tokens)
        manager.append(sequence, num_tokens)
        free_after[num_tokens] = manager.num_free_blocks

    assert free_after == {4: 1, 5: 0, 6: 0}
    assert manager.can_append(sequence, 8)
    assert not manager.can_append(sequence, 9)


def test_blocks_of_one_token_grow_by_one_each(new_sequence: NewSequence) -> None:
    manager = BlockManager(8, 1)
    sequence = new_sequence(range(5))
    run(manager, sequence)

    manager.append(sequence, 6)

    assert sequence.block_ids == [0, 1, 2, 3, 4, 5]
    assert manager.num_cached_blocks == 5


def test_a_decoded_block_is_registered_when_its_last_key_value_exists(
    new_sequence: NewSequence,
) -> None:
    # [A B C D][E F _ _]: +G nothing; +H fills the block, whose K/V exists one step later; +I grows.
    manager = BlockManager(4, 4)
    sequence = new_sequence(b"ABCDEF")
    run(manager, sequence)
    num_cached: list[int] = []

    for token in b"GHI":
        sequence.token_ids.append(token)
        num_cached.append(manager.num_cached_blocks)
        manager.append(sequence, sequence.num_tokens)
        compute(manager, sequence)

    assert num_cached == [1, 1, 2]
    assert sequence.block_ids == [0, 1, 2]


def test_registration_covers_the_blocks_a_chunk_completed_and_continues_the_chain(
    new_sequence: NewSequence,
) -> None:
    manager = BlockManager(8, 4, root=b"")
    sequence = new_sequence(range(14))
    allocate(manager, sequence)
    num_cached: list[int] = []

    for end in (3, 6, 7, 13, 14):
        compute(manager, sequence, end)
        num_cached.append(manager.num_cached_blocks)

    whole = new_sequence(range(14))
    run(BlockManager(8, 4, root=b""), whole)
    assert num_cached == [0, 1, 1, 3, 3]
    assert sequence.block_hashes == whole.block_hashes


def test_a_later_turn_hits_blocks_of_the_answer(new_sequence: NewSequence) -> None:
    manager = BlockManager(8, 4)
    turn = new_sequence(range(6))
    run(manager, turn)
    for token in range(10, 18):
        turn.token_ids.append(token)
        manager.append(turn, turn.num_tokens)
        compute(manager, turn)
    manager.free(turn)

    prefix = manager.lookup(new_sequence([*turn.token_ids, 99]))

    assert prefix.num_tokens == 12


def test_entries_survive_the_release_of_their_blocks(new_sequence: NewSequence) -> None:
    manager = BlockManager(4, 4)
    sequence = new_sequence(range(8))
    run(manager, sequence)

    manager.free(sequence)

    assert manager.num_cached_blocks == 2


def test_what_follows_a_twin_is_found_through_the_block_that_is_registered(
    new_sequence: NewSequence,
) -> None:
    manager = BlockManager(8, 4)
    short, long = new_sequence(range(4)), new_sequence(range(8))
    allocate(manager, short)
    allocate(manager, long)  # nothing is registered yet: it computes the first block again
    compute(manager, short)
    compute(manager, long)

    prefix = manager.lookup(new_sequence(range(9)))

    assert prefix.block_ids == (short.block_ids[0], long.block_ids[1])


def test_a_child_whose_parent_was_evicted_is_replaced_when_it_is_computed_again(
    new_sequence: NewSequence,
) -> None:
    manager = BlockManager(8, 4)
    first, filler, again = (new_sequence(t) for t in (range(8), range(50, 78), range(8)))
    run(manager, first)
    manager.hold(1)
    manager.free(first)
    run(manager, filler)  # takes all blocks but the child, also its parent
    manager.free(filler)
    hits_without_parent = manager.lookup(again).block_ids

    run(manager, again)

    assert hits_without_parent == ()
    assert 1 not in again.block_ids
    assert manager.lookup(new_sequence(range(9))).block_ids == tuple(again.block_ids)


def test_a_block_in_computation_is_waited_for_until_its_step_is_committed(
    new_sequence: NewSequence,
) -> None:
    manager = BlockManager(8, 4)
    first, second = new_sequence(range(9)), new_sequence(range(9))
    allocate(manager, first)
    manager.mark_computing(first, 0, 6)
    during = manager.lookup(second)

    compute(manager, first, 6)
    manager.unmark_computing(first, 0, 6)

    assert during == CachedPrefix(is_computing=True)
    assert manager.is_computing(second.block_hashes[0]) is False
    assert manager.lookup(second) == CachedPrefix((0,), num_tokens=4)


def test_two_steps_that_compute_one_block_are_both_waited_for(new_sequence: NewSequence) -> None:
    manager = BlockManager(8, 4)
    first, second, third = (new_sequence(range(5)) for _ in range(3))
    manager.allocate(first, CachedPrefix(), 5)
    manager.allocate(second, CachedPrefix(), 5)
    manager.mark_computing(first, 0, 5)
    manager.mark_computing(second, 0, 5)

    manager.unmark_computing(first, 0, 5)

    assert manager.lookup(third).is_computing
    manager.unmark_computing(second, 0, 5)
    assert not manager.lookup(third).is_computing


@pytest.mark.parametrize(
    ("num_tokens", "shared", "copy_from"),
    [(9, (0, 1), 2), (8, (0, 1), None), (3, (), 0), (0, (), None)],
)
def test_a_fork_shares_whole_blocks_and_copies_the_partial_one(
    num_tokens: int, shared: tuple[int, ...], copy_from: int | None, new_sequence: NewSequence
) -> None:
    manager = BlockManager(8, 4, enable_prefix_caching=False)
    leader = new_sequence(range(10))
    run(manager, leader)

    prefix = manager.fork_prefix(leader, num_tokens)

    assert prefix == CachedPrefix(shared, copy_from, num_tokens)


def test_a_leader_without_blocks_or_progress_cannot_be_forked(new_sequence: NewSequence) -> None:
    manager = BlockManager(8, 4)
    leader = new_sequence(range(10))
    allocate(manager, leader)
    compute(manager, leader, 6)
    early = manager.fork_prefix(leader, 9)
    compute(manager, leader)
    manager.free(leader)

    assert early is None
    assert manager.fork_prefix(leader, 9) is None


def test_after_a_reset_nothing_old_hits_and_free_blocks_keep_no_content(
    new_sequence: NewSequence,
) -> None:
    manager = BlockManager(8, 4)
    first, running = new_sequence(range(9)), new_sequence(range(20, 27))
    run(manager, first)
    manager.free(first)
    run(manager, running)

    manager.reset_prefix_cache(1)

    assert manager.num_cached_blocks == 0
    assert [manager.prefix_hash(i) for i in range(8)] == [None] * 8
    assert manager.lookup(new_sequence(range(9))) == CachedPrefix()
    manager.check([running])


def test_a_sequence_that_ran_over_a_reset_registers_nothing_more(new_sequence: NewSequence) -> None:
    manager = BlockManager(8, 4)
    running = new_sequence(range(3))
    run(manager, running)

    manager.reset_prefix_cache(1)
    running.token_ids.extend(range(3, 9))
    manager.append(running, 9)
    compute(manager, running)

    assert manager.num_cached_blocks == 0
    assert manager.fork_prefix(running, 2) is None
    assert manager.lookup(new_sequence(range(9))) == CachedPrefix()


def test_a_sequence_looked_up_before_a_reset_is_hashed_anew(new_sequence: NewSequence) -> None:
    manager = BlockManager(8, 4)
    waiting = new_sequence(range(9))
    manager.lookup(waiting)

    manager.reset_prefix_cache(1)
    run(manager, waiting)

    assert manager.lookup(new_sequence(range(9))).num_tokens == 8
