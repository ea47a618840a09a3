"""Runs a drawn call by transformers' own loop and by the engine, and compares everything.

Two tensors of tokens are equal, or differ in a row only from a step on at which the two candidate
scores lie within `TIE` of each other in transformers' own run.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from nanoserve_core.errors import InvalidRequest
from tests.hf_generate_shim.calls import CACHE, PAD

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from tests.conformance.drawn_calls import DrawnCall

Output: TypeAlias = Any
"""A tensor or one of transformers' output classes."""

TIE = 1e-4
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a call gave: an output or an exception, its stream, and the generator afterwards."""

    output: Output = None
    error: Exception | None = None
    stream: list[object] | None = None
    random_state: torch.Tensor


def run(model: Qwen3ForCausalLM, call: DrawnCall, **overrides: Any) -> Run:  # Any: as generate's
    """Make the call after seeding torch; any warning is fine."""
    torch.manual_seed(call.seed)
    output, error, arguments = None, None, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            arguments = {**call.arguments(), **overrides}
            output = model.generate(**arguments)
        except Exception as raised:  # noqa: BLE001 - the error is the outcome, and is compared
            error = raised
    stream = getattr(arguments.get("streamer"), "events", None)
    return Run(output=output, error=error, stream=stream, random_state=torch.get_rng_state())


def difference(ours: Run, theirs: Run, *, reference: Qwen3ForCausalLM, call: DrawnCall) -> str:
    """What differs between the runs: nothing (""), "near tie", or a description."""
    if (ours.error is None) != (theirs.error is None):
        return f"ours raised {ours.error!r}, transformers' loop {theirs.error!r}"
    if ours.error is not None:
        # An empty prompt, on which transformers' loop stumbles over a shape, is refused by name.
        same = isinstance(ours.error, (type(theirs.error), InvalidRequest))
        return "" if same else f"ours raised {ours.error!r}, transformers' loop {theirs.error!r}"
    if type(ours.output) is not type(theirs.output):
        return f"{type(ours.output)} instead of {type(theirs.output)}"
    if not torch.equal(_sequences(ours.output), _sequences(theirs.output)):
        return _of_tokens(ours.output, theirs.output, reference, call)
    if not torch.equal(ours.random_state, theirs.random_state):
        return "other random numbers were drawn"
    if ours.stream != theirs.stream:
        return f"streamed {ours.stream} instead of {theirs.stream}"
    return (
        ""
        if isinstance(ours.output, torch.Tensor)
        else _of_fields(ours.output, theirs.output, call)
    )


def _sequences(output: Output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def _of_tokens(ours: Output, theirs: Output, reference: Qwen3ForCausalLM, call: DrawnCall) -> str:
    found, expected = _sequences(ours), _sequences(theirs)
    described = f"tokens {found.tolist()} instead of {expected.tolist()}"
    if found.shape[0] != expected.shape[0] or found.dtype != expected.dtype:
        return described
    extra = {"return_dict_in_generate": True, "output_scores": True}
    scores = run(reference, call, **extra).output.scores
    width = min(found.shape[1], expected.shape[1])
    start = expected.shape[1] - len(scores)
    for row in range(len(found)):
        unequal = (found[row, :width] != expected[row, :width]).nonzero()
        if len(unequal) and not _is_tie(scores, row, int(unequal[0]), start, found, expected):
            return described
    return "near tie"


def _is_tie(
    scores: tuple[torch.Tensor, ...],
    row: int,
    column: int,
    start: int,
    found: torch.Tensor,
    expected: torch.Tensor,
) -> bool:
    if column < start:
        return False  # in the prompt
    ours, theirs = scores[column - start][
        row, [int(found[row, column]), int(expected[row, column])]
    ]
    return bool((ours - theirs).abs() <= TIE)


def _of_fields(ours: Output, theirs: Output, call: DrawnCall) -> str:
    if set(ours) != set(theirs):
        return f"fields {sorted(ours)} instead of {sorted(theirs)}"
    pad = call.config.get("pad_token_id", PAD)
    for name in ("scores", "logits"):
        found, expected = getattr(ours, name), getattr(theirs, name)
        if "watermarking_config" in call.config and name == "scores":
            found, expected = (_without_noise(steps) for steps in (found, expected))
        wrong = _of_steps(found, expected, theirs.sequences, pad)
        if wrong:
            return f"{name}: {wrong}"
    caches = [getattr(output, CACHE, None) for output in (ours, theirs)]
    lengths = [None if cache is None else cache.get_seq_length() for cache in caches]
    return "" if lengths[0] == lengths[1] else f"cache of {lengths[0]}, not {lengths[1]} positions"


def _without_noise(steps: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...] | None:
    """A watermark takes logarithms of probabilities that are mostly rounding: one in e^16."""
    if steps is None:
        return None
    floors = [step.amax(dim=-1, keepdim=True) - 16 for step in steps]
    return tuple(torch.maximum(step, floor) for step, floor in zip(steps, floors, strict=True))


def _of_steps(
    ours: tuple[torch.Tensor, ...] | None,
    theirs: tuple[torch.Tensor, ...] | None,
    sequences: torch.Tensor,
    pad: int,
) -> str:
    if ours is None or theirs is None or len(ours) != len(theirs):
        return "" if ours is theirs else f"{ours and len(ours)} steps, not {theirs and len(theirs)}"
    num_pads = _num_pads(sequences, pad)
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return (
                f"step {step}: {found.dtype} {found.shape}, not {expected.dtype} {expected.shape}"
            )
        alive = len(theirs) - step > num_pads if len(found) == len(num_pads) else slice(None)
        if not torch.allclose(found[alive], expected[alive], **TOLERANCE, equal_nan=True):
            largest = (found[alive] - expected[alive]).abs().nan_to_num(0.0).max()
            return f"step {step}: values differ, by {largest:g} where both are finite"
    return ""


def _num_pads(sequences: torch.Tensor, pad: int) -> torch.Tensor:
    """[num_rows]: the pads at the end of each row, where the values mean nothing."""
    return (sequences.flip(1) == pad).int().cumprod(dim=1).sum(dim=1)
