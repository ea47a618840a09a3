"""A plugin that draws what the engine did: a Chrome trace (Perfetto opens it) and a PNG.

    python examples/timeline_plugin.py --model examples/tiny_qwen3 --out out

One line per sequence: waiting, cached prefix, prefill, decode, preempted; below it the rows of each
step and the free K/V blocks.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve_core import LLM, Request, SamplingParams, StepStats, hookimpl

TINY = Path(__file__).resolve().parent / "tiny_qwen3"
COLOURS = {
    "waiting": "#d9d9d9",
    "cached": "#59a14f",
    "prefill": "#f28e2b",
    "decode": "#4e79a7",
    "preempted": "#e15759",
}


@dataclass
class Line:
    """The life of one sequence: (kind, start, end) in seconds, and what it waits for now."""

    name: str
    since: float
    waits_as: str = "waiting"
    num_cached_tokens: int = 0
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    def add(self, kind: str, start: float, end: float) -> None:
        """Add a span; one that goes on from the last of its kind makes that one longer."""
        if self.since < start:
            if self.waits_as == "preempted" or not self.spans:
                self.spans.append((self.waits_as, self.since, start))
            self.waits_as = "waiting"
        if self.spans and self.spans[-1][0] == kind and start - self.spans[-1][2] < 1e-3:
            self.spans[-1] = (kind, self.spans[-1][1], end)
        else:
            self.spans.append((kind, start, end))
        self.since = end


class Timeline:
    """Records requests and steps; `save` writes the two files."""

    def __init__(self) -> None:
        self._origin = time.monotonic()
        self._lines: dict[tuple[str, int], Line] = {}
        self._steps: list[StepStats] = []

    @hookimpl
    def nanoserve_request_added(self, request: Request) -> None:
        """A line for each sample of the request begins."""
        for index in range(request.sampling.n):
            name = (
                request.request_id if request.sampling.n == 1 else f"{request.request_id}/{index}"
            )
            self._lines[request.request_id, index] = Line(name, since=time.monotonic())

    @hookimpl
    def nanoserve_request_scheduled(
        self, request: Request, index: int, num_cached_tokens: int
    ) -> None:
        """Remember what the prefix cache supplied, to be drawn with the first step."""
        self._lines[request.request_id, index].num_cached_tokens = num_cached_tokens

    @hookimpl
    def nanoserve_request_preempted(self, request: Request, index: int) -> None:
        """From now until it runs again the sequence is waiting because of a preemption."""
        self._lines[request.request_id, index].waits_as = "preempted"

    @hookimpl
    def nanoserve_step_finished(self, stats: StepStats) -> None:
        """Add the step to the lines of the sequences it ran."""
        self._steps.append(stats)
        start, end = stats.start_time, stats.start_time + stats.duration_seconds
        for row in stats.rows:
            line = self._lines[row.request_id, row.index]
            if line.num_cached_tokens:
                share = line.num_cached_tokens / (line.num_cached_tokens + row.num_tokens)
                line.add("cached", start, start + share * (end - start))
                line.num_cached_tokens = 0
                line.add("prefill", line.since, end)
            else:
                line.add("prefill" if row.is_prefill else "decode", start, end)

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write ``timeline.json`` and ``timeline.png`` into ``folder``; returns both paths."""
        folder.mkdir(parents=True, exist_ok=True)
        trace, picture = folder / "timeline.json", folder / "timeline.png"
        trace.write_text(json.dumps({"traceEvents": self._trace_events()}))
        self._draw(picture)
        return trace, picture

    def _trace_events(self) -> list[dict[str, Any]]:  # Any: the trace format's fields
        events: list[dict[str, Any]] = []
        for thread, line in enumerate(self._lines.values()):
            common = {"pid": 1, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", "args": {"name": line.name}, **common})
            events += [
                {
                    "ph": "X",
                    "name": kind,
                    "ts": self._us(start),
                    "dur": (end - start) * 1e6,
                    **common,
                }
                for kind, start, end in line.spans
            ]
        for step in self._steps:
            counters = {"rows": len(step.rows), "free blocks": step.num_free_blocks}
            for name, value in counters.items():
                ts = self._us(step.start_time)
                events.append({"ph": "C", "pid": 1, "name": name, "ts": ts, "args": {name: value}})
        return events

    def _us(self, seconds: float) -> float:
        return (seconds - self._origin) * 1e6

    def _draw(self, path: Path) -> None:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        figure = Figure(figsize=(12, min(4 + 0.16 * len(self._lines), 14)), layout="constrained")
        lives, counts = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        for height, line in enumerate(self._lines.values()):
            for kind, start, end in line.spans:
                lives.broken_barh(
                    [(start - self._origin, end - start)], (height - 0.4, 0.8), color=COLOURS[kind]
                )
        lives.set(ylabel="sequence", ylim=(len(self._lines), -1))
        lives.legend(
            handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()],
            ncols=len(COLOURS),
            loc="lower left",
            bbox_to_anchor=(0, 1),
            frameon=False,
        )
        times = [step.start_time - self._origin for step in self._steps]
        counts.step(times, [len(step.rows) for step in self._steps], where="post", color="#4e79a7")
        counts.set(xlabel="seconds", ylabel="rows of the step")
        blocks = counts.twinx()
        blocks.step(times, [s.num_free_blocks for s in self._steps], where="post", color="#e15759")
        blocks.set_ylabel("free blocks", color="#e15759")
        figure.savefig(path, dpi=120)


def main() -> None:
    """Draw two dozen requests with a common prefix in a pool too small for all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=str(TINY), help="directory or hub id of a Qwen3 checkpoint"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the two files")
    arguments = parser.parse_args()

    timeline = Timeline()
    system = "You are a patient reader of old novels, and you answer in one short sentence. " * 2
    prompts = [f"{system} Chapter {number}: She" for number in range(1, 25)]
    params = [
        SamplingParams(temperature=0, max_tokens=16 + 4 * (i % 6), ignore_eos=True)
        for i in range(24)
    ]
    options = {"num_kvcache_blocks": 28, "max_num_batched_tokens": 128, "max_num_seqs": 16}
    with LLM(arguments.model, plugins=[timeline], **options) as llm:
        llm.generate(prompts, params)
    trace, picture = timeline.save(arguments.out)
    print(f"trace (open it in Perfetto): {trace}\npicture: {picture}")


if __name__ == "__main__":
    main()
