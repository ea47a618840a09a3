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

CASES = ((1, 256), (16, 192), (256, 128))
"""Rows and output tokens of each."""
PROMPT_LEN = 128
BUSY_COUNTS = (0, 1, 4, 0)
_SEEDS = itertools.count()


def spin(stop: threading.Event) -> None:
    """Run pure Python until told to stop."""
    while not stop.is_set():
        sum(range(100))


def tokens_per_second(llm: LLM, num_rows: int, output_len: int, num_busy: int) -> float:
    """One run on prompts that no other run had."""
    prompts = uniform(num_rows, PROMPT_LEN, output_len, seed=next(_SEEDS)).prompts
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
        for num_rows, output_len in CASES:
            tokens_per_second(llm, num_rows, output_len, 0)
        for interval, (num_rows, output_len) in itertools.product(arguments.intervals, CASES):
            sys.setswitchinterval(interval)
            rates = [tokens_per_second(llm, num_rows, output_len, n) for n in BUSY_COUNTS]
            figures = zip(BUSY_COUNTS, rates, strict=True)
            line = ", ".join(f"{n} busy {rate:,.0f}" for n, rate in figures)
            print(f"{interval * 1e3:g} ms, {num_rows} rows: {line}", flush=True)
    sys.setswitchinterval(before)


if __name__ == "__main__":
    main()
