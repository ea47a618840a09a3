"""Batch states whose slots are filled without an engine, and one step of sampling on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nanoserve_core.batch_state import BatchState
from nanoserve_core.plan import SlotAssignment, StepPlan
from nanoserve_core.request import Request
from nanoserve_core.sampler import Sampler
from nanoserve_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nanoserve_core.batch_state import BatchLogitsProcessor
    from nanoserve_core.sampler import SamplerOutput

VOCAB_SIZE = 50
EOS = 49


def make_state(
    num_slots: int = 8,
    vocab_size: int = VOCAB_SIZE,
    processors: Sequence[BatchLogitsProcessor] = (),
) -> BatchState:
    return BatchState(num_slots, vocab_size, 64, "cpu", eos_token_ids=(EOS,), processors=processors)


def assignment(
    slot: int,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    *,
    seed: int = 0,
    request: dict[str, Any] | None = None,
    **sampling: Any,
) -> SlotAssignment:
    """The tenant of a slot: a sequence with these prompt and output tokens."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": None, **sampling})
    return SlotAssignment(
        slot=slot,
        generation=0,
        request=Request(
            request_id=f"slot-{slot}",
            prompt_token_ids=tuple(prompt),
            sampling=params,
            **(request or {}),
        ),
        index=0,
        seed=seed,
        token_ids=(*prompt, *output),
        num_prompt_tokens=len(prompt),
    )


def plan(*assigned: SlotAssignment, released: Sequence[int] = ()) -> StepPlan:
    return StepPlan(
        step_id=0, seqs=(), num_decode_seqs=0, assigned=assigned, released=tuple(released)
    )


def filled(*assigned: SlotAssignment, vocab_size: int = VOCAB_SIZE, **options: Any) -> BatchState:
    """A state with these tenants."""
    state = make_state(1 + max(each.slot for each in assigned), vocab_size, **options)
    state.apply(plan(*assigned))
    return state


def sample(logits: Tensor, state: BatchState, slots: Sequence[int] | None = None) -> SamplerOutput:
    """Sample the next token of each slot (of slots 0, 1, ... if none are named)."""
    chosen = np.array(range(len(logits)) if slots is None else slots, dtype=np.int64)
    return Sampler().sample(logits, chosen, state.num_tokens[chosen].copy(), state)


def sample_and_advance(
    logits: Tensor, state: BatchState, slots: Sequence[int] | None = None
) -> list[int]:
    """`sample`, then move the slots on; the new tokens."""
    chosen = np.array(range(len(logits)) if slots is None else slots, dtype=np.int64)
    token_ids = sample(logits, state, slots).token_ids
    state.advance(chosen, token_ids)
    tokens: list[int] = token_ids.tolist()
    return tokens
