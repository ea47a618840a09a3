"""``with_structured_output``: a chat model bound to a schema, with the parser behind it."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from langchain_llm.structured_parser import StructuredParser
from langchain_llm.tool_options import tool_schema
from nanoserve_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.language_models import LanguageModelInput
    from langchain_core.runnables import Runnable

    from langchain_llm.chat_model import ChatNanoserve

    Schema = dict[str, Any] | type  # Any: JSON

# Of functions in the forms of OpenAI, Anthropic and Bedrock.
_FUNCTION_KEYS = frozenset({"function", "parameters", "input_schema", "toolSpec"})
METHODS = ("json_schema", "function_calling", "json_mode")


def structured_output(
    model: ChatNanoserve,
    schema: Schema,
    *,
    method: str = "json_schema",
    include_raw: bool = False,
    strict: bool | None = None,
    tools: Sequence[Any] | None = None,  # Any: whatever bind_tools accepts
    **options: Any,  # Any: options of the calls
) -> Runnable[LanguageModelInput, Any]:  # Any: an instance of the schema's class, or JSON
    """`model` with its answers as documents of `schema`; see `ChatNanoserve`."""
    if method not in METHODS:
        raise ConfigError(
            f"method={method!r} is not served: expected one of {', '.join(METHODS)}. Leave it out "
            "for json_schema."
        )
    if tools and method == "function_calling":
        raise ConfigError(
            "tools were given with method='function_calling', which makes the schema the only tool:"
            " expected none. Use json_schema for an answer that may call tools instead."
        )
    options["ls_structured_output_format"] = {
        "kwargs": {"method": method, "strict": strict},
        "schema": traced_schema(schema),
    }
    parser = StructuredParser(
        model_class=schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None,
        tool_name=tool_schema(schema)["function"]["name"] if method == "function_calling" else None,
        may_call_tools=bool(tools),
    )
    if method == "function_calling":
        bound = model.bind_tools(
            [schema],
            tool_choice=parser.tool_name,
            strict=strict,
            parallel_tool_calls=False,
            **options,
        )
    else:
        response_format = _response_format(schema, strict=strict)
        bound = model.bind_tools(tools or [], response_format=response_format, **options)
    return _with_raw(bound, parser) if include_raw else bound | parser


def document_schema(schema: Schema) -> dict[str, Any]:  # Any: JSON
    """The JSON schema that documents of `schema` follow: a pydantic class's own, a dict as it is
    unless it describes a function.
    """
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return schema.model_json_schema()
    if isinstance(schema, dict) and not _FUNCTION_KEYS & schema.keys():
        return dict(schema)
    return convert_to_json_schema(schema)


def traced_schema(schema: Schema) -> dict[str, Any]:  # Any: JSON
    """The schema as LangChain's traces have it; one without a name stays as it is."""
    if isinstance(schema, dict) and not {"title", *_FUNCTION_KEYS} & schema.keys():
        return dict(schema)
    return convert_to_json_schema(schema)


def _response_format(schema: Schema, *, strict: bool | None) -> dict[str, Any]:  # Any: JSON
    if strict is False:
        return {"type": "json_object"}
    found = document_schema(schema)
    return {
        "type": "json_schema",
        "json_schema": {"name": found.get("title", "document"), "schema": found},
    }


def _with_raw(
    bound: Runnable[LanguageModelInput, Any], parser: StructuredParser
) -> Runnable[LanguageModelInput, Any]:
    """``raw``, ``parsed`` and ``parsing_error``; one of the last two is None."""
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")
