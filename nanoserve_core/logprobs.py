"""Logprobs of tokens, from the device's tensors to `PositionLogprobs`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from nanoserve_core.kernels import reference_sampling as ops
from nanoserve_core.request import Logprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nanoserve_core.kernels.reference_sampling import GatheredLogprobs
    from nanoserve_core.request import PositionLogprobs

# Rows of logits are copied to float32 and normalised so many elements at a time.
_MAX_ELEMENTS = 2**22


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Logprobs of some rows, still on the device."""

    rows: Sequence[int]
    num_top: Sequence[int]
    """How many tokens besides the given one each row asked for."""
    gathered: GatheredLogprobs

    def on_its_way(self) -> LogprobRows:
        """See `SamplerOutput.on_its_way`."""
        gathered = type(self.gathered)(*(to_host(tensor) for tensor in self.gathered))
        return replace(self, gathered=gathered)

    def read(self) -> dict[int, PositionLogprobs]:
        """Row -> logprobs. Waits for the device."""
        columns = zip(*(tensor.tolist() for tensor in self.gathered), strict=True)
        return {
            row: _position_logprobs(*lists, num_entries=1 + num_top)
            for row, num_top, lists in zip(self.rows, self.num_top, columns, strict=True)
        }


def to_host(tensor: Tensor) -> Tensor:
    """A copy in page-locked memory that is complete when the current stream has got so far; a
    tensor of the host as it is.
    """
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def token_logprobs(scores: Tensor, token_ids: Tensor, num_top: int) -> list[PositionLogprobs]:
    """Logprobs of a given token per row and of the ``num_top`` most likely ones (prompt logprobs).

    ``scores``: [rows, vocab] logits of any float dtype; ``token_ids``: [rows] int64. Waits for the
    device.
    """
    step = max(1, _MAX_ELEMENTS // scores.shape[1])
    result: list[PositionLogprobs] = []
    for start in range(0, len(scores), step):
        part, ids = scores[start : start + step].float(), token_ids[start : start + step]
        rows = LogprobRows(
            range(len(part)), [num_top] * len(part), ops.gather_logprobs(part, ids, num_top)
        )
        result.extend(rows.read().values())
    return result


def _position_logprobs(
    ids: list[int], logprobs: list[float], ranks: list[int], *, num_entries: int
) -> PositionLogprobs:
    entries = zip(ids[:num_entries], logprobs, ranks, strict=False)
    return {token_id: Logprob(logprob, rank) for token_id, logprob, rank in entries}
