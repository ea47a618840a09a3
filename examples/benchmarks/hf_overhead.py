"""What an installed model adds to the host's work for one call of `generate`.

    python -m examples.benchmarks.hf_overhead [--layers 1 28] [--rows 1 16] [--repeats 300]

One new token each, greedy, on a model so small that its forward costs next to nothing. Per call:

prepare    transformers' own work before its loop (a `custom_generate` that returns at once)
plain      the whole call without nanoserve
installed  the whole call on an installed model
engine     the same requests handed to the engine's thread, from submit to the last output
added      installed - prepare - engine: what this door adds to a call
cpu        the same difference in processor time of the calling thread: other processes of a busy
           machine do not show in it, nor do waits for the engine's thread

Medians, in milliseconds; the kinds of call take turns in a drawn order.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import hf_generate_shim
from hf_generate_shim.results import CallSink
from nanoserve_core.request import Request
from nanoserve_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from hf_generate_shim import Handle

VOCAB_SIZE = 256
PROMPT_LENGTH = 16


def small_model(num_layers: int) -> Qwen3ForCausalLM:
    """A random Qwen3 of hidden size 16."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def milliseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Wall time and processor time of this thread for one call."""
    start, start_cpu = time.perf_counter(), time.thread_time()
    call()
    return 1e3 * (time.perf_counter() - start), 1e3 * (time.thread_time() - start_cpu)


class Calls:
    """The four kinds of call for one model and batch; every prompt is new, as in real use."""

    def __init__(self, model: Qwen3ForCausalLM, handle: Handle, num_rows: int) -> None:
        self._installed = model
        self._plain = copy.deepcopy(model)  # a copy of an installed model is not installed
        self._thread = handle.thread
        self._num_rows = num_rows

    def prepare(self) -> None:
        """transformers' preparation alone."""
        self._generate(self._plain, custom_generate=_return_at_once)

    def plain(self) -> None:
        """`generate` without nanoserve."""
        self._generate(self._plain)

    def installed(self) -> None:
        """`generate` as a user of nanoserve calls it."""
        self._generate(self._installed)

    def engine(self) -> None:
        """The requests of such a call, without `generate`."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        requests = [
            Request(request_id=uuid4().hex, prompt_token_ids=tuple(row), sampling=sampling)
            for row in self._prompts().tolist()
        ]
        sink = CallSink(len(requests), every_step=False)
        self._thread.submit_many(requests, [sink] * len(requests))
        for _ in sink.read():
            pass

    def _generate(self, model: Qwen3ForCausalLM, **options: Callable[..., torch.Tensor]) -> None:
        ids = self._prompts()
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, **options)

    def _prompts(self) -> torch.Tensor:
        return torch.randint(VOCAB_SIZE, (self._num_rows, PROMPT_LENGTH))


def _return_at_once(model: object, input_ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
    del model, kwargs
    return input_ids


KINDS = ("prepare", "plain", "installed", "engine")


def measure(num_layers: int, num_rows: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of each kind of call, and what the door adds."""
    model = small_model(num_layers)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with hf_generate_shim.installed(model, num_kvcache_blocks=256) as handle:
        calls = Calls(model, handle, num_rows)
        for _ in range(repeats):
            for kind in random.sample(KINDS, len(KINDS)):
                times[kind].append(milliseconds(getattr(calls, kind)))
    walls = {kind: statistics.median(wall for wall, _ in times[kind]) for kind in KINDS}
    cpus = {kind: statistics.median(cpu for _, cpu in times[kind]) for kind in KINDS}
    return {**walls, "added": _added(walls), "cpu": _added(cpus)}


def _added(medians: dict[str, float]) -> float:
    return medians["installed"] - medians["prepare"] - medians["engine"]


def main() -> None:
    """Print one line per model and batch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 28])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "layers  rows  " + "  ".join(f"{kind:>9}" for kind in (*KINDS, "added", "cpu")) + "   (ms)"
    )
    for num_layers in arguments.layers:
        for num_rows in arguments.rows:
            found = measure(num_layers, num_rows, arguments.repeats)
            numbers = "  ".join(f"{value:9.3f}" for value in found.values())
            print(f"{num_layers:6}  {num_rows:4}  {numbers}", flush=True)


if __name__ == "__main__":
    main()
