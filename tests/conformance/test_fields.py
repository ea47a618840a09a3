"""Every field of `GenerationConfig` is known here, and each value by itself changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import GenerationConfig

from tests.conformance.drawn_calls import DrawnCall
from tests.conformance.fields import DRAWN, FEW, NEEDS, NOT_DRAWN, SAMPLED
from tests.conformance.options_table import TABLE
from tests.hf_generate_shim.calls import ragged

if TYPE_CHECKING:
    from tests.conformance.tally import Pair

CASES = [
    pytest.param(name, value, id=f"{name}-{index}")
    for name, values in DRAWN.items()
    for index, value in enumerate(values)
]


def test_every_field_of_the_config_is_drawn_or_left_out_for_a_reason() -> None:
    fields = set(vars(GenerationConfig()))

    unknown = fields - set(DRAWN) - set(NOT_DRAWN)

    assert not unknown, "say in tests/conformance/fields.py which values a drawn call may carry"
    assert not set(DRAWN) & set(NOT_DRAWN)


@pytest.mark.parametrize(("name", "value"), CASES)
def test_field_by_itself_equals_transformers(
    name: str,
    value: object,
    pair: Pair,
) -> None:
    config = {"eos_token_id": FEW, "max_new_tokens": 5, "do_sample": name in SAMPLED}
    config = {**config, **NEEDS.get(name, {}), name: value}

    outcome = pair.compare(DrawnCall(inputs=ragged(2), config=config))

    assert outcome.difference == ""
    usual = {"prepared": "fast", "fast": "lockstep" if config["do_sample"] else "fast"}
    assert outcome.path in {usual.get(way, way) for way in TABLE[name]}
