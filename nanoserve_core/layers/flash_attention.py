"""`FlashAttention`: attention on a CUDA device by the flash-attn package (2.8), where installed.

Decode rows go through ``flash_attn_with_kvcache``, chunks of prompts through
``flash_attn_varlen_func``, both over our blocks. Neither waits for the device, and the numbers of
splits and tiles follow from shapes alone, so that steps can be captured. It knows no scheduler.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nanoserve_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.config import ModelSpec
    from nanoserve_core.layers.attention import ForwardBatch

BLOCK_SIZE = 256
"""What the package's kernels read K and V by: blocks are multiples of it."""
MAX_HEAD_DIM = 256
MAX_SPLITS = 16
"""A row is split no further: adding the parts up costs more than it gains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashAttentionPlan:
    """What `FlashAttention` works out once per step. Row-wise tensors as in `ForwardBatch`."""

    decode_tables: Tensor
    decode_lens: Tensor
    num_splits: int
    chunk_tables: Tensor
    chunk_starts: Tensor
    """[chunks + 1] int32, from 0 on: where the query tokens of each begin."""
    chunk_kv_starts: Tensor
    """[chunks + 1] int32: the same of their K/V, one after the other."""
    max_chunk: int
    max_kv_len: int


class FlashAttention:
    """See `AttentionBackend`. Keeps nothing between steps."""

    name = "flash_attn"
    default_block_size = BLOCK_SIZE
    graph_safe = True
    batch_invariant = False

    def __init__(self, spec: ModelSpec, *, num_multiprocessors: int) -> None:
        """Raises `ConfigError` when the package is not installed."""
        package = _package()
        self._with_kvcache: Any = package.flash_attn_with_kvcache  # Any: without types
        self._varlen: Any = package.flash_attn_varlen_func  # Any: as above
        self._num_kv_heads = spec.num_key_value_heads
        self._num_programs = 2 * num_multiprocessors

    @staticmethod
    def check(spec: ModelSpec) -> None:
        """Raise `ConfigError` for a model that the package cannot serve."""
        is_half = spec.dtype in (torch.bfloat16, torch.float16)
        if not is_half or spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
            raise ConfigError(
                f"attention_backend='flash_attn' cannot serve heads of {spec.head_dim} elements in "
                f"{spec.dtype}: expected bfloat16 or float16, and a multiple of 8 up to "
                f"{MAX_HEAD_DIM}. Leave attention_backend at None."
            )

    def supports_block_size(self, block_size: int) -> bool:
        """Powers of two from 256 on: the package reads 256 tokens at a time, our kernels these."""
        return block_size >= BLOCK_SIZE and block_size & (block_size - 1) == 0

    def plan(self, batch: ForwardBatch, *, block_size: int) -> FlashAttentionPlan:
        """Lengths as the package wants them; see `AttentionBackend.plan`."""
        num_rows = batch.num_decode_seqs
        chunk_lens, chunk_tables = batch.kv_lens[num_rows:], batch.block_tables[num_rows:]
        starts = batch.query_start[num_rows:]
        if num_rows:
            starts = starts - starts[:1]
        # A captured step knows no length: its bounds are those of its shape.
        host_lens, host_starts = batch.host_kv_lens[num_rows:], batch.host_query_start[num_rows:]
        is_known = len(host_starts) > 1
        longest = host_lens.max() if is_known else chunk_tables.shape[1] * block_size
        most = (host_starts[1:] - host_starts[:-1]).max() if is_known else batch.num_tokens
        return FlashAttentionPlan(
            decode_tables=batch.block_tables[:num_rows],
            decode_lens=batch.kv_lens[:num_rows],
            num_splits=self._num_splits(num_rows),
            chunk_tables=chunk_tables,
            chunk_starts=starts,
            chunk_kv_starts=torch.nn.functional.pad(
                chunk_lens.cumsum(0, dtype=torch.int32), (1, 0)
            ),
            max_chunk=max(int(most), 2),  # with one token each it would rearrange the heads
            max_kv_len=int(longest),
        )

    def decode(
        self,
        query: Tensor,
        *,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: FlashAttentionPlan,
        out: Tensor,
    ) -> None:
        """See `AttentionBackend.decode`."""
        result = self._with_kvcache(
            query.unsqueeze(1),
            key_cache,
            value_cache,
            cache_seqlens=plan.decode_lens,
            block_table=plan.decode_tables,
            causal=True,
            num_splits=plan.num_splits,
        )
        out.copy_(result.squeeze(1))

    def prefill(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: FlashAttentionPlan,
        out: Tensor,
    ) -> None:
        """See `AttentionBackend.prefill`: from the cache, which holds the chunks already."""
        del key, value
        result = self._varlen(
            query,
            key_cache,
            value_cache,
            plan.chunk_starts,
            plan.chunk_kv_starts,
            plan.max_chunk,
            plan.max_kv_len,
            causal=True,
            block_table=plan.chunk_tables,
        )
        out.copy_(result)

    def _num_splits(self, num_rows: int) -> int:
        """As many as give every multiprocessor two programs."""
        return min(
            max(self._num_programs // (max(num_rows, 1) * self._num_kv_heads), 1), MAX_SPLITS
        )


def _package() -> Any:  # noqa: ANN401 - a package without types
    try:
        return importlib.import_module("flash_attn")
    except ImportError as error:
        raise ConfigError(
            f"attention_backend='flash_attn' is not available ({error}): expected the package "
            "flash-attn, built for this torch and device. Install it (the extra 'flash'), or leave "
            "attention_backend at None."
        ) from error
