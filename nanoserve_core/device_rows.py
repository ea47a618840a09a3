"""`DeviceRows`: the slots and rows of the running sequences on the device, kept up to date by
deltas.

The host sends what has changed since the previous step, in one copy and one kernel; a step in
which nothing has changed sends nothing. What the device computes itself (last token, position) is
never sent back and forth. It runs no model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoserve_core.kernels.slot_deltas import SlotDeltas
from nanoserve_core.kernels.slot_tables import (
    MAX_STOP_IDS,
    SlotField,
    SlotTables,
    StepRows,
    TokenRing,
)
from nanoserve_core.prefix_groups import group_rows
from nanoserve_core.slot_rules import effective_top_k

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from nanoserve_core.config import ModelSpec
    from nanoserve_core.cuda_stream import Uploads
    from nanoserve_core.kernels.slot_tables import SlotLayout
    from nanoserve_core.kernels.step_ops import StepOps
    from nanoserve_core.layers.attention import IntArray
    from nanoserve_core.plan import SlotAssignment, StepPlan

RING_LENGTH = 80
"""Launches of `advance_state` whose tokens the ring keeps: two for each of forty steps."""


class DeviceRows:
    """Slot tables and step rows of one runner. Plans must come in launch order, on its thread."""

    def __init__(
        self,
        layout: SlotLayout,
        spec: ModelSpec,
        *,
        max_model_len: int,
        ops: StepOps,
        uploads: Uploads,
        device: torch.device,
        pack_size: int = 1,
    ) -> None:
        """All slots free. ``pack_size``: decode rows that can read shared blocks together."""
        self._spec = spec
        self._max_model_len = max_model_len
        self._pack_size = pack_size
        self._block_size = layout.block_size
        self._ops = ops
        self.tables = SlotTables.allocate(layout, device)
        self.ring = TokenRing.allocate(RING_LENGTH, layout.num_slots, device)
        self._decode = StepRows.allocate(layout, device, slots=self.tables.row_slots)
        self._loose = StepRows.allocate(layout, device)
        self._deltas = SlotDeltas(layout)
        self._num_blocks = [0] * layout.num_slots
        self._slots: list[int] = []
        self._row_slots: list[int] = []
        self._num_rows = 0
        self._has_new_tenants = False
        self._sent_groups: tuple[list[int], list[int]] = [], []
        self.order: IntArray | None = None
        """The plan's row at each decode row, where they are not in the plan's order."""
        self._uploads = uploads
        num_pairs = 1 + _max_num_changes(layout)
        self._pending = torch.zeros(num_pairs, 2, dtype=torch.int32, device=device)

    @staticmethod
    def nbytes(layout: SlotLayout) -> int:
        """Bytes on the device."""
        return 4 * (3 * layout.size + max_num_delta_ints(layout))

    def apply(self, plan: StepPlan) -> None:
        """Note the plan's changes to slots and block tables; they travel with the next `send`."""
        self._has_new_tenants |= bool(plan.released or plan.assigned)
        for slot in plan.released:
            self._num_blocks[slot] = 0
            self._deltas.deactivate(slot)
        for assignment in plan.assigned:
            self._assign(assignment)
        for seq in plan.seqs:
            if seq.new_block_ids:
                first = self._num_blocks[seq.slot]
                self._deltas.set_blocks(seq.slot, first, seq.new_block_ids)
                self._num_blocks[seq.slot] = first + len(seq.new_block_ids)

    def set_decode_rows(
        self,
        slots: list[int],
        num_rows: int,
        tables_of: Callable[[list[int]], tuple[IntArray, IntArray]],
    ) -> None:
        """The slots of the next decode rows; ``num_rows``: padding included.

        Rows that share blocks are brought together: see `order`. ``tables_of``: what the host knows
        of block tables (`StepInputs.tables_of`), asked when rows or their tenants have changed.
        """
        is_same = slots == self._slots and num_rows == self._num_rows
        if is_same and not self._has_new_tenants:
            return
        rows = [*self._group(slots, tables_of), *[-1] * (num_rows - len(slots))]
        if rows != self._row_slots:
            self._deltas.set_rows(rows)
            self._row_slots = rows
        self._slots, self._num_rows, self._has_new_tenants = slots, num_rows, False

    def send(self) -> None:
        """Bring the changes to the device, where the next `receive` writes them down. A copy, if
        there is anything to copy; it never waits for a step.
        """
        num_ints = 2 * (1 + len(self._deltas))
        if num_ints > 2:
            self._deltas.take(self._uploads.piece(num_ints).reshape(-1, 2))
            self._uploads.send(self._pending, num_ints)

    def receive(self, *, pdl: bool = False) -> None:
        """The device's side of `send`; capturable. Harmless where nothing was sent."""
        self._ops.apply_deltas(self.tables, self._pending, pdl=pdl)

    def gather(self, rows: StepRows, *, pdl: bool = False) -> None:
        """Make rows ready to run, after `receive`; capturable."""
        self._ops.gather_rows(self.tables, rows, pdl=pdl)

    def decode_rows(self, num_rows: int, *, packed: bool = False) -> StepRows:
        """Views of the first decode rows as they are, always of the same memory.

        ``packed``: with their groups; for rows that are in another `order` than the plan's.
        """
        rows = self._decode
        if packed:
            leads, shared = self.tables.row_groups
            rows = replace(rows, leads=leads, shared=shared)
        return rows.first(num_rows)

    def loose_rows(self, slots: Tensor) -> StepRows:
        """Rows of a step of prompts, to be gathered. slots: [rows] int32, on the device; -1 for
        padding.
        """
        return replace(self._loose.first(slots.shape[0]), slots=slots)

    def last_tokens(self, slots: Tensor) -> Tensor:
        """The newest tokens of some slots, [rows] int32. slots: [rows] integers, on the device."""
        return self.tables.fields[SlotField.LAST_TOKEN].index_select(0, slots)

    def _group(
        self,
        slots: list[int],
        tables_of: Callable[[list[int]], tuple[IntArray, IntArray]],
    ) -> list[int]:
        """The slots in the order of their groups; notes order and groups."""
        self.order = None
        if self._pack_size < 2 or len(slots) < 2:
            return slots
        tables, num_blocks = tables_of(slots)
        groups = group_rows(tables, num_blocks, pack_size=self._pack_size)
        if groups is None:
            return slots
        shared = [number * self._block_size for number in groups.num_shared]
        if (groups.leads, shared) != self._sent_groups:
            self._deltas.set_groups(groups.leads, shared)
            self._sent_groups = groups.leads, shared
        self.order = np.array(groups.order)
        return [slots[row] for row in groups.order]

    def _assign(self, assignment: SlotAssignment) -> None:
        slot, request = assignment.slot, assignment.request
        sampling, num_prompt = request.sampling, assignment.num_prompt_tokens
        max_total = self._max_model_len
        if sampling.max_tokens is not None:
            max_total = min(max_total, num_prompt + sampling.max_tokens)
        self._num_blocks[slot] = 0
        self._deltas.set_seed(slot, assignment.seed)
        self._deltas.set_stop_ids(slot, self._stop_ids(assignment))
        self._deltas.set_fields(
            slot,
            {
                SlotField.TEMPERATURE: sampling.temperature,
                SlotField.TOP_K: effective_top_k(sampling, self._spec.vocab_size),
                SlotField.TOP_P: sampling.top_p,
                SlotField.MIN_P: sampling.min_p,
                SlotField.WANTS_LOGPROB: 0,
                SlotField.LAST_TOKEN: assignment.token_ids[-1],
                SlotField.POSITION: len(assignment.token_ids) - 1,
                SlotField.IS_ACTIVE: 1,
                SlotField.NUM_BLOCKS: 0,
                SlotField.MAX_TOTAL_TOKENS: max_total,
                SlotField.FIRST_STOP_POSITION: num_prompt + sampling.min_tokens,
            },
        )

    def _stop_ids(self, assignment: SlotAssignment) -> Sequence[int]:
        sampling = assignment.request.sampling
        eos_token_ids = () if sampling.ignore_eos else self._spec.eos_token_ids
        return sorted({*eos_token_ids, *sampling.stop_token_ids})


def max_num_delta_ints(layout: SlotLayout) -> int:
    """Ints of the largest `DeviceRows.send`."""
    return 2 * (1 + _max_num_changes(layout))


def _max_num_changes(layout: SlotLayout) -> int:
    """When every slot gets a new tenant with a whole block table."""
    return layout.num_slots * (len(SlotField) + MAX_STOP_IDS + layout.max_num_blocks + 3)
