"""One preparation serves many prompts only where none of them could have another outcome."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from transformers import GenerationConfig, LogitsProcessorList

from hf_generate_shim.planner import Planner
from hf_generate_shim.route import Path
from tests.hf_generate_shim.calls import PAD, prompt

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle

LENGTHS = (1, 7, 2, 3, 30, 4, 12, 7, 2, 5)
OPTIONS: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_new_tokens": 4},
    "max_length": {"max_length": 64},
    "min_length": {"max_new_tokens": 40, "min_length": 7, "eos_token_id": 3},
    "min_new_tokens": {"max_new_tokens": 9, "min_new_tokens": 7, "eos_token_id": 3},
    "forced_bos": {"max_new_tokens": 4, "forced_bos_token_id": 9},
    "words": {"max_new_tokens": 4, "bad_words_ids": [[5], [6, 7, 8, 9]]},
    "sampled": {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 3},
    "penalty": {"max_new_tokens": 4, "repetition_penalty": 2.0},
    "encoder penalty": {"max_new_tokens": 4, "encoder_repetition_penalty": 2.0},
    "max_time": {"max_new_tokens": 4, "max_time": 9.0},
    "beams": {"max_new_tokens": 4, "num_beams": 2},
}


def count_preparations(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the prompts that transformers prepares."""
    lengths: list[int] = []
    prepare = handle.prepare

    def counted(model: Qwen3ForCausalLM, arguments: dict[str, Any]) -> object:
        lengths.append(arguments["input_ids"].shape[1])
        return prepare(model, arguments)

    monkeypatch.setattr(handle, "prepare", counted)
    return lengths


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_plan_is_what_the_prompt_s_own_call_gives(
    model: Qwen3ForCausalLM, handle: Handle, options: dict[str, Any]
) -> None:
    planner = Planner(handle, model, {"pad_token_id": PAD, **options})
    rows = [tuple(prompt(length, seed)) for seed, length in enumerate(LENGTHS)]

    plans = [planner.plan(row) for row in rows]

    for row, plan in zip(rows, plans, strict=True):
        alone = handle.prepare(model, planner.call_arguments(row)).route
        assert plan.route.path is alone.path
        if alone.task is None or plan.task is None:
            assert plan.task is None
            assert alone.path is not Path.FAST
            continue
        same_clock = replace(plan.task, time_limit=alone.task.time_limit)
        assert same_clock == alone.task


@pytest.mark.parametrize(
    ("options", "num_prepared"),
    [
        ({"max_new_tokens": 4}, 2),
        ({"max_new_tokens": 4, "do_sample": True, "top_p": 0.5, "repetition_penalty": 2.0}, 2),
        ({"max_length": 200}, 100 + 8),
    ],
    ids=["greedy", "sampled", "each length"],
)
def test_hundred_prompts_cost_few_preparations(
    model: Qwen3ForCausalLM,
    handle: Handle,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    num_prepared: int,
) -> None:
    prepared = count_preparations(handle, monkeypatch)
    planner = Planner(handle, model, options)

    plans = [planner.plan((5,) * length) for length in range(2, 102) for _ in range(2)]

    assert {plan.route.path for plan in plans} == {Path.FAST}
    assert len(prepared) <= num_prepared


def test_prompt_s_tokens_are_read_by_its_own_preparation(
    model: Qwen3ForCausalLM, handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = count_preparations(handle, monkeypatch)
    planner = Planner(handle, model, {"max_new_tokens": 4, "max_time": 5.0})

    plans = [planner.plan((5,) * length) for length in (3, 3, 4)]

    assert prepared == [3, 3, 3, 4]
    assert plans[0].task != plans[1].task


def test_model_that_became_another_one_is_noticed(model: Qwen3ForCausalLM, handle: Handle) -> None:
    planner = Planner(handle, model, {"max_new_tokens": 4})
    before = planner.plan((5, 6))
    hook = model.lm_head.register_forward_hook(lambda *_: None)

    after = planner.plan((5, 6))
    hook.remove()

    assert before.task is not None
    assert (after.task, after.route.path) == (None, Path.FALLBACK)


def test_own_objects_take_turns(model: Qwen3ForCausalLM, handle: Handle) -> None:
    processors = LogitsProcessorList([lambda _, scores: scores])

    plan = Planner(handle, model, {"max_new_tokens": 4, "logits_processor": processors}).plan((5,))

    assert plan.takes_turns
    assert plan.task is None


def test_fields_are_resolved_as_transformers_merges_them(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    model.generation_config.eos_token_id = [3, 4]
    config = GenerationConfig(num_return_sequences=2, do_sample=True)

    given = Planner(handle, model, {"generation_config": config})
    argued = Planner(handle, model, {"num_return_sequences": 5, "eos_token_id": 9})

    assert (given.num_rows, given.eos_token_ids) == (2, {3, 4})
    assert (argued.num_rows, argued.eos_token_ids) == (5, {9})
