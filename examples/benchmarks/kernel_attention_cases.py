"""Decode and prefill attention: batches, single rows, shared prefixes, block sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from kernel_case import (
    HEAD_DIM,
    LARGE,
    SHAPES,
    SMALL,
    Case,
    Run,
    Shape,
    copies_for,
    num_multiprocessors,
    randn,
    relative_error,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanoserve_core.kernels import triton_ops as ops
from nanoserve_core.kernels.prefill_attention import PrefillConfig, prefill_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

SPREAD = torch.randint(100, 2001, (256,), generator=torch.Generator().manual_seed(0)).tolist()
DECODE_CASES: list[tuple[str, list[int], Shape, int, int]] = [
    ("0.6B 256 rows, 100 to 2000", SPREAD, SMALL, 64, 0),
    ("0.6B 256 rows, block 16", SPREAD, SMALL, 16, 0),
    ("0.6B 64 rows of 1100", [1100] * 64, SMALL, 64, 0),
    ("8B 64 rows of 1100", [1100] * 64, LARGE, 64, 0),
    ("0.6B 64 rows of 1280, 1024 shared", [1280] * 64, SMALL, 64, 1024),
    ("0.6B 16 rows of 640", [640] * 16, SMALL, 64, 0),
    ("0.6B 1 row of 512", [512], SMALL, 64, 0),
    ("0.6B 1 row of 4096", [4096], SMALL, 64, 0),
]
PREFILL_CASES = [(16, 1024, 0), (1, 16384, 0), (64, 100, 0), (8, 512, 4096)]
DECODE_TILES = [(32, 2, 3), (64, 4, 3), (32, 4, 3), (32, 2, 4)]
PREFILL_TILES = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)]


class PagedRows:
    """Rows of given lengths in scattered blocks of several layers.

    With ``shared``, all begin with the same blocks, for so many tokens.
    """

    def __init__(
        self,
        lens: Sequence[int],
        shape: Shape,
        *,
        layers: int,
        block_size: int = 64,
        shared: int = 0,
    ) -> None:
        counts = [-(-length // block_size) for length in lens]
        ids = (torch.randperm(sum(counts)) + 1).tolist()
        common = ids[: shared // block_size]
        tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            blocks = common + [ids.pop() for _ in range(count - len(common))]
            tables[row, :count] = torch.tensor(blocks)
        self.cache = randn(2, layers, sum(counts) + 1, block_size, shape.kv_heads, HEAD_DIM)
        self.block_tables = tables.cuda()
        self.kv_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        self.query = randn(len(lens), shape.heads, HEAD_DIM)
        self.out = torch.empty_like(self.query)
        self.shape, self.shared = shape, shared

    def memory_for(self, config: ops.DecodeConfig) -> ops.DecodePlan:
        """A plan that fits these rows."""
        return ops.DecodePlan.allocate(
            config,
            max_rows=len(self.kv_lens),
            max_kv_len=int(self.kv_lens.max()),
            num_heads=self.shape.heads,
            num_kv_heads=self.shape.kv_heads,
            head_dim=HEAD_DIM,
            device=self.query.device,
        )

    def plan(self, plan: ops.DecodePlan, config: ops.DecodeConfig, _copy: int = 0) -> None:
        """Launch the planner."""
        lead = torch.zeros_like(self.kv_lens) if self.shared else None
        shared = None if lead is None else lead + self.shared
        ops.decode_plan(self.kv_lens, plan=plan, config=config, lead=lead, shared=shared)

    def attend(self, plan: ops.DecodePlan, config: ops.DecodeConfig, layer: int) -> None:
        """Launch the attention of one layer."""
        ops.decode_attention(
            self.query,
            key_cache=self.cache[0, layer],
            value_cache=self.cache[1, layer],
            block_tables=self.block_tables,
            kv_lens=self.kv_lens,
            plan=plan,
            config=config,
            out=self.out,
        )

    def planned(self, config: ops.DecodeConfig) -> Run:
        """The attention in one configuration, with a plan made for it."""
        memory = self.memory_for(config)
        self.plan(memory, config)
        return partial(self.attend, memory, config)

    def error(self) -> float:
        """The largest of a few rows of layer 0, against float64."""
        step = max(len(self.kv_lens) // 4, 1)
        return max(self._error_of(row) for row in range(0, len(self.kv_lens), step))

    def _error_of(self, row: int) -> float:
        length, group = int(self.kv_lens[row]), self.shape.heads // self.shape.kv_heads
        blocks = self.block_tables[row, : -(-length // self.cache.shape[3])].long()
        keys, values = (
            half[0, blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
            for half in self.cache
        )
        scores = torch.einsum("hd,nhd->hn", self.query[row].double(), keys)
        weights = (scores * HEAD_DIM**-0.5).softmax(-1)
        return relative_error(self.out[row], torch.einsum("hn,nhd->hd", weights, values))


def decode_configs(default: ops.DecodeConfig, num_rows: int) -> dict[str, ops.DecodeConfig]:
    """The table's choice, and tiles, grids and chunks around it."""
    few = num_rows <= 16
    configs = {"table": default}
    for block_n, num_warps, num_stages in DECODE_TILES:
        for programs in (1, 2, 4) if few else (4, 5, 6, 8):
            for chunk in (64, 128, 256) if few else (128, 256, 512):
                name = f"BN{block_n} w{num_warps} s{num_stages} P{programs} C{chunk}"
                configs[name] = replace(
                    default,
                    min_chunk=chunk,
                    max_chunk=chunk,
                    block_n=block_n,
                    num_warps=num_warps,
                    num_stages=num_stages,
                    num_programs=programs * num_multiprocessors(),
                )
    return configs


