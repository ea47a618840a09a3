"""Drawn calls of `generate` give what transformers' own loop gives.

Oracle: a copy of the model that is not installed. A test run draws a hundred calls;
``pytest tests/conformance --hypothesis-profile=thorough`` draws 2,000. Both end with a tally.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.conformance.drawn_calls import DrawnCall, drawn_calls
from tests.conformance.tally import TALLY, Pair, Tally, can_sample

MAX_NEAR_TIES_PER_CALL = 1 / 1000


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Tally:
    """Shown at the end of the run."""
    return request.config.stash.setdefault(TALLY, Tally())


@pytest.mark.timeout(0)  # the thorough profile takes minutes
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(call=drawn_calls(may_sample=can_sample()))
def test_drawn_call_equals_transformers(call: DrawnCall, pair: Pair, tally: Tally) -> None:
    outcome = pair.compare(call)

    tally.add(call, outcome)
    assert outcome.difference in ("", "near tie")


def test_near_ties_are_as_rare_as_rounding_makes_them(tally: Tally) -> None:
    assert tally.num_near_ties <= max(1, tally.num_calls * MAX_NEAR_TIES_PER_CALL)


def test_nothing_was_left_in_the_engine(pair: Pair) -> None:
    stats = pair.handle.stats()

    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks == stats.num_blocks
