"""`StepDraft`: a step while the scheduler plans it. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nanoserve_core.plan import CachedPrefix, ScheduledSeq, SlotAssignment, StepPlan

if TYPE_CHECKING:
    from nanoserve_core.request import Sequence


@dataclass(slots=True)
class StepDraft:
    """``sequences`` are those of the rows."""

    budget: int
    rows: list[ScheduledSeq] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    num_decode_seqs: int = 0
    assigned: list[SlotAssignment] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    def original(self, prefix: CachedPrefix) -> CachedPrefix:
        """The same tokens, copied from a block whose content is there before the step.

        A step makes its copies at the same time. A sample may find the block it wants to copy in a
        sibling that this very step admits, and that is itself about to get it by a copy.
        """
        sources = {destination: source for source, destination in self.block_copies}
        if prefix.copy_from in sources:
            return replace(prefix, copy_from=sources[prefix.copy_from])
        return prefix

    def plan(self, step_id: int, released: list[int]) -> StepPlan:
        """What is launched."""
        sources, destinations = {s for s, _ in self.block_copies}, {d for _, d in self.block_copies}
        assert not sources & destinations, f"a block is copied from and to: {self.block_copies}"
        return StepPlan(
            step_id=step_id,
            seqs=tuple(self.rows),
            num_decode_seqs=self.num_decode_seqs,
            assigned=tuple(self.assigned),
            released=tuple(released),
            block_copies=tuple(self.block_copies),
        )
