"""What a decode step reads and writes on the device, besides weights and K/V.

`SlotTables` holds one entry per *slot*, for the whole life of a sequence; `StepRows` one per *row*
of a step, in the order in which kernels work. `gather_rows` makes the second from the first, and
`advance_state` writes the tokens of a step back.

Everything is int32 in one piece of memory, floats by their bits, so that one copy and one
`apply_deltas` change whatever has changed. Nothing here knows a request, a model or a policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

MAX_STOP_IDS = 8
"""Ids that end a sequence on the device; when it has more, the host finds the others late."""
NO_TOKEN = -1
"""In a `TokenRing`: the row was padding, ended, or without a block for its K/V."""
FAILED = -2
"""In a `TokenRing`: there was no token to draw (NaN, +inf, or all logits -inf); the row ended."""


class SlotField(IntEnum):
    """Rows of `SlotTables.fields`. `gather_rows` copies those before `LAST_TOKEN` as they are."""

    TEMPERATURE = 0
    """float32; 0 is argmax."""
    TOP_K = 1
    """0 keeps all."""
    TOP_P = 2
    """float32; 1 keeps all."""
    MIN_P = 3
    """float32; 0 keeps all."""
    SEED_LOW = 4
    SEED_HIGH = 5
    """The 64 bits of the sequence's seed."""
    WANTS_LOGPROB = 6
    """1: `pick_token` reports the token's log-probability under the model's logits."""
    LAST_TOKEN = 7
    """The newest known token: the input of the next step."""
    POSITION = 8
    """Absolute position of `LAST_TOKEN`."""
    IS_ACTIVE = 9
    """0: ended, or nobody's."""
    NUM_BLOCKS = 10
    """Valid entries of the slot's block table; what is behind them is an earlier tenant's."""
    MAX_TOTAL_TOKENS = 11
    """The sequence ends with its token at this position - 1."""
    FIRST_STOP_POSITION = 12
    """Stop ids count from this absolute position on: prompt length + ``min_tokens``."""


