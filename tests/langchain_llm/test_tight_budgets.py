"""Documents and calls of a random model under tight limits: all valid, by one running batch.

``NANOSERVE_SEEDS=100`` makes the run as long as the design asks for.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, Field

from tests.langchain_llm.doors import RealDoor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerFast

SEEDS = range(int(os.environ.get("NANOSERVE_SEEDS", "4")))
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
THINKING = f"{TEMPLATE}<think>\n"


class Text(BaseModel):
    text: str


class Joke(BaseModel):
    setup: str
    punchline: str | None = None


class Bounded(BaseModel):
    code: str = Field(min_length=2, max_length=5)
    size: int = Field(ge=3, le=70)


class Number(BaseModel):
    value: float


class Words(BaseModel):
    words: list[str]


class Pair(BaseModel):
    first: Text
    second: Text


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Choice(BaseModel):
    colour: Colour
    is_sure: bool


class Nested(BaseModel):
    items: list[Choice] = Field(min_length=1)


class Tree(BaseModel):
    name: str
    children: list[Tree]


class Union(BaseModel):
    either: int | str | None


SCHEMAS: list[type[BaseModel]] = [
    *(Text, Joke, Bounded, Number, Words, Pair, Choice, Nested, Tree, Union),
]


@pytest.fixture(scope="module")
def roomy(tokenizer: PreTrainedTokenizerFast) -> Iterator[RealDoor]:
    """A random model with room for all seeds at once."""
    door = RealDoor(tokenizer, max_model_len=512, num_blocks=6000)
    yield door
    door.thread.close()


@pytest.mark.parametrize(
    ("schema", "template"),
    [*((schema, TEMPLATE) for schema in SCHEMAS), (Joke, THINKING), (Nested, THINKING)],
)
def test_every_seed_gives_a_valid_document(
    roomy: RealDoor, schema: type[BaseModel], template: str
) -> None:
    chat = roomy.chat(temperature=1.0, max_tokens=70, chat_template=template)
    structured = chat.with_structured_output(schema, include_raw=True)

    answers: list[Any] = structured.batch([f"write {seed}" for seed in SEEDS])

    failed = [answer["parsing_error"] for answer in answers if answer["parsing_error"] is not None]
    assert failed == []
    assert all(isinstance(answer["parsed"], schema) for answer in answers)


@pytest.mark.parametrize("choice", ["any", None])
def test_every_call_is_whole(roomy: RealDoor, choice: str | None) -> None:
    def write(text: str, title: str) -> str:
        """Write a text."""
        return text + title

    chat = roomy.chat(temperature=1.0, max_tokens=110, chat_template=TEMPLATE)
    bound = chat.bind_tools([write], tool_choice=choice)

    answers = bound.batch([f"write {seed}" for seed in SEEDS])

    assert not any(answer.invalid_tool_calls for answer in answers)
    assert choice is None or all(answer.tool_calls for answer in answers)
    for answer in answers:
        for call in answer.tool_calls:
            assert {kind for key in ("text", "title") for kind in [type(call["args"][key])]} == {
                str
            }
