"""`PromptInputs`: what a step of prompts reads, always at the same addresses for the same shape.

A step is filled up to one of few shapes, so that it can be captured: padding tokens write no K/V,
padding rows are empty, and what the padding gives nobody reads.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nanoserve_core.cuda_stream import Uploads
    from nanoserve_core.layers.attention import IntArray
    from nanoserve_core.step_inputs import StepArrays

FEW_TOKENS = (16, 32, 64, 128, 256, 512)
TOKEN_STEP = 1024
"""Distance of the token counts beyond the few: where the products are bound by arithmetic, padding
costs what it adds."""
ROWS = (1, 8, 64)
"""A padding row costs its share of the head (75 us for all of the first 64, 0.6B on an H200)."""
_ALIGNMENT = 4
"""Ints: 16 bytes, which is what kernels may take for granted of a pointer."""
_NOTHING = np.zeros(0, dtype=np.int32)


class PromptShape(NamedTuple):
    """The size of a step, padding included."""

    num_tokens: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTensors:
    """Views of one shape, all int32: see `ForwardBatch`, with the slots of rows besides."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    kv_lens: Tensor
    row_slots: Tensor
    """[rows]: slots of all rows, for their block tables."""
    logits_indices: Tensor
    sampled_slots: Tensor
    """[rows]: slots of the rows that sample, one after the other; -1 for padding."""


class PromptInputs:
    """One step's inputs on the device, overwritten by the next."""

    def __init__(
        self, *, max_num_tokens: int, max_num_rows: int, uploads: Uploads, device: torch.device
    ) -> None:
        few = [n for n in FEW_TOKENS if n < max_num_tokens]
        more = range(TOKEN_STEP, max_num_tokens, TOKEN_STEP)
        self._token_counts = (*few, *more, max_num_tokens)
        self._row_counts = (*(n for n in ROWS if n < max_num_rows), max_num_rows)
        self._uploads = uploads
        num_ints = num_prompt_ints(max_num_tokens, max_num_rows)
        self._memory = torch.zeros(num_ints, dtype=torch.int32, device=device)
        self._views: dict[PromptShape, PromptTensors] = {}

    def shapes(self, max_num_tokens: int) -> list[PromptShape]:
        """Those of up to so many tokens, without rows that could not all have a token."""
        return [
            PromptShape(num_tokens, num_rows)
            for num_tokens in self._token_counts
            for num_rows in self._row_counts
            if num_rows <= num_tokens <= max_num_tokens
        ]

    def shape_of(self, num_tokens: int, num_rows: int) -> PromptShape:
        """The smallest shape that holds so much."""
        return PromptShape(
            self._token_counts[bisect_left(self._token_counts, num_tokens)],
            self._row_counts[bisect_left(self._row_counts, num_rows)],
        )

    def send(self, step: StepArrays, shape: PromptShape) -> None:
        """Bring a step, of which all ids are known, to the device, in one copy."""
        parts = (
            list(chain.from_iterable(step.known_ids)),
            step.positions,
            step.slot_mapping,
            step.query_start,
            step.kv_lens,
            step.slots,
            step.logits_indices,
            step.sampled_slots,
        )
        self._send(parts, shape, num_tokens=step.num_tokens)

    def send_padding(self, shape: PromptShape) -> None:
        """Bring a step to the device that is nothing but padding, to try the shape out."""
        self._send([_NOTHING] * len(_sizes(shape)), shape, num_tokens=0)

    def _send(
        self, parts: Sequence[list[int] | IntArray], shape: PromptShape, *, num_tokens: int
    ) -> None:
        ends = _ends(shape)
        piece = self._uploads.piece(ends[-1])
        paddings = (0, 0, -1, num_tokens, 0, 0, 0, -1)
        for values, padding, start, end in zip(parts, paddings, (0, *ends), ends, strict=False):
            piece[start : start + len(values)] = values
            piece[start + len(values) : end] = padding
        self._uploads.send(self._memory, ends[-1])

    def tensors(self, shape: PromptShape) -> PromptTensors:
        """The views of a shape; filled by `send`."""
        if shape not in self._views:
            self._views[shape] = self._view(shape)
        return self._views[shape]

    def _view(self, shape: PromptShape) -> PromptTensors:
        ends, sizes = _ends(shape), _sizes(shape)
        views = [
            self._memory[start : start + size]
            for start, size in zip((0, *ends), sizes, strict=False)
        ]
        token_ids, positions, slot_mapping, query_start, kv_lens, row_slots, indices, sampled = (
            views
        )
        return PromptTensors(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=query_start,
            kv_lens=kv_lens,
            row_slots=row_slots,
            logits_indices=indices,
            sampled_slots=sampled,
        )


def num_prompt_ints(max_num_tokens: int, max_num_rows: int) -> int:
    """Ints of the largest `PromptInputs.send`."""
    return _ends(PromptShape(max_num_tokens, max_num_rows))[-1]


def _sizes(shape: PromptShape) -> tuple[int, ...]:
    tokens, rows = shape
    return (tokens, tokens, tokens, rows + 1, rows, rows, rows, rows)


def _ends(shape: PromptShape) -> list[int]:
    """Where the parts end, each beginning at a multiple of 16 bytes."""
    return list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in _sizes(shape)))
