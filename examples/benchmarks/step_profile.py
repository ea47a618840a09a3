"""Where the time of one decode step goes, on the device and on the host: a table and a picture.

    python examples/benchmarks/step_profile.py                        0.6B; 1, 16, 64, 256 rows
    python examples/benchmarks/step_profile.py --model-size 8B --rows 1 64 --out profile-8b.svg
    python examples/benchmarks/step_profile.py --tiny --device cpu    the host's part alone

"device" is the median over steps of what the kernels of a part take, as the profiler sees them in
steps that are not captured; "floor" the least that the part could take (`roofline.py`). The whole
step is captured and timed by itself: "gaps" is what it takes beyond the sum of its kernels, below
zero where they overlap. The host's times are those of `Engine.step`, without its waiting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu import CONTEXT, MAX_ID, MAX_MODEL_LEN, NUM_STEPS, NUM_WARM_STEPS, StepTimer, random_model
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from roofline import SHAPES, decode_parts

from nanoserve_adapters.testing import tiny_model
from nanoserve_core import Engine, EngineConfig, Request, SamplingParams
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.plugins import PluginManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from roofline import Shape
    from transformers import Qwen3ForCausalLM

NUM_PROFILED = 8
NUM_HOST_STEPS = 64
MAX_NEW_TOKENS = 3000
"""More than the timed visits can bring, however many steps each of them launches."""
FIRST_OF_STEP = "apply_deltas"
"""Part of the name of the kernel that every step begins with."""
PRODUCTS = ("o", "gate_up", "down", "qkv")
"""In their order after an attention; the last one of a step is the head's."""
ATTENTION = "decode_attention"
SEPARATORS = ("norm", "silu")
"""Parts of the names of kernels between two products, each of which may be several kernels."""
KINDS = {
    "sampler": ("tile_statistics", "pick_token", "filter"),
    "state": (
        *("apply_deltas", "gather_rows", "advance_state", "decode_plan"),
        *("Memcpy", "Memset", "copy_kernel"),
    ),
    "norms, rope, silu": ("norm", "silu"),
}
PARTS = (
    *("attention", "qkv", "o", "gate_up", "down", "lm_head"),
    *("norms, rope, silu", "sampler", "state", "gaps"),
)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One batch size; all in seconds a step."""

    num_rows: int
    step: float
    """A captured step, several in flight."""
    floors: Mapping[str, float]
    parts: Mapping[str, float]
    host: Mapping[str, float]


def main() -> None:
    """Measure, print, draw."""
    args = parse_arguments()
    console = Console(width=100)
    shape = SHAPES[args.model_size]
    if args.tiny:
        model = tiny_model(max_position_embeddings=MAX_MODEL_LEN).to(args.device)
    else:
        model = random_model(shape)
        console.print(f"{torch.cuda.get_device_name()}, Qwen3-{args.model_size}, context {CONTEXT}")
    devices = {} if args.tiny else device_profiles(model, shape, args.rows)
    profiles = []
    for num_rows in args.rows:
        host = host_seconds(model, num_rows, args.device)
        step, parts, floors = devices.get(num_rows, (0.0, {}, {}))
        profiles.append(
            Profile(num_rows=num_rows, step=step, parts=parts, floors=floors, host=host)
        )
        if parts:
            console.print(device_table(profiles[-1]))
    console.print(host_table(profiles))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(profiles).savefig(args.out, dpi=150)
    console.print(f"picture: {args.out}")


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-size", choices=SHAPES, default="0.6B")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--out", type=Path, default=Path("out/step_profile.svg"), help="svg or png")
    parser.add_argument("--tiny", action="store_true", help="two layers, and the host's part alone")
    parser.add_argument("--device", default="cuda", help="of the tiny model")
    return parser.parse_args()


def device_profiles(
    model: Qwen3ForCausalLM, shape: Shape, batch_sizes: Sequence[int]
) -> dict[int, tuple[float, dict[str, float], dict[str, float]]]:
    """By rows: seconds of a captured step, of its parts with the gaps, and of their floors."""
    steps, kernels = {}, {}
    for enforce_eager in (False, True):
        config = EngineConfig(
            max_num_seqs=max(batch_sizes),
            max_model_len=MAX_MODEL_LEN,
            enforce_eager=enforce_eager,
            kv_cache_memory_bytes=(max(batch_sizes) + 1) * 1024 * shape.kv_nbytes + (1 << 30),
        )
        runner = ModelRunner.create(model, config, PluginManager())
        for num_rows in batch_sizes:
            timer = StepTimer(runner, num_rows)
            if enforce_eager:
                kernels[num_rows] = profiled_parts(timer)
            else:
                steps[num_rows], _ = timer.run()
        runner.close()
    found = {}
    for num_rows in batch_sizes:
        parts, step = kernels[num_rows], steps[num_rows]
        contexts = [CONTEXT + NUM_WARM_STEPS + NUM_STEPS // 2] * num_rows
        parts["gaps"] = step - sum(parts.values())
        found[num_rows] = step, parts, decode_parts(shape, contexts)
    return found


def profiled_parts(timer: StepTimer) -> dict[str, float]:
    """Seconds a step of each part, the median of some eager steps."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    timer.run(num_steps=NUM_PROFILED, within=profiler)
    cuda = torch.autograd.DeviceType.CUDA
    events = [event for event in profiler.events() or () if event.device_type == cuda]
    if not events:
        raise RuntimeError(
            "the profiler saw no kernel: expected those of the steps. Run where CUPTI may trace."
        )
    events.sort(key=lambda event: event.time_range.start)
    spans = [
        (event.name, (event.time_range.end - event.time_range.start) / 1e6) for event in events
    ]
    return median_parts(steps_of(spans))


