"""Tokens per second of the engine beside busy Python threads, on a CUDA device.

    python examples/benchmarks/busy_threads.py

No prompt is served twice, so that no figure owes anything to the prefix cache; each number of rows
runs once untimed. The quiet figure is taken before and after the busy ones.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time

from gpu import random_model
from roofline import SHAPES
from workloads import uniform

from nanoserve_core import LLM, SamplingParams

CASES = ((1, 128, 512), (16, 128, 512), (256, 128, 128), (256, 768, 128))
"""Rows, prompt and output tokens of each. 256 short rows take 3 ms a step, long ones 7."""
BUSY_COUNTS = (0, 1, 4, 0)
_SEEDS = itertools.count()


def spin(stop: threading.Event) -> None:
    """Run pure Python until told to stop."""
    while not stop.is_set():
        sum(range(100))


def tokens_per_second(
    llm: LLM, num_rows: int, prompt_len: int, output_len: int, num_busy: int
) -> float:
    """One run on prompts that no other run had."""
    prompts = uniform(num_rows, prompt_len, output_len, seed=next(_SEEDS)).prompts
    params = SamplingParams(
        temperature=0.6, max_tokens=output_len, ignore_eos=True, detokenize=False
    )
    stop = threading.Event()
    threads = [threading.Thread(target=spin, args=(stop,)) for _ in range(num_busy)]
    for thread in threads:
        thread.start()
    start = time.perf_counter()
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        seconds = time.perf_counter() - start
        stop.set()
        for thread in threads:
            thread.join()
    return num_rows * output_len / seconds


def main() -> None:
    """Print a line for each switch interval and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--intervals", type=float, nargs="+", default=[0.005, 0.0005])
    arguments = parser.parse_args()
    before = sys.getswitchinterval()
    with LLM(random_model(SHAPES["0.6B"]), max_num_seqs=256, max_model_len=2048) as llm:
        for case in CASES:
            tokens_per_second(llm, *case, 0)
        for interval, case in itertools.product(arguments.intervals, CASES):
            sys.setswitchinterval(interval)
            rates = [tokens_per_second(llm, *case, num_busy) for num_busy in BUSY_COUNTS]
            quiet = (rates[0] + rates[-1]) / 2
            figures = zip(BUSY_COUNTS, rates, strict=True)
            line = ", ".join(f"{n} busy {rate:,.0f} ({rate / quiet:.2f})" for n, rate in figures)
            rows = f"{case[0]} rows of {case[1]}"
            print(f"{interval * 1e3:g} ms, {rows}: {line}", flush=True)
    sys.setswitchinterval(before)


if __name__ == "__main__":
    main()
