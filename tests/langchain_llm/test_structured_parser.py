"""Answers as documents: whole ones are parsed strictly, pieces as far as they go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic
import pydantic.v1
import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk

from langchain_llm.structured_parser import StructuredParser

if TYPE_CHECKING:
    from collections.abc import Iterator


class Person(pydantic.BaseModel):
    name: str
    age: int


class OldPerson(pydantic.v1.BaseModel):
    name: str
    age: int


TEXT = '{"name": "Ann", "age": 7}'
CALL = {"name": "Person", "args": {"name": "Ann", "age": 7}, "id": "1", "type": "tool_call"}


def chunks(*texts: str, finish_reason: str = "stop") -> Iterator[AIMessageChunk]:
    yield from (AIMessageChunk(content=text) for text in texts)
    yield AIMessageChunk(
        content="", response_metadata={"finish_reason": finish_reason}, chunk_position="last"
    )


@pytest.mark.parametrize(
    ("model_class", "expected"),
    [
        (Person, Person(name="Ann", age=7)),
        (OldPerson, OldPerson(name="Ann", age=7)),
        (None, {"name": "Ann", "age": 7}),
    ],
)
def test_whole_text_becomes_an_instance(model_class: type | None, expected: object) -> None:
    parser = StructuredParser(model_class=model_class)

    assert parser.invoke(AIMessage(TEXT)) == expected
    assert parser.parse(TEXT) == expected


def test_whole_call_becomes_an_instance() -> None:
    parser = StructuredParser(model_class=Person, tool_name="Person")

    assert parser.invoke(AIMessage("Sure.", tool_calls=[CALL])) == Person(name="Ann", age=7)


def test_pieces_give_the_object_so_far() -> None:
    found = list(StructuredParser().transform(chunks('{"name": "A', 'nn"', ', "age": 7}')))

    assert found == [{"name": "A"}, {"name": "Ann"}, {"name": "Ann", "age": 7}]


def test_pieces_give_an_instance_when_there_is_one() -> None:
    parser = StructuredParser(model_class=Person)

    found = list(parser.transform(chunks('{"name": "Ann"', ', "age": 7', "}")))

    assert found == [Person(name="Ann", age=7)]


@pytest.mark.parametrize("text", [TEXT[:-1], '{"name": "An', ""])
@pytest.mark.parametrize("model_class", [Person, None])
def test_document_cut_by_the_limit_is_an_error_that_says_so(
    text: str, model_class: type | None
) -> None:
    parser = StructuredParser(model_class=model_class)
    answer = AIMessage(text, response_metadata={"finish_reason": "length"})

    with pytest.raises(OutputParserException, match=r"limit .*'length'.*max_tokens"):
        parser.invoke(answer)
    with pytest.raises(OutputParserException, match="max_tokens"):
        list(parser.transform(chunks(text, finish_reason="length")))


def test_call_cut_by_the_limit_is_an_error_that_says_so() -> None:
    parser = StructuredParser(tool_name="Person")

    with pytest.raises(OutputParserException, match="max_tokens"):
        parser.invoke(AIMessage("", response_metadata={"finish_reason": "length"}))


@pytest.mark.parametrize(
    "answer",
    [
        AIMessage("Ann is 7."),
        AIMessage('{"name": "Ann", "age": "old"}'),
        AIMessage("", tool_calls=[{**CALL, "name": "Other"}]),
    ],
)
@pytest.mark.parametrize("tool_name", [None, "Person"])
def test_anything_else_is_an_error_with_the_answer(
    answer: AIMessage, tool_name: str | None
) -> None:
    parser = StructuredParser(model_class=Person, tool_name=tool_name)

    with pytest.raises(OutputParserException, match="not what was asked for") as error:
        parser.invoke(answer)

    assert error.value.llm_output == answer.content


def test_calls_of_tools_in_place_of_the_document_parse_as_none() -> None:
    answer: Any = AIMessage("", tool_calls=[CALL])

    assert StructuredParser(model_class=Person, may_call_tools=True).invoke(answer) is None
