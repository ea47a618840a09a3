"""transformers' continuous batching on an installed model, beside the bare engine.

    python examples/benchmarks/continuous_batching.py               a 0.6B shape, on the card
    python examples/benchmarks/continuous_batching.py --tiny --device cpu    in seconds

Routes: ``bare engine`` (its thread), ``generate_batch``, ``manager`` (each request with a limit of
its own: nano256's lengths). Greedy, no end of sequence, prompts that no earlier route had.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from gpu import random_model
from roofline import SHAPES
from transformers import GenerationConfig
from workloads import Workload, ragged, uniform

import hf_generate_shim
from nanoserve_adapters.testing import tiny_model
from nanoserve_core import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle

POOL_NBYTES = 32 << 30


def bare_engine(handle: Handle, work: Workload) -> int:
    """The requests straight into the engine's thread."""
    requests = [
        Request(
            request_id=f"bare-{number}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False
            ),
        )
        for number, (prompt, length) in enumerate(zip(work.prompts, work.output_lens, strict=True))
    ]
    stream = handle.thread.stream(*requests)
    return sum(len(output.token_ids) for outputs in stream for output in outputs)


def batch(model: Qwen3ForCausalLM, work: Workload) -> int:
    """One call, one length for all."""
    config = GenerationConfig(
        max_new_tokens=work.output_lens[0], do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    results = model.generate_batch(work.prompts, generation_config=config)
    return sum(len(result.generated_tokens) for result in results.values())


def manager(model: Qwen3ForCausalLM, work: Workload) -> int:
    """One request at a time into a running manager."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(generation_config=config) as running:
        for prompt, length in zip(work.prompts, work.output_lens, strict=True):
            running.add_request(prompt, max_new_tokens=length)
        results = [running.get_result() for _ in work.prompts]
    return sum(len(result.generated_tokens) for result in results)


def show(name: str, run: Callable[[], int]) -> None:
    """Time one route and print its row."""
    start = time.perf_counter()
    num_tokens = run()
    seconds = time.perf_counter() - start
    print(f"{name:34} {num_tokens:8,} tokens {seconds:8.2f} s {num_tokens / seconds:10,.0f} tok/s")


def main() -> None:
    """Every route, after a warm-up of the same shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="of the tiny model")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, few tokens")
    parser.add_argument(
        "--own", action="store_true", help="transformers' own too, 64 prompts of it"
    )
    args = parser.parse_args()
    if args.tiny:
        model = tiny_model(max_position_embeddings=256).to(args.device)
        even, mixed, options = uniform(8, 12, 8), ragged(8, 4, 16), {"num_kvcache_blocks": 512}
    else:
        model = random_model(SHAPES["0.6B"])
        even, mixed = uniform(256, 128, 256), ragged(256, 100, 1024)
        options = {"kv_cache_memory_bytes": POOL_NBYTES}
    vocab_size = 250 if args.tiny else 10_000
    with hf_generate_shim.installed(model, **options) as handle:
        bare_engine(handle, even.with_repeat(1, vocab_size))
        show("bare engine, even", lambda: bare_engine(handle, even.with_repeat(2, vocab_size)))
        show("generate_batch, even", lambda: batch(model, even.with_repeat(3, vocab_size)))
        bare_engine(handle, mixed.with_repeat(4, vocab_size))
        show("bare engine, mixed", lambda: bare_engine(handle, mixed.with_repeat(5, vocab_size)))
        show("manager, mixed", lambda: manager(model, mixed.with_repeat(6, vocab_size)))
        print("calls by path:", handle.counters)


if __name__ == "__main__":
    main()