def steps_of(kernels: Iterable[tuple[str, float]]) -> Iterator[list[tuple[str, float]]]:
    """The kernels of each step, in order; what was launched before the first is left out."""
    step: list[tuple[str, float]] = []
    for name, seconds in kernels:
        if FIRST_OF_STEP in name:
            if step:
                yield step
            step = []
        if step or FIRST_OF_STEP in name:
            step.append((name, seconds))
    if step:
        yield step


def median_parts(steps: Iterable[list[tuple[str, float]]]) -> dict[str, float]:
    """By part, the median of the steps' sums."""
    sums = [sum_parts(step) for step in steps]
    return {
        part: statistics.median(each.get(part, 0.0) for each in sums)
        for part in PARTS
        if part != "gaps"
    }


def sum_parts(kernels: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Seconds of one step by part.

    A kernel that is of no known kind belongs to a matrix product. Which one, the order tells: our
    products of one row are a kernel each, others are parted by norms, activation and attention.
    """
    sums: dict[str, float] = defaultdict(float)
    number, is_new = len(PRODUCTS) - 2, True
    last = max((i for i, (name, _) in enumerate(kernels) if ATTENTION in name), default=-1)
    for place, (name, seconds) in enumerate(kernels):
        kind = next((k for k, names in KINDS.items() if any(n in name for n in names)), None)
        if ATTENTION in name:
            kind, number, is_new = "attention", -1, True
        elif kind is None:
            if is_new or "gemv" in name:
                number += 1
            is_new = False
            product = PRODUCTS[min(number, len(PRODUCTS) - 1)]
            kind = "lm_head" if product == "qkv" and place > last >= 0 else product
        elif any(separator in name for separator in SEPARATORS):
            is_new = True
        sums[kind] += seconds
    return sums


def host_seconds(model: Qwen3ForCausalLM, num_rows: int, device: str) -> dict[str, float]:
    """Seconds a step of the host's work in `Engine.step`, by part."""
    config = EngineConfig(max_num_seqs=num_rows, max_model_len=MAX_MODEL_LEN, device=device)
    sampling = SamplingParams(temperature=0.6, max_tokens=MAX_NEW_TOKENS, ignore_eos=True)
    with Engine(model, config) as engine:
        for slot in range(num_rows):
            ids = tuple(
                (7919 * slot + 31 * i) % min(MAX_ID, engine.spec.vocab_size) for i in range(64)
            )
            engine.add_request(
                Request(request_id=str(slot), prompt_token_ids=ids, sampling=sampling)
            )
        while engine.stats().generated_tokens < num_rows * NUM_HOST_STEPS // 2:
            engine.step()
        return timed_steps(engine)


def timed_steps(engine: Engine) -> dict[str, float]:
    """Step a busy engine, and take the time of what it calls."""
    seconds: dict[str, float] = defaultdict(float)
    scheduler, runner = engine._scheduler, engine._runner  # noqa: SLF001  # they are what is timed
    watch(scheduler, "schedule", "schedule", seconds)
    watch(runner, "launch", "launch", seconds)
    watch(scheduler, "commit", "commit", seconds)
    watch(engine, "_deliver_tokens", "deliver", seconds)
    before, start = engine.stats().steps, time.perf_counter()
    for _ in range(NUM_HOST_STEPS):
        engine.step()
    whole, num_steps = time.perf_counter() - start, engine.stats().steps - before
    parts = {name: value / num_steps for name, value in seconds.items()}
    parts["waiting and the rest"] = whole / num_steps - sum(parts.values())
    return parts


def watch(owner: object, method: str, name: str, seconds: dict[str, float]) -> None:
    """Add the time of each call of a method to ``seconds[name]``, for this object alone."""
    call: Callable[..., Any] = getattr(owner, method)  # Any: the method's own

    def timed(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - the method's own
        start = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            seconds[name] += time.perf_counter() - start

    setattr(owner, method, timed)


def device_table(profile: Profile) -> Table:
    """The parts of a step."""
    table = Table(title=f"{profile.num_rows} rows: a step of {1e6 * profile.step:,.0f} us")
    for column in ("part", "device us", "floor us", "floor / device", "of the step"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part in PARTS:
        seconds, floor = profile.parts[part], profile.floors.get(part)
        numbers = ["-", "-"]
        if floor is not None and seconds > 0:
            numbers = [f"{1e6 * floor:,.1f}", f"{floor / seconds:.2f}"]
        share = f"{seconds / profile.step:.1%}"
        table.add_row(part, f"{1e6 * seconds:,.1f}", *numbers, share)
    floor = sum(profile.floors.values())
    numbers = [f"{1e6 * profile.step:,.1f}", f"{1e6 * floor:,.1f}", f"{floor / profile.step:.2f}"]
    table.add_row("whole step", *numbers, "100.0%", style="bold")
    return table


def host_table(profiles: Sequence[Profile]) -> Table:
    """The host's times, a line for each batch size."""
    names = list(profiles[0].host)
    table = Table("rows", *[f"{name} us" for name in names], title="host, a step")
    for profile in profiles:
        numbers = [f"{1e6 * profile.host.get(name, 0.0):,.1f}" for name in names]
        table.add_row(str(profile.num_rows), *numbers)
    return table


def draw(profiles: Sequence[Profile]) -> Figure:
    """Stacked bars of the steps' shares, with their floors; of the host's times where there is no
    other.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    has_device = bool(profiles[0].parts)
    names = list(PARTS) if has_device else list(profiles[0].host)
    labels = [f"{profile.num_rows} rows\n{label_of(profile)}" for profile in profiles]
    bottoms = [0.0] * len(profiles)
    for name in names:
        times = [profile.parts if has_device else profile.host for profile in profiles]
        heights = [max(each.get(name, 0.0), 0.0) for each in times]
        shares = [h / whole_of(p) for h, p in zip(heights, profiles, strict=True)]
        axes.bar(labels, shares, bottom=bottoms, label=name, width=0.6)
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    for place, profile in enumerate(profiles):
        if has_device:
            floor = sum(profile.floors.values()) / profile.step
            axes.plot([place - 0.36, place + 0.36], [floor, floor], color="black", lw=2)
            axes.annotate(f"floor {floor:.2f}", (place + 0.31, floor + 0.01), fontsize=8)
    axes.set_ylabel("share of the step")
    axes.set_title("One decode step, by part" if has_device else "The host's part of a step")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def whole_of(profile: Profile) -> float:
    """Seconds of the step, or of the host's part."""
    return profile.step if profile.parts else sum(profile.host.values())


def label_of(profile: Profile) -> str:
    """Microseconds of the whole."""
    return f"{1e6 * whole_of(profile):,.0f} us"


if __name__ == "__main__":
    main()
