"""Rows with sampling parameters, for the tests of the sampling kernels on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoserve_core.kernels import reference_sampling
from nanoserve_core.kernels.slot_deltas import SlotDeltas
from nanoserve_core.kernels.slot_tables import SlotField, SlotLayout, SlotTables, StepRows
from nanoserve_core.philox import uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one row asks for. ``position``: of its last token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    wants_logprob: bool = True


def rows_of(rows: Sequence[Row], device: str = "cpu") -> StepRows:
    """`StepRows` in which only parameters and positions mean something."""
    layout = SlotLayout(num_slots=len(rows), max_num_blocks=1, block_size=16)
    deltas = SlotDeltas(layout)
    for slot, row in enumerate(rows):
        deltas.set_seed(slot, row.seed)
        deltas.set_fields(
            slot,
            {
                SlotField.TEMPERATURE: row.temperature,
                SlotField.TOP_K: row.top_k,
                SlotField.TOP_P: row.top_p,
                SlotField.MIN_P: row.min_p,
                SlotField.WANTS_LOGPROB: row.wants_logprob,
            },
        )
    tables = SlotTables.allocate(layout, "cpu")
    tables.storage.index_copy_(0, *changes(deltas))
    step = StepRows.allocate(layout, device)
    step.parameters.copy_(tables.fields[: len(step.parameters)])
    step.positions.copy_(torch.tensor([row.position for row in rows]))
    return step


def changes(deltas: SlotDeltas) -> tuple[Tensor, Tensor]:
    """Offsets, int64, and values of what ``deltas`` holds; takes it."""
    out = np.zeros((len(deltas) + 1, 2), dtype=np.int32)
    deltas.take(out)
    offsets, values = torch.from_numpy(out[1:]).unbind(1)
    return offsets.long(), values


def draws_of(rows: Sequence[Row]) -> NDArray[np.float64]:
    """The uniform number of each row's next token."""
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    return uniform(seeds, np.array([row.position + 1 for row in rows]))


def sampled_on_cpu(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The tokens of the CPU's sampler, [rows] int64. logits: [rows, vocab] on the CPU."""
    temperature = torch.tensor([row.temperature for row in rows], dtype=torch.float64)
    scores = logits.float() / temperature.clamp(min=1e-30).float()[:, None]
    top_k = [row.top_k if row.top_k < logits.shape[1] else 0 for row in rows]
    sampled = reference_sampling.sample_tokens(
        scores,
        torch.from_numpy(draws_of(rows)),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float64),
        min_p=torch.tensor([row.min_p for row in rows], dtype=torch.float64),
        max_top_k=max(top_k),
    )
    return torch.where(temperature == 0, logits.float().argmax(-1), sampled.token_ids)
