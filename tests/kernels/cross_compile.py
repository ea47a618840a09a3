"""Compiles the kernels for an H200 on a machine without a GPU, and prints what each one needs.

The launchers run on meta tensors, so that every launch has the signature and the constants of a
real one; nothing is launched. A program of its own, because it replaces Triton's driver.

    python -m tests.kernels.cross_compile          one JSON object a line: a `Usage`
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface

from nanoserve_core.kernels import triton_ops as ops
from nanoserve_core.kernels.prefill_attention import prefill_config
from nanoserve_core.kernels.skinny_gemm import num_splits
from tests.kernels.sampling_launches import sampling_launches, state_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from torch import Tensor
    from triton.compiler import CompiledKernel

HOPPER = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
DTYPE = torch.bfloat16
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one compiled kernel needs of a multiprocessor."""

    launch: str
    kernel: str
    num_warps: int
    registers: int
    """Per thread."""
    stack_nbytes: int
    """Per thread: what spilled."""
    shared_nbytes: int
    """Per program."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a checkpoint that decide how kernels are compiled."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 128
    vocab: int = 151936


SHAPES = {
    "0.6B": Shape(hidden=1024, heads=16, kv_heads=8, intermediate=3072),
    "8B": Shape(hidden=4096, heads=32, kv_heads=8, intermediate=12288),
    "14B": Shape(hidden=5120, heads=40, kv_heads=8, intermediate=17408),
    "32B": Shape(hidden=5120, heads=64, kv_heads=8, intermediate=25600),
}


class NoDevice:
    """Stands in for the driver: a current device of the target's kind, and no way to launch."""

    def get_current_device(self) -> int:
        """The only device there is."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return device

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return HOPPER

    def get_device_interface(self) -> ModuleType:
        """Where Triton looks for device functions."""
        return torch.cuda


def meta(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """A tensor that has everything but contents."""
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_ids(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """The same, of integers."""
    return meta(*shape, dtype=dtype)


def norm_launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Norms, activation and copies: the small kernels."""
    small, large = SHAPES["0.6B"], SHAPES["8B"]
    x, weight, cache = meta(256, small.hidden), meta(small.hidden), meta(2, 28, 100, 64, 8, 128)
    y, parts = meta(64, large.hidden), meta(4, 64, large.hidden, dtype=torch.float32)
    ids = meta_ids(256, dtype=torch.int64)
    gate, up = meta(256, 2 * small.intermediate).chunk(2, dim=1)
    norm: dict[str, Any] = {"weight": weight, "eps": EPS, "out": x, "pdl": True}  # Any: arguments
    yield "0.6B rms_norm", lambda: ops.rms_norm(x, **norm)
    yield "0.6B add_rms_norm", lambda: ops.add_rms_norm(x, x, **norm)
    yield (
        "0.6B embed_rms_norm",
        lambda: ops.embed_rms_norm(ids, meta(small.vocab, small.hidden), residual=x, **norm),
    )
    yield (
        "8B add_rms_norm of 4 parts",
        lambda: ops.add_rms_norm(parts, y, weight=meta(large.hidden), eps=EPS, out=y, pdl=True),
    )
    yield "0.6B silu_mul", lambda: ops.silu_mul(gate, up, out=meta(*gate.shape), pdl=True)
    yield "copy_blocks", lambda: ops.copy_blocks(cache, sources=ids, destinations=ids)


def qk_launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """QK-norm, RoPE and the cache write."""
    for name in ("0.6B", "14B"):

        def launch(shape: Shape = SHAPES[name]) -> None:
            ids = meta_ids(256, dtype=torch.int64)
            table = meta(4096, shape.head_dim, dtype=torch.float32)
            weight = meta(shape.head_dim)
            ops.qk_norm_rope_write(
                meta(256, shape.heads + 2 * shape.kv_heads, shape.head_dim),
                ops.place_tokens(table, positions=ids, slot_mapping=ids),
                q_weight=weight,
                k_weight=weight,
                eps=EPS,
                cache=meta(2, 28, 6400, shape.kv_heads, shape.head_dim)[:, 0],
                pdl=True,
            )

        yield f"{name} qk_norm_rope_write", launch


def decode_launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """The planner and decode attention: every group of query heads, every block size."""
    base = ops.decode_config(256, num_multiprocessors=132)
    wide = ops.decode_config(1, num_multiprocessors=132)
    cases = [(name, 64, base) for name in SHAPES]
    cases += [("0.6B", 16, base), ("0.6B", 256, base), ("0.6B", 64, wide), ("32B", 16, wide)]
    for name, block_size, config in cases:
        shape = SHAPES[name]
        plan = ops.DecodePlan.allocate(
            config,
            max_rows=256,
            max_kv_len=4096,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            device=torch.device("meta"),
        )
        lens = meta_ids(256)
        if name == "0.6B" and config is base and block_size == 64:
            yield (
                f"{name} decode_plan",
                lambda p=plan, c=config, n=lens: ops.decode_plan(
                    n, plan=p, config=c, lead=n, shared=n, pdl=True
                ),
            )

        def launch(
            shape: Shape = shape,
            block_size: int = block_size,
            plan: ops.DecodePlan = plan,
            config: ops.DecodeConfig = config,
            lens: Tensor = lens,
        ) -> None:
            cache = meta(2, 28, 100, block_size, shape.kv_heads, shape.head_dim)
            query = meta(256, shape.heads + 2 * shape.kv_heads, shape.head_dim)[:, : shape.heads]
            ops.decode_attention(
                query,
                key_cache=cache[0, 0],
                value_cache=cache[1, 0],
                block_tables=meta_ids(256, 64),
                kv_lens=lens,
                plan=plan,
                config=config,
                out=meta(256, shape.heads, shape.head_dim),
                pdl=True,
            )

        tile = f"block {block_size}, tile {config.block_n}"
        yield f"{name} decode_attention, {tile}", launch


