"""What attention needs to know about a step (`ForwardBatch`), and who computes it
(`AttentionBackend`).

A backend reads K and V through block tables. It does not know the scheduler, and it keeps nothing
of a step but scratch memory: what it works out for a step goes into an opaque plan, made once and
used by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanoserve_core.config import ModelSpec

IntArray: TypeAlias = np.ndarray[
    Any, np.dtype[Any]
]  # Any: shape and width are given where the array is made
AttentionPlan: TypeAlias = Any  # Any: each backend has its own type


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """One step as the model sees it: decode rows (one query token each) first, then prefill chunks.

    Token-wise tensors have ``T`` entries, row-wise ones ``S``, all on the model's device. The
    ``host_*`` arrays repeat figures for backends that plan on the host; a step that is replayed as
    a CUDA graph reads the tensors only.
    """

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, absolute."""
    slot_mapping: Tensor
    """[T] int64: block * block_size + offset of the token's K/V; -1 writes nothing."""
    query_start: Tensor
    """[S + 1] int32: row s owns the tokens [query_start[s], query_start[s + 1])."""
    kv_lens: Tensor
    """[S] int32: K/V length a row attends to, its own tokens included."""
    block_tables: Tensor
    """[S, max_blocks] int32; entries beyond a row's length are never read."""
    logits_indices: Tensor
    """[R] int64: the tokens whose logits are wanted."""
    num_decode_seqs: int
    host_query_start: IntArray
    host_kv_lens: IntArray
    host_block_tables: IntArray
    row_leads: Tensor | None = None
    row_shared: Tensor | None = None
    """[num_decode_seqs] int32, or both None: decode rows that share blocks, for backends that read
    those once (`StepRows.leads` and `StepRows.shared`). They change no result.
    """

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return self.token_ids.shape[0]


class AttentionBackend(Protocol):
    """Attention over a paged K/V cache.

    ``key_cache`` and ``value_cache``: [blocks, block_size, kv_heads, head_dim], of one layer.
    """

    name: str
    default_block_size: int
    graph_safe: bool
    """True when `plan` and `decode` neither wait for the device nor read ``host_*`` arrays:
    capturable.
    """
    batch_invariant: bool
    """True when a row's result does not depend on the other rows of the step."""

    def supports_block_size(self, block_size: int) -> bool:
        """Whether the cache may have blocks of so many tokens."""
        ...

    def plan(self, batch: ForwardBatch, *, block_size: int) -> AttentionPlan:
        """Work out once per step what all layers share. Called before the first layer."""
        ...

    def decode(
        self,
        query: Tensor,
        *,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: AttentionPlan,
        out: Tensor,
    ) -> None:
        """Fill ``out`` for the decode rows. query, out: [num_decode_seqs, heads, head_dim]."""
        ...

    def prefill(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: AttentionPlan,
        out: Tensor,
    ) -> None:
        """Fill ``out`` for the prefill chunks: causal, the last token sees all of its row's K/V.

        query, out: [tokens, heads, head_dim]. key, value: [tokens, kv_heads, head_dim], the chunks'
        own, which the cache holds already.
        """
        ...


