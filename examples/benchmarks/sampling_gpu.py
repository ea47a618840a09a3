"""Time of the sampling kernels on an NVIDIA GPU, launched from a captured graph.

    python examples/benchmarks/sampling_gpu.py

The share is of the time that reading all logits once takes at `BANDWIDTH`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from nanoserve_core.kernels import triton_ops as ops
from nanoserve_core.kernels.sampling_scratch import (
    FILTER_CAPACITY,
    FILTER_GROUP,
    FILTER_TILE,
    FilterTiles,
    TileStatistics,
)
from nanoserve_core.kernels.slot_tables import (
    PickedTokens,
    SlotField,
    SlotLayout,
    SlotTables,
    StepRows,
    TokenRing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Launch = Callable[[torch.Tensor], None]

VOCAB = 151_936
BANDWIDTH = 4.3e12
NUM_REPLAYS = 10
QWEN3 = {SlotField.TEMPERATURE: 0.6, SlotField.TOP_K: 20, SlotField.TOP_P: 0.95}
KINDS: dict[str, Mapping[SlotField, float]] = {
    "greedy": {SlotField.TEMPERATURE: 0},
    "sampled": {SlotField.TEMPERATURE: 0.8},
    "sampled, logprob": {SlotField.TEMPERATURE: 0.8, SlotField.WANTS_LOGPROB: 1},
    "top-k 20, top-p 0.95": QWEN3,
    "top-k 50": {SlotField.TEMPERATURE: 1, SlotField.TOP_K: 50},
    "top-p 0.9": {SlotField.TEMPERATURE: 1, SlotField.TOP_P: 0.9},
    "min-p 0.05": {SlotField.TEMPERATURE: 1, SlotField.MIN_P: 0.05},
    "top-k 1000": {SlotField.TEMPERATURE: 1, SlotField.TOP_K: 1000},
}
TILES = (4096, 2048, 1024)
FILTER_TILES = ((FILTER_TILE, FILTER_GROUP, FILTER_CAPACITY), (128, 32, 128), (256, 16, 64))


def benchmark_sampling() -> None:
    """Print a table: microseconds per step for 256 rows and for one, by kind of row."""
    print(f"{'rows':>5} {'':36} {'us':>8} {'of 4.3 TB/s':>12}")
    for num_rows in (256, 1):
        logits = random_logits(num_rows, num_likely=40)
        flat = random_logits(num_rows, num_likely=0)
        for kind, parameters in KINDS.items():
            report(num_rows, kind, seconds_of(sampling_launch(num_rows, parameters), logits))
        top_p = sampling_launch(num_rows, KINDS["top-p 0.9"])
        report(num_rows, "top-p 0.9, flat: whole rows", seconds_of(top_p, flat))
        report_parts(num_rows, logits)
        report_sizes(num_rows, logits)
        report_state(num_rows)


def report_parts(num_rows: int, logits: Sequence[torch.Tensor]) -> None:
    """The four kernels of rows that filter, one by one."""
    rows = rows_with(num_rows, QWEN3)
    cut = torch.full((num_rows,), 10.0, device="cuda")
    tiles = FilterTiles.allocate(num_rows, VOCAB, "cuda")
    stats = TileStatistics.allocate(num_rows, VOCAB, "cuda")
    picked = PickedTokens.allocate(num_rows, "cuda")
    parts: dict[str, Launch] = {
        "filter_tiles": partial(ops.filter_tiles, rows=rows, tiles=tiles),
        "filter_cut": partial(ops.filter_cut, rows=rows, tiles=tiles, cut=cut),
        "tile_statistics": partial(ops.tile_statistics, rows=rows, cut=cut, stats=stats),
        "pick_token": partial(ops.pick_token, rows=rows, cut=cut, stats=stats, picked=picked),
    }
    for name, launch in parts.items():
        # What filter_cut and pick_token read belongs to the last logits: nothing else is timed.
        launch(logits[-1])
        needs_one = name in ("filter_cut", "pick_token")
        report(num_rows, f"  {name}", seconds_of(launch, logits[-1:] if needs_one else logits))


def report_sizes(num_rows: int, logits: Sequence[torch.Tensor]) -> None:
    """Other tile sizes than the default ones."""
    for tile in TILES:
        launch = sampling_launch(num_rows, KINDS["sampled"], tile=tile)
        report(num_rows, f"  sampled, tile {tile}", seconds_of(launch, logits))
    for sizes in FILTER_TILES:
        launch = sampling_launch(num_rows, QWEN3, filter_sizes=sizes)
        name = " x ".join(map(str, sizes))
        report(num_rows, f"  top-k 20, top-p 0.95, tiles {name}", seconds_of(launch, logits))


def report_state(num_rows: int) -> None:
    """The three kernels of slot state."""
    layout = SlotLayout(num_slots=num_rows, max_num_blocks=64, block_size=64)
    tables = SlotTables.allocate(layout, "cuda")
    rows = StepRows.allocate(layout, "cuda", slots=tables.row_slots)
    tables.row_slots.copy_(torch.arange(num_rows))
    tables.fields[SlotField.IS_ACTIVE] = 1
    tables.fields[SlotField.NUM_BLOCKS] = 64
    tables.fields[SlotField.MAX_TOTAL_TOKENS] = 4096
    picked, ring = PickedTokens.allocate(num_rows, "cuda"), TokenRing.allocate(8, num_rows, "cuda")
    picked.token_ids.fill_(7)
    deltas = torch.full((4 * num_rows + 1, 2), -1, dtype=torch.int32, device="cuda")
    launches: dict[str, Callable[[], None]] = {
        "  apply_deltas, none": partial(ops.apply_deltas, tables, deltas),
        "  gather_rows": partial(ops.gather_rows, tables, rows),
        "  advance_state": partial(ops.advance_state, tables, rows, picked=picked, ring=ring),
    }
    for name, launch in launches.items():
        seconds = seconds_of(lambda _, launch=launch: launch(), [picked.token_ids] * 8)
        print(f"{num_rows:5} {name:36} {seconds * 1e6:8.2f}")


def sampling_launch(
    num_rows: int,
    parameters: Mapping[SlotField, float],
    *,
    tile: int = TILES[0],
    filter_sizes: tuple[int, int, int] = FILTER_TILES[0],
) -> Launch:
    """What samples one token per row of the logits it is given."""
    rows = rows_with(num_rows, parameters)
    stats = TileStatistics.allocate(num_rows, VOCAB, "cuda", tile=tile)
    filter_tile, group, capacity = filter_sizes
    tiles = FilterTiles.allocate(
        num_rows, VOCAB, "cuda", tile=filter_tile, group=group, capacity=capacity
    )
    picked = PickedTokens.allocate(num_rows, "cuda")
    has_filters = bool({SlotField.TOP_K, SlotField.TOP_P, SlotField.MIN_P} & set(parameters))
    cut = torch.empty(num_rows, device="cuda") if has_filters else None

    def launch(logits: torch.Tensor) -> None:
        if cut is not None:
            ops.filter_tiles(logits, rows, tiles=tiles)
            ops.filter_cut(logits, rows, tiles=tiles, cut=cut)
        ops.tile_statistics(logits, rows, cut=cut, stats=stats)
        ops.pick_token(logits, rows, cut=cut, stats=stats, picked=picked)

    return launch


def rows_with(num_rows: int, parameters: Mapping[SlotField, float]) -> StepRows:
    """Rows that all ask for the same, each with a seed of its own."""
    layout = SlotLayout(num_slots=num_rows, max_num_blocks=1, block_size=64)
    rows = StepRows.allocate(layout, "cuda")
    for field, value in {SlotField.TOP_P: 1.0, **parameters}.items():
        rows.parameter(field).fill_(value)
    rows.parameter(SlotField.SEED_LOW).copy_(torch.arange(num_rows))
    return rows


def random_logits(num_rows: int, *, num_likely: int) -> list[torch.Tensor]:
    """Logits of several steps, so that no launch finds all of its own in the cache; ``num_likely``
    tokens stand out as they do in a trained model.
    """
    sets = []
    for seed in range(2 if num_rows > 64 else 8):
        generator = torch.Generator("cuda").manual_seed(seed)
        logits = torch.randn(num_rows, VOCAB, device="cuda", generator=generator) * 2
        places = torch.randint(VOCAB, (num_rows, num_likely), device="cuda", generator=generator)
        likely = torch.rand(places.shape, device="cuda", generator=generator) * 8 + 12
        sets.append(logits.scatter_(1, places, likely).bfloat16())
    return sets


def seconds_of(launch: Launch, logits: Sequence[torch.Tensor]) -> float:
    """Time of one launch, from a graph that makes several for each set of logits."""
    launch(logits[0])
    torch.cuda.synchronize()
    num_rounds = max(1, 16 // len(logits))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            for each in logits:
                launch(each)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / (NUM_REPLAYS * num_rounds * len(logits))


def report(num_rows: int, name: str, seconds: float) -> None:
    """One line of the table."""
    share = num_rows * VOCAB * 2 / BANDWIDTH / seconds
    print(f"{num_rows:5} {name:36} {seconds * 1e6:8.2f} {share:12.2f}")


if __name__ == "__main__":
    benchmark_sampling()
