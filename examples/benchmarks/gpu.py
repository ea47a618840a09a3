"""The whole engine on a CUDA device, with random weights of a true shape, against the roofline.

    python examples/benchmarks/gpu.py --quick                  0.6B, everything once, under 100 s
    python examples/benchmarks/gpu.py --model-size 8B --rows 1 64 --workloads c64_1k_256

First it checks that captured steps give the tokens of eager ones. Then it times decode steps of a
fixed batch, three in flight ("host" is the part of it that launching takes), and whole workloads,
each once to warm up and once or more for the figure. Nothing is started that would end after
``--budget`` seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from roofline import SHAPES, decode_seconds, workload_seconds
from transformers import Qwen3Config, Qwen3ForCausalLM
from workloads import GPU_WORKLOADS

from nanoserve_core import Engine, EngineConfig, Request, SamplingParams
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.plan import ScheduledSeq, SlotAssignment, StepPlan
from nanoserve_core.plugins import PluginManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from roofline import Shape
    from workloads import Workload

    from nanoserve_core.model_runner import InFlight

CONTEXT = 832
"""Prompt length of the timed steps; with 56 steps in the middle, their mean context is 860."""
NUM_STEPS = 56
NUM_WARM_STEPS = 4
NUM_CHECKED = 12
MAX_ID = 10_000
MAX_MODEL_LEN = 4096
SHARED_PREFIX = {"shared": 2048}
QUICK_ROWS = [1, 16, 64, 256]
QUICK_WORKLOADS = ["single", "b16", "shared", "nano256"]
FLOOR_SHARE_GUESS = 0.3


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table."""

    name: str
    seconds: float
    floor: float
    num_tokens: int
    note: str = ""

    def __str__(self) -> str:
        rate = self.num_tokens / self.seconds
        share = self.floor / self.seconds
        return (
            f"{self.name:14} {1e3 * self.seconds:10.3f} {1e3 * self.floor:10.3f} {share:6.2f}"
            f" {rate:12,.0f}  {self.note}"
        )


