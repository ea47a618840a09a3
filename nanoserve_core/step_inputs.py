"""`StepInputs`: from a step plan to the tensors of a `ForwardBatch`.

Holds the block table of each slot, which plans extend by deltas. All arithmetic is on whole arrays;
only rows that got a block are visited one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoserve_core.layers.attention import ForwardBatch
from nanoserve_core.plan import ScheduledSeq

if TYPE_CHECKING:
    from collections.abc import Sequence as ListOf

    from torch import Tensor

    from nanoserve_core.layers.attention import IntArray
    from nanoserve_core.plan import StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The model's part of a step, and which slots it samples for."""

    forward: ForwardBatch
    sampled_slots: IntArray
    """[R] int64, in row order over the rows with ``samples=True``."""
    sampled_positions: IntArray
    """[R] int64: the absolute position of each new token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepArrays:
    """A step on the host, as numpy arrays: making them lets go of the GIL nowhere, as torch's
    functions do, for steps of up to 500 tokens.
    """

    known_ids: tuple[tuple[int, ...], ...]
    """Per row, the input ids; empty: one token that only the device knows."""
    positions: IntArray
    """[T] int64, and so on as `ForwardBatch` says; ``query_start`` and ``kv_lens`` int32."""
    slot_mapping: IntArray
    query_start: IntArray
    kv_lens: IntArray
    block_tables: IntArray
    logits_indices: IntArray
    slots: IntArray
    """[S] int64."""
    sampled_slots: IntArray
    sampled_positions: IntArray
    """Both as in `StepBatch`."""

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return len(self.positions)


class StepInputs:
    """Block tables by slot. Used by one thread; plans must come in launch order."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._block_size = block_size
        self._device = device
        self._is_on_host = device.type == "cpu"
        # Steps of decode rows only read prefixes of these.
        self._counting = np.arange(max_num_seqs + 1)
        self._query_starts = self._counting.astype(np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Carry out the plan's changes to slots and block tables, before its rows run."""
        for slot in plan.released:
            self._num_blocks[slot] = 0
        for assignment in plan.assigned:
            self._num_blocks[assignment.slot] = 0
        for seq in plan.seqs:
            if seq.new_block_ids:
                first = self._num_blocks[seq.slot]
                last = first + len(seq.new_block_ids)
                self._tables[seq.slot, first:last] = seq.new_block_ids
                self._num_blocks[seq.slot] = last

    def live_block_ids(self) -> IntArray:
        """[n] int64: the blocks of all tables, each once."""
        counts = np.array(self._num_blocks)[:, None]
        live = self._tables[np.arange(self._tables.shape[1]) < counts]
        return np.unique(live).astype(np.int64)

    def tables_of(self, slots: list[int]) -> tuple[IntArray, IntArray]:
        """The block tables of some slots, [n, max_blocks], and how many blocks each has, [n]."""
        return self._tables[slots], np.array(self._num_blocks)[slots]

    def arrays(self, seqs: ListOf[ScheduledSeq]) -> StepArrays:
        """The rows of an applied plan, or some of them; at least one."""
        columns = dict(zip(ScheduledSeq._fields, zip(*seqs, strict=True), strict=True))
        slots = np.array(columns["slot"])
        starts = np.array(columns["start"])
        counts = np.array(columns["num_tokens"])
        ends = starts + counts
        query_start, row_of_token, positions = self._spread(starts, counts)
        tables = self._tables[slots, : -(-int(ends.max()) // self._block_size)]
        block, offset = np.divmod(positions, self._block_size)
        last_tokens = query_start[1:] - np.int64(1)
        sampled_slots, sampled_positions = slots, ends
        if not all(columns["samples"]):
            samples = np.array(columns["samples"])
            last_tokens = last_tokens[samples]
            sampled_slots, sampled_positions = slots[samples], ends[samples]
        return StepArrays(
            known_ids=columns["token_ids"],
            positions=positions,
            slot_mapping=tables[row_of_token, block] * np.int64(self._block_size) + offset,
            query_start=query_start,
            kv_lens=ends.astype(np.int32),
            block_tables=tables,
            logits_indices=last_tokens,
            slots=slots,
            sampled_slots=sampled_slots,
            sampled_positions=sampled_positions,
        )

    def batch(self, plan: StepPlan, last_token: Tensor) -> StepBatch:
        """The tensors of the plan's rows. last_token: [max_num_seqs] int64, for rows whose token
        the host does not know.

        The plan must have rows and have been applied.
        """
        step = self.arrays(plan.seqs)
        forward = ForwardBatch(
            token_ids=self._token_ids(step.known_ids, step.slots, step.query_start, last_token),
            positions=self._to_device(step.positions),
            slot_mapping=self._to_device(step.slot_mapping),
            query_start=self._to_device(step.query_start),
            kv_lens=self._to_device(step.kv_lens),
            block_tables=self._to_device(step.block_tables),
            logits_indices=self._to_device(step.logits_indices),
            num_decode_seqs=plan.num_decode_seqs,
            host_query_start=step.query_start,
            host_kv_lens=step.kv_lens,
            host_block_tables=step.block_tables,
        )
        return StepBatch(
            forward=forward,
            sampled_slots=step.sampled_slots,
            sampled_positions=step.sampled_positions,
        )

    def _spread(self, starts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Where each row's tokens begin; and per token, its row and its absolute position."""
        num_rows = len(starts)
        query_start = np.zeros(num_rows + 1, dtype=np.int32)
        counts.cumsum(out=query_start[1:])
        num_tokens = int(query_start[-1])
        if num_tokens == num_rows:
            return self._query_starts[: num_rows + 1], self._counting[:num_rows], starts
        row_of_token = np.repeat(self._counting[:num_rows], counts)
        positions = np.arange(num_tokens) + (starts - query_start[:-1])[row_of_token]
        return query_start, row_of_token, positions

    def _token_ids(
        self,
        known: tuple[tuple[int, ...], ...],
        slots: IntArray,
        query_start: IntArray,
        last_token: Tensor,
    ) -> Tensor:
        """[tokens] int64: what the host knows, and each other row's slot's last sampled token."""
        flat = list(chain.from_iterable(known))
        if not flat:
            return last_token.index_select(0, self._to_device(slots))
        if len(flat) == query_start[-1]:
            return self._to_device(np.array(flat))
        is_unknown = np.array([not ids for ids in known])
        newest = last_token.index_select(0, self._to_device(slots[is_unknown]))
        where_unknown = query_start[:-1][is_unknown].astype(np.int64)
        is_known = np.ones(query_start[-1], dtype=bool)
        is_known[where_unknown] = False
        token_ids = np.zeros(len(is_known), dtype=np.int64)
        token_ids[is_known] = flat
        return self._to_device(token_ids).index_copy_(0, self._to_device(where_unknown), newest)

    def _to_device(self, array: IntArray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._is_on_host else tensor.to(self._device, non_blocking=True)
