"""Slots in the middle of their lives, for the tests of the slot state ops on any device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoserve_core.kernels.slot_deltas import SlotDeltas
from nanoserve_core.kernels.slot_tables import (
    PickedTokens,
    SlotField,
    SlotLayout,
    SlotTables,
    StepRows,
    TokenRing,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

BLOCK_SIZE = 4
RING_LENGTH = 3


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One sequence: ``num_tokens`` known, the last of them ``last_token``."""

    num_tokens: int
    last_token: int = 11
    block_ids: list[int] = field(default_factory=lambda: [3, 1, 2])
    max_total_tokens: int = 100
    first_stop_position: int = 0
    stop_ids: Sequence[int] = ()
    is_active: bool = True


@dataclass(frozen=True, kw_only=True)
class SlotCase:
    """Tables, rows and ring of a few slots; ``step`` runs the state ops of one step."""

    ops: ModuleType
    tables: SlotTables
    rows: StepRows
    ring: TokenRing

    def gather(self) -> StepRows:
        """Gather the rows."""
        self.ops.gather_rows(self.tables, self.rows)
        return self.rows

    def advance(self, tokens: Sequence[int]) -> None:
        """Give each row its token, and minus the token as log-probability."""
        picked = PickedTokens.allocate(len(tokens), self.rows.slots.device)
        picked.token_ids.copy_(torch.tensor(tokens))
        picked.logprobs.copy_(-picked.token_ids)
        self.ops.advance_state(self.tables, self.rows, picked=picked, ring=self.ring)

    def change(self, deltas: SlotDeltas) -> None:
        """Apply changes."""
        out = np.zeros((len(deltas) + 1, 2), dtype=np.int32)
        deltas.take(out)
        self.ops.apply_deltas(self.tables, torch.from_numpy(out).to(self.rows.slots.device))

    def of_slots(self, name: SlotField) -> list[int]:
        """A field of every slot."""
        return self.tables.fields[name].tolist()


def slot_case(
    ops: ModuleType, slots: Sequence[Slot], rows: Sequence[int], *, device: str = "cpu"
) -> SlotCase:
    """``slots`` from 0 on; ``rows`` name them. Entries that mean nothing hold nonsense."""
    layout = SlotLayout(
        num_slots=max(len(slots), len(rows)), max_num_blocks=6, block_size=BLOCK_SIZE
    )
    tables = SlotTables.allocate(layout, device)
    tables.block_tables.fill_(99)
    deltas = SlotDeltas(layout)
    for index, slot in enumerate(slots):
        deltas.set_stop_ids(index, slot.stop_ids)
        deltas.set_blocks(index, 0, slot.block_ids)
        deltas.set_seed(index, 2**40 + index)
        deltas.set_fields(
            index,
            {
                SlotField.TEMPERATURE: 0.5 + index,
                SlotField.TOP_P: 0.5,
                SlotField.LAST_TOKEN: slot.last_token,
                SlotField.POSITION: slot.num_tokens - 1,
                SlotField.IS_ACTIVE: slot.is_active,
                SlotField.MAX_TOTAL_TOKENS: slot.max_total_tokens,
                SlotField.FIRST_STOP_POSITION: slot.first_stop_position,
            },
        )
    deltas.set_rows(rows)
    case = SlotCase(
        ops=ops,
        tables=tables,
        rows=StepRows.allocate(layout, device, slots=tables.row_slots).first(len(rows)),
        ring=TokenRing.allocate(RING_LENGTH, layout.num_slots, device),
    )
    case.change(deltas)
    return case
