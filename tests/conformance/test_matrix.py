"""Each combination of the matrix gives what transformers' own loop gives, on the path it should."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.matrix import LEFT_TO_TRANSFORMERS, SERVED

if TYPE_CHECKING:
    from tests.conformance.drawn_calls import DrawnCall
    from tests.conformance.tally import Pair


@pytest.mark.parametrize("call", SERVED.values(), ids=SERVED.keys())
def test_served_combination_equals_transformers(call: DrawnCall, pair: Pair) -> None:
    outcome = pair.compare(call)

    assert outcome.difference == ""
    assert outcome.path in ("fast", "lockstep")


@pytest.mark.parametrize("call", LEFT_TO_TRANSFORMERS.values(), ids=LEFT_TO_TRANSFORMERS.keys())
def test_combination_left_to_transformers_is_counted_with_its_reason(
    call: DrawnCall, pair: Pair
) -> None:
    outcome = pair.compare(call)

    assert outcome.difference == ""
    assert outcome.path == "fallback"
    assert outcome.reason
