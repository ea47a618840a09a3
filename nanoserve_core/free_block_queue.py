"""The free blocks, least recently used first: a doubly linked list threaded through the blocks
themselves.

A cached block that is hit leaves from the middle, so every operation is O(1); a deque would search
(policy and structure as in vllm-project/vllm, vllm/v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoserve_core.block import Block

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class FreeBlockQueue:
    """Queue of blocks: taken at the head, given back at the tail, claimed anywhere.

    A ring with one sentinel: its ``next`` is the head, its ``previous`` the tail, so no operation
    has a special case.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._ring = Block(block_id=-1)
        self._ring.previous = self._ring.next = self._ring
        self._num_blocks = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        """The blocks from head to tail; the queue must not change meanwhile."""
        block = self._ring.next
        while block is not None and block is not self._ring:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Put a block that is not in the queue at its tail: it will be taken last."""
        assert block.next is None, f"block {block.block_id} is free already"
        tail = self._ring.previous
        assert tail is not None, "the ring of free blocks is broken"
        block.previous, block.next = tail, self._ring
        tail.next = self._ring.previous = block
        self._num_blocks += 1

    def remove(self, block: Block) -> None:
        """Take a block out of the queue, wherever it is."""
        before, after = block.previous, block.next
        assert before is not None, f"block {block.block_id} is not free"
        assert after is not None, f"block {block.block_id} is not free"
        before.next, after.previous = after, before
        block.previous = block.next = None
        self._num_blocks -= 1

    def pop_head(self) -> Block:
        """Take the block that has been free for longest; the queue must not be empty."""
        head = self._ring.next
        assert head is not None, "the ring of free blocks is broken"
        assert head is not self._ring, "no block is free"
        self.remove(head)
        return head
