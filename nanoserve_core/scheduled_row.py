"""What a plan says of a sequence: its slot's assignment, its row of known positions.

Decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoserve_core.plan import ScheduledSeq, SlotAssignment

if TYPE_CHECKING:
    from nanoserve_core.request import Sequence


def assignment_of(sequence: Sequence) -> SlotAssignment:
    """For a sequence that has just taken its slot."""
    return SlotAssignment(
        slot=sequence.slot,
        generation=sequence.generation,
        request=sequence.request,
        index=sequence.index,
        seed=sequence.seed,
        token_ids=tuple(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        grammar=sequence.grammar,
    )


def row_of(sequence: Sequence, start: int, end: int) -> ScheduledSeq:
    """The row of positions [start, end), all known; the sequence has them in flight from now on."""
    samples = end == sequence.num_tokens
    row = ScheduledSeq(
        sequence_id=sequence.sequence_id,
        slot=sequence.slot,
        generation=sequence.generation,
        start=start,
        num_tokens=end - start,
        token_ids=tuple(sequence.token_ids[start:end]),
        samples=samples,
        new_block_ids=tuple(sequence.block_ids[sequence.num_sent_blocks :]),
        num_prompt_logprobs=_num_prompt_logprobs(sequence, start, end),
    )
    sequence.num_sent_blocks = len(sequence.block_ids)
    sequence.num_in_flight += end - start
    sequence.num_pending += samples
    return row


def wants_prompt_logprobs(sequence: Sequence) -> bool:
    """Whether each position of the prompt must be computed: sample 0 reports them, once."""
    is_wanted = sequence.request.sampling.prompt_logprobs is not None
    return is_wanted and sequence.index == 0 and sequence.num_output_tokens == 0


def _num_prompt_logprobs(sequence: Sequence, start: int, end: int) -> int:
    """Positions of a chunk whose logits tell of a prompt token: the prompt's last does not."""
    if not wants_prompt_logprobs(sequence):
        return 0
    return max(0, min(end, sequence.num_prompt_tokens - 1) - start)
