"""`SoloCall`: a request of continuous batching that is a blocking call of `generate`."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from hf_generate_shim.call import HFObject


class Cancelled(Exception):
    """Ends a call at its next token because its request was cancelled."""


@dataclass(frozen=True, kw_only=True)
class SoloResult:
    """What came out: new tokens per row, the ends included, pads not."""

    rows: list[list[int]]
    logprobs: list[list[float]] | None = None


@dataclass(frozen=True, kw_only=True)
class SoloCall:
    """One prompt's call, to be run once, on any thread."""

    model: nn.Module
    generate: Callable[..., HFObject]
    arguments: Mapping[str, HFObject]
    """Of `generate`, the prompt [1, num_tokens] included."""
    eos_token_ids: frozenset[int]
    on_tokens: Callable[[Sequence[int]], None]
    """Called with each step's token per row while the call runs, where ``can_stream``."""
    can_stream: bool
    return_logprobs: bool = False
    seed: int | None = None
    cancelled: threading.Event

    def run(self) -> SoloResult:
        """Run the call; raises what it raises, and `Cancelled`."""
        if self.cancelled.is_set():
            raise Cancelled
        options: dict[str, HFObject] = {}
        if self.can_stream:
            options["streamer"] = _Tap(self)
        if self.return_logprobs:
            options |= {"return_dict_in_generate": True, "output_scores": True}
        with _seeded(self.model, self.seed):
            output = self.generate(self.model, **{**self.arguments, **options})
        return self._read(output)

    def _read(self, output: HFObject) -> SoloResult:
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        width = self.arguments["input_ids"].shape[1]
        rows = [self._until_end(row) for row in sequences[:, width:].tolist()]
        if not self.return_logprobs:
            return SoloResult(rows=rows)
        model: HFObject = self.model
        scores = model.compute_transition_scores(
            sequences, output.scores, output.get("beam_indices"), normalize_logits=True
        ).tolist()
        logprobs = [all_steps[: len(row)] for row, all_steps in zip(rows, scores, strict=True)]
        return SoloResult(rows=rows, logprobs=logprobs)

    def _until_end(self, row: list[int]) -> list[int]:
        """Only beside longer rows does a row go on with pads."""
        ends = (place for place, token_id in enumerate(row) if token_id in self.eos_token_ids)
        return row[: next(ends, len(row)) + 1]


class _Tap:
    """A streamer that hands on tokens, and raises when the request was cancelled."""

    def __init__(self, call: SoloCall) -> None:
        self._call = call
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then int64 [num_rows] per step."""
        if self._call.cancelled.is_set():
            raise Cancelled
        if self._has_prompt:
            self._call.on_tokens(value.tolist())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing waits for it."""


@contextmanager
def _seeded(model: nn.Module, seed: int | None) -> Iterator[None]:
    """transformers' loop knows torch's generators only: they are lent a seed and put back."""
    if seed is None:
        yield
        return
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed % 2**63)
        yield
