"""Puts a call's results together as transformers returns them; the one place that does."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from hf_generate_shim.call import CACHE_NAMES
from hf_generate_shim.replayed_cache import ReplayedCache

if TYPE_CHECKING:
    from hf_generate_shim.call import HFObject, SampleCall
    from hf_generate_shim.lockstep import LockstepSampler
    from hf_generate_shim.results import Results, Sample
    from hf_generate_shim.task import Task


@dataclass
class GenerateOutputWithLogprobs(GenerateDecoderOnlyOutput):  # type: ignore[misc]  # has no types
    """transformers' output of `generate`, with what ``nanoserve_logprobs`` asks for."""

    logprobs: torch.Tensor | None = None
    """[num_rows, num_steps] float32: of the chosen tokens; 0 where a row has ended."""


def assemble(call: SampleCall, task: Task, results: Results) -> HFObject:
    """The tensor [num_rows, width + num_steps] int64, or the `GenerateDecoderOnlyOutput`.

    The prompt's columns come first and unchanged, on the device of ``input_ids``; rows that ended
    early are filled with the pad id up to the longest row.

    ``scores`` and ``logits`` are tuples of ``num_steps`` tensors, float32 [num_rows, vocab_size].
    A row that has ended holds zeros from its end on: transformers goes on computing such rows over
    pads, the engine does not, and neither value means anything.
    """
    num_steps = _num_steps(task, results)
    sequences = torch.cat(
        [call.input_ids.long(), _new_tokens(call, task, results, num_steps)], dim=1
    )
    if not call.wants_dict:
        return sequences
    logits = _per_step(call, [row.logits for row in results.rows], num_steps)
    scores = _per_step(call, [_scores(row, task) for row in results.rows], num_steps)
    if not call.logits_processor:  # then transformers' two tuples hold the same tensors
        scores = logits
    logprobs = _logprobs(call, results, num_steps) if task.options.logprobs else None
    return _dict_output(call, sequences, scores, logits, logprobs)


def assemble_lockstep(call: SampleCall, sampler: LockstepSampler) -> HFObject:
    """As `assemble`, from what the sampler of a lockstep call has put together step by step.

    Rows that have ended hold in ``scores`` what the processors made of zeros.
    """
    logprobs = torch.stack(sampler.logprobs, dim=1) if sampler.logprobs else None
    _use_here(sampler.sequences, *sampler.scores, *sampler.logits)
    if not call.wants_dict:
        return sampler.sequences
    return _dict_output(call, sampler.sequences, sampler.scores, sampler.logits, logprobs)


def _dict_output(
    call: SampleCall,
    sequences: torch.Tensor,
    scores: tuple[torch.Tensor, ...],
    logits: tuple[torch.Tensor, ...],
    logprobs: torch.Tensor | None,
) -> HFObject:
    output_class = GenerateDecoderOnlyOutput if logprobs is None else GenerateOutputWithLogprobs
    return output_class(
        **({} if logprobs is None else {"logprobs": logprobs}),
        sequences=sequences,
        scores=scores if call.wants_scores else None,
        logits=logits if call.wants_logits else None,
        **{_cache_field(): ReplayedCache.of(call, sequences)},
    )


def _use_here(*tensors: torch.Tensor) -> None:
    """They were made on the engine's stream: their memory may be given away only after what the
    caller's stream does with them.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _scores(row: Sample, task: Task) -> list[torch.Tensor]:
    if not task.renormalizes_scores:
        return row.scores
    return [scores.log_softmax(dim=-1) for scores in row.scores]


def _num_steps(task: Task, results: Results) -> int:
    limit = task.time_limit.num_steps if task.time_limit else math.inf
    return int(min(max(len(row.token_ids) for row in results.rows), limit))


def _new_tokens(call: SampleCall, task: Task, results: Results, num_steps: int) -> torch.Tensor:
    pad = task.pad_token_id or 0
    rows = [row.token_ids[:num_steps] for row in results.rows]
    filled = [row + [pad] * (num_steps - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.long, device=call.input_ids.device)


def _logprobs(call: SampleCall, results: Results, num_steps: int) -> torch.Tensor:
    rows = [row.logprobs[:num_steps] for row in results.rows]
    filled = [row + [0.0] * (num_steps - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.float32, device=call.input_ids.device)


def _per_step(
    call: SampleCall, rows: list[list[torch.Tensor]], num_steps: int
) -> tuple[torch.Tensor, ...]:
    """From one list of [vocab_size] per row to one [num_rows, vocab_size] per step."""
    example = next((row[0] for row in rows if row), None)
    if example is None:
        return ()
    _use_here(*(tensor for row in rows for tensor in row))
    ended = torch.zeros_like(example)
    steps = (
        torch.stack([row[step] if step < len(row) else ended for row in rows])
        for step in range(num_steps)
    )
    return tuple(step.to(call.input_ids.device) for step in steps)


def _cache_field() -> str:
    names = {field.name for field in fields(GenerateDecoderOnlyOutput)}
    return next(name for name in CACHE_NAMES if name in names)