def prefill_launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Prefill attention with small and large tiles."""
    for name, num_tokens, block_size in (
        ("0.6B", 64, 64),
        ("0.6B", 8192, 64),
        ("14B", 8192, 16),
    ):
        shape = SHAPES[name]

        def launch(
            shape: Shape = shape, num_tokens: int = num_tokens, block_size: int = block_size
        ) -> None:
            cache = meta(2, 28, 100, block_size, shape.kv_heads, shape.head_dim)
            query = meta(num_tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
            ops.prefill_attention(
                query[:, : shape.heads],
                key_cache=cache[0, 0],
                value_cache=cache[1, 0],
                block_tables=meta_ids(8, 64),
                query_start=meta_ids(9),
                kv_lens=meta_ids(8),
                out=meta(num_tokens, shape.heads, shape.head_dim),
            )

        group = shape.heads // shape.kv_heads
        config = prefill_config(num_tokens, num_rows=8, group=group)
        tile = f"block {block_size}, tile {config.block_m} x {config.block_n}"
        yield f"{name} prefill_attention, {tile}", launch


def product_launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Products of one row and of few rows, as a decoder layer has them."""
    for name in ("0.6B", "8B", "14B", "32B"):
        shape = SHAPES[name]
        x, weight = meta(1, shape.hidden), meta(shape.hidden)
        norm: dict[str, Any] = {"norm_weight": weight, "eps": EPS, "pdl": True}  # Any: arguments
        yield (
            f"{name} gemv gate_up",
            lambda x=x, n=shape.intermediate, k=norm: ops.gemv(
                x, meta(2 * n, x.shape[1]), out=meta(1, n), silu_mul=True, **k
            ),
        )
        yield (
            f"{name} gemv down",
            lambda x=x, n=shape.intermediate: ops.gemv(
                meta(1, n), meta(x.shape[1], n), out=x, add=True, pdl=True
            ),
        )
    small, large = SHAPES["0.6B"], SHAPES["8B"]
    for name, num_rows, in_size, out_size in (
        ("0.6B skinny_gemm down", 16, small.intermediate, small.hidden),
        ("0.6B skinny_gemm down", 64, small.intermediate, small.hidden),
        ("8B skinny_gemm down", 64, large.intermediate, large.hidden),
        ("8B skinny_gemm qkv", 16, large.hidden, 6144),
        ("8B skinny_gemm lm_head", 64, large.hidden, large.vocab),
    ):

        def launch(
            num_rows: int = num_rows, in_size: int = in_size, out_size: int = out_size
        ) -> None:
            splits = num_splits(out_size, in_size)
            out = meta(num_rows, out_size)
            if splits > 1:
                out = meta(splits, num_rows, out_size, dtype=torch.float32)
            x, weight = meta(num_rows, in_size), meta(out_size, in_size)
            ops.skinny_gemm(x, weight, out=out, pdl=True)

        yield f"{name}, {num_rows} rows", launch


def all_launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every launch that is compiled: a name and what makes it."""
    yield from norm_launches()
    yield from qk_launches()
    yield from decode_launches()
    yield from prefill_launches()
    yield from product_launches()
    yield from sampling_launches()
    yield from state_launches()


def usage_of(launch: str, compiled: CompiledKernel) -> Usage:
    """What the assembler reports for one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = USAGE.search(report)
    if found is None:
        raise RuntimeError(f"{launch}: no usage in what cuobjdump printed:\n{report}")
    registers, stack, local = map(int, found.groups())
    return Usage(
        launch=launch,
        kernel=compiled.metadata.name,
        num_warps=compiled.metadata.num_warps,
        registers=registers,
        stack_nbytes=stack + local,
        shared_nbytes=compiled.metadata.shared,
    )


def compile_all() -> Iterator[Usage]:
    """Compile every launch for `HOPPER`."""
    compiled: list[CompiledKernel] = []

    def compile_only(kernel: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:  # Any: the kernel's arguments
            compiled.append(kernel.run(*args, grid=grid, warmup=True, **kwargs))

        return run

    driver.set_active(NoDevice())
    KernelInterface.__getitem__ = compile_only
    for name, launch in all_launches():
        launch()
        yield usage_of(name, compiled.pop())


def main() -> None:
    """Print one line per launch."""
    for usage in compile_all():
        sys.stdout.write(json.dumps(asdict(usage)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
