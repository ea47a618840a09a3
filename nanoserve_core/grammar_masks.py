"""`GrammarMasks`: the bitmasks of a step's constrained rows, filled by a few threads while the
forward runs.

    masks.start(plan.seqs)                  once the forward is under way, or about to be
    bitmask, errors = masks.take(slots)     in the sampler: waits for the threads, one upload

A step without such rows costs one test of an empty dict.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from nanoserve_core.grammar import Bitmask
    from nanoserve_core.plan import ScheduledSeq
    from nanoserve_core.sample_grammar import SampleGrammar

    Row = tuple[int, int]  # slot, tokens known

_MAX_THREADS = 4


class GrammarMasks:
    """The grammars of the slots of one engine. Used on the engine's thread."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._num_words = -(-vocab_size // 32)
        self._device = device
        self._grammars: dict[int, SampleGrammar] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._bitmask = torch.empty(0, self._num_words, dtype=torch.int32)
        self._started: dict[Row, int] = {}  # -> row of the bitmask
        self._futures: list[Future[None]] = []
        self.apply = _apply_op(device)
        """`reference_sampling.apply_token_bitmask`, or the device's own."""

    def assign(self, slot: int, grammar: SampleGrammar) -> None:
        """The slot's new tenant has a grammar."""
        self._grammars[slot] = grammar

    def release(self, slot: int) -> None:
        """The slot's tenant left; idempotent."""
        self._grammars.pop(slot, None)

    def is_active(self, slot: int, num_tokens: int) -> bool:
        """Whether the token after the slot's ``num_tokens`` known ones is constrained."""
        if (slot, num_tokens) in self._started:
            return True  # it was; a thread may be asking the matcher now
        grammar = self._grammars.get(slot)
        return grammar is not None and grammar.is_active(num_tokens)

    def are_in(self, seqs: Iterable[ScheduledSeq]) -> bool:
        """Whether any of the rows yields a constrained token."""
        return bool(self._grammars) and any(
            seq.samples and self.is_active(seq.slot, seq.end) for seq in seqs
        )

    def start(self, seqs: Iterable[ScheduledSeq]) -> None:
        """Begin to fill the masks of the rows that yield a constrained token."""
        if not self._grammars:
            return
        rows = [
            (seq.slot, seq.end) for seq in seqs if seq.samples and self.is_active(seq.slot, seq.end)
        ]
        self._settle()
        if not rows:
            return
        if self._pool is None:
            num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
            self._pool = ThreadPoolExecutor(num_threads, "nanoserve-grammar")
        self._bitmask = self._new_bitmask(len(rows))
        self._started = {row: index for index, row in enumerate(rows)}
        step = -(-len(rows) // _MAX_THREADS)
        self._futures = [
            self._pool.submit(_fill, self._tasks(rows[first : first + step], self._bitmask[first:]))
            for first in range(0, len(rows), step)
        ]

    def take(
        self, slots: Sequence[int], num_tokens: Sequence[int]
    ) -> tuple[Tensor, dict[int, Exception]]:
        """The masks of some rows, [rows, words] int32 on the device; and row -> why it must fail.

        Waits for the threads; what `start` was not told of is filled here.
        """
        wanted = list(zip(slots, num_tokens, strict=True))
        for future in self._futures:
            future.result()
        if any(row not in self._started for row in wanted):
            bitmask = self._new_bitmask(len(wanted))
            _fill(self._tasks(wanted, bitmask))
        elif wanted == list(self._started):
            bitmask = self._bitmask
        else:
            bitmask = self._bitmask[[self._started[row] for row in wanted]]
        found = ((row, self._grammars[slot].error) for row, slot in enumerate(slots))
        errors = {row: error for row, error in found if error is not None}
        self._settle()
        return bitmask.to(self._device, non_blocking=True), errors

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._settle()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _settle(self) -> None:
        """Forget what was started, once no thread works on it."""
        for future in self._futures:
            future.result()
        self._futures, self._started = [], {}

    def _new_bitmask(self, num_rows: int) -> Tensor:
        # A copy from pinned memory does not wait for the forward; torch keeps it until then.
        is_pinned = self._device.type == "cuda"
        size = num_rows, self._num_words
        return torch.zeros(size, dtype=torch.int32, pin_memory=is_pinned)

    def _tasks(self, rows: list[Row], bitmask: Tensor) -> list[tuple[SampleGrammar, Bitmask, int]]:
        """The bitmask may have further rows."""
        masks = bitmask.numpy()
        return [
            (self._grammars[slot], masks[index], num_tokens)
            for index, (slot, num_tokens) in enumerate(rows)
        ]


def _fill(tasks: list[tuple[SampleGrammar, Bitmask, int]]) -> None:
    for grammar, row, num_tokens in tasks:
        grammar.fill(row, num_tokens)


def _apply_op(device: torch.device) -> Callable[..., None]:
    from nanoserve_core.kernels import reference_sampling

    if device.type != "cuda" or torch.version.cuda is None:
        return reference_sampling.apply_token_bitmask
    from nanoserve_core.kernels.apply_token_bitmask import apply_token_bitmask

    return apply_token_bitmask
