"""Options that are not honoured: refused or served elsewhere, by name, once said and counted."""

from __future__ import annotations

import warnings

import pytest

from nanoserve_adapters.unsupported import (
    NanoserveFallbackWarning,
    Unsupported,
    UnsupportedPolicy,
)
from nanoserve_core.errors import UnsupportedOption


def num_beams(value: object = 4) -> Unsupported:
    """The example of the house style."""
    return Unsupported(
        option="num_beams",
        value=value,
        because="samples one continuation per row",
        way_out="Pass num_beams=1, or install with strict=False.",
    )


def test_strict_policy_refuses_naming_option_value_reason_and_way_out() -> None:
    policy = UnsupportedPolicy(strict=True, door="nanoserve")

    with pytest.raises(UnsupportedOption) as refused:
        policy.report(num_beams())

    assert str(refused.value) == (
        "num_beams=4 is not served by nanoserve (strict=True): it samples one continuation per "
        "row. Pass num_beams=1, or install with strict=False."
    )
    assert isinstance(refused.value, ValueError)


def test_lenient_policy_warns_once_per_reason_at_the_callers_line() -> None:
    policy = UnsupportedPolicy(strict=False, door="hf_generate_shim")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in (4, 5, 4):
            policy.report(num_beams(value))

    assert [str(warning.message) for warning in caught] == [policy.message(num_beams())]
    assert "num_beams=4" in str(caught[0].message)
    assert "hf_generate_shim" in str(caught[0].message)
    assert caught[0].category is NanoserveFallbackWarning
    assert caught[0].filename == __file__


def test_each_reason_is_warned_of_and_counted_apart() -> None:
    policy = UnsupportedPolicy(strict=False, door="nanoserve")
    other = Unsupported(option="assistant_model", value=None, because="drafts", way_out="Drop it.")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for found in (num_beams(), other, num_beams(8)):
            policy.report(found)

    assert len(caught) == 2
    assert policy.counters == {num_beams().reason: 2, other.reason: 1}


def test_refusals_are_counted_too() -> None:
    policy = UnsupportedPolicy(strict=True, door="nanoserve")

    for _ in range(2):
        with pytest.raises(UnsupportedOption):
            policy.report(num_beams())

    assert policy.counters == {num_beams().reason: 2}


def test_counters_are_a_snapshot() -> None:
    policy = UnsupportedPolicy(strict=True, door="nanoserve")
    before = policy.counters

    with pytest.raises(UnsupportedOption):
        policy.report(num_beams())

    assert before == {}


def test_huge_values_are_shown_short() -> None:
    policy = UnsupportedPolicy(strict=True, door="nanoserve")

    assert len(policy.message(num_beams(list(range(10_000))))) < 300
