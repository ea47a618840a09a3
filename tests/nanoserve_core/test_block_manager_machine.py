"""Any order of allocations, steps, releases, holds, copies and resets keeps the books right.

The model is a memory of its own: for each block, which positions of which prefix were written into
it. Whatever a lookup offers must hold exactly the tokens it is offered for, computed under the
weights of now. Hash functions that collide now and then, or always, must not change that.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoserve_core import prefix_index
from nanoserve_core.block_manager import BlockManager
from nanoserve_core.plan import CachedPrefix
from tests.nanoserve_core.simulated_device import RequestFactory

if TYPE_CHECKING:
    from nanoserve_core.request import Sequence

WEAK_HASHES = {
    "eight bits": lambda data: bytes([sum(data) % 251]),
    "no prefix": lambda data: data[-8:],
    "constant": lambda _: b"",
}

tokens_of_a_prompt = st.builds(
    lambda length, tail: [*([1, 2, 1, 1, 2, 2, 1, 2, 1, 2, 2, 1][:length]), *tail],
    length=st.integers(0, 12),
    tail=st.lists(st.integers(1, 2), max_size=2),
).filter(bool)


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences that hold blocks, in the roles that the scheduler gives them."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        hash_algo=st.sampled_from(["xxh64", "sha256", *WEAK_HASHES]),
    )
    def start(self, num_blocks: int, block_size: int, hash_algo: str) -> None:
        functions = {**prefix_index.HASH_FUNCTIONS, **WEAK_HASHES}
        with patch.object(prefix_index, "HASH_FUNCTIONS", functions):
            self.manager = BlockManager(num_blocks, block_size, hash_algo=hash_algo)
        self.is_strong = hash_algo not in WEAK_HASHES
        self.block_size = block_size
        self.new_request = RequestFactory()
        self.live: list[Sequence] = []
        self.held: list[int] = []
        self.computing: list[tuple[Sequence, int, int]] = []
        self.written: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        """(block, offset) -> (epoch, all tokens up to and with that position)."""
        self.epoch = 0
        self.epochs: dict[int, int] = {}
        """Weights of the K/V of each sequence, by its id."""

    @rule(tokens=tokens_of_a_prompt, ignore_cache=st.booleans())
    def allocate(self, tokens: list[int], ignore_cache: bool) -> None:
        (sequence,) = self.new_request(tokens, 1)
        prefix = CachedPrefix() if ignore_cache else self.manager.lookup(sequence)
        num_free = self.manager.num_free_blocks
        num_new = self.manager.num_new_blocks(sequence, prefix, len(tokens))
        if num_new > num_free:
            return

        block_copy = self.manager.allocate(sequence, prefix, len(tokens))

        assert self.manager.num_free_blocks == num_free - num_new
        assert len(sequence.block_ids) == self.manager.num_blocks_for(len(tokens))
        if block_copy is not None:
            self.held.append(block_copy[0])
            self._copy(*block_copy)
        self.live.append(sequence)
        self.epochs[sequence.sequence_id] = self.epoch
        sequence.num_computed_tokens = prefix.num_tokens

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0), num_tokens=st.integers(1, 8), is_late=st.booleans())
    def compute(self, number: int, num_tokens: int, is_late: bool) -> None:
        sequence = self.live[number % len(self.live)]
        start = sequence.num_computed_tokens
        end = min(start + num_tokens, sequence.num_tokens)
        if start == end or any(sequence is other for other, _, _ in self.computing):
            return

        self.manager.mark_computing(sequence, start, end)
        for position in range(start, end):
            block_id = sequence.block_ids[position // self.block_size]
            assert self.manager.ref_count(block_id) == 1 + self.held.count(block_id)
            written = self.epochs[sequence.sequence_id], tuple(sequence.token_ids[: position + 1])
            self.written[block_id, position % self.block_size] = written

        self.computing.append((sequence, start, end))
        if not is_late:
            self.commit(len(self.computing) - 1)

    @precondition(lambda self: self.computing)
    @rule(number=st.integers(0))
    def commit(self, number: int) -> None:
        sequence, start, end = self.computing.pop(number % len(self.computing))

        self.manager.commit(sequence, end)
        self.manager.unmark_computing(sequence, start, end)

        sequence.num_computed_tokens = end

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0), token=st.integers(1, 2))
    def grow(self, number: int, token: int) -> None:
        sequence = self.live[number % len(self.live)]
        num_blocks, num_free = len(sequence.block_ids), self.manager.num_free_blocks
        num_tokens = sequence.num_tokens + 1
        fits = num_free > 0 or num_tokens <= num_blocks * self.block_size
        assert self.manager.can_append(sequence, num_tokens) == fits
        if not fits:
            return

        sequence.token_ids.append(token)
        self.manager.append(sequence, num_tokens)

        num_new = num_free - self.manager.num_free_blocks
        assert (
            num_new
            == len(sequence.block_ids) - num_blocks
            == int(num_tokens > num_blocks * self.block_size)
        )

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0))
    def free(self, number: int) -> None:
        sequence = self.live[number % len(self.live)]
        if any(sequence is other for other, _, _ in self.computing):
            return

        self.manager.free(sequence)

        self.live.remove(sequence)

    @rule(number=st.integers(0))
    def hold(self, number: int) -> None:
        block_id = number % self.manager.num_blocks

        self.manager.hold(block_id)

        self.held.append(block_id)

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0))
    def unhold(self, number: int) -> None:
        self.manager.unhold(self.held.pop(number % len(self.held)))

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0), num_tokens=st.integers(1, 12))
    def fork(self, number: int, num_tokens: int) -> None:
        leader = self.live[number % len(self.live)]
        (sequence,) = self.new_request(leader.token_ids, 1)
        num_tokens = min(num_tokens, leader.num_tokens - 1)

        prefix = self.manager.fork_prefix(leader, num_tokens)

        is_current = self.epochs[leader.sequence_id] == self.epoch
        can_fork = is_current and leader.num_computed_tokens >= num_tokens
        assert (prefix is not None) == can_fork
        if prefix is not None:
            assert prefix.num_tokens == num_tokens
            self._check_prefix(sequence, prefix)

    @rule()
    def reset(self) -> None:
        self.epoch += 1

        self.manager.reset_prefix_cache(self.epoch)

        assert self.manager.num_cached_blocks == 0

    @rule(tokens=tokens_of_a_prompt)
    def lookup(self, tokens: list[int]) -> None:
        (sequence,) = self.new_request(tokens, 1)

        prefix = self.manager.lookup(sequence)

        assert prefix.num_tokens < len(tokens)
        self._check_prefix(sequence, prefix)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check(self.live, self.held)
        named = Counter(chain(self.held, *(s.block_ids for s in self.live)))
        for block_id in range(self.manager.num_blocks):
            assert self.manager.ref_count(block_id) == named[block_id]

    @invariant()
    def live_sequences_are_found_again(self) -> None:
        for sequence in getattr(self, "live", ()):
            (again,) = self.new_request([*sequence.token_ids, 1], 1)
            prefix = self.manager.lookup(again)
            self._check_prefix(again, prefix)
            full = sequence.block_ids[: sequence.num_computed_tokens // self.block_size]
            if self.is_strong and all(self._is_findable(block_id) for block_id in full):
                assert prefix.block_ids[: len(full)] == tuple(full)

    def _is_findable(self, block_id: int) -> bool:
        """Whether the block, and not a twin of it, is the one that is registered."""
        prefix_hash = self.manager.prefix_hash(block_id)
        return prefix_hash is not None and self.manager.cached_block(prefix_hash) == block_id

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.computing:
            self.commit(0)
        for sequence in self.live:
            self.manager.free(sequence)
        for block_id in self.held:
            self.manager.unhold(block_id)
        self.manager.check([])
        with pytest.raises(AssertionError, match="more often"):
            self.manager.unhold(0)

    def _copy(self, source: int, destination: int) -> None:
        for offset in range(self.block_size):
            if (source, offset) in self.written:
                self.written[destination, offset] = self.written[source, offset]

    def _check_prefix(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        blocks = [*prefix.block_ids, *([] if prefix.copy_from is None else [prefix.copy_from])]
        for position in range(prefix.num_tokens):
            slot = blocks[position // self.block_size], position % self.block_size
            wanted = self.epoch, tuple(sequence.token_ids[: position + 1])
            assert self.written[slot] == wanted, f"position {position} is not what it seems"


TestBlockManager = BlockManagerMachine.TestCase
