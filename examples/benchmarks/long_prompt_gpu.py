"""What 16 running streams feel of a 32k-token prompt that comes in between, on a CUDA device.

    python examples/benchmarks/long_prompt_gpu.py                    0.6B, several chunk limits
    python examples/benchmarks/long_prompt_gpu.py --chunks 256 1024 --model-size 8B
    python examples/benchmarks/long_prompt_gpu.py --tiny --device cpu --prompt-len 300

"chunk" is ``long_prefill_token_threshold`` (0: none but ``max_num_batched_tokens``). A gap is the
time between two deliveries to one stream; "quiet" before the prompt came, "during" until its first
token. The aim is a p99 of at most 3 medians. A first prompt of the same length, untimed, compiles
and captures. Milliseconds.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from gpu import MAX_ID, random_model
from roofline import SHAPES

from nanoserve_adapters.testing import tiny_model
from nanoserve_core import Engine, EngineConfig, Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_STREAMS, STREAM_PROMPT = 16, 128
NUM_QUIET_VISITS = 300
MAX_MODEL_LEN = 40960
_IDS = itertools.count()


@dataclass
class Watch:
    """When each stream was given something."""

    last: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)

    def note(self, request_id: str, now: float) -> None:
        """A delivery."""
        if request_id in self.last:
            self.gaps.append(now - self.last[request_id])
        self.last[request_id] = now

    def take(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The gaps so far, in milliseconds; they are forgotten."""
        gaps, self.gaps = self.gaps, []
        return 1e3 * np.array(gaps)


class Load:
    """The streams, and prompts that come in between."""

    def __init__(self, engine: Engine, prompt_len: int, num_streams: int) -> None:
        self._engine = engine
        self._prompt_len = prompt_len
        self._rng = Random(0)
        self._max_id = min(MAX_ID, engine.spec.vocab_size - 1)
        self._watch = Watch()
        most = engine.max_model_len - STREAM_PROMPT
        for _ in range(num_streams):
            self._add("stream", STREAM_PROMPT, most)

    def quiet(self, num_visits: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Gaps while nothing else happens."""
        for _ in range(num_visits):
            self._visit()
        return self._watch.take()

    def during(self) -> tuple[float, np.ndarray[tuple[int], np.dtype[np.float64]]]:
        """Seconds to the first token of a new prompt, and the gaps until then."""
        self._watch.take()
        start = time.perf_counter()
        name = self._add("long", self._prompt_len, 1)
        while name not in self._visit():
            pass
        return time.perf_counter() - start, self._watch.take()

    def _add(self, kind: str, length: int, max_tokens: int) -> str:
        ids = tuple(self._rng.randint(0, self._max_id) for _ in range(length))
        sampling = SamplingParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True)
        name = f"{kind}-{next(_IDS)}"
        self._engine.add_request(Request(request_id=name, prompt_token_ids=ids, sampling=sampling))
        return name

    def _visit(self) -> set[str]:
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            assert output.error is None, output.error
            if output.request_id.startswith("stream") and output.token_ids:
                self._watch.note(output.request_id, now)
        return {output.request_id for output in outputs if output.token_ids}


def line(batched: int, chunk: int, quiet: object, seconds: float, gaps: object) -> str:
    """One setting's figures."""
    before, within = np.asarray(quiet), np.asarray(gaps)
    median, p99 = np.median(within), np.percentile(within, 99)
    return (
        f"{batched:8} {chunk:6} {np.median(before):8.2f} {np.percentile(before, 99):8.2f} "
        f"{median:8.2f} {p99:8.2f} {within.max():8.2f} {p99 / median:8.1f} "
        f"{p99 / np.median(before):8.1f} {1e3 * seconds:9.1f}"
    )


def main() -> None:
    """Print a line for each setting."""
    args = parse_arguments()
    if args.tiny:
        model = tiny_model(max_position_embeddings=MAX_MODEL_LEN).to(args.device)
    else:
        model = random_model(SHAPES[args.model_size])
    print(
        f"{'batched':>8} {'chunk':>6} {'quiet':>8} {'p99':>8} {'during':>8} {'p99':>8} {'most':>8} "
        f"{'p99/med':>8} {'/quiet':>8} {'TTFT':>9}"
    )
    for batched, chunk in itertools.product(args.batched, args.chunks):
        config = EngineConfig(
            max_model_len=min(MAX_MODEL_LEN, args.prompt_len + 8192),
            max_num_seqs=args.streams + 1,
            max_num_batched_tokens=batched,
            long_prefill_token_threshold=chunk,
        )
        with Engine(model, config) as engine:
            load = Load(engine, args.prompt_len, args.streams)
            load.quiet(20)
            load.during()
            quiet = load.quiet(args.visits)
            seconds, gaps = load.during()
            print(line(batched, chunk, quiet, seconds, gaps), flush=True)


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    integers: dict[str, Callable[[str], int] | str] = {"type": int, "nargs": "+"}
    parser.add_argument("--model-size", choices=SHAPES, default="0.6B")
    parser.add_argument("--batched", default=[16384], help="max_num_batched_tokens", **integers)
    parser.add_argument("--chunks", default=[0, 2048, 1024, 512, 256], **integers)
    parser.add_argument("--prompt-len", type=int, default=32768)
    parser.add_argument("--streams", type=int, default=NUM_STREAMS)
    parser.add_argument("--visits", type=int, default=NUM_QUIET_VISITS, help="quiet ones, timed")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers")
    parser.add_argument("--device", default="cuda", help="of the tiny model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
