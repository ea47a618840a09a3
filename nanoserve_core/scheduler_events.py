"""What the scheduler tells the engine: results of a step, events for hooks, counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nanoserve_core.request import Sequence


class Committed(NamedTuple):
    """What a committed step brought one sequence; its ``finish_reason`` is set if that was the end.

    ``token_id`` is already in ``sequence.token_ids``; it is None when the row failed or the
    sequence wanted no token. ``row`` is the index into the ``token_ids`` of `Scheduler.commit`.
    """

    sequence: Sequence
    token_id: int | None
    row: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that was admitted for the first time; so many of its tokens need no computing."""

    sequence: Sequence
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerEvents:
    """What happened since the previous `Scheduler.take_events`, in order.

    ``preempted``: sequences that went back to waiting; one whose launched steps must come in first
    appears when it has.
    """

    admitted: tuple[Admission, ...]
    preempted: tuple[Sequence, ...]

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the first admissions need not compute."""
        return sum(admission.num_cached_tokens for admission in self.admitted)


@dataclass(slots=True)
class SchedulerStats:
    """Sums over all launched steps; what admissions after a preemption cost is counted apart.

    Cached tokens came from the prefix index or from another sample of the request; ``recached`` and
    ``recomputed`` are the cached and prefilled ones of sequences that were preempted before.
    ``generated``: tokens that became known, not those discarded after a stop.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    peak_num_seqs: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_recached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