def decode_cases() -> Iterator[Case]:
    """Each with its planner, which runs once per step for all layers."""
    for name, lens, shape, block_size, shared in DECODE_CASES:
        read = sum(lens) - (len(lens) - 1) * shared
        nbytes = 4.0 * read * shape.kv_heads * HEAD_DIM
        layers = max(copies_for(nbytes, most=128), 2)
        rows = PagedRows(lens, shape, layers=layers, block_size=block_size, shared=shared)
        default = ops.decode_config(len(lens), num_multiprocessors=num_multiprocessors())
        configs = decode_configs(default, len(lens))
        if shared or block_size != 64:
            configs = {name: configs[name] for name in list(configs)[::4]}
        yield Case(
            name=f"decode {name}",
            nbytes=nbytes,
            copies=layers,
            variants={name: rows.planned(config) for name, config in configs.items()},
            in_use="table",
            error=rows.error,
        )
        yield Case(
            name="       its plan",
            nbytes=12.0 * len(lens),
            copies=20,
            variants={"table": partial(rows.plan, rows.memory_for(default), default)},
            in_use="table",
        )


class PrefillChunks:
    """Rows of ``new`` query tokens behind ``cached`` ones."""

    def __init__(self, rows: int, new: int, cached: int, shape: Shape) -> None:
        self.rows = PagedRows([new + cached] * rows, shape, layers=1)
        self.query = randn(rows * new, shape.heads, HEAD_DIM)
        self.out = torch.empty_like(self.query)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * new

    def attend(self, config: PrefillConfig, _copy: int) -> None:
        """Launch it."""
        rows = self.rows
        ops.prefill_attention(
            self.query,
            key_cache=rows.cache[0, 0],
            value_cache=rows.cache[1, 0],
            block_tables=rows.block_tables,
            query_start=self.starts,
            kv_lens=rows.kv_lens,
            out=self.out,
            config=config,
        )

    def error(self) -> float:
        """Of the last tokens of a few rows: each is one decode row."""
        last = self.starts[1:].long() - 1
        self.rows.query, self.rows.out = self.query[last], self.out[last]
        return self.rows.error()


def prefill_cases() -> Iterator[Case]:
    """New prompts, where cuDNN competes on K and V that lie side by side, and cached prefixes."""
    configs = {
        f"{m}x{n} w{w} s{s}": PrefillConfig(block_m=m, block_n=n, num_warps=w, num_stages=s)
        for m, n, w, s in PREFILL_TILES
    }
    for name, shape in SHAPES.items():
        for rows, new, cached in PREFILL_CASES:
            chunks = PrefillChunks(rows, new, cached, shape)
            group = shape.heads // shape.kv_heads
            table = prefill_config(rows * new, num_rows=rows, group=group)
            seen = new * cached + new * (new + 1) / 2
            read = (new + cached) * 2 * shape.kv_heads + new * 2 * shape.heads
            yield Case(
                name=f"prefill {name} {rows} x {new} behind {cached}",
                nbytes=2.0 * rows * read * HEAD_DIM,
                flops=4.0 * rows * shape.heads * HEAD_DIM * seen,
                copies=4,
                variants={key: partial(chunks.attend, c) for key, c in configs.items()},
                in_use=next(key for key, config in configs.items() if config == table),
                rivals={} if cached else {"cuDNN": cudnn(shape, rows, new)},
                error=chunks.error,
            )


def cudnn(shape: Shape, rows: int, length: int) -> Run:
    """Causal attention of whole prompts by cuDNN."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    query, keys, values = (randn(rows, length, n, HEAD_DIM).transpose(1, 2) for n in heads)

    def run(_copy: int) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                query, keys, values, is_causal=True, enable_gqa=True
            )

    return run
