"""A stand-in for a CUDA device: what `CudaRunner` drives, in plain torch and at once.

Ops are the oracles of the kernels; graphs are calls; events are always done. The results of a step
are there when it is launched, but the engine reads them two steps later, as on a GPU.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from nanoserve_core.cuda_graphs import PlainCalls
from nanoserve_core.cuda_runner import CudaRunner, StepTools
from nanoserve_core.kernels import reference, reference_state
from nanoserve_core.models.source import open_source
from nanoserve_core.plugins import PluginManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from torch import Tensor, nn

    from nanoserve_core.config import EngineConfig
    from nanoserve_core.cuda_stream import Mark
    from nanoserve_core.layers.attention import AttentionBackend, ForwardBatch

FEW_SPLITS = 2
PACK_SIZE = 4


class HostMark:
    """`Mark` of work that is said to be done once somebody has waited for it."""

    def __init__(self) -> None:
        self.is_set = False

    def is_done(self) -> bool:
        """Whether it is."""
        return not self.is_set

    def wait(self) -> None:
        """Returns at once."""
        self.is_set = False


class HostStream:
    """`StepStream` that does everything at once."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Nothing to enter."""
        yield

    def host_buffer(self, num_ints: int) -> Tensor:
        """Ordinary memory."""
        return torch.zeros(num_ints, dtype=torch.int32)

    def make_mark(self) -> HostMark:
        """See `HostMark`."""
        return HostMark()

    def upload(self, target: int, source: int, nbytes: int, mark: Mark) -> None:
        """Copies."""
        self.set(mark)
        ctypes.memmove(target, source, nbytes)

    def download(self, buffer: Tensor, parts: list[tuple[Tensor, int]], mark: Mark) -> None:
        """Copies."""
        self.set(mark)
        start = 0
        for source, num_ints in parts:
            buffer[start : start + num_ints] = source[:num_ints]
            start += num_ints

    def set(self, mark: Mark) -> None:
        """It is done when somebody waits for it."""
        assert isinstance(mark, HostMark), "marks belong to the stream that made them"
        mark.is_set = True

    def close(self) -> None:
        """Nothing to give back."""

    def give_back_memory(self) -> None:
        """As above."""


