"""Which block holds which prefix, by chained hashes, and which are being computed right now.

The hash of block i is ``H(hash of block i-1 || its tokens as little-endian int64)``; the chain
starts from a root that is random per process and into which cache salt and weights epoch enter
(scheme of GeeeekExplorer/nano-vllm, nanovllm/engine/block_manager.py, whose hashes it equals for
xxh64, an empty root, no salt and epoch 0). A hash is only a hint: a hit also needs equal tokens and
the same parent content, so colliding chains never cross.

This file knows no reference counts and no free list.
"""

from __future__ import annotations

import hashlib
import os
import sys
from array import array
from types import MappingProxyType
from typing import TYPE_CHECKING

import xxhash

from nanoserve_core.block import NO_CONTENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Sequence as ListOf

    from nanoserve_core.block import Block
    from nanoserve_core.request import Sequence

NUM_ROOT_BYTES = 16

# xxhash's digests are big-endian; reversed, they are the little-endian numbers of nano-vllm.
HASH_FUNCTIONS: Mapping[str, Callable[[bytes], bytes]] = MappingProxyType(
    {
        "xxh64": lambda data: xxhash.xxh64_digest(data)[::-1],
        "xxh128": lambda data: xxhash.xxh128_digest(data)[::-1],
        "sha256": lambda data: hashlib.sha256(data).digest(),
    }
)


class PrefixIndex:
    """Finds registered blocks by the tokens they hold and the block they follow."""

    def __init__(self, block_size: int, *, hash_algo: str, root: bytes | None) -> None:
        """``root``: first link of each chain; None draws one, so that hashes cannot be foreseen."""
        self._block_size = block_size
        self._hash = HASH_FUNCTIONS[hash_algo]
        self._root = os.urandom(NUM_ROOT_BYTES) if root is None else root
        self._epoch = 0
        self._last_content_id = 0
        self._blocks: dict[bytes, Block] = {}
        self._num_computing: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def epoch(self) -> int:
        """Weights epoch of everything that can be found."""
        return self._epoch

    def token_bytes(self, sequence: Sequence, index: int) -> bytes:
        """The tokens of a full block of a sequence, as they are hashed and compared."""
        first = index * self._block_size
        return _packed(sequence.token_ids[first : first + self._block_size])

    def all_token_bytes(self, sequence: Sequence) -> list[bytes]:
        """`token_bytes` of each full block, packed at once: a tenth of the cost."""
        size, packed = 8 * self._block_size, _packed(sequence.token_ids)
        return [packed[end - size : end] for end in range(size, len(packed) + 1, size)]

    def prefix_hash(
        self, sequence: Sequence, index: int, token_bytes: bytes | None = None
    ) -> bytes:
        """Hash of block ``index`` and all before it: hashed once, kept in ``block_hashes``.

        ``token_bytes``: those of the block, where the caller has them.
        """
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            link = hashes[-1] if hashes else self._first_link(sequence.request.cache_salt)
            own = token_bytes if len(hashes) == index else None
            hashes.append(self._hash(link + (own or self.token_bytes(sequence, len(hashes)))))
        return hashes[index]

    def get(self, prefix_hash: bytes) -> Block | None:
        """The block registered under a hash, whatever it holds."""
        return self._blocks.get(prefix_hash)

    def find(self, prefix_hash: bytes, token_bytes: bytes, parent_id: int) -> Block | None:
        """The registered block that holds exactly these tokens after exactly this parent."""
        block = self._blocks.get(prefix_hash)
        if block is None or block.parent_id != parent_id or block.token_bytes != token_bytes:
            return None
        return block

    def register(
        self, block: Block, prefix_hash: bytes, *, token_bytes: bytes, parent_id: int
    ) -> None:
        """Enter a block whose K/V is computed and whose tokens are final.

        If another block with the same content is registered it stays the one that is found, and
        this one is its twin. Another content under the same hash is replaced: it collides, or its
        parent is gone and nobody can reach it any more.
        """
        twin = self.find(prefix_hash, token_bytes, parent_id)
        if twin is None:
            self._blocks[prefix_hash] = block
            self._last_content_id += 1
        block.content_id = self._last_content_id if twin is None else twin.content_id
        block.prefix_hash = prefix_hash
        block.token_bytes = token_bytes
        block.parent_id = parent_id

    def forget(self, block: Block) -> None:
        """Drop a block's content, and its entry unless that points at another block by now."""
        if block.prefix_hash is not None:
            if self._blocks.get(block.prefix_hash) is block:
                del self._blocks[block.prefix_hash]
            block.clear_content()

    def clear(self, epoch: int) -> None:
        """Drop all entries and marks; chains that start now differ from all earlier ones."""
        self._epoch = epoch
        self._blocks.clear()
        self._num_computing.clear()

    def mark_computing(self, prefix_hash: bytes) -> None:
        """A launched step computes the block with this hash."""
        self._num_computing[prefix_hash] = self._num_computing.get(prefix_hash, 0) + 1

    def unmark_computing(self, prefix_hash: bytes) -> None:
        """That step is committed, or its result is not wanted any more."""
        left = self._num_computing[prefix_hash] - 1
        if left:
            self._num_computing[prefix_hash] = left
        else:
            del self._num_computing[prefix_hash]

    def is_computing(self, prefix_hash: bytes) -> bool:
        """Whether a launched step computes the block with this hash."""
        return prefix_hash in self._num_computing

    def check(self, blocks: Iterable[Block]) -> None:
        """Raise AssertionError unless each entry is one of these blocks, under its own hash."""
        hashed = [(b, b.prefix_hash) for b in blocks if b.prefix_hash is not None]
        found = [b for b, prefix_hash in hashed if self._blocks.get(prefix_hash) is b]
        assert len(found) == len(self._blocks), "an entry names a block with another hash"
        ids = {block.content_id for block in found}
        assert len(ids) == len(found), f"content ids are not unique: {ids}"
        assert NO_CONTENT not in ids, "an entry names a block without content"

    def _first_link(self, salt: str | None) -> bytes:
        if salt is None and self._epoch == 0:
            return self._root
        epoch = self._epoch.to_bytes(8, "little")
        return self._hash(self._root + epoch + (b"" if salt is None else b"\0" + salt.encode()))


def _packed(token_ids: ListOf[int]) -> bytes:
    """Little-endian int64, so that hashes are the same on every machine."""
    numbers = array("q", token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
