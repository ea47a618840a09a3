"""Checks and times every kernel on a CUDA device, against its roofline, aten, cuBLAS and cuDNN.

    python examples/benchmarks/kernels_gpu.py                      everything, about 90 s
    python examples/benchmarks/kernels_gpu.py --only decode stack

A figure is the median of several replays of a CUDA graph, over copies of the data that do not fit
the L2 cache. "share" is the part of the roofline that is reached: bytes at 4.3 TB/s or operations
at 790 TFLOP/s, whichever take longer, both as measured on an H200. Under a row stand the variants
that were tried, fastest first, "*" before the one that the library's tables choose.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from kernel_attention_cases import decode_cases, prefill_cases
from kernel_layer_cases import small_cases, stack_cases
from kernel_product_cases import gemv_cases, skinny_cases
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import KernelInterface

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel_case import Case, Run

BANDWIDTH = 4.3e12
PEAK = 790e12
NUM_REPLAYS = 7
NUM_SHOWN = 4
NUM_COMPILERS = 14

SECTIONS: dict[str, Callable[[], Iterator[Case]]] = {
    "small": small_cases,
    "decode": decode_cases,
    "gemv": gemv_cases,
    "skinny": skinny_cases,
    "prefill": prefill_cases,
    "stack": stack_cases,
}


def main() -> None:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'':<44} {'us':>9} {'rate':>13} {'share':>6}")
    start = time.perf_counter()
    with torch.no_grad():
        for section in args.only:
            for case in SECTIONS[section]():
                report(case)
                del case
                torch.cuda.empty_cache()
            print(f"-- {section}, after {time.perf_counter() - start:.0f} s")


def report(case: Case) -> None:
    """Compile, measure, check and print one case."""
    with compiling():
        for run in case.variants.values():
            run(0)
    times = {name: seconds_of(run, case.copies) for name, run in case.variants.items()}
    times = {name: seconds for name, seconds in times.items() if seconds is not None}
    rivals = {name: seconds_of(run, case.copies) for name, run in case.rivals.items()}
    used = times[case.in_use]
    notes = [f"{name} {seconds * 1e6:.1f}" for name, seconds in rivals.items() if seconds]
    if case.error is not None:
        case.variants[case.in_use](0)
        notes.append(f"error {case.error():.0e}")
    moving, computing = case.nbytes / BANDWIDTH, case.flops / PEAK
    if computing > moving:
        rate = f"{case.flops / used / 1e12:.0f} TFLOP/s"
    else:
        rate = f"{case.nbytes / used / 1e12:.2f} TB/s"
    share = max(moving, computing) / used
    print(f"{case.name:<44} {used * 1e6:9.1f} {rate:>13} {share:6.2f}  {', '.join(notes)}")
    if len(times) > 1:
        fastest = sorted(times, key=times.__getitem__)[:NUM_SHOWN]
        shown = [f"{'*' * (n == case.in_use)}{n} {times[n] * 1e6:.1f}" for n in fastest]
        print("    " + " | ".join(shown))
    sys.stdout.flush()


def seconds_of(run: Run, copies: int) -> float | None:
    """Median seconds of one run, in a graph that makes one per copy; None if it does not fit."""
    stream = side_stream()
    torch.cuda.synchronize()  # the data was made on another stream
    with torch.cuda.stream(stream):
        try:
            run(0)
        except OutOfResources:
            return None
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for copy in range(copies):
            run(copy)
        graph.capture_end()
        spans = [replay(graph) for _ in range(NUM_REPLAYS + 1)]
        stream.synchronize()
    times = [start.elapsed_time(end) for start, end in spans[1:]]
    return statistics.median(times) / copies / 1000


@cache
def side_stream() -> torch.cuda.Stream:
    """Where everything is captured: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream()


def replay(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events before and after one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    return start, end


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, launches only compile, in threads; at the end all are ready."""
    launch = KernelInterface.__getitem__

    def compile_only(kernel: KernelInterface, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:  # Any: the kernel's arguments
            kernel.run(*args, grid=grid, warmup=True, **kwargs)

        return run

    KernelInterface.__getitem__ = compile_only
    try:
        with ThreadPoolExecutor(NUM_COMPILERS) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        KernelInterface.__getitem__ = launch


if __name__ == "__main__":
    main()
