"""`TokenPicker`: how the rows of a lockstep call get their tokens from the processed scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from nanoserve_core.errors import RequestFailed
from nanoserve_core.kernels.reference_sampling import sample_tokens
from nanoserve_core.philox import uniform

if TYPE_CHECKING:
    from collections.abc import Sequence


class TokenPicker(Protocol):
    """Picks a token for each row of a step."""

    def __call__(self, scores: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """[num_rows] int64, of which only ``rows`` count, those that have not ended.

        ``scores``: float [num_rows, vocab_size]. Called once a step, in order.
        """
        ...


def pick_largest(scores: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Greedy search."""
    del rows
    return torch.argmax(scores, dim=-1)


def pick_as_transformers(scores: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """One draw from torch's default generator for all rows, those that have ended included."""
    del rows
    probabilities = torch.nn.functional.softmax(scores, dim=-1)
    return torch.multinomial(probabilities, num_samples=1).squeeze(1)


class RowPicker:
    """Each row draws from a stream of its own, as rows do that run freely."""

    def __init__(self, seeds: Sequence[int], num_prompt_tokens: Sequence[int]) -> None:
        self._seeds = np.array(seeds, dtype=np.uint64)
        self._positions = np.array(num_prompt_tokens, dtype=np.int64)

    def __call__(self, scores: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """See `TokenPicker`. Raises `RequestFailed` for a row without a finite score."""
        draws = torch.from_numpy(uniform(self._seeds[rows], self._positions[rows]))
        self._positions += 1
        sampled = sample_tokens(scores[rows].float(), draws.to(scores.device))
        if sampled.is_empty.any():
            row = rows[int(sampled.is_empty.nonzero()[0])]
            raise RequestFailed(
                f"row {row}: no token can be drawn: the scores are all -inf, or contain NaN or "
                "+inf. Expected at least one finite score. Look at the logits processors of the "
                "call."
            )
        tokens = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
        tokens[rows] = sampled.token_ids
        return tokens
