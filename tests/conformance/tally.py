"""`Pair` makes calls on an installed model and on its oracle; `Tally` counts what came of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

import pytest

from tests.conformance.comparison import difference, run
from tests.conformance.options_table import may_fall_back

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Counters, Handle
    from tests.conformance.drawn_calls import DrawnCall

PATHS = ("fast", "lockstep", "fallback")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a call came to."""

    difference: str
    """Empty when equal, "near tie", or a description."""
    path: str
    """The path it was counted under; "refused" when transformers refused it before the seam."""
    reason: str = ""
    """Why it fell back."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An installed model, and a copy that is not."""

    model: Qwen3ForCausalLM
    reference: Qwen3ForCausalLM
    handle: Handle

    def compare(self, call: DrawnCall) -> Outcome:
        """Make the call on both; AssertionError when it was not counted as it should be."""
        theirs = run(self.reference, call)
        before = self.handle.counters
        ours = run(self.model, call)
        found = difference(ours, theirs, reference=self.reference, call=call)
        counts = _growth(before, self.handle.counters)
        if "token_healing" not in call.config:  # that one calls generate inside
            assert sum(counts.values()) <= 1
            assert counts.total() == 1 or theirs.error is not None
        path = next((path for path in PATHS if counts[path]), "refused")
        reasons = _growth_of_reasons(before, self.handle.counters)
        assert reasons.total() == counts["fallback"]
        assert all(map(may_fall_back, reasons)), reasons
        return Outcome(difference=found, path=path, reason=next(iter(reasons), ""))


@dataclass(kw_only=True)
class Tally:
    """Counts over many calls."""

    num_calls: int = 0
    num_near_ties: int = 0
    paths: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    pairs: set[tuple[str, str]] = field(default_factory=set)
    """Options that met in a call."""

    def add(self, call: DrawnCall, outcome: Outcome) -> None:
        """Count one call."""
        self.num_calls += 1
        self.num_near_ties += outcome.difference == "near tie"
        self.paths[outcome.path] += 1
        self.reasons.update([outcome.reason] if outcome.reason else [])
        self.pairs.update(combinations(sorted(call.options), 2))

    def lines(self) -> list[str]:
        """For a person."""
        paths = ", ".join(f"{count} {path}" for path, count in self.paths.most_common())
        return [
            f"{self.num_calls} drawn calls: {paths}; {self.num_near_ties} near ties, "
            f"{len(self.pairs)} pairs of options met",
            *(f"{count:6d}  {reason}" for reason, count in self.reasons.most_common()),
        ]


TALLY = pytest.StashKey[Tally]()
"""Where a test run keeps its tally."""


def _growth(before: Counters, after: Counters) -> Counter[str]:
    return Counter({path: getattr(after, path) - getattr(before, path) for path in PATHS})


def _growth_of_reasons(before: Counters, after: Counters) -> Counter[str]:
    return Counter(after.reasons) - Counter(before.reasons)
