"""Modes that never reach `_sample` are recognised by what selects them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from transformers import GenerationConfig

from hf_generate_shim.modes import other_mode

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 2},
        {"generation_config": GenerationConfig(num_beams=3)},
        {"assistant_model": object()},
        {"prompt_lookup_num_tokens": 3},
        {"custom_generate": "a/repo"},
        {"penalty_alpha": 0.5, "top_k": 4},
    ],
)
def test_switch_is_named(model: Qwen3ForCausalLM, arguments: dict[str, Any]) -> None:
    found = other_mode(model, arguments)

    assert found is not None
    assert found.option in {*arguments, "num_beams"}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_beams": 1},
        {"do_sample": True, "top_k": 5},
        {"cache_implementation": "paged"},
        {"generation_config": GenerationConfig(cache_implementation="paged")},
        {"num_beams": 1, "generation_config": GenerationConfig(num_beams=3)},
        {"num_beams": None, "generation_config": GenerationConfig(num_beams=3)},
    ],
)
def test_sampling_and_greedy_search_are_not(
    model: Qwen3ForCausalLM, arguments: dict[str, Any]
) -> None:
    assert other_mode(model, arguments) is None


def test_model_s_own_config_counts_where_nothing_was_given() -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(num_beams=4))

    found = other_mode(model, {})  # type: ignore[arg-type]  # only its config is read

    assert found is not None
    assert (found.option, found.value) == ("num_beams", 4)
