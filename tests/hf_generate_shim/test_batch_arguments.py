"""What was given for all requests, and what for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import GenerationConfig

from hf_generate_shim.batch_arguments import BatchArguments
from nanoserve_core.errors import UnsupportedOption
from tests.hf_generate_shim.calls import batch

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle


def test_request_s_own_arguments_win(model: Qwen3ForCausalLM, handle: Handle) -> None:
    config = GenerationConfig(max_new_tokens=3, do_sample=True, top_k=7, eos_token_id=5)
    arguments = BatchArguments(config, {"top_k": 8, "top_p": 0.5})

    planner = arguments.planner(handle, model, {"max_new_tokens": 5, "top_p": 0.75})

    names = ("max_new_tokens", "top_k", "top_p", "eos_token_id")
    assert [planner.resolved(name) for name in names] == [5, 8, 0.75, 5]
    assert (config.max_new_tokens, config.top_k, config.top_p) == (3, 7, None)


def test_none_means_not_given_only_where_it_is_the_default(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    config = GenerationConfig(max_new_tokens=3, do_sample=True, top_k=7)
    given = {"max_new_tokens": None, "eos_token_id": None, "top_k": None}

    planner = BatchArguments(config, {}).planner(handle, model, given)
    task = planner.plan((1, 2)).task

    assert task is not None
    assert (task.sampling.max_tokens, task.sampling.top_k) == (3, 0)  # 0 keeps all


def test_equal_arguments_share_a_planner(model: Qwen3ForCausalLM, handle: Handle) -> None:
    arguments = BatchArguments(GenerationConfig(), {})
    given = {"max_new_tokens": 5, "eos_token_id": [1, 2]}

    first = arguments.planner(handle, model, given)
    second = arguments.planner(handle, model, dict(reversed(given.items())))
    other = arguments.planner(handle, model, {**given, "eos_token_id": [1, 3]})
    objects = [arguments.planner(handle, model, {"tokenizer": handle}) for _ in range(2)]

    assert first is second
    assert first is not other
    assert objects[0] is not objects[1]


@pytest.mark.parametrize("name", ["streamer", "input_ids", "attention_mask", "past_key_values"])
def test_what_a_request_cannot_have_is_refused(
    model: Qwen3ForCausalLM, handle: Handle, name: str
) -> None:
    with pytest.raises(UnsupportedOption, match=name):
        BatchArguments(None, {}).planner(handle, model, {name: object()})


def test_dict_output_is_refused_only_where_tensors_would_be_lost(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    as_dict = GenerationConfig(return_dict_in_generate=True)
    with_scores = GenerationConfig(return_dict_in_generate=True, output_scores=True)

    planner = BatchArguments(as_dict, {}).planner(handle, model, {})

    assert not planner.resolved("return_dict_in_generate")
    with pytest.raises(UnsupportedOption, match="output_scores=True"):
        BatchArguments(with_scores, {}).planner(handle, model, {})


def test_equality_is_of_configs_and_arguments() -> None:
    config = GenerationConfig(max_new_tokens=3)
    first = BatchArguments(config, {"top_k": 4})

    assert first.are_equal(BatchArguments(GenerationConfig(max_new_tokens=3), {"top_k": 4}))
    assert not first.are_equal(BatchArguments(config, {"top_k": 5}))
    assert not first.are_equal(BatchArguments(None, {"top_k": 4}))
    assert not BatchArguments(None, {"x": first}).are_equal(BatchArguments(None, {"x": first}))


@pytest.mark.parametrize(
    ("common", "num_prepared"),
    [({}, 0), ({"do_sample": True, "top_p": 0.5}, 0), ({"min_new_tokens": 2}, 2)],
    ids=["greedy", "sampled", "a minimum"],
)
def test_another_limit_costs_no_preparation_where_nothing_else_depends_on_it(
    model: Qwen3ForCausalLM,
    handle: Handle,
    monkeypatch: pytest.MonkeyPatch,
    common: dict[str, object],
    num_prepared: int,
) -> None:
    arguments = BatchArguments(None, {"eos_token_id": 5, "pad_token_id": 5, **common})
    arguments.planner(handle, model, {"max_new_tokens": 4}).plan((1, 2, 3))
    prepare, prepared = handle.prepare, []
    monkeypatch.setattr(handle, "prepare", lambda *call: prepared.append(1) or prepare(*call))

    plan = arguments.planner(handle, model, {"max_new_tokens": 9}).plan((1, 2, 3, 4))

    assert plan.task is not None
    assert plan.task.sampling.max_tokens == 9
    assert len(prepared) == num_prepared
    call = {**batch([1, 2, 3, 4]), "max_new_tokens": 9, "eos_token_id": 5, "pad_token_id": 5}
    assert prepare(model, {**call, **common}).route.task == plan.task


@pytest.mark.parametrize("limit", [0, -1])
def test_wrong_limit_is_refused_as_generate_does(
    model: Qwen3ForCausalLM, handle: Handle, limit: int
) -> None:
    arguments = BatchArguments(None, {})
    arguments.planner(handle, model, {"max_new_tokens": 4}).plan((1, 2, 3))

    planner = arguments.planner(handle, model, {"max_new_tokens": limit})

    with pytest.raises(ValueError, match="max_new_tokens"):
        planner.plan((1, 2, 3))
