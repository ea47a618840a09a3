"""Options: call > bind > field > default; unknown ones are errors naming the nearest (B4, B9)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from langchain_llm import ChatNanoserve, NanoserveLLM
from nanoserve_adapters.testing import tiny_model
from nanoserve_core import ConfigError, UnsupportedOption, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    from nanoserve_core import Request, SamplingParams
    from tests.langchain_llm.doors import FakeDoor

CLASSES = [ChatNanoserve, NanoserveLLM]
SAMPLING = {
    "temperature": 0.25,
    "max_tokens": 7,
    "min_tokens": 2,
    "top_p": 0.75,
    "top_k": 5,
    "min_p": 0.125,
    "seed": 3,
    "stop": ["END"],
    "stop_token_ids": [9],
    "include_stop_str_in_output": True,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {3: 1.0},
    "ignore_eos": True,
    "skip_special_tokens": False,
}


def sampled(door: FakeDoor) -> dict[str, Any]:
    """The sampling parameters of the newest request, lists in place of tuples."""
    sampling = door.requests[-1].sampling
    values = {name: getattr(sampling, name) for name in SAMPLING}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("place", ["constructor", "bind", "call"])
def test_every_sampling_option_reaches_the_engine(
    make_fake: Callable[..., FakeDoor], cls: type[Any], place: str
) -> None:
    door = make_fake("x" * 20)
    in_constructor = SAMPLING if place == "constructor" else {}
    model = cls(engine=door.reference, **in_constructor)

    if place == "bind":
        model.bind(**SAMPLING).invoke("hi")
    else:
        model.invoke("hi", **(SAMPLING if place == "call" else {}))

    assert sampled(door) == SAMPLING


def test_call_wins_over_bind_and_bind_over_the_field(fake: FakeDoor) -> None:
    chat = fake.chat(max_tokens=1)

    chat.invoke("hi")
    chat.bind(max_tokens=2).invoke("hi")
    chat.bind(max_tokens=2).invoke("hi", max_tokens=3)

    assert [request.sampling.max_tokens for request in fake.requests] == [1, 2, 3]


def test_none_in_a_call_leaves_the_field(fake: FakeDoor) -> None:
    fake.chat(max_tokens=4, stop=["END"]).invoke("hi", max_tokens=None, stop=None)

    assert fake.requests[-1].sampling.max_tokens == 4
    assert fake.requests[-1].sampling.stop == ("END",)


@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_stop_of_the_call_replaces_that_of_the_field(
    make_fake: Callable[..., FakeDoor], kind: str
) -> None:
    door = make_fake("one END two")
    model: Any = door.chat(stop=["END"]) if kind == "chat" else door.llm(stop=["END"])

    def text(**options: Any) -> str:
        answer = model.invoke("hi", **options)
        return answer if kind == "llm" else answer.content

    assert text() == "one "
    assert text(stop=["two"]) == "one END "
    assert model.bind(stop=["two"]).invoke("hi", stop=["END"]) is not None
    assert text(stop=[]) == "one END two"


def test_stop_is_trimmed_and_reported(make_fake: Callable[..., FakeDoor]) -> None:
    door = make_fake("one END two")

    answer = door.chat(stop=["END"]).invoke("hi")
    kept = door.chat(stop=["END"], include_stop_str_in_output=True).invoke("hi")

    assert answer.content == "one "
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["stop_reason"] == "END"
    assert kept.content == "one END"


def test_stop_may_be_a_plain_string_in_the_constructor() -> None:
    assert ChatNanoserve(model="x", stop="END").stop == ["END"]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("alias", ["max_new_tokens", "max_tokens"])
def test_max_new_tokens_is_max_tokens(fake: FakeDoor, cls: type[Any], alias: str) -> None:
    cls(engine=fake.reference, **{alias: 3}).invoke("hi")
    cls(engine=fake.reference).invoke("hi", **{alias: 3})
    cls(engine=fake.reference).bind(**{alias: 3}).invoke("hi")

    assert [request.sampling.max_tokens for request in fake.requests] == [3, 3, 3]


def test_bound_max_tokens_cuts_the_answer(fake: FakeDoor) -> None:
    answer = fake.chat().bind(max_tokens=3).invoke("hi")

    assert answer.content == "Hel"
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 3


@pytest.mark.parametrize("alias", ["model", "model_name", "model_id"])
@pytest.mark.parametrize("cls", CLASSES)
def test_model_has_three_names(cls: type[Any], alias: str) -> None:
    model = cls(**{alias: "some/model"})

    assert model.model == model.model_name == "some/model"


@pytest.mark.parametrize("cls", CLASSES)
def test_unknown_constructor_argument_is_an_error_that_names_the_nearest(cls: type[Any]) -> None:
    with pytest.raises(ConfigError, match=r"temprature=3 .*Did you mean 'temperature'"):
        cls(model="x", temprature=3)


@pytest.mark.parametrize("way", ["invoke", "stream", "batch", "generate"])
@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_unknown_call_argument_is_an_error_that_names_the_nearest(
    fake: FakeDoor, kind: str, way: str
) -> None:
    model: Any = fake.chat() if kind == "chat" else fake.llm()
    prompts: dict[str, Any] = {
        "invoke": "hi",
        "stream": "hi",
        "batch": ["a", "b"],
        "generate": ["a", "b"] if kind == "llm" else [[], []],
    }

    with pytest.raises(ConfigError, match=r"max_tokenz=3 .*Did you mean 'max_tokens'"):
        list(getattr(model, way)(prompts[way], max_tokenz=3))

    assert not fake.requests


def test_option_of_the_other_class_is_unknown(fake: FakeDoor) -> None:
    with pytest.raises(ConfigError, match="n=2 is not an option of ChatNanoserve"):
        fake.chat().invoke("hi", n=2)


@pytest.mark.parametrize("name", ["engine", "streaming", "callbacks", "api_key"])
def test_field_that_is_no_call_option_is_refused_in_a_call(fake: FakeDoor, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        fake.chat().call_options(**{name: "value"})


def test_option_given_twice_with_different_values_is_an_error() -> None:
    with pytest.raises(ConfigError, match="max_tokens was given twice"):
        ChatNanoserve(model="x", max_tokens=3, max_new_tokens=4)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"min_tokens": 5, "max_tokens": 2}, {"stop": [""]}]
)
def test_wrong_value_is_found_by_the_constructor(cls: type[Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        cls(model="x", **wrong)


def test_value_of_a_wrong_type_is_found_by_the_constructor() -> None:
    with pytest.raises(ValidationError, match="max_tokens"):
        ChatNanoserve(model="x", max_tokens="many")


def test_arguments_for_remote_models_are_accepted_and_unused() -> None:
    chat = ChatNanoserve(model="x", api_key="k", base_url="u", max_retries=2, timeout=60)

    assert "k" not in repr(chat.api_key) or "api_key" not in repr(chat)
    assert chat.call_options().timeout == 60


def test_neither_model_nor_engine_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"model=.*engine=.*from_hf"):
        ChatNanoserve()


@pytest.mark.parametrize("key", ["tools", "tool_choice", "response_format"])
def test_tools_in_a_call_of_the_llm_are_refused_not_dropped(fake: FakeDoor, key: str) -> None:
    with pytest.raises(UnsupportedOption, match=rf"{key}.*ChatNanoserve"):
        fake.llm().invoke("hi", **{key: ["something"]})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"top_logprobs": 3}, 3),
        ({"logprobs": 2}, 2),
        ({"logprobs": False, "top_logprobs": 3}, None),
    ],
)
def test_logprobs_in_both_forms(
    fake: FakeDoor, options: dict[str, Any], expected: int | None
) -> None:
    assert fake.chat(**options).call_options().sampling.logprobs == expected
    assert fake.chat().call_options(**options).sampling.logprobs == expected


def test_call_may_name_the_model_by_a_served_name_only(fake: FakeDoor) -> None:
    chat = fake.chat(served_model_names=["alias"])

    assert chat.invoke("hi", model="alias").response_metadata["model_name"] == "alias"
    assert chat.invoke("hi", model="tiny").response_metadata["model_name"] == "tiny"
    with pytest.raises(ConfigError, match=r"'other' .*'tiny', 'alias'"):
        chat.invoke("hi", model="other")


def test_delivery_options_reach_the_request(fake: FakeDoor) -> None:
    fake.chat(priority=3, cache_salt="tenant").invoke("hi")
    fake.chat().invoke("hi", priority=4, cache_salt="other")

    assert [(r.priority, r.cache_salt) for r in fake.requests] == [(3, "tenant"), (4, "other")]


def test_bad_words_become_token_ids(fake: FakeDoor) -> None:
    fake.chat(bad_words=["no"]).invoke("hi")

    sampling = fake.requests[-1].sampling
    assert sampling.bad_words == ()
    assert tuple(b"no") in sampling.bad_words_ids


def test_length_without_a_limit_is_the_context_for_chat_and_512_for_text(
    make_fake: Callable[..., FakeDoor],
) -> None:
    wide, narrow = make_fake(), make_fake(max_model_len=100)

    for door in (wide, narrow):
        door.chat().invoke("hi")
        door.llm().invoke("hi")
        door.llm().invoke("hi", max_tokens=-1)
        door.llm(max_tokens=-1).invoke("hi", max_tokens=None)

    assert [request.sampling.max_tokens for request in wide.requests] == [None, 512, None, None]
    assert [request.sampling.max_tokens for request in narrow.requests] == [None, 98, None, None]


class Requests:
    """A plugin that remembers the sampling parameters of every request."""

    def __init__(self) -> None:
        self.sampling: list[SamplingParams] = []

    @hookimpl
    def nanoserve_request_added(self, request: Request) -> None:
        """Engine thread."""
        self.sampling.append(request.sampling)


@pytest.fixture
def recommending() -> Qwen3ForCausalLM:
    """A model whose generation_config recommends how to sample."""
    model = tiny_model()
    model.generation_config.update(temperature=0.5, top_k=7, top_p=0.9, max_new_tokens=3)
    return model


@pytest.mark.parametrize("cls", CLASSES)
def test_checkpoint_recommends_what_nobody_has_set(
    cls: type[Any], recommending: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    seen = Requests()
    options = {"plugins": (seen,), "num_kvcache_blocks": 64}

    with cls.from_hf(recommending, tokenizer, engine_options=options, top_k=5) as model:
        model.invoke("hi")
        model.invoke("hi", temperature=0.0)
        asyncio.run(model.ainvoke("hi", max_tokens=2))
        model.batch(["hi"], top_p=1.0)

    found = [(s.temperature, s.top_k, s.top_p, s.max_tokens) for s in seen.sampling]
    assert found == [(0.5, 5, 0.9, 3), (0.0, 5, 0.9, 3), (0.5, 5, 0.9, 2), (0.5, 5, 1.0, 3)]
