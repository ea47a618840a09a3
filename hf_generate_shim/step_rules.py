"""`StepRule`: tokens that are forced or forbidden at one step of a call, and no other.

transformers counts the columns of its padded batch; a row of the engine has none, so rules count
new tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """What holds for new token ``step``, counted from 0."""

    step: int
    token_ids: tuple[int, ...]
    is_forced: bool
    """True: one of ``token_ids``, with score 0. False: none of them."""

    def edit(self, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` [1, vocab_size] under this rule, edited in place."""
        if self.is_forced:
            scores.fill_(-math.inf)
        scores[:, list(self.token_ids)] = 0.0 if self.is_forced else -math.inf
        return scores


class StepRules:
    """The rules of one row, in order, as a logits processor of its request."""

    def __init__(self, rules: Sequence[StepRule], *, num_prompt_tokens: int) -> None:
        self._rules = rules
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Edit the scores of the next token; see `LogitsProcessor`."""
        step = input_ids.shape[1] - self._num_prompt_tokens
        for rule in self._rules:
            if rule.step == step:
                scores = rule.edit(scores)
        return scores