GATHER_NBYTES = 1 << 19
"""K and V bytes gathered at a time for decode rows: small enough to be read back from the CPU's L2
cache (2 MB: 1.2 times slower), large enough that one gather serves several short rows."""
MASK_ELEMENTS = 1 << 20
"""Largest causal mask of a chunk with a prefix; longer chunks are attended to in several pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gather:
    """Blocks of some rows, copied side by side into the scratch; valid until the next gather."""

    block_ids: Tensor
    key_blocks: Tensor
    value_blocks: Tensor
    keys: Sequence[Tensor]
    """Per row, [1, kv_heads, kv_len, head_dim]: its part of the scratch."""
    values: Sequence[Tensor]

    def run(self, key_cache: Tensor, value_cache: Tensor) -> None:
        torch.index_select(key_cache, 0, self.block_ids, out=self.key_blocks)
        torch.index_select(value_cache, 0, self.block_ids, out=self.value_blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Query tokens [start, end) of a chunk, which see its first ``kv_len`` keys; mask None: all of
    them.
    """

    start: int
    end: int
    kv_len: int
    mask: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Query tokens [start, end) of one prefill row; without a gather, no prefix, plainly causal."""

    start: int
    end: int
    gather: _Gather | None
    pieces: Sequence[_Piece]


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchAttentionPlan:
    """What `TorchAttention` works out once per step."""

    decode_gathers: Sequence[_Gather]
    chunks: Sequence[_Chunk]


class TorchAttention:
    """Paged attention in plain torch, one row at a time: no padding to the longest, no mask for
    decode rows.

    A row's blocks are gathered into a scratch that is reused (fresh memory costs more in page
    faults than the maths), then ``scaled_dot_product_attention`` runs with the query heads of a kv
    head as query positions. Measured against five other forms, this one is within 1.3 times the
    cost of the copy alone.
    """

    name = "torch"
    default_block_size = 16
    graph_safe = False
    batch_invariant = True

    def __init__(self, spec: ModelSpec, *, device: torch.device) -> None:
        self._num_kv_heads = spec.num_key_value_heads
        self._group = spec.num_attention_heads // spec.num_key_value_heads
        self._token_nbytes = 2 * self._num_kv_heads * spec.head_dim * spec.dtype.itemsize
        self._scratch = _Scratch(spec, device)

    def supports_block_size(self, block_size: int) -> bool:
        """Every size is served."""
        return block_size >= 1

    def plan(self, batch: ForwardBatch, *, block_size: int) -> TorchAttentionPlan:
        """Group the decode rows into gathers, cut the chunks that need a mask."""
        kv_lens = batch.host_kv_lens.tolist()
        tables = _Tables(batch.host_block_tables, kv_lens, block_size)
        return TorchAttentionPlan(
            decode_gathers=self._plan_decode(tables, batch.num_decode_seqs),
            chunks=self._plan_chunks(tables, batch),
        )

    def decode(
        self,
        query: Tensor,
        *,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: TorchAttentionPlan,
        out: Tensor,
    ) -> None:
        """See `AttentionBackend.decode`."""
        num_rows, _, head_dim = query.shape
        queries = iter(query.view(num_rows, 1, self._num_kv_heads, self._group, head_dim).unbind(0))
        results: list[Tensor] = []
        for gather in plan.decode_gathers:
            gather.run(key_cache, value_cache)
            results += [
                scaled_dot_product_attention(next(queries), key, value)
                for key, value in zip(gather.keys, gather.values, strict=True)
            ]
        torch.cat(results, out=out.view(num_rows, self._num_kv_heads, self._group, head_dim))

    def prefill(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: TorchAttentionPlan,
        out: Tensor,
    ) -> None:
        """See `AttentionBackend.prefill`."""
        for chunk in plan.chunks:
            rows = slice(chunk.start, chunk.end)
            if chunk.gather is None:
                self._attend(
                    query[rows],
                    _heads_first(key[rows]),
                    _heads_first(value[rows]),
                    out[rows],
                    is_causal=True,
                )
                continue
            chunk.gather.run(key_cache, value_cache)
            keys, values = chunk.gather.keys[0], chunk.gather.values[0]
            for piece in chunk.pieces:
                rows = slice(piece.start, piece.end)
                seen = slice(0, piece.kv_len)
                self._attend(
                    query[rows], keys[:, :, seen], values[:, :, seen], out[rows], mask=piece.mask
                )

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> None:
        result = scaled_dot_product_attention(
            _heads_first(query),
            keys,
            values,
            attn_mask=mask,
            is_causal=is_causal,
            enable_gqa=self._group > 1,
        )
        out.copy_(result[0].transpose(0, 1))

    def _plan_decode(self, tables: _Tables, num_rows: int) -> list[_Gather]:
        most = max(GATHER_NBYTES // (self._token_nbytes * tables.block_size), 1)
        gathers, first, num_blocks = [], 0, 0
        for row in range(num_rows):
            num_blocks += tables.num_blocks[row]
            if num_blocks >= most or row == num_rows - 1:
                gathers.append(self._gather(tables, first, row + 1))
                first, num_blocks = row + 1, 0
        return gathers

    def _plan_chunks(self, tables: _Tables, batch: ForwardBatch) -> list[_Chunk]:
        first = batch.num_decode_seqs
        starts = (batch.host_query_start[first:] - first).tolist()
        chunks = []
        for row, (start, end) in enumerate(pairwise(starts), first):
            kv_len = tables.kv_lens[row]
            if kv_len == end - start:
                chunks.append(_Chunk(start=start, end=end, gather=None, pieces=()))
                continue
            gather = self._gather(tables, row, row + 1)
            pieces = self._pieces(start, end, kv_len)
            chunks.append(_Chunk(start=start, end=end, gather=gather, pieces=pieces))
        return chunks

    def _pieces(self, start: int, end: int, kv_len: int) -> list[_Piece]:
        """Cut a chunk so that no mask is huge; a piece leaves out the keys that none of it sees."""
        size = max(MASK_ELEMENTS // kv_len, 1)
        pieces = []
        for first in range(start, end, size):
            last = min(first + size, end)
            seen = kv_len - (end - last)
            mask = None
            if last - first > 1:
                mask = torch.ones(last - first, seen, dtype=torch.bool, device=self._scratch.device)
                mask = mask.tril_(seen - (last - first))
            pieces.append(_Piece(start=first, end=last, kv_len=seen, mask=mask))
        return pieces

    def _gather(self, tables: _Tables, first: int, last: int) -> _Gather:
        """The gather of the rows [first, last)."""
        block_ids = tables.block_ids(first, last)
        scratch = self._scratch.sized(len(block_ids), tables.block_size)
        sizes = tables.sizes(first, last)
        num_tokens = len(block_ids) * tables.block_size
        return _Gather(
            block_ids=torch.from_numpy(block_ids).to(self._scratch.device),
            key_blocks=scratch.key_blocks.narrow(0, 0, len(block_ids)),
            value_blocks=scratch.value_blocks.narrow(0, 0, len(block_ids)),
            keys=scratch.keys.narrow(2, 0, num_tokens).split_with_sizes(sizes, dim=2)[::2],
            values=scratch.values.narrow(2, 0, num_tokens).split_with_sizes(sizes, dim=2)[::2],
        )


class _Scratch:
    """Where blocks are gathered: K and V, by block and, in the same memory, by head and token."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.device = device
        self._row = (spec.num_key_value_heads, spec.head_dim)
        self._dtype = spec.dtype
        self._shape = (0, 0)

    def sized(self, num_blocks: int, block_size: int) -> _Scratch:
        """Itself, after it has grown if so many blocks do not fit; it never shrinks."""
        if num_blocks > self._shape[0] or block_size != self._shape[1]:
            self._shape = (num_blocks, block_size)
            shape = (2, num_blocks, block_size, *self._row)
            both = torch.empty(shape, dtype=self._dtype, device=self.device)
            self.key_blocks, self.value_blocks = both.unbind(0)
            self.keys, self.values = (_heads_first(half.flatten(0, 1)) for half in both.unbind(0))
        return self


class _Tables:
    """The block tables of a step in Python's numbers: rows are few, numpy's calls cost more."""

    def __init__(self, tables: IntArray, kv_lens: list[int], block_size: int) -> None:
        self.block_size = block_size
        self.kv_lens = kv_lens
        self.num_blocks = [-(-kv_len // block_size) for kv_len in kv_lens]
        self._tables = tables

    def block_ids(self, first: int, last: int) -> IntArray:
        """[n] int32: the blocks of the rows [first, last), one row after the other."""
        if last - first == 1:
            return self._tables[first, : self.num_blocks[first]]
        return np.concatenate(
            [self._tables[row, : self.num_blocks[row]] for row in range(first, last)]
        )

    def sizes(self, first: int, last: int) -> list[int]:
        """For each of the rows, its length and what is left of its last block."""
        sizes: list[int] = []
        for row in range(first, last):
            kv_len = self.kv_lens[row]
            sizes += (kv_len, self.num_blocks[row] * self.block_size - kv_len)
        return sizes


def _heads_first(x: Tensor) -> Tensor:
    """[tokens, heads, head_dim] -> [1, heads, tokens, head_dim], a view."""
    return x.transpose(0, 1).unsqueeze(0)
