"""Reads transformers' stopping criteria back into the rules by which the engine ends a row.

As with processors: exact classes only, anything else is `Unsupported`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformers.generation import stopping_criteria as hf

from hf_generate_shim.stop_strings import StopStrings
from nanoserve_adapters.unsupported import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hf_generate_shim.call import HFObject


class TimeLimit:
    """`MaxTimeCriteria` as a `StopCheck` of the engine, shared by all rows of a call.

    transformers stops all rows of a batch after the same step. Here rows may be some steps apart
    when time is up: the shortest row that time stopped counts, and results are cut at its length.
    """

    def __init__(self, initial_timestamp: float, max_time: float) -> None:
        self._initial_timestamp = initial_timestamp
        self._max_time = max_time
        self.num_steps: float = math.inf
        """Steps that all rows may keep; written on the engine's thread."""

    def __call__(self, index: int, output_token_ids: list[int]) -> bool:
        """True once the time is up; called by the engine after each new token of each row."""
        del index
        if time.time() - self._initial_timestamp <= self._max_time:  # the criterion's own clock
            return False
        self.num_steps = min(self.num_steps, len(output_token_ids))
        return True


@dataclass
class StopRules:
    """When the rows of one call end."""

    max_length: float = math.inf
    """Columns of the longest result, prompt and pads included."""
    eos_token_ids: list[int] = field(default_factory=list)
    has_eos_criterion: bool = False
    """transformers writes pads after the end of a row only then."""
    time_limit: TimeLimit | None = None
    stop_strings: StopStrings | None = None

    def known_eos_ids(self, vocab_size: int) -> list[int]:
        """The ids that end a row, without those that can never be sampled."""
        return sorted({token_id for token_id in self.eos_token_ids if token_id < vocab_size})

    def max_tokens(self, width: int) -> int:
        """New tokens of a row whose prompt has ``width`` columns: one at least."""
        return max(1, math.ceil(self.max_length - width))


def read_criteria(criteria: Iterable[object], rules: StopRules) -> list[Unsupported]:
    """Fill ``rules`` from the criteria. Returns why some could not be translated."""
    reasons = []
    for criterion in criteria:
        rules.has_eos_criterion |= hasattr(criterion, "eos_token_id")  # transformers' own test
        if not _read(criterion, rules):
            reasons.append(_unsupported(criterion))
    return reasons


def _read(criterion: HFObject, rules: StopRules) -> bool:
    if type(criterion) is hf.MaxLengthCriteria:
        rules.max_length = min(rules.max_length, criterion.max_length)
        return True
    if type(criterion) is hf.EosTokenCriteria and not criterion.eos_token_id.is_floating_point():
        ids = criterion.eos_token_id.flatten().tolist()
        rules.eos_token_ids += [token_id for token_id in ids if token_id >= 0]  # -1: never
        return True
    if type(criterion) is hf.MaxTimeCriteria and rules.time_limit is None:
        rules.time_limit = TimeLimit(criterion.initial_timestamp, criterion.max_time)
        return True
    if type(criterion) is StopStrings and rules.stop_strings is None:
        rules.stop_strings = criterion
        return True
    return False


def _unsupported(criterion: object) -> Unsupported:
    name = type(criterion).__name__
    return Unsupported(
        option="stopping_criteria",
        value=name,
        because=f"asks {name} about the whole batch after each step",
        way_out="Leave stopping_criteria out to let rows run freely.",
    )