NUM_PARAMETERS = SlotField.LAST_TOKEN.value
FLOAT_FIELDS = frozenset({SlotField.TEMPERATURE, SlotField.TOP_P, SlotField.MIN_P})


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotLayout:
    """Where everything is in `SlotTables.storage`; known to the host, which makes deltas by it."""

    num_slots: int
    max_num_blocks: int
    """Of one sequence."""
    block_size: int

    @property
    def stop_ids_start(self) -> int:
        """Offset of the stop ids."""
        return len(SlotField) * self.num_slots

    @property
    def block_tables_start(self) -> int:
        """Offset of the block tables."""
        return self.stop_ids_start + MAX_STOP_IDS * self.num_slots

    @property
    def row_slots_start(self) -> int:
        """Offset of the slots of the rows."""
        return self.block_tables_start + self.max_num_blocks * self.num_slots

    @property
    def row_groups_start(self) -> int:
        """Offset of the groups of the rows."""
        return self.row_slots_start + self.num_slots

    @property
    def size(self) -> int:
        """Number of int32."""
        return self.row_groups_start + 2 * self.num_slots


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotTables:
    """One entry per slot. All tensors are views of ``storage``."""

    layout: SlotLayout
    storage: Tensor
    """[layout.size] int32."""
    fields: Tensor
    """[len(SlotField), slots] int32: see `SlotField`."""
    stop_ids: Tensor
    """[slots, MAX_STOP_IDS] int32: -1 where there is none."""
    block_tables: Tensor
    """[slots, max_num_blocks] int32."""
    row_slots: Tensor
    """[slots] int32: the slot of each row of the next steps, -1 for padding."""
    row_groups: Tensor
    """[2, slots] int32: `StepRows.leads` and `StepRows.shared` of each row of the next steps."""

    @classmethod
    def allocate(cls, layout: SlotLayout, device: torch.device | str) -> SlotTables:
        """Tables without a tenant."""
        storage = torch.zeros(layout.size, dtype=torch.int32, device=device)
        stop_ids = storage[layout.stop_ids_start : layout.block_tables_start]
        block_tables = storage[layout.block_tables_start : layout.row_slots_start]
        row_slots = storage[layout.row_slots_start : layout.row_groups_start]
        stop_ids.fill_(-1)
        row_slots.fill_(-1)
        return cls(
            layout=layout,
            storage=storage,
            fields=storage[: layout.stop_ids_start].view(len(SlotField), layout.num_slots),
            stop_ids=stop_ids.view(layout.num_slots, MAX_STOP_IDS),
            block_tables=block_tables.view(layout.num_slots, layout.max_num_blocks),
            row_slots=row_slots,
            row_groups=storage[layout.row_groups_start :].view(2, layout.num_slots),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """One entry per row of a step: what its kernels read."""

    slots: Tensor
    """[rows] int32: the row's slot, -1 for padding. Given; all others are written by
    `gather_rows`."""
    parameters: Tensor
    """[NUM_PARAMETERS, rows] int32: the leading `SlotField`."""
    token_ids: Tensor
    """[rows] int32: the input tokens; 0 in rows that do not run."""
    positions: Tensor
    """[rows] int32: theirs; the row's new token will be at ``positions + 1``."""
    kv_lens: Tensor
    """[rows] int32: tokens to attend to, the input included; 0 in rows that do not run."""
    slot_mapping: Tensor
    """[rows] int32: where the K/V of the input goes; -1 in rows that do not run."""
    block_tables: Tensor
    """[rows, max_num_blocks] int32: entries behind the sequence's blocks mean nothing."""
    leads: Tensor | None = None
    """[rows] int32: the row's group, as `decode_plan` wants it. Given, if rows share blocks."""
    shared: Tensor | None = None
    """[rows] int32: leading tokens whose blocks the group shares. Given with ``leads``."""

    @classmethod
    def allocate(
        cls, layout: SlotLayout, device: torch.device | str, *, slots: Tensor | None = None
    ) -> StepRows:
        """Rows for the largest step. ``slots``: `SlotTables.row_slots`, or None for own ones."""
        num_rows = layout.num_slots
        if slots is None:
            slots = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        rows = torch.zeros(4 + NUM_PARAMETERS, num_rows, dtype=torch.int32, device=device)
        tables = torch.zeros(num_rows, layout.max_num_blocks, dtype=torch.int32, device=device)
        token_ids, positions, kv_lens, slot_mapping = rows[NUM_PARAMETERS:]
        slot_mapping.fill_(-1)
        return cls(
            slots=slots,
            parameters=rows[:NUM_PARAMETERS],
            token_ids=token_ids,
            positions=positions,
            kv_lens=kv_lens,
            slot_mapping=slot_mapping,
            block_tables=tables,
        )

    def first(self, num_rows: int) -> StepRows:
        """Views of the first rows: a step of that size."""
        return StepRows(
            slots=self.slots[:num_rows],
            parameters=self.parameters[:, :num_rows],
            token_ids=self.token_ids[:num_rows],
            positions=self.positions[:num_rows],
            kv_lens=self.kv_lens[:num_rows],
            slot_mapping=self.slot_mapping[:num_rows],
            block_tables=self.block_tables[:num_rows],
            leads=None if self.leads is None else self.leads[:num_rows],
            shared=None if self.shared is None else self.shared[:num_rows],
        )

    @property
    def num_rows(self) -> int:
        """Padding included."""
        return self.slots.shape[0]

    def parameter(self, field: SlotField) -> Tensor:
        """[rows], a view: float32 or int32, as `SlotField` says."""
        row = self.parameters[field.value]
        return row.view(torch.float32) if field in FLOAT_FIELDS else row


@dataclass(frozen=True, kw_only=True, slots=True)
class PickedTokens:
    """What `pick_token` gives, one entry per row."""

    token_ids: Tensor
    """[rows] int32; negative where there was no token to draw."""
    logprobs: Tensor
    """[rows] float32: log-softmax of the model's logits at the token; NaN where nobody wants it."""

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device | str) -> PickedTokens:
        """Memory for steps of up to ``num_rows`` rows."""
        return cls(
            token_ids=torch.full((num_rows,), NO_TOKEN, dtype=torch.int32, device=device),
            logprobs=torch.full((num_rows,), torch.nan, dtype=torch.float32, device=device),
        )

    def first(self, num_rows: int) -> PickedTokens:
        """Views of the first rows."""
        return PickedTokens(token_ids=self.token_ids[:num_rows], logprobs=self.logprobs[:num_rows])


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRing:
    """The tokens of the newest steps, for the host to copy while later ones run."""

    step: Tensor
    """[1] int32: the launches of `advance_state` so far; the next writes at ``step % length``."""
    token_ids: Tensor
    """[length, rows] int32: a token, `NO_TOKEN` or `FAILED`."""
    logprobs: Tensor
    """[length, rows] float32: of `PickedTokens`."""

    @classmethod
    def allocate(cls, length: int, num_rows: int, device: torch.device | str) -> TokenRing:
        """A ring of ``length`` steps of up to ``num_rows`` rows."""
        return cls(
            step=torch.zeros(1, dtype=torch.int32, device=device),
            token_ids=torch.full((length, num_rows), NO_TOKEN, dtype=torch.int32, device=device),
            logprobs=torch.full((length, num_rows), torch.nan, device=device, dtype=torch.float32),
        )
