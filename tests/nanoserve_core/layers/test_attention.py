"""`TorchAttention` against attention by the book in float64, over drawn block tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanoserve_core.config import ModelSpec
from nanoserve_core.kernels import reference
from nanoserve_core.layers import attention
from nanoserve_core.layers.attention import ForwardBatch, TorchAttention
from tests.nanoserve_core.random_qwen3 import random_config

CPU = torch.device("cpu")
SHAPES = [(1, 1, 16), (4, 4, 16), (4, 2, 64), (8, 1, 128), (6, 2, 32)]
TOLERANCES = [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize(("dtype", "atol"), TOLERANCES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_mixed_step_is_attention_by_the_book(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, atol: float
) -> None:
    case = Case(num_heads, num_kv_heads, head_dim, dtype=dtype)

    # (query tokens, K/V length): decode rows, a fresh prompt, chunks behind a prefix.
    out = case.run([(1, 1), (1, 40), (1, 7)], [(9, 9), (5, 30), (1, 12), (1, 1)])

    torch.testing.assert_close(out.double(), case.expected(), rtol=0.0, atol=atol)


@pytest.mark.parametrize("block_size", [1, 2, 5, 16, 64])
def test_block_size_does_not_matter(block_size: int) -> None:
    case = Case(4, 2, 16, block_size=block_size)

    out = case.run([(1, 33), (1, 64)], [(20, 50)])

    torch.testing.assert_close(out.double(), case.expected(), rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("nbytes", [1, 3000, 1 << 30])
def test_rows_per_gather_do_not_matter(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(attention, "GATHER_NBYTES", nbytes)
    case = Case(4, 2, 16)

    out = case.run([(1, n) for n in (3, 25, 1, 60, 16, 17)], [])

    torch.testing.assert_close(out.double(), case.expected(), rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("elements", [1, 40, 1000])
def test_long_chunk_is_cut_so_that_no_mask_is_large(
    monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    monkeypatch.setattr(attention, "MASK_ELEMENTS", elements)
    case = Case(4, 2, 16)

    out = case.run([(1, 8)], [(23, 50), (6, 6)])

    torch.testing.assert_close(out.double(), case.expected(), rtol=0.0, atol=2e-6)


def test_row_gives_the_same_alone_and_among_others() -> None:
    case = Case(4, 2, 16)
    together = case.run([(1, 30), (1, 45), (1, 9)], [(7, 20)])

    alone = case.rerun_row(1)

    assert torch.equal(alone, together[1:2])


def test_scratch_that_grew_serves_shorter_steps() -> None:
    case = Case(4, 2, 16)
    case.run([(1, 90)], [])

    out = case.run([(1, 4), (1, 11)], [])

    torch.testing.assert_close(out.double(), case.expected(), rtol=0.0, atol=2e-6)


def test_memory_behind_a_row_is_never_read() -> None:
    case = Case(4, 2, 16)
    case.poison_unused = True

    out = case.run([(1, 5), (1, 17)], [(3, 10)])

    assert out.isfinite().all()


class Case:
    """Random queries and a random cache behind drawn block tables."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        block_size: int = 8,
    ) -> None:
        config = random_config(
            num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=head_dim
        )
        self.spec = ModelSpec.from_hf_config(config, dtype=dtype)
        self.block_size = block_size
        self.backend = TorchAttention(self.spec, device=CPU)
        self.generator = torch.Generator().manual_seed(0)
        self.poison_unused = False

    def run(self, decode: list[tuple[int, int]], chunks: list[tuple[int, int]]) -> torch.Tensor:
        """Draw a step of these rows and compute it: [tokens, heads, head_dim]."""
        rows = decode + chunks
        num_blocks = [-(-kv_len // self.block_size) for _, kv_len in rows]
        spec, total = self.spec, sum(num_blocks)
        shape = (total + 3, self.block_size, spec.num_key_value_heads, spec.head_dim)
        self.caches = [self._draw(*shape), self._draw(*shape)]
        order = torch.randperm(total + 3, generator=self.generator)[:total]
        tables = np.full((len(rows), max(num_blocks)), 10**6, dtype=np.int32)
        for row, blocks in enumerate(order.split(num_blocks)):
            tables[row, : len(blocks)] = blocks.numpy()
        query_lens = [query_len for query_len, _ in rows]
        self.query_start = np.cumsum([0, *query_lens]).astype(np.int32)
        self.kv_lens = np.array([kv_len for _, kv_len in rows], dtype=np.int32)
        self.tables, self.num_decode = tables, len(decode)
        self.query = self._draw(int(self.query_start[-1]), spec.num_attention_heads, spec.head_dim)
        if self.poison_unused:
            self._poison()
        return self._compute(list(range(len(rows))))

    def rerun_row(self, row: int) -> torch.Tensor:
        """The row of the last step as a step of its own."""
        return self._compute([row])

    def expected(self) -> torch.Tensor:
        """The last step by the book, in float64."""
        keys, values = (cache.double() for cache in self.caches)
        return reference.paged_attention(
            self.query.double(),
            key_cache=keys,
            value_cache=values,
            block_tables=torch.from_numpy(self.tables),
            query_start=torch.from_numpy(self.query_start),
            kv_lens=torch.from_numpy(self.kv_lens),
        )

    def _compute(self, rows: list[int]) -> torch.Tensor:
        tokens = torch.cat(
            [torch.arange(self.query_start[row], self.query_start[row + 1]) for row in rows]
        )
        batch = self._batch(rows, len(tokens))
        query, num_decode = self.query[tokens], batch.num_decode_seqs
        key, value = self._own_keys_and_values(rows)
        out = torch.full_like(query, torch.nan)
        plan = self.backend.plan(batch, block_size=self.block_size)
        caches = {"key_cache": self.caches[0], "value_cache": self.caches[1]}
        if num_decode:
            self.backend.decode(query[:num_decode], plan=plan, out=out[:num_decode], **caches)
        if num_decode < len(tokens):
            rest = slice(num_decode, None)
            self.backend.prefill(
                query[rest], key=key[rest], value=value[rest], plan=plan, out=out[rest], **caches
            )
        return out

    def _batch(self, rows: list[int], num_tokens: int) -> ForwardBatch:
        query_lens = np.diff(self.query_start)[rows]
        query_start = np.cumsum([0, *query_lens]).astype(np.int32)
        kv_lens, tables = self.kv_lens[rows], self.tables[rows]
        nothing = torch.zeros(num_tokens, dtype=torch.int64)
        return ForwardBatch(
            token_ids=nothing,
            positions=nothing,
            slot_mapping=nothing,
            query_start=torch.from_numpy(query_start),
            kv_lens=torch.from_numpy(kv_lens),
            block_tables=torch.from_numpy(tables),
            logits_indices=nothing,
            num_decode_seqs=sum(row < self.num_decode for row in rows),
            host_query_start=query_start,
            host_kv_lens=kv_lens,
            host_block_tables=tables,
        )

    def _own_keys_and_values(self, rows: list[int]) -> list[torch.Tensor]:
        """K and V of the query tokens: the last ones of each row, which the cache holds too."""
        own = []
        for cache in self.caches:
            parts = []
            for row in rows:
                kv_len = int(self.kv_lens[row])
                num_blocks = -(-kv_len // self.block_size)
                blocks = torch.from_numpy(self.tables[row, :num_blocks].astype(np.int64))
                query_len = int(self.query_start[row + 1] - self.query_start[row])
                parts.append(cache[blocks].flatten(0, 1)[kv_len - query_len : kv_len])
            own.append(torch.cat(parts))
        return own

    def _poison(self) -> None:
        """NaN in every slot that no row covers."""
        used = torch.zeros(len(self.caches[0]) * self.block_size, dtype=torch.bool)
        for row, kv_len in enumerate(self.kv_lens.tolist()):
            positions = np.arange(kv_len)
            blocks = self.tables[row, positions // self.block_size].astype(np.int64)
            used[blocks * self.block_size + positions % self.block_size] = True
        for cache in self.caches:
            cache.flatten(0, 1)[~used] = torch.nan

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.spec.dtype)