class PagedReference:
    """`AttentionBackend` by the book, that reads nothing but the batch's tensors."""

    name = "paged_reference"
    default_block_size = 16
    graph_safe = True
    batch_invariant = True

    def supports_block_size(self, block_size: int) -> bool:
        """All."""
        return block_size >= 1

    def plan(self, batch: ForwardBatch, *, block_size: int) -> ForwardBatch:
        """The batch itself."""
        del block_size
        return batch

    def decode(
        self,
        query: Tensor,
        *,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: ForwardBatch,
        out: Tensor,
    ) -> None:
        """A row of length 0 gets zeros."""
        num_rows = plan.num_decode_seqs
        out.copy_(
            reference.paged_attention(
                query,
                key_cache=key_cache,
                value_cache=value_cache,
                block_tables=self._shared_tables(plan, key_cache.shape[1]),
                query_start=torch.arange(num_rows + 1),
                kv_lens=plan.kv_lens[:num_rows],
            )
        )

    def _shared_tables(self, plan: ForwardBatch, block_size: int) -> Tensor:
        """The decode rows' tables, in which what a tile's group shares is its first live row's."""
        tables = plan.block_tables[: plan.num_decode_seqs].clone()
        if plan.row_leads is None or plan.row_shared is None:
            return tables
        firsts: dict[tuple[int, int], int] = {}
        for row, (lead, shared) in enumerate(
            zip(plan.row_leads.tolist(), plan.row_shared.tolist(), strict=True)
        ):
            if plan.kv_lens[row] > 0:
                first = firsts.setdefault((row // PACK_SIZE, lead), row)
                num_shared = shared // block_size
                tables[row, :num_shared] = tables[first, :num_shared]
        return tables

    def prefill(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: ForwardBatch,
        out: Tensor,
    ) -> None:
        """From the cache alone."""
        del key, value
        first = plan.num_decode_seqs
        out.copy_(
            reference.paged_attention(
                query,
                key_cache=key_cache,
                value_cache=value_cache,
                block_tables=plan.block_tables[first:],
                query_start=plan.query_start[first:] - plan.query_start[first],
                kv_lens=plan.kv_lens[first:],
            )
        )


class HostOps:
    """`StepOps` in plain torch."""

    linear = staticmethod(reference.linear)
    qk_views = staticmethod(reference.qk_views)
    rms_norm = staticmethod(reference.rms_norm)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The oracle of that name, without ``pdl``."""
        if not hasattr(reference_state, name) and not hasattr(reference, name):
            raise AttributeError(name)
        oracle = getattr(reference_state, name, None) or getattr(reference, name)

        def call(*args: Any, pdl: bool = False, **options: Any) -> None:
            del pdl
            oracle(*args, **options)

        return call

    def copy_blocks(self, cache: Tensor, *, sources: Tensor, destinations: Tensor) -> None:
        """The oracle takes int64."""
        reference.copy_blocks(cache, sources=sources.long(), destinations=destinations.long())

    def place_tokens(
        self, rotary_table: Tensor, *, positions: Tensor, slot_mapping: Tensor
    ) -> reference.TokenPlacement:
        """The oracle takes int64."""
        return reference.place_tokens(
            rotary_table, positions=positions.long(), slot_mapping=slot_mapping.long()
        )

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        weight: Tensor,
        eps: float,
        out: Tensor,
        pdl: bool = False,
    ) -> None:
        """Also of the parts of a sum."""
        del pdl
        x = x.sum(0).to(residual.dtype) if x.dim() == 3 else x
        reference.add_rms_norm(x, residual, weight=weight, eps=eps, out=out)

    def embed_rms_norm(
        self,
        token_ids: Tensor,
        embedding: Tensor,
        *,
        weight: Tensor,
        eps: float,
        residual: Tensor,
        out: Tensor,
        pdl: bool = False,
    ) -> None:
        """Two ops in one."""
        del pdl
        residual.copy_(embedding.index_select(0, token_ids))
        reference.rms_norm(residual, weight, eps=eps, out=out)

    def gemv(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        out: Tensor,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        silu_mul: bool = False,
        add: bool = False,
        pdl: bool = False,
    ) -> None:
        """Up to four ops in one."""
        del pdl
        if norm_weight is not None:
            normed = torch.empty_like(x)
            reference.rms_norm(x, norm_weight, eps=eps, out=normed)
            x = normed
        result = x @ weight.t()
        if silu_mul:
            gate, up = result.chunk(2, dim=1)
            reference.silu_mul(gate, up, out=gate)
            result = gate
        out.copy_(out + result if add else result)

    def skinny_gemm(self, x: Tensor, weight: Tensor, *, out: Tensor, pdl: bool = False) -> None:
        """Whole, or parts of a sum, each over its share of the inner dimension."""
        del pdl
        if out.dim() == 2:
            out.copy_(x @ weight.t())
            return
        for part, some_x, some_weight in zip(
            out, x.chunk(len(out), dim=1), weight.chunk(len(out), dim=1), strict=True
        ):
            part.copy_(some_x.float() @ some_weight.float().t())

    def num_splits(self, out_size: int, in_size: int) -> int:
        """Always some."""
        del out_size, in_size
        return FEW_SPLITS


def cuda_runner_on_host(
    model: nn.Module,
    config: EngineConfig,
    plugins: PluginManager | None = None,
    *,
    backend: AttentionBackend | None = None,
) -> CudaRunner:
    """A `CudaRunner` whose device is this CPU. ``backend``: None takes `PagedReference`."""
    plugins = plugins or PluginManager()
    with torch.no_grad():
        tools = StepTools(
            ops=HostOps(),
            backend=backend or PagedReference(),
            stream=HostStream(),
            replays=PlainCalls(),
            use_pdl=True,
            pack_size=PACK_SIZE if backend is None else 1,
        )
        return CudaRunner(open_source(model, config, {}), config, plugins, tools)
