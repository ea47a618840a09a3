"""Drawn calls of `generate` give what transformers' own loop gives.

Oracle: a copy of the model that is not installed. A test run draws a hundred calls;
``pytest tests/conformance --hypothesis-profile=thorough`` draws 2,000. Both end with a tally.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.comparison import difference, run
from tests.conformance.drawn_calls import DrawnCall, drawn_calls
from tests.conformance.tally import TALLY, Pair, Tally

MAX_NEAR_TIES_PER_CALL = 1 / 1000
NUM_GROUPS = settings().max_examples // 5
"""Of calls at once, beside the calls one by one."""


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Tally:
    """Shown at the end of the run."""
    return request.config.stash.setdefault(TALLY, Tally())


@pytest.mark.timeout(0)  # the thorough profile takes minutes
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(call=drawn_calls())
def test_drawn_call_equals_transformers(call: DrawnCall, pair: Pair, tally: Tally) -> None:
    outcome = pair.compare(call)

    tally.add(call, outcome)
    assert outcome.difference in ("", "near tie")


def test_near_ties_are_as_rare_as_rounding_makes_them(tally: Tally) -> None:
    assert tally.num_near_ties <= max(1, tally.num_calls * MAX_NEAR_TIES_PER_CALL)


@pytest.mark.timeout(0)  # as above
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=NUM_GROUPS)
@given(calls=st.lists(drawn_calls(may_sample=False), min_size=2, max_size=4))
def test_calls_of_several_threads_do_not_meet(calls: list[DrawnCall], pair: Pair) -> None:
    expected = [run(pair.reference, call) for call in calls]

    with ThreadPoolExecutor(len(calls)) as executor:
        outcomes = list(executor.map(partial(run, pair.model), calls))

    for call, ours, theirs in zip(calls, outcomes, expected, strict=True):
        theirs = replace(theirs, random_state=ours.random_state)  # of the process
        found = difference(ours, theirs, reference=pair.reference, call=call)
        assert found in ("", "near tie")
