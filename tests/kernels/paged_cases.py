"""Paged K/V with queries on it, for the attention tests: what must not be read is NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from nanoserve_core.kernels import reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LAYER = 1
NUM_LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    """Arguments of an attention call. Caches are one layer's views of a tensor of two layers."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    kv_lens: Tensor
    query_start: Tensor

    def expected(self) -> Tensor:
        """The attention by the book in float64, [tokens, heads, head_dim]; NaN is never seen."""
        return reference.paged_attention(
            self.query.double(),
            key_cache=self.key_cache.double(),
            value_cache=self.value_cache.double(),
            block_tables=self.block_tables,
            query_start=self.query_start,
            kv_lens=self.kv_lens,
        )

    def row(self, row: int) -> PagedCase:
        """The same case with one row only."""
        start, end = self.query_start[row : row + 2].tolist()
        return replace(
            self,
            query=self.query[start:end],
            block_tables=self.block_tables[row : row + 1],
            kv_lens=self.kv_lens[row : row + 1],
            query_start=self.query_start.new_tensor([0, end - start]),
        )


def paged_case(
    kv_lens: Sequence[int],
    *,
    query_lens: Sequence[int] | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    shared_tokens: int = 0,
    seed: int = 0,
) -> PagedCase:
    """Rows of these lengths in scattered blocks, one query token each unless ``query_lens`` says
    more. The first ``shared_tokens`` tokens (whole blocks) of all rows lie in the same blocks.
    """
    generator = torch.Generator().manual_seed(seed)
    query_lens = query_lens or [1] * len(kv_lens)
    tables, num_blocks = scattered_tables(
        kv_lens, block_size=block_size, num_shared=shared_tokens // block_size, generator=generator
    )
    cache_shape = (2, NUM_LAYERS, num_blocks, block_size, num_kv_heads, head_dim)
    cache = torch.full(cache_shape, torch.nan, dtype=dtype)
    for table, kv_len in zip(tables, kv_lens, strict=True):
        for block, start in zip(table, range(0, kv_len, block_size), strict=False):
            tokens = slice(0, min(kv_len - start, block_size))
            if torch.isnan(cache[0, LAYER, block, tokens]).any():
                content = torch.randn(cache[:, LAYER, block, tokens].shape, generator=generator)
                cache[:, LAYER, block, tokens] = content.to(dtype)
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    keys, values = cache.to(device)[:, LAYER].unbind(0)
    return PagedCase(
        query=query.to(device),
        key_cache=keys,
        value_cache=values,
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        query_start=starts.to(dtype=torch.int32, device=device),
    )


def scattered_tables(
    kv_lens: Sequence[int], *, block_size: int, num_shared: int, generator: torch.Generator
) -> tuple[list[list[int]], int]:
    """A block table per row, as wide as the longest, and the number of blocks. Block 0 is nobody's:
    it fills the tables up.
    """
    own = [max(-(-kv_len // block_size) - num_shared, 0) for kv_len in kv_lens]
    num_blocks = 1 + num_shared + sum(own)
    blocks = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    shared, rest = blocks[:num_shared], iter(blocks[num_shared:])
    rows = [shared + [next(rest) for _ in range(count)] for count in own]
    width = max(map(len, rows), default=0) + 1
    return [row + [0] * (width - len(row)) for row in rows], num_blocks
