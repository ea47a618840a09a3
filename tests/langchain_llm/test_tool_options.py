"""Tools in every form LangChain knows, and every way to say whether they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import pytest
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, tool
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from langchain_llm.tool_options import tool_options
from nanoserve_core import ConfigError, UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Callable


@tool
def base_tool(a: int) -> int:
    """Adds one."""
    return a + 1


def function(a: int) -> int:
    """Adds one."""
    return a + 1


class Pydantic(BaseModel):
    """Adds one."""

    a: int = Field(description="a number")


class Typed(TypedDict):
    """Adds one."""

    a: Annotated[int, ..., "a number"]


SCHEMA: dict[str, Any] = {
    "title": "schema",
    "description": "Adds one.",
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
}
ANTHROPIC: dict[str, Any] = {"name": "anthropic", "input_schema": SCHEMA, "description": "Adds."}
OPENAI: dict[str, Any] = {
    "type": "function",
    "function": {"name": "openai", "parameters": {"type": "object", "properties": {}}},
}


def as_tool() -> BaseTool:
    """A runnable as a tool; LangChain says that it may change."""

    def greet(given: dict[str, str]) -> str:
        return given["style"]

    return RunnableLambda(greet).as_tool(
        name="greeter", description="Greets.", arg_types={"style": str}
    )


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: base_tool, "base_tool"),
        (lambda: function, "function"),
        (lambda: Pydantic, "Pydantic"),
        (lambda: Typed, "Typed"),
        (lambda: SCHEMA, "schema"),
        (lambda: ANTHROPIC, "anthropic"),
        (lambda: OPENAI, "openai"),
        pytest.param(
            as_tool, "greeter", marks=pytest.mark.filterwarnings("ignore:This API is in beta")
        ),
    ],
)
def test_every_kind_of_tool_becomes_openais_form(make: Callable[[], Any], name: str) -> None:
    (schema,) = tool_options([make()]).schemas

    assert schema["type"] == "function"
    assert schema["function"]["name"] == name
    assert schema["function"]["parameters"]["type"] == "object"


@pytest.mark.parametrize(
    ("choice", "kind", "named"),
    [
        (None, "auto", None),
        ("auto", "auto", None),
        ({"type": "auto"}, "auto", None),
        ("none", "none", None),
        (False, "none", None),
        ("any", "required", None),
        ("required", "required", None),
        (True, "required", None),
        ("function", "required", "function"),
        ({"type": "function", "function": {"name": "function"}}, "required", "function"),
        ({"type": "function", "name": "function"}, "required", "function"),
        ({"type": "tool", "name": "function"}, "required", "function"),
    ],
)
def test_every_way_to_choose_is_understood(choice: object, kind: str, named: str | None) -> None:
    options = tool_options([function, base_tool], choice)

    assert (options.choice, options.named) == (kind, named)


def test_only_a_named_tool_may_be_called_but_all_are_shown() -> None:
    options = tool_options([function, base_tool], "base_tool")

    assert [f["name"] for f in options.callable_functions] == ["base_tool"]
    assert [s["function"]["name"] for s in options.shown] == ["function", "base_tool"]


def test_where_none_may_be_called_none_is_shown() -> None:
    options = tool_options([function], "none")

    assert options.shown == options.callable_functions == ()
    assert not options.may_call


@pytest.mark.parametrize("choice", ["functoin", {"type": "function", "function": {"name": "x"}}])
def test_unknown_name_is_a_value_error_that_lists_the_known(choice: object) -> None:
    with pytest.raises(ConfigError, match=r"tool_choice.*'function', 'base_tool'") as error:
        tool_options([function, base_tool], choice)

    assert isinstance(error.value, ValueError)


def test_forced_call_without_tools_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a tool"):
        tool_options([], "any")


def test_no_tools_at_all_are_fine() -> None:
    options = tool_options([])

    assert options.schemas == ()
    assert not options.may_call


def test_strict_closes_the_schema_and_is_not_shown_to_the_model() -> None:
    options = tool_options([Pydantic], strict=True)

    assert options.schemas[0]["function"]["strict"] is True
    assert options.schemas[0]["function"]["parameters"]["additionalProperties"] is False
    assert "strict" not in options.shown[0]["function"]


def test_tool_of_a_providers_server_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match="web_search"):
        tool_options([{"type": "web_search"}])
