"""Every row of the GPU table: workloads at 0.6B and 8B, with what is achieved, floor and target.

It is what ``bench.py --device cuda`` runs. Random weights of the true shapes, made on the device;
temperature 0.6; one run to warm up, then the median of the repeats.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from gpu import MAX_MODEL_LEN, SHARED_PREFIX, Clock, random_model, requests_of, serve, timed
from rich.table import Table
from roofline import SHAPES, workload_seconds
from workloads import GPU_WORKLOADS, uniform

from nanoserve_core import Engine, EngineConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import Qwen3ForCausalLM
    from workloads import Workload

TEMPERATURE = 0.6
MAX_ID = 10_000
FIRST_TOKEN = "first token"
FIRST_TOKEN_PROMPT, NUM_FIRST_TOKENS = 100, 9
TARGETS: dict[tuple[str, str], tuple[int | None, int]] = {
    ("0.6B", "nano256"): (21_900, 29_500),
    ("0.6B", "single"): (576, 2_000),
    ("0.6B", "b16"): (7_620, 20_000),
    ("0.6B", "shared"): (16_300, 40_000),
    ("8B", "single"): (192, 250),
    ("8B", "c64_1k_256"): (4_465, 5_050),
    ("8B", "nano256"): (9_005, 10_600),
}
"""Output tokens per second: of the best of the engines that were measured on this card, and what we
want."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One workload on one model; rates in output tokens per second."""

    model_size: str
    workload: str
    seconds: float
    rate: float
    floor_rate: float
    num_repeats: int

    @property
    def share(self) -> float:
        """Part of the floor that is reached."""
        return self.rate / self.floor_rate


def measure_card(
    model_sizes: Sequence[str], names: Sequence[str], *, repeats: int, budget: float
) -> Iterator[Row]:
    """The rows of the table that were asked for, model by model."""
    clock = Clock(budget)
    for size in model_sizes:
        wanted = [name for of, name in TARGETS if of == size and name in names]
        if not wanted or not clock.has(20, size):
            continue
        model = random_model(SHAPES[size])
        workloads = {name: GPU_WORKLOADS[name]() for name in wanted}
        yield from measure_model(model, size, workloads, repeats=repeats, clock=clock)
        del model
        gc.collect()
        torch.cuda.empty_cache()


def measure_model(
    model: Qwen3ForCausalLM,
    model_size: str,
    workloads: dict[str, Workload],
    *,
    repeats: int,
    clock: Clock,
) -> Iterator[Row]:
    """One engine, all workloads, and the time to a first token."""
    shape = SHAPES[model_size]
    with Engine(model, EngineConfig(max_num_seqs=256, max_model_len=MAX_MODEL_LEN)) as engine:
        max_id = min(MAX_ID, engine.spec.vocab_size - 1)
        yield first_token_row(engine, model_size, max_id)
        for name, workload in workloads.items():
            floor = workload_seconds(
                shape,
                [len(prompt) for prompt in workload.prompts],
                workload.output_lens,
                num_shared=SHARED_PREFIX.get(name, 0),
            )
            if not clock.has(3 * floor, f"{model_size} {name}"):
                continue
            run_once(engine, workload, 0, max_id)  # compiles and captures
            seconds: list[float] = []
            for repeat in range(1, repeats + 1):
                if seconds and not clock.has(seconds[-1], f"{name}, repeat {repeat}"):
                    break
                seconds.append(run_once(engine, workload, repeat, max_id))
            median = statistics.median(seconds)
            yield Row(
                model_size=model_size,
                workload=name,
                seconds=median,
                rate=workload.num_output_tokens / median,
                floor_rate=workload.num_output_tokens / floor,
                num_repeats=len(seconds),
            )


def run_once(engine: Engine, workload: Workload, repeat: int, max_id: int) -> float:
    """Seconds of one run on ids that no other repeat has."""
    requests = requests_of(workload.with_repeat(repeat, max_id + 1), TEMPERATURE)
    return timed(lambda: serve(engine, requests))


def first_token_row(engine: Engine, model_size: str, max_id: int) -> Row:
    """Time to the first token of a prompt of 100, on an idle engine."""
    seconds = []
    for number in range(NUM_FIRST_TOKENS + 2):
        workload = uniform(1, FIRST_TOKEN_PROMPT, 1, seed=1000 + number)
        requests = requests_of(workload.with_repeat(0, max_id + 1), TEMPERATURE)
        start = time.perf_counter()
        serve(engine, requests)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[2:])
    floor = workload_seconds(SHAPES[model_size], [FIRST_TOKEN_PROMPT], [1])
    return Row(
        model_size=model_size,
        workload=FIRST_TOKEN,
        seconds=median,
        rate=1 / median,
        floor_rate=1 / floor,
        num_repeats=NUM_FIRST_TOKENS,
    )


def card_table(rows: Sequence[Row]) -> Table:
    """What is achieved, beside floor, best peer and target."""
    table = Table("model", "workload", title="output tokens per second")
    for column in ("seconds", "tokens/s", "floor", "share", "best peer", "target", "of target"):
        table.add_column(column, justify="right")
    for row in rows:
        peer, target = TARGETS.get((row.model_size, row.workload), (None, 0))
        table.add_row(
            row.model_size,
            row.workload,
            f"{row.seconds:.4f}",
            f"{row.rate:,.0f}",
            f"{row.floor_rate:,.0f}",
            f"{row.share:.2f}",
            f"{peer:,}" if peer else "-",
            f"{target:,}" if target else "-",
            f"{row.rate / target:.2f}" if target else "-",
        )
    return table
