"""SamplingParams: accepted forms, refused values, and messages that name both."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from nanoserve_core import SamplingParams
from nanoserve_core.errors import ConfigError


def test_defaults_are_the_ones_of_the_field() -> None:
    params = SamplingParams()

    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (
        1,
        1.0,
        0,
        1.0,
        0.0,
    )
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (
        16,
        0,
        None,
        None,
    )


def test_params_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]  # the point of the test


def test_one_stop_string_and_a_list_mean_the_same() -> None:
    assert SamplingParams(stop="END").stop == SamplingParams(stop=["END"]).stop == ("END",)  # type: ignore[arg-type]  # accepted forms


def test_minus_one_disables_top_k_as_in_vllm() -> None:
    assert SamplingParams(top_k=-1).top_k == 0


def test_changing_the_callers_bias_later_changes_nothing() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)

    bias[3] = 9.0

    assert params.logit_bias == {3: 1.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("logprobs_mode", "cooked"),
        ("stop", [3]),
        ("stop", ""),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("bad_words_ids", [[]]),
        ("logit_bias", {0: float("nan")}),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:  # noqa: ANN401 - a caller's value
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: value})


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_tokens=5 exceeds max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="detokenize"):
        SamplingParams(stop=("x",), detokenize=False)


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"temprature=0.5 .*Did you mean 'temperature'"):
        SamplingParams.from_options(temprature=0.5)


def test_replace_validates_again() -> None:
    with pytest.raises(ConfigError, match="top_p"):
        SamplingParams().replace(top_p=2.0)
