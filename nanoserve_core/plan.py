"""What one engine step will run, in plain ints: the message from the scheduler to the model runner.

A plan is made *before* the tokens of earlier steps need be known (run-ahead). A row therefore names
its input tokens only when the host knows them; otherwise the runner takes the slot's last sampled
token from the batch state on the device.

This file knows no tensor and no policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nanoserve_core.request import Request
    from nanoserve_core.sample_grammar import SampleGrammar


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """A sequence took (or, after preemption, took again) a row of the batch state; sent once, with
    its first step.

    ``token_ids`` are all tokens the host knows (prompt and what was generated before a preemption),
    so that the runner can rebuild penalties and history. ``generation`` counts the tenants of the
    slot: results are matched by (slot, generation).
    """

    slot: int
    generation: int
    request: Request
    index: int
    """Which of the request's ``n`` samples this sequence is."""
    seed: int
    """Key of the sequence's random stream: the token at absolute position p is drawn with
    ``philox(seed, p)``.
    """
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    grammar: SampleGrammar | None = None


class ScheduledSeq(NamedTuple):
    """One row of a step: positions ``[start, start + num_tokens)`` of the sequence in ``slot``.

    ::

        known tokens   |################################|..pending..|
        computed       |###############|                              KV exists in the blocks
        this row                       |== num_tokens ==|             start = computed + in flight

    A named tuple because each step makes one per sequence: 0.35 us, a frozen dataclass 1.3 us.
    """

    sequence_id: int
    slot: int
    generation: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    """Input ids for the positions of this row; empty = one token, the slot's last sampled one,
    known to the device.
    """
    samples: bool
    """True when the row reaches the end of the sequence and so yields its next token."""
    new_block_ids: tuple[int, ...] = ()
    """Blocks appended to the sequence's block table since its previous row (the whole table in its
    first row).
    """
    num_prompt_logprobs: int = 0
    """So many of this row's positions, the first ones, need prompt logprobs."""

    @property
    def end(self) -> int:
        """One past the last position of the row; the length of the K/V the row attends to."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: decode rows first, then prefill chunks; carried out by ``ModelRunner.launch`` in
    this order: ``released`` slots are cleared, ``assigned`` slots are filled, ``block_copies`` are
    made, ``seqs`` run.
    """

    step_id: int
    seqs: tuple[ScheduledSeq, ...]
    num_decode_seqs: int
    """The first ``num_decode_seqs`` rows have one query token; the rest are prefill chunks."""
    assigned: tuple[SlotAssignment, ...] = ()
    released: tuple[int, ...] = ()
    """Slots whose sequence ended or was preempted since the previous plan (may be assigned again in
    this very plan).
    """
    block_copies: tuple[tuple[int, int], ...] = ()
    """(source block, destination block): whole blocks to copy, K and V of every layer, before the
    forward. All at the same time: no block is a source and a destination.
    """

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step, at most ``max_num_batched_tokens``."""
        return sum(seq.num_tokens for seq in self.seqs)

    @property
    def num_samples(self) -> int:
        """Rows that yield a token."""
        return sum(seq.samples for seq in self.seqs)


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the prefix index found for a waiting sequence; made by ``BlockManager.lookup``, spent by
    ``allocate``.
    """

    block_ids: tuple[int, ...] = ()
    """Shared whole blocks, in order."""
    copy_from: int | None = None
    """A block whose leading tokens continue the prefix but which must not be written to: it is
    copied, not shared.
    """
    num_tokens: int = 0
    """Tokens whose K/V need no computing: at most the sequence's length - 1."""
    is_computing: bool = field(default=False)
    """True when the first missing block is being computed for another sequence: wait for it instead
    of doing it twice.
    """
