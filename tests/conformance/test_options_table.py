"""The table for users names every option that transformers has, and only ways that exist."""

from __future__ import annotations

import inspect

from transformers import GenerationConfig, Qwen3ForCausalLM

from tests.conformance.options_table import TABLE, WAYS


def test_every_field_of_the_config_has_a_row() -> None:
    missing = set(vars(GenerationConfig())) - set(TABLE)

    assert not missing, "say in hf_generate_shim/OPTIONS.md what becomes of them"


def test_every_argument_of_generate_has_a_row() -> None:
    missing = set(inspect.signature(Qwen3ForCausalLM.generate).parameters) - {"self"} - set(TABLE)

    assert not missing, "say in hf_generate_shim/OPTIONS.md what becomes of them"


def test_rows_name_ways_that_exist() -> None:
    unknown = {option: ways - WAYS for option, ways in TABLE.items() if ways - WAYS}

    assert not unknown
