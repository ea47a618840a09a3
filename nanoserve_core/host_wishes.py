"""`HostWishes`: which slots ask for what the captured step does not do, and until when.

Penalties, biases, bad words, processors, log-probabilities, handed-out logits and scores, minimum
lengths that are not reached yet, and grammars while they constrain are the business of `Sampler`
and `BatchState`. Their slots are assigned there at once, others only when a step of theirs goes
that way beside one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from nanoserve_core.plan import StepPlan
from nanoserve_core.slot_rules import Feature, features_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanoserve_core.batch_state import BatchState
    from nanoserve_core.plan import ScheduledSeq, SlotAssignment

FILTERS = Feature.TOP_K | Feature.TOP_P | Feature.MIN_P
ON_DEVICE = Feature.SAMPLED | FILTERS
FOREVER = sys.maxsize


class HostWishes:
    """Wishes by slot. Plans must come in launch order, on the runner's thread."""

    def __init__(self, state: BatchState, *, all_steps: bool) -> None:
        """``all_steps``: nothing can be captured anyhow, so every step goes through ``state``."""
        self._state = state
        self.all_steps = all_steps
        self._until: dict[int, int] = {}
        self._filtering: set[int] = set()
        self._unassigned: dict[int, SlotAssignment] = {}

    def apply(self, plan: StepPlan) -> None:
        """Note who left and who came."""
        released = [slot for slot in plan.released if not self._forget(slot)]
        if released:
            self._state.apply(_changes(released=released))
        for assignment in plan.assigned:
            self._assign(assignment)

    def are_in(self, plan: StepPlan) -> bool:
        """Whether the step must go through the host's sampler."""
        if self._until and any(self._is_wished(seq) for seq in plan.seqs):
            return True
        return self._state.grammars.are_in(plan.seqs)

    def have_filters(self, seqs: Iterable[ScheduledSeq]) -> bool:
        """Whether any of the rows filters (top-k, top-p, min-p)."""
        return bool(self._filtering) and any(seq.slot in self._filtering for seq in seqs)

    def prepare(self, seqs: Iterable[ScheduledSeq]) -> None:
        """Before the sampler sees rows: their slots are assigned and know their lengths."""
        late = [self._unassigned.pop(s.slot) for s in seqs if s.slot in self._unassigned]
        if late:
            self._state.apply(_changes(assigned=late))
        for seq in seqs:
            if seq.samples:
                self._state.num_tokens[seq.slot] = seq.end

    def _assign(self, assignment: SlotAssignment) -> None:
        slot, state = assignment.slot, self._state
        features = features_of(assignment.request, state.vocab_size)
        if not self.all_steps and features & FILTERS:
            self._filtering.add(slot)
        asked = features & ~ON_DEVICE
        if assignment.request.sampling.prompt_logprobs is not None:
            asked |= Feature.RAW_LOGPROBS
        if not asked and not state.processors and assignment.grammar is None:
            self._unassigned[slot] = assignment
            return
        state.apply(_changes(assigned=[assignment]))
        # What a plugin's processor has added; a grammar is asked each step.
        asked |= int(state.features[slot]) & ~(ON_DEVICE | Feature.GRAMMAR)
        if asked == Feature.MIN_TOKENS:
            min_tokens = assignment.request.sampling.min_tokens
            self._until[slot] = assignment.num_prompt_tokens + min_tokens
        elif asked:
            self._until[slot] = FOREVER

    def _forget(self, slot: int) -> bool:
        """Drop what is known of a slot; True when the batch state never heard of its tenant."""
        self._until.pop(slot, None)
        self._filtering.discard(slot)
        return self._unassigned.pop(slot, None) is not None

    def _is_wished(self, seq: ScheduledSeq) -> bool:
        until = self._until.get(seq.slot)
        return until is not None and (bool(seq.num_prompt_logprobs) or seq.end < until)


def _changes(*, released: Iterable[int] = (), assigned: Iterable[SlotAssignment] = ()) -> StepPlan:
    """A step without rows, as `BatchState.apply` takes it."""
    return StepPlan(
        step_id=-1,
        seqs=(),
        num_decode_seqs=0,
        released=tuple(released),
        assigned=tuple(assigned),
    )
