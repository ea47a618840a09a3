"""`TritonAttention`: attention on a CUDA device, by our own kernels.

Decode rows are planned on the device, so a captured step stays right while lengths grow. Chunks of
prompts go through the paged kernel in one launch, whatever their lengths; one that is long and
begins its sequence goes to cuDNN, which is faster there (641 against 332 TFLOP/s at 16k tokens) but
spends milliseconds on each new length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanoserve_core.kernels import triton_ops as ops
from nanoserve_core.kernels.decode_config import max_items

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.config import ModelSpec
    from nanoserve_core.kernels.decode_config import DecodeConfig
    from nanoserve_core.kernels.decode_plan import DecodePlan
    from nanoserve_core.layers.attention import ForwardBatch

MIN_CUDNN_TOKENS = 8192
"""Shortest chunk without prefix that is worth a cuDNN plan of its own."""
MAX_PDL_ROWS = 8
"""Rows up to which overlapping launches gain: larger grids fill the device anyhow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonAttentionPlan:
    """What `TritonAttention` works out once per step. Row-wise tensors as in `ForwardBatch`."""

    decode: DecodePlan
    decode_config: DecodeConfig
    decode_tables: Tensor
    decode_lens: Tensor
    chunk_tables: Tensor
    chunk_starts: Tensor
    chunk_lens: Tensor
    is_one_long_prompt: bool
    pdl: bool


class TritonAttention:
    """See `AttentionBackend`. Owns the scratch of one step at a time."""

    name = "triton"
    default_block_size = 64
    graph_safe = True

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: torch.device,
        max_num_rows: int,
        max_kv_len: int,
        use_pdl: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        """For decode rows up to ``max_num_rows`` and sequences up to ``max_kv_len`` tokens.

        ``batch_invariant``: cut decode rows alike in every step.
        """
        self.batch_invariant = batch_invariant
        self._num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._use_pdl = use_pdl
        self._group = spec.num_attention_heads // spec.num_key_value_heads
        self._has_cudnn = spec.dtype in (torch.bfloat16, torch.float16) and spec.head_dim <= 128
        config = max(
            (self._config(rows) for rows in range(1, max_num_rows + 1)),
            key=lambda config: max_items(
                config,
                num_rows=max_num_rows,
                max_kv_len=max_kv_len,
                num_kv_heads=spec.num_key_value_heads,
            ),
        )
        self._plan = ops.DecodePlan.allocate(
            config,
            max_rows=max_num_rows,
            max_kv_len=max_kv_len,
            num_heads=spec.num_attention_heads,
            num_kv_heads=spec.num_key_value_heads,
            head_dim=spec.head_dim,
            device=device,
        )

    @staticmethod
    def serves(spec: ModelSpec) -> bool:
        """Whether the kernels were written for such heads."""
        head_dim, group = spec.head_dim, spec.num_attention_heads // spec.num_key_value_heads
        return head_dim >= 16 and head_dim & (head_dim - 1) == 0 and group <= 64

    @staticmethod
    def pack_size(spec: ModelSpec) -> int:
        """Decode rows whose shared blocks are read once: see `kernels.decode_plan`."""
        return ops.pack_size(spec.num_attention_heads // spec.num_key_value_heads)

    def supports_block_size(self, block_size: int) -> bool:
        """Powers of two."""
        return block_size >= 1 and block_size & (block_size - 1) == 0

    def plan(self, batch: ForwardBatch, *, block_size: int) -> TritonAttentionPlan:
        """List the work of the decode rows, on the device; see `AttentionBackend.plan`."""
        del block_size
        num_rows = batch.num_decode_seqs
        config = self._config(max(num_rows, 1))
        pdl = self._use_pdl and num_rows <= MAX_PDL_ROWS and num_rows == batch.num_tokens
        rows = max(num_rows, 1)
        plan = replace(
            self._plan,
            first_partials=self._plan.first_partials[:rows],
            tickets=self._plan.tickets[:rows],
        )
        decode_lens = batch.kv_lens[:num_rows]
        if num_rows > 0:
            ops.decode_plan(
                decode_lens,
                plan=plan,
                config=config,
                lead=batch.row_leads,
                shared=batch.row_shared,
                pdl=pdl,
            )
        return TritonAttentionPlan(
            decode=plan,
            decode_config=config,
            decode_tables=batch.block_tables[:num_rows],
            decode_lens=decode_lens,
            chunk_tables=batch.block_tables[num_rows:],
            chunk_starts=batch.query_start[num_rows:],
            chunk_lens=batch.kv_lens[num_rows:],
            is_one_long_prompt=self._is_one_long_prompt(batch),
            pdl=pdl,
        )

    def decode(
        self,
        query: Tensor,
        *,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: TritonAttentionPlan,
        out: Tensor,
    ) -> None:
        """See `AttentionBackend.decode`. A row of length 0 gets zeros."""
        ops.decode_attention(
            query,
            key_cache=key_cache,
            value_cache=value_cache,
            block_tables=plan.decode_tables,
            kv_lens=plan.decode_lens,
            plan=plan.decode,
            config=plan.decode_config,
            out=out,
            pdl=plan.pdl,
        )

    def prefill(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: TritonAttentionPlan,
        out: Tensor,
    ) -> None:
        """See `AttentionBackend.prefill`."""
        if plan.is_one_long_prompt:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
                result = scaled_dot_product_attention(
                    _heads_first(query),
                    _heads_first(key),
                    _heads_first(value),
                    is_causal=True,
                    enable_gqa=self._group > 1,
                )
            out.copy_(result[0].transpose(0, 1))
            return
        ops.prefill_attention(
            query,
            key_cache=key_cache,
            value_cache=value_cache,
            block_tables=plan.chunk_tables,
            query_start=plan.chunk_starts,
            kv_lens=plan.chunk_lens,
            out=out,
        )

    def _config(self, num_rows: int) -> DecodeConfig:
        return ops.decode_config(
            num_rows,
            num_multiprocessors=self._num_multiprocessors,
            batch_invariant=self.batch_invariant,
        )

    def _is_one_long_prompt(self, batch: ForwardBatch) -> bool:
        """Of a step of decode rows only, nothing on the host is looked at."""
        num_rows = batch.num_decode_seqs
        num_tokens = batch.num_tokens - num_rows
        if not self._has_cudnn or num_tokens < MIN_CUDNN_TOKENS:
            return False
        is_one = len(batch.host_kv_lens) == num_rows + 1
        return is_one and int(batch.host_kv_lens[num_rows]) == num_tokens


def _heads_first(x: Tensor) -> Tensor:
    """[tokens, heads, head_dim] -> [1, heads, tokens, head_dim], a view."""
    return x.transpose(0, 1).unsqueeze(0)
