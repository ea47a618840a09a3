"""Drives a model runner by plans made by hand: a scheduler and block manager of a few lines.

Blocks come in a drawn order, so that no sequence's blocks are neighbours by chance.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoserve_core.plan import ScheduledSeq, SlotAssignment, StepPlan
from nanoserve_core.request import Request
from nanoserve_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from nanoserve_core.model_runner import ModelRunner, StepResult

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


@dataclass(eq=False)
class Driven:
    """One sequence: its tokens so far, its blocks, and the logits each new token was taken from."""

    slot: int
    tokens: list[int]
    num_prompt_tokens: int
    request: Request
    seed: int
    block_ids: list[int] = field(default_factory=list)
    num_sent_blocks: int = 0
    num_computed: int = 0
    is_assigned: bool = False
    logits: list[Tensor] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_left(self) -> int:
        """Tokens whose K/V is missing."""
        return len(self.tokens) - self.num_computed


class Driver:
    """Adds sequences to a runner and runs steps; each step's tokens are appended at once."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._free_blocks = list(range(runner.num_blocks))
        random.Random(0).shuffle(self._free_blocks)
        self._num_slots = 0
        self._released: list[int] = []
        self._num_steps = 0

    def add(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingParams = GREEDY,
        prefix_of: Driven | None = None,
        num_shared_blocks: int = 0,
    ) -> Driven:
        """A new sequence, which may begin with computed blocks of another one."""
        request = Request(
            request_id=str(self._num_slots),
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            output_logits=True,
        )
        slot = self._num_slots
        sequence = Driven(slot, list(prompt), len(prompt), request, seed=slot)
        self._num_slots += 1
        if prefix_of is not None:
            sequence.block_ids = prefix_of.block_ids[:num_shared_blocks]
            sequence.num_computed = num_shared_blocks * self._runner.block_size
        return sequence

    def release(self, sequence: Driven) -> None:
        """Its slot and blocks are free from the next step on."""
        self._released.append(sequence.slot)
        self._free_blocks += sequence.block_ids

    def step(
        self,
        work: Mapping[Driven, int],
        *,
        block_copies: Sequence[tuple[int, int]] = (),
    ) -> StepResult:
        """Compute so many tokens of each sequence; decode rows must come first."""
        assigned = tuple(self._assign(each) for each in work if not each.is_assigned)
        rows = tuple(self._row(each, num_tokens) for each, num_tokens in work.items())
        plan = StepPlan(
            step_id=self._num_steps,
            seqs=rows,
            num_decode_seqs=sum(not row.token_ids for row in rows),
            assigned=assigned,
            released=tuple(self._released),
            block_copies=tuple(block_copies),
        )
        self._num_steps += 1
        self._released = []
        result = self._runner.launch(plan).wait()
        self._take(work, rows, result)
        return result

    def prefill(self, sequence: Driven, chunk: int | None = None) -> None:
        """Compute what the host knows of a sequence, in chunks of at most ``chunk`` tokens."""
        num_tokens = len(sequence.tokens)
        while sequence.num_computed < num_tokens:
            self.step({sequence: min(chunk or num_tokens, num_tokens - sequence.num_computed)})

    def decode(self, sequences: Sequence[Driven], num_steps: int) -> None:
        """Generate so many tokens for all of them."""
        for _ in range(num_steps):
            self.step(dict.fromkeys(sequences, 1))

    def take_block(self) -> int:
        """A free block."""
        return self._free_blocks.pop()

    def _assign(self, sequence: Driven) -> SlotAssignment:
        sequence.is_assigned = True
        return SlotAssignment(
            slot=sequence.slot,
            generation=0,
            request=sequence.request,
            index=0,
            seed=sequence.seed,
            token_ids=tuple(sequence.tokens),
            num_prompt_tokens=sequence.num_prompt_tokens,
        )

    def _row(self, sequence: Driven, num_tokens: int) -> ScheduledSeq:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        while len(sequence.block_ids) * self._runner.block_size < end:
            sequence.block_ids.append(self._free_blocks.pop())
        new_block_ids = tuple(sequence.block_ids[sequence.num_sent_blocks :])
        sequence.num_sent_blocks = len(sequence.block_ids)
        is_decode = num_tokens == 1 and len(sequence.output) > 0
        return ScheduledSeq(
            sequence_id=sequence.slot,
            slot=sequence.slot,
            generation=0,
            start=start,
            num_tokens=num_tokens,
            token_ids=() if is_decode else tuple(sequence.tokens[start:end]),
            samples=end == len(sequence.tokens),
            new_block_ids=new_block_ids,
            num_prompt_logprobs=_num_prompt_logprobs(sequence, start, end),
        )

    def _take(
        self, work: Mapping[Driven, int], rows: Sequence[ScheduledSeq], result: StepResult
    ) -> None:
        for sequence, num_tokens in work.items():
            sequence.num_computed += num_tokens
        sampled = [each for each, row in zip(work, rows, strict=True) if row.samples]
        assert len(sampled) == len(result.token_ids), "one token per row that samples"
        for row, (sequence, token) in enumerate(zip(sampled, result.token_ids, strict=True)):
            sequence.tokens.append(int(token))
            sequence.logits.append(result.logits[row])


def _num_prompt_logprobs(sequence: Driven, start: int, end: int) -> int:
    """Of the positions [start, end), how many are followed by a token of the prompt."""
    if sequence.request.sampling.prompt_logprobs is None:
        return 0
    return max(min(end, sequence.num_prompt_tokens - 1) - start, 0)