class Clock:
    """The time budget of the whole program."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    def has(self, seconds: float, what: str) -> bool:
        """Whether so much is left; says what is left out when not."""
        if time.perf_counter() + seconds < self._end:
            return True
        print(f"{what}: left out, {seconds:.0f} s would pass the budget", flush=True)
        return False


def main() -> None:
    """Check, measure, print."""
    args = parse_arguments()
    clock, shape = Clock(args.budget), SHAPES[args.model_size]
    start = time.perf_counter()
    model = random_model(shape)
    device = torch.cuda.get_device_name()
    print(f"{device}, Qwen3-{args.model_size}, made in {time.perf_counter() - start:.1f} s")
    if not args.no_check:
        check(model)
    print(f"{'':14} {'ms':>10} {'floor ms':>10} {'share':>6} {'tokens/s':>12}")
    for figure in measure_steps(model, shape, args.rows, clock, enforce_eager=args.enforce_eager):
        print(figure, flush=True)
    for figure in measure_workloads(model, shape, args, clock):
        print(figure, flush=True)
    print(f"{time.perf_counter() - start:.1f} s in all")


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-size", choices=SHAPES, default="0.6B")
    parser.add_argument("--rows", type=int, nargs="*", default=QUICK_ROWS)
    parser.add_argument("--workloads", nargs="*", choices=GPU_WORKLOADS, default=QUICK_WORKLOADS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.6, help="of the workloads")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds, of the whole run")
    parser.add_argument("--quick", action="store_true", help="one repeat, 95 seconds")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--enforce-eager", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.budget = 1, 95.0
    return args


def random_model(shape: Shape) -> Qwen3ForCausalLM:
    """A live model of random bfloat16 weights on the device."""
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=shape.is_tied,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)  # noqa: SLF001  # its own way
    return model.eval().requires_grad_(False)


def check(model: Qwen3ForCausalLM) -> None:
    """Captured and eager steps are the same kernels, so their tokens are the same."""
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=tuple(range(100 + number, 140 + 13 * number)),
            sampling=SamplingParams(
                temperature=0.7 * (number % 2),
                top_k=20 * (number % 4 == 1),
                max_tokens=NUM_CHECKED,
                ignore_eos=True,
                seed=number,
            ),
        )
        for number in range(9)
    ]
    options = {"num_kvcache_blocks": 400, "max_num_seqs": 16, "max_model_len": 1024}
    results = []
    for enforce_eager in (True, False):
        with Engine(model, EngineConfig(enforce_eager=enforce_eager, **options)) as engine:
            results.append(serve(engine, requests))
            backends = engine.stats().backends
    is_equal = results[0] == results[1]
    print(f"captured == eager: {is_equal}; {backends}", flush=True)
    assert is_equal, "captured steps differ from eager ones: their figures would mean nothing"


def serve(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Run all requests, there at the start; tokens by request id."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    return tokens


def measure_steps(
    model: Qwen3ForCausalLM,
    shape: Shape,
    batch_sizes: Sequence[int],
    clock: Clock,
    *,
    enforce_eager: bool,
) -> Iterator[Figure]:
    """Decode steps of fixed batches, through the runner alone."""
    if not batch_sizes or not clock.has(10, "steps"):
        return
    config = EngineConfig(
        max_num_seqs=max(batch_sizes),
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=enforce_eager,
        kv_cache_memory_bytes=(max(batch_sizes) + 1) * 1024 * shape.kv_nbytes + (1 << 30),
    )
    runner = ModelRunner.create(model, config, PluginManager())
    contexts = range(CONTEXT + NUM_WARM_STEPS + 1, CONTEXT + NUM_WARM_STEPS + NUM_STEPS + 1)
    for num_rows in batch_sizes:
        if clock.has(6, f"{num_rows} rows"):
            seconds, host = StepTimer(runner, num_rows).run()
            floors = [decode_seconds(shape, [context] * num_rows) for context in contexts]
            yield Figure(
                name=f"step, {num_rows} rows",
                seconds=seconds,
                floor=statistics.mean(floors),
                num_tokens=num_rows,
                note=f"host {1e6 * host:.0f} us",
            )
    runner.close()


class StepTimer:
    """A batch of equal rows, decoding."""

    def __init__(self, runner: ModelRunner, num_rows: int) -> None:
        self._runner = runner
        self._num_rows = num_rows
        self._blocks = -(-(CONTEXT + NUM_WARM_STEPS + NUM_STEPS + 4) // runner.block_size)
        self._sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

    def run(
        self, *, num_steps: int = NUM_STEPS, within: AbstractContextManager[object] | None = None
    ) -> tuple[float, float]:
        """Seconds a step; and of them, those in which the host launched. ``within``: what is
        entered for the timed steps.
        """
        at_once = max(16384 // CONTEXT, 1)
        for first in range(0, self._num_rows, at_once):
            slots = range(first, min(first + at_once, self._num_rows))
            self._runner.launch(self._prefill(slots)).wait()
        plan = self._decode()
        self._launch(plan, NUM_WARM_STEPS)
        with within or nullcontext():
            start = time.perf_counter()
            host = self._launch(plan, num_steps)
            seconds = time.perf_counter() - start
        leave = StepPlan(
            step_id=0, seqs=(), num_decode_seqs=0, released=tuple(range(self._num_rows))
        )
        self._runner.launch(leave).wait()
        return seconds / num_steps, host / num_steps

    def _launch(self, plan: StepPlan, num_steps: int) -> float:
        host = 0.0
        in_flight: deque[InFlight] = deque()
        for _ in range(num_steps):
            start = time.perf_counter()
            in_flight.append(self._runner.launch(plan))
            host += time.perf_counter() - start
            if len(in_flight) > self._runner.run_ahead:
                in_flight.popleft().wait()
        while in_flight:
            in_flight.popleft().wait()
        return host

    def _prefill(self, slots: range) -> StepPlan:
        prompts = [tuple((7919 * slot + 31 * i) % MAX_ID for i in range(CONTEXT)) for slot in slots]
        return StepPlan(
            step_id=0,
            num_decode_seqs=0,
            assigned=tuple(map(self._assignment, slots, prompts)),
            seqs=tuple(
                ScheduledSeq(
                    sequence_id=slot,
                    slot=slot,
                    generation=0,
                    start=0,
                    num_tokens=CONTEXT,
                    token_ids=prompt,
                    samples=True,
                    new_block_ids=tuple(range(slot * self._blocks, (slot + 1) * self._blocks)),
                )
                for slot, prompt in zip(slots, prompts, strict=True)
            ),
        )

    def _assignment(self, slot: int, prompt: tuple[int, ...]) -> SlotAssignment:
        return SlotAssignment(
            slot=slot,
            generation=0,
            request=Request(request_id=str(slot), prompt_token_ids=prompt, sampling=self._sampling),
            index=0,
            seed=slot,
            token_ids=prompt,
            num_prompt_tokens=CONTEXT,
        )

    def _decode(self) -> StepPlan:
        """The device knows the positions, so the same plan serves every step."""
        return StepPlan(
            step_id=0,
            num_decode_seqs=self._num_rows,
            seqs=tuple(
                ScheduledSeq(
                    sequence_id=slot,
                    slot=slot,
                    generation=0,
                    start=CONTEXT,
                    num_tokens=1,
                    token_ids=(),
                    samples=True,
                )
                for slot in range(self._num_rows)
            ),
        )


def measure_workloads(
    model: Qwen3ForCausalLM, shape: Shape, args: argparse.Namespace, clock: Clock
) -> Iterator[Figure]:
    """Whole workloads through the engine: all requests there at the start."""
    if not args.workloads:
        return
    config = EngineConfig(
        max_num_seqs=256, max_model_len=MAX_MODEL_LEN, enforce_eager=args.enforce_eager
    )
    with Engine(model, config) as engine:
        for name in args.workloads:
            workload = GPU_WORKLOADS[name]()
            floor = workload_seconds(
                shape,
                [len(prompt) for prompt in workload.prompts],
                workload.output_lens,
                num_shared=SHARED_PREFIX.get(name, 0),
            )
            if clock.has(2 * floor / FLOOR_SHARE_GUESS + 3, name):
                yield measure_workload(engine, name, workload, floor, args, clock)


def measure_workload(
    engine: Engine,
    name: str,
    workload: Workload,
    floor: float,
    args: argparse.Namespace,
    clock: Clock,
) -> Figure:
    """The median of the repeats that fit; the first run compiles and captures."""
    seconds: list[float] = []
    vocab_size = MAX_ID + 1
    first = requests_of(workload.with_repeat(0, vocab_size), args.temperature)
    timed(lambda: serve(engine, first))
    for repeat in range(1, args.repeats + 1):
        if seconds and not clock.has(seconds[-1], f"{name}, repeat {repeat}"):
            break
        requests = requests_of(workload.with_repeat(repeat, vocab_size), args.temperature)
        seconds.append(timed(lambda requests=requests: serve(engine, requests)))
    stats = engine.stats()
    return Figure(
        name=name,
        seconds=statistics.median(seconds),
        floor=floor,
        num_tokens=workload.num_output_tokens,
        note=f"{len(seconds)} repeats, {stats.preemptions} preemptions so far",
    )


def requests_of(workload: Workload, temperature: float) -> list[Request]:
    """Requests of exact lengths."""
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=False
            ),
        )
        for number, (prompt, output_len) in enumerate(
            zip(workload.prompts, workload.output_lens, strict=True)
        )
    ]


def timed(function: Callable[[], object]) -> float:
    """Seconds, with the device idle before and after."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
