"""Structured output of a random model: valid by every method, for every kind of schema."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import pydantic.v1
import pytest
from langchain_core.exceptions import OutputParserException
from typing_extensions import TypedDict

from langchain_llm.structured_output import document_schema
from nanoserve_adapters.grammar import UnsupportedSchema
from nanoserve_core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.langchain_llm.doors import FakeDoor, RealDoor

SHORT = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
OPENED = f"{SHORT}<think>\n"


class Mood(pydantic.BaseModel):
    """How somebody feels."""

    feeling: Literal["good", "bad"] = pydantic.Field(description="in one word")
    is_sure: bool


class OldMood(pydantic.v1.BaseModel):
    """How somebody feels."""

    feeling: Literal["good", "bad"]
    is_sure: bool


class TypedMood(TypedDict):
    """How somebody feels."""

    feeling: Annotated[Literal["good", "bad"], ..., "in one word"]
    is_sure: Annotated[bool, ..., "or not"]


SCHEMA = Mood.model_json_schema()
FUNCTION = {"name": "mood", "description": "How.", "parameters": SCHEMA}
PROMPTS = [f"hi {number}" for number in range(12)]
METHODS = ["json_schema", "function_calling", "json_mode"]
KINDS: list[tuple[Any, type]] = [
    (Mood, Mood),
    (OldMood, OldMood),
    (TypedMood, dict),
    (SCHEMA, dict),
    (FUNCTION, dict),
]


@pytest.fixture(autouse=True)
def _free(real: RealDoor) -> None:
    real.script.texts = {}  # nothing is scripted: the random model's own text


def values_of(found: object) -> dict[str, Any]:
    """The fields, of whatever class."""
    return found if isinstance(found, dict) else dict(vars(found))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("schema", "kind"), KINDS)
def test_every_method_gives_every_kind_of_schema(
    real: RealDoor, method: str, schema: dict[str, Any] | type, kind: type
) -> None:
    chat = real.chat(chat_template=SHORT, temperature=1.0, seed=1, max_tokens=120)

    found = chat.with_structured_output(schema, method=method).invoke("hi")

    assert isinstance(found, kind)
    values = values_of(found)
    assert values.keys() == {"feeling", "is_sure"}
    assert values["feeling"] in ("good", "bad")
    assert isinstance(values["is_sure"], bool)


@pytest.mark.parametrize("method", METHODS)
def test_every_route_gives_the_same_document(real: RealDoor, method: str) -> None:
    chat = real.chat(chat_template=SHORT, temperature=1.0, seed=2, max_tokens=120)
    structured = chat.with_structured_output(Mood, method=method)

    async def streamed() -> list[Any]:
        return [piece async for piece in structured.astream("hi")]

    expected = structured.invoke("hi")

    assert isinstance(expected, Mood)
    assert structured.batch(["hi", "hi"]) == [expected, expected]
    assert asyncio.run(structured.ainvoke("hi")) == expected
    assert list(structured.stream("hi")) == asyncio.run(streamed()) == [expected]


def test_stream_of_a_dict_grows(real: RealDoor) -> None:
    chat = real.chat(chat_template=SHORT, temperature=1.0, seed=2, max_tokens=120)

    pieces = list(chat.with_structured_output(SCHEMA).stream("hi"))

    assert len(pieces) > 2
    assert pieces[0] == {}
    assert values_of(pieces[-1]).keys() == {"feeling", "is_sure"}


@pytest.mark.parametrize("template", [SHORT, OPENED])
@pytest.mark.parametrize("method", METHODS)
def test_document_comes_after_the_thoughts(real: RealDoor, method: str, template: str) -> None:
    chat = real.chat(chat_template=template, temperature=1.0, seed=1, max_tokens=120)
    structured = chat.with_structured_output(Mood, method=method, include_raw=True)

    found: list[Any] = structured.batch(PROMPTS[:6])

    assert all(isinstance(answer["parsed"], Mood) for answer in found)
    thoughts = [answer["raw"].additional_kwargs.get("reasoning_content") for answer in found]
    assert any(thoughts) or template == SHORT


def test_raw_answer_comes_with_the_document(real: RealDoor) -> None:
    chat = real.chat(chat_template=SHORT, max_tokens=120)

    found: Any = chat.with_structured_output(Mood, include_raw=True).invoke("hi")

    assert json.loads(found["raw"].content) == found["parsed"].model_dump()
    assert found["parsing_error"] is None


def test_document_cut_by_the_limit_is_an_error_that_says_so(real: RealDoor) -> None:
    chat = real.chat(chat_template=SHORT, max_tokens=9, close_json=False)

    with pytest.raises(OutputParserException, match=r"'length'.*max_tokens"):
        chat.with_structured_output(Mood).invoke("hi")
    found: Any = chat.with_structured_output(Mood, include_raw=True).invoke("hi")

    assert found["parsed"] is None
    assert "max_tokens" in str(found["parsing_error"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_not_strict_is_json_but_not_the_schema(real: RealDoor, method: str) -> None:
    schema = {"title": "odd", "type": "object", "properties": {"a": {"not": {}}}}
    chat = real.chat(chat_template=SHORT, temperature=1.0, seed=3, max_tokens=100)

    with pytest.raises(UnsupportedSchema, match="not at #/properties/a"):
        chat.with_structured_output(schema, method=method)
    free = chat.with_structured_output(schema, method=method, strict=False)

    assert free is not None


def test_schema_that_cannot_be_honoured_is_refused_where_it_is_bound(fake: FakeDoor) -> None:
    odd: Any = {
        "title": "odd",
        "type": "object",
        "properties": {"a": {"type": "array", "contains": {"type": "string"}}},
    }

    with pytest.raises(UnsupportedSchema, match="contains at #/properties/a"):
        fake.chat().bind_tools([odd])
    with pytest.raises(UnsupportedSchema, match="contains at #/properties/a"):
        fake.chat().with_structured_output(odd)

    assert issubclass(UnsupportedSchema, ValueError)
    fake.chat().bind_tools([odd], strict=False)


@pytest.mark.parametrize("options", [{"method": "magic"}, {"max_tokenz": 3}, {"tools": [print]}])
def test_wrong_options_are_refused_where_they_are_bound(
    fake: FakeDoor, options: dict[str, Any]
) -> None:
    options = {"method": "function_calling", **options}

    with pytest.raises(ConfigError):
        fake.chat().with_structured_output(Mood, **options)


def test_traces_are_told_the_schema(fake: FakeDoor) -> None:
    bound: Any = fake.chat().with_structured_output(Mood, method="json_mode", strict=True)

    format_ = bound.first.kwargs["ls_structured_output_format"]

    assert format_["kwargs"] == {"method": "json_mode", "strict": True}
    assert format_["schema"]["title"] == "Mood"


def test_schema_of_a_pydantic_class_keeps_its_references() -> None:
    class Pair(pydantic.BaseModel):
        first: Mood
        second: Mood

    assert "$ref" in json.dumps(document_schema(Pair))


@pytest.mark.parametrize(
    "schema", [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}]
)
def test_schema_without_a_name_is_fine_for_documents(
    real: RealDoor, schema: dict[str, Any]
) -> None:
    chat = real.chat(chat_template=SHORT, temperature=1.0, seed=1, max_tokens=60)

    found = chat.with_structured_output(schema).invoke("hi")

    assert isinstance(values_of(found)["a"], int)


def weather(city: Literal["Bern", "Rome"]) -> str:
    """The weather."""
    return city


def test_answer_to_tools_and_format_is_calls_or_the_document(real: RealDoor) -> None:
    chat = real.chat(chat_template=SHORT, temperature=1.0, seed=1, max_tokens=120)
    bound = chat.bind_tools([weather], response_format=Mood)

    answers = bound.batch(PROMPTS)

    for answer in answers:
        if answer.tool_calls:
            assert {call["args"]["city"] for call in answer.tool_calls} <= {"Bern", "Rome"}
            assert answer.content == ""
        else:
            Mood.model_validate_json(str(answer.content))
    kinds = {bool(answer.tool_calls) for answer in answers}
    assert kinds == {True, False}


def test_calls_of_tools_bound_beside_a_schema_parse_as_none(real: RealDoor) -> None:
    chat = real.chat(chat_template=SHORT, temperature=1.0, seed=1, max_tokens=120)
    structured = chat.with_structured_output(Mood, tools=[weather], include_raw=True)

    found: list[Any] = structured.batch(PROMPTS)

    assert {answer["parsed"] is None for answer in found} == {True, False}
    assert all((answer["parsed"] is None) == bool(answer["raw"].tool_calls) for answer in found)


@pytest.mark.parametrize(
    ("choice", "names"),
    [("any", {"weather", "now"}), ("weather", {"weather"}), (True, {"weather", "now"})],
)
def test_forced_calls_are_made_and_follow_their_schema(
    real: RealDoor, choice: str | bool, names: set[str]
) -> None:
    def now() -> str:
        """The time."""
        return "noon"

    chat = real.chat(chat_template=SHORT, temperature=1.0, seed=1, max_tokens=120)
    bound = chat.bind_tools([weather, now], tool_choice=choice, parallel_tool_calls=False)

    answers = bound.batch(PROMPTS)

    calls = [call for answer in answers for call in answer.tool_calls]
    assert len(calls) == len(answers)
    assert {call["name"] for call in calls} <= names
    for call in calls:
        assert call["args"] == {} or call["args"]["city"] in ("Bern", "Rome")
    assert {answer.response_metadata["finish_reason"] for answer in answers} == {"tool_calls"}


@pytest.mark.parametrize("budget", [0, 5])
@pytest.mark.parametrize("route", ["invoke", "stream"])
def test_thoughts_end_where_the_budget_is_spent(real: RealDoor, budget: int, route: str) -> None:
    real.script.texts = {}
    chat = real.chat(chat_template=OPENED, thinking_budget=budget, max_tokens=40, ignore_eos=True)

    usage: Any
    if route == "invoke":
        usage = chat.invoke("hi").usage_metadata
    else:
        usage = next(c.usage_metadata for c in chat.stream("hi") if c.usage_metadata)

    assert usage["output_token_details"]["reasoning"] == budget


def test_budget_without_marks_is_refused(
    make_fake: Callable[..., FakeDoor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from langchain_llm.thinking_grammar import ThinkMarks

    monkeypatch.setattr(ThinkMarks, "of", lambda _: None)

    with pytest.raises(ValueError, match=r"thinking_budget=5.*<think>"):
        make_fake().chat(thinking_budget=5).invoke("hi")
