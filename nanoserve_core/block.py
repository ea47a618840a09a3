"""One K/V block of the pool as the bookkeeping sees it; no tensor, no policy, no sequence."""

from __future__ import annotations

from dataclasses import dataclass

ROOT_CONTENT = 0
"""Parent of every first block."""
NO_CONTENT = -1
"""The block holds nothing that was registered."""


@dataclass(slots=True, eq=False)
class Block:
    """Reference count, registered content and place in the free queue of one block.

    ``content_id`` is drawn from a counter when content is registered and never used twice. So it
    stands for a block *and* its generation: a child that names its parent by it can not be reached
    through a block that was reused since. Blocks with equal content after the same parent (computed
    twice) have the same id; one of them is in the index.
    """

    block_id: int
    ref_count: int = 0
    """Tables that name this block, plus holds: it is the source of a copy not committed yet."""
    prefix_hash: bytes | None = None
    """Chained hash of the registered content; None before registration."""
    token_bytes: bytes = b""
    """The registered content itself: little-endian int64 token ids."""
    content_id: int = NO_CONTENT
    parent_id: int = NO_CONTENT
    """``content_id`` of the block before it; `ROOT_CONTENT` for a first block."""
    previous: Block | None = None
    """Neighbour in the free queue towards its head; None outside of it."""
    next: Block | None = None

    def clear_content(self) -> None:
        """Forget what was registered: it will be overwritten, or the weights have changed."""
        self.prefix_hash = None
        self.token_bytes = b""
        self.content_id = self.parent_id = NO_CONTENT
