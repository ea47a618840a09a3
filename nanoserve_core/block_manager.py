"""Owner of the K/V blocks: block tables, reference counts, the free queue and the prefix index.

::

    table of a sequence   | shared | shared | private | private |
    references                3        2         1         1       with more than one: never written
    registered               yes      yes       yes        no      full, computed, tokens final

A block that nobody names any more goes to the tail of the free queue and keeps its content until it
is taken from the head. Blocks of a sequence are released last first, so that the end of a prefix is
evicted before its beginning.

This file knows no tensor, no budget and no policy; it never changes a sequence's progress. One
thread at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoserve_core.block import NO_CONTENT, ROOT_CONTENT, Block
from nanoserve_core.free_block_queue import FreeBlockQueue
from nanoserve_core.plan import CachedPrefix
from nanoserve_core.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanoserve_core.request import Sequence

NO_PREFIX = CachedPrefix()


class BlockManager:
    """Hands out the blocks ``0 .. num_blocks - 1`` of ``block_size`` tokens each."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_algo: str = "xxh64",
        root: bytes | None = None,
    ) -> None:
        """``hash_algo``: xxh64, xxh128 or sha256; ``root`` starts each hash chain, None: random."""
        assert min(num_blocks, block_size) >= 1, f"{num_blocks=} {block_size=}: expected >= 1"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlockQueue(self._blocks)
        self._index = PrefixIndex(block_size, hash_algo=hash_algo, root=root)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody names; cached content does not make a block less free."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a lookup can find, in use or free."""
        return len(self._index)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that cover ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)

    def lookup(self, sequence: Sequence) -> CachedPrefix:
        """The longest cached prefix of a sequence without blocks; changes no count and no order.

        At most its length - 1 tokens: one must be computed to sample from. When whole blocks would
        cover everything, the last one is to be copied, because computing that token writes into it.
        """
        if not self.enable_prefix_caching:
            return NO_PREFIX
        self._enter_epoch(sequence)
        index, parent_id = self._index, ROOT_CONTENT
        block_ids: list[int] = []
        for i, token_bytes in enumerate(index.all_token_bytes(sequence)):
            prefix_hash = index.prefix_hash(sequence, i, token_bytes)
            block = index.find(prefix_hash, token_bytes, parent_id)
            if block is None:
                is_computing = index.is_computing(prefix_hash)
                return CachedPrefix(
                    tuple(block_ids), None, len(block_ids) * self.block_size, is_computing
                )
            block_ids.append(block.block_id)
            parent_id = block.content_id
        return self._split_prefix(block_ids, sequence.num_tokens - 1)

    def fork_prefix(self, leader: Sequence, num_tokens: int) -> CachedPrefix | None:
        """The first ``num_tokens`` tokens of a running sequence, for another that begins alike.

        None when the leader has given its blocks back, has not computed that far, or did so with
        older weights.
        """
        if (
            not leader.block_ids
            or leader.num_computed_tokens < num_tokens
            or leader.cache_epoch != self._index.epoch
        ):
            return None
        return self._split_prefix(leader.block_ids, num_tokens)

    def num_new_blocks(self, sequence: Sequence, prefix: CachedPrefix, num_tokens: int) -> int:
        """Blocks that `allocate` would take off the free queue: new ones and hits that are free."""
        assert not sequence.block_ids, f"sequence {sequence.sequence_id} has blocks already"
        blocks = self._blocks
        num_free_hits = sum(blocks[block_id].ref_count == 0 for block_id in prefix.block_ids)
        if prefix.copy_from is not None:
            num_free_hits += blocks[prefix.copy_from].ref_count == 0
        return self.num_blocks_for(num_tokens) - len(prefix.block_ids) + num_free_hits

    def allocate(
        self, sequence: Sequence, prefix: CachedPrefix, num_tokens: int
    ) -> tuple[int, int] | None:
        """Build the table of a sequence: the prefix, then new blocks for ``num_tokens`` positions.

        Returns (source, destination) of the block to copy, if any; the source is held until the
        caller unholds it. There must be `num_new_blocks` free blocks. Hits are claimed before new
        blocks are taken, so a sequence never evicts its own.
        """
        assert not sequence.block_ids, f"sequence {sequence.sequence_id} has blocks already"
        self._enter_epoch(sequence)
        for block_id in prefix.block_ids:
            self.hold(block_id)
        if prefix.copy_from is not None:
            self.hold(prefix.copy_from)
        sequence.block_ids.extend(prefix.block_ids)
        self.append(sequence, num_tokens)
        if prefix.copy_from is None:
            return None
        return prefix.copy_from, sequence.block_ids[len(prefix.block_ids)]

    def can_append(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `append` would find enough free blocks."""
        return self.num_blocks_for(num_tokens) - len(sequence.block_ids) <= len(self._free)

    def append(self, sequence: Sequence, num_tokens: int) -> None:
        """Grow the table of a sequence until it covers ``num_tokens`` positions."""
        for _ in range(self.num_blocks_for(num_tokens) - len(sequence.block_ids)):
            block = self._free.pop_head()
            self._index.forget(block)
            block.ref_count = 1
            sequence.block_ids.append(block.block_id)

    def mark_computing(self, sequence: Sequence, start: int, end: int) -> None:
        """A step is being launched that computes the known positions [start, end)."""
        if self._registers(sequence):
            for i in range(start // self.block_size, end // self.block_size):
                self._index.mark_computing(self._index.prefix_hash(sequence, i))

    def unmark_computing(self, sequence: Sequence, start: int, end: int) -> None:
        """That step is committed, even if the sequence ended meanwhile."""
        if self._registers(sequence):
            for i in range(start // self.block_size, end // self.block_size):
                self._index.unmark_computing(sequence.block_hashes[i])

    def is_computing(self, prefix_hash: bytes) -> bool:
        """Whether a launched step computes the block with this hash."""
        return self._index.is_computing(prefix_hash)

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        """Register the blocks that became full.

        K/V of the first ``num_computed`` tokens exists and these tokens are final. Called before
        ``sequence.num_computed_tokens`` is raised to that number.
        """
        if self._registers(sequence):
            first = sequence.num_computed_tokens // self.block_size
            for i in range(first, num_computed // self.block_size):
                self._register(sequence, i)

    def free(self, sequence: Sequence) -> None:
        """Release the table of a sequence, last block first; no launched step may write into it."""
        for block_id in reversed(sequence.block_ids):
            self.unhold(block_id)
        sequence.block_ids.clear()

    def hold(self, block_id: int) -> None:
        """One more reference; a free block leaves the queue and keeps its content."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            self._free.remove(block)
        block.ref_count += 1

    def unhold(self, block_id: int) -> None:
        """One reference less; without any the block joins the free queue and keeps its content."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is released more often than it was taken"
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free.append(block)

    def has_private_blocks(self, sequence: Sequence) -> bool:
        """Whether freeing this sequence would free a block."""
        return any(self._blocks[i].ref_count == 1 for i in reversed(sequence.block_ids))

    def reset_prefix_cache(self, epoch: int) -> None:
        """Nothing computed so far can be found any more; ``epoch`` numbers the new weights.

        Sequences that hold blocks keep them, but register nothing until they are allocated again.
        """
        self._index.clear(epoch)
        for block in self._blocks:
            block.clear_content()

    def ref_count(self, block_id: int) -> int:
        """Tables and holds that name a block."""
        return self._blocks[block_id].ref_count

    def prefix_hash(self, block_id: int) -> bytes | None:
        """Chained hash of the content registered for a block, None if there is none."""
        return self._blocks[block_id].prefix_hash

    def cached_block(self, prefix_hash: bytes) -> int | None:
        """The block registered under a hash."""
        block = self._index.get(prefix_hash)
        return None if block is None else block.block_id

    def free_block_ids(self) -> list[int]:
        """Free blocks in the order in which they will be taken."""
        return [block.block_id for block in self._free]

    def check(self, sequences: Iterable[Sequence], held: Iterable[int] = ()) -> None:
        """Raise AssertionError unless the books name exactly these holders. For tests."""
        counts = [0] * self.num_blocks
        for sequence in sequences:
            table = sequence.block_ids
            assert len(set(table)) == len(table), f"a block twice in {table}"
            for block_id in table:
                counts[block_id] += 1
        for block_id in held:
            counts[block_id] += 1
        assert counts == [block.ref_count for block in self._blocks], f"{counts=}"
        free = self.free_block_ids()
        assert len(free) == len(self._free), f"{free=}, but {len(self._free)} are counted"
        assert sorted(free) == [i for i, n in enumerate(counts) if n == 0], f"{free=} {counts=}"
        self._index.check(self._blocks)

    def _enter_epoch(self, sequence: Sequence) -> None:
        if sequence.cache_epoch != self._index.epoch:
            sequence.cache_epoch = self._index.epoch
            sequence.block_hashes.clear()

    def _registers(self, sequence: Sequence) -> bool:
        return self.enable_prefix_caching and sequence.cache_epoch == self._index.epoch

    def _split_prefix(self, block_ids: list[int], num_tokens: int) -> CachedPrefix:
        """``num_tokens`` tokens of these blocks: whole ones to share, a partial one to copy."""
        num_shared = min(num_tokens // self.block_size, len(block_ids))
        is_partial = num_shared < len(block_ids) and num_tokens % self.block_size > 0
        return CachedPrefix(
            tuple(block_ids[:num_shared]),
            block_ids[num_shared] if is_partial else None,
            num_tokens if is_partial else num_shared * self.block_size,
        )

    def _register(self, sequence: Sequence, i: int) -> None:
        blocks, index = self._blocks, self._index
        parent_id = ROOT_CONTENT if i == 0 else blocks[sequence.block_ids[i - 1]].content_id
        assert parent_id != NO_CONTENT, f"block {i} is registered before block {i - 1}"
        index.register(
            blocks[sequence.block_ids[i]],
            index.prefix_hash(sequence, i),
            token_bytes=index.token_bytes(sequence, i),
            parent_id=parent_id,
        )
