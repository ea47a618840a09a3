"""Seconds from the start of a process, or from a loaded model, to the first token on a CUDA device.

    python examples/benchmarks/start_gpu.py                       0.6B, random weights in a file
    python examples/benchmarks/start_gpu.py --checkpoint DIR      weights of yours

Each line is a process of its own, with an empty or a warm cache of compiled kernels. "start" counts
from before the process exists: imports, engine (CUDA, weights from the file, compiling), and one
token of a prompt of 100.
"attach" counts from a loaded `Qwen3ForCausalLM` to the first token of its own `generate`, served by
the shim. "again" is the time to first token of a later prompt. Everything is seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import Qwen3ForCausalLM

    from nanoserve_core import Engine

PROMPT_LEN = 100
NUM_AGAIN = 5
MAX_MODEL_LEN = 4096
TARGETS = {"start empty": 8.0, "start warm": 3.0, "attach warm": 2.0}
"""Seconds to the first token that we set ourselves."""


class Marks:
    """What happened when, in seconds since some moment."""

    def __init__(self, since: float) -> None:
        self._last = self._since = since
        self.seconds: dict[str, float] = {}

    def note(self, name: str) -> None:
        """The time since the mark before."""
        now = time.time()
        self.seconds[name], self._last = now - self._last, now

    def note_total(self, name: str) -> None:
        """The time since the beginning."""
        self.seconds[name] = time.time() - self._since


def start(marks: Marks, args: argparse.Namespace) -> None:
    """A new process to a first token, through the engine."""
    import torch

    from nanoserve_core import Engine, EngineConfig

    marks.note("import")
    config = EngineConfig(max_model_len=MAX_MODEL_LEN, device=args.device, dtype=args.dtype)
    with Engine(args.checkpoint, config) as engine:
        marks.note("engine")
        first_token(engine, 0)
        marks.note("token")
        marks.note_total("first token")
        began = time.perf_counter()
        for number in range(1, NUM_AGAIN + 1):
            first_token(engine, number)
        marks.seconds["again"] = (time.perf_counter() - began) / NUM_AGAIN
        marks.note("")
        engine.warmup()
        marks.note("warmup")
    del marks.seconds[""]
    assert args.device == "cpu" or torch.cuda.is_initialized(), "this would be no figure of a GPU"


def attach(marks: Marks, args: argparse.Namespace) -> None:
    """A loaded model to a first token of its `generate`."""
    import torch

    import hf_generate_shim

    model = make_model(args)
    ids = torch.randint(0, 100, (NUM_AGAIN + 1, PROMPT_LEN), device=args.device)
    float(ids.sum())  # the device is idle
    own = Marks(time.time())
    with hf_generate_shim.installed(model, max_model_len=MAX_MODEL_LEN):
        own.note("engine")
        generate_one(model, ids[:1])
        own.note("token")
        own.note_total("first token")
        began = time.perf_counter()
        for row in ids[1:]:
            generate_one(model, row[None])
        own.seconds["again"] = (time.perf_counter() - began) / NUM_AGAIN
    marks.seconds |= own.seconds


def save(marks: Marks, args: argparse.Namespace) -> None:
    """Random weights of a true shape, in a file."""
    make_model(args).save_pretrained(args.checkpoint)
    marks.note("saved")


def make_model(args: argparse.Namespace) -> Qwen3ForCausalLM:
    """Random weights of a true shape, made on the device; or tiny ones."""
    if args.tiny:
        from nanoserve_adapters.testing import tiny_model

        return tiny_model(max_position_embeddings=MAX_MODEL_LEN).to(args.device)
    from gpu import random_model
    from roofline import SHAPES

    return random_model(SHAPES[args.model_size])


def first_token(engine: Engine, number: int) -> None:
    """One token of a prompt that no other call has."""
    from nanoserve_core import Request, SamplingParams

    request = Request(
        request_id=str(number),
        prompt_token_ids=tuple((7 * i + 13 * number) % 100 for i in range(PROMPT_LEN)),
        sampling=SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True),
    )
    engine.add_request(request)
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert len(tokens) == 1, tokens


def generate_one(model: Qwen3ForCausalLM, ids: object) -> None:
    """One token, on the host."""
    import torch

    assert isinstance(ids, torch.Tensor), "rows of ids"
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    assert out.cpu().shape[1] == PROMPT_LEN + 1, "no token came"


ROUTES = {"start": start, "attach": attach, "save": save}


def measured_child(route: str, cache: Path, args: argparse.Namespace) -> dict[str, float]:
    """The seconds that a process of its own prints as its last line."""
    command = [sys.executable, __file__, "--child", route, "--checkpoint", str(args.checkpoint)]
    command += ["--device", args.device, "--dtype", args.dtype, "--model-size", args.model_size]
    command += ["--tiny"] * args.tiny + ["--since", str(time.time())]
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, str(Path(root) / "adapters"), os.environ.get("PYTHONPATH", "")]
    environment = {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return seconds


def lines(args: argparse.Namespace) -> Iterator[str]:
    """One for each process."""
    with tempfile.TemporaryDirectory() as folder:
        if args.checkpoint is None:
            args.checkpoint = Path(folder) / "model"
            measured_child("save", Path(folder) / "none", args)
        for route in ("start", "attach"):
            for state in ("empty", "warm"):
                cache = Path(folder) / route
                seconds = measured_child(route, cache, args)
                name = f"{route} {state}"
                parts = " ".join(f"{key} {value:7.3f} " for key, value in seconds.items())
                target = f"(target {TARGETS[name]:g})" if name in TARGETS else ""
                yield f"{name:12} {parts} {target}"


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-size", default="0.6B")
    parser.add_argument("--checkpoint", type=Path, help="of `start`; None makes one")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers")
    parser.add_argument("--device", default="cuda", help="of the tiny model or the checkpoint")
    parser.add_argument("--dtype", default="auto", help="of the checkpoint")
    parser.add_argument("--child", choices=ROUTES, help="be one of the processes")
    parser.add_argument("--since", type=float, default=None, help="a child's beginning")
    return parser.parse_args()


def main() -> None:
    """Start the processes, or be one."""
    args = parse_arguments()
    if args.child is None:
        for line in lines(args):
            print(line, flush=True)
        return
    marks = Marks(args.since or time.time())
    ROUTES[args.child](marks, args)
    print(json.dumps(marks.seconds))


if __name__ == "__main__":
    main()
