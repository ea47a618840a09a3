"""`model.generate` of a live 0.6B-shaped model on a CUDA device, served by the shim.

    python examples/benchmarks/attach_gpu.py

Run it twice: the first run of a machine also compiles the kernels.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING

import torch
from gpu import random_model
from roofline import SHAPES

import hf_generate_shim

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_ID = 10_000
POOL_NBYTES = 4 << 30
_SEEDS = itertools.count()


def seconds_of(model: PreTrainedModel, num_rows: int, prompt_len: int, output_len: int) -> float:
    """One greedy call on prompts that no other call had, until its tokens are on the host."""
    torch.manual_seed(next(_SEEDS))
    ids = torch.randint(0, MAX_ID, (num_rows, prompt_len), device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=output_len,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    out.cpu()
    return time.perf_counter() - start


def main() -> None:
    """Print first token, time to first token, speed and memory."""
    model = random_model(SHAPES["0.6B"])
    before = torch.cuda.memory_allocated()
    with hf_generate_shim.installed(model, kv_cache_memory_bytes=POOL_NBYTES) as handle:
        print(f"first token after install: {seconds_of(model, 1, 100, 1):.2f} s")
        after = torch.cuda.memory_allocated()
        for num_rows in (1, 16):
            seconds_of(model, num_rows, 128, 16)
        first = statistics.median(seconds_of(model, 1, 100, 1) for _ in range(9))
        print(f"time to first token, 100-token prompt, idle engine: {first * 1e3:.1f} ms")
        for num_rows in (1, 16):
            rate = num_rows * 512 / seconds_of(model, num_rows, 128, 512)
            print(f"{num_rows} x 128 in, 512 out: {rate:,.0f} tokens/s")
        print(f"device memory: {before >> 20} MiB, with the engine {after >> 20} MiB")
        print(f"of which K/V pool {POOL_NBYTES >> 20} MiB; calls by path: {handle.counters}")


if __name__ == "__main__":
    main()
