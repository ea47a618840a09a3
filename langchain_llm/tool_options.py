"""`ToolOptions`: which tools a call offers, and whether the model may, must or must not call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from langchain_core.utils.function_calling import convert_to_openai_tool

from nanoserve_core.errors import ConfigError, UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ToolSchema: TypeAlias = "dict[str, Any]"  # Any: JSON
"""A tool in OpenAI's form: ``{"type": "function", "function": {"name", "parameters", ...}}``."""

_FORCED = frozenset({"any", "required", True})


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """The tools of one call. By default there are none."""

    schemas: tuple[ToolSchema, ...] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    named: str | None = None
    """With ``required``: the one tool to be called."""
    is_parallel: bool = True
    """Whether an answer may hold several calls."""

    @property
    def shown(self) -> tuple[ToolSchema, ...]:
        """The tools as the chat template gets them: none where none may be called."""
        if self.choice == "none":
            return ()
        return tuple(_without_strict(schema) for schema in self.schemas)

    @property
    def may_call(self) -> bool:
        """Whether calls are looked for in the answer."""
        return bool(self.schemas) and self.choice != "none"

    @property
    def callable_functions(self) -> tuple[dict[str, Any], ...]:  # Any: JSON
        """``name``, ``parameters`` and so on of each tool that the answer may call."""
        functions = (schema["function"] for schema in self.schemas if self.may_call)
        return tuple(f for f in functions if self.named in (None, f["name"]))


def tool_options(
    tools: Sequence[Any] | None,  # Any: whatever convert_to_openai_tool accepts
    choice: object = None,
    *,
    is_parallel: bool | None = None,
    strict: bool | None = None,
) -> ToolOptions:
    """The options of a call from what LangChain's users write.

    ``choice``: None or "auto"; "none" or False; "any", "required" or True; a tool's name, or
    OpenAI's dict with it. `ConfigError` (a ValueError) for a name that no tool has.
    """
    schemas = tuple(tool_schema(tool, strict=strict) for tool in tools or ())
    kind, named = _choice(choice, [schema["function"]["name"] for schema in schemas])
    return ToolOptions(
        schemas=schemas, choice=kind, named=named, is_parallel=is_parallel is not False
    )


def tool_schema(
    tool: Any,  # noqa: ANN401 - whatever convert_to_openai_tool accepts
    *,
    strict: bool | None = None,
) -> ToolSchema:
    """The tool in OpenAI's form; `UnsupportedOption` for tools that run on OpenAI's servers."""
    schema = convert_to_openai_tool(tool, strict=strict)
    if "function" not in schema:
        raise UnsupportedOption(
            f"the tool {schema!r} runs on its provider's servers: expected a function. Pass a "
            "callable, a BaseTool, a pydantic class, a TypedDict or a JSON schema with a title."
        )
    return schema


def _without_strict(schema: ToolSchema) -> ToolSchema:
    """It is said to the server and not to the model, which has not seen it in training."""
    function = {key: value for key, value in schema["function"].items() if key != "strict"}
    return {**schema, "function": function}


def _choice(
    choice: object, names: Sequence[str]
) -> tuple[Literal["auto", "none", "required"], str | None]:
    if isinstance(choice, dict):
        choice = _name_in(choice)
    if isinstance(choice, str) and choice in names:
        return "required", choice
    if choice is None or choice == "auto":
        return "auto", None
    if choice is False or choice == "none":
        return "none", None
    if choice in _FORCED:
        if not names:
            raise ConfigError(
                f"tool_choice={choice!r} needs a tool to call: expected at least one. Pass tools, "
                "or leave tool_choice out."
            )
        return "required", None
    raise ConfigError(
        f"tool_choice={choice!r} names no tool: expected auto, none, any, required or one of "
        f"{', '.join(map(repr, names)) or 'no names at all, for there are no tools'}. Correct it, "
        "or add the tool."
    )


def _name_in(choice: Mapping[Any, Any]) -> object:  # Any: a user's dict
    """OpenAI's ``{"type": "function", "function": {"name"}}``; also with the name outside, and
    ``{"type": "auto"}``.
    """
    function = choice.get("function")
    if isinstance(function, dict) and "name" in function:
        return function["name"]
    return choice.get("name", choice.get("type"))
