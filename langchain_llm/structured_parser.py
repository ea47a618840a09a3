"""`StructuredParser`: an answer's JSON, of its text or of its tool call, as what was asked for."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pydantic.v1
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseCumulativeTransformOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.utils.json import parse_partial_json
from typing_extensions import override


class StructuredParser(BaseCumulativeTransformOutputParser[Any]):  # Any: an instance, or JSON
    """Parses what ``with_structured_output`` makes the model write.

    In a stream each piece gives the document so far, as soon as it is an instance of
    ``model_class`` or, without one, an object; the last piece is parsed as a whole. A whole answer
    that is no such document raises `OutputParserException`: LangChain's own parsers complete the
    JSON of answers that the limit has cut.
    """

    model_class: Any = None
    """A pydantic class, of either version, or None for JSON. Any: they share no type."""
    tool_name: str | None = None
    """The tool whose call holds the document; None: the answer's text is it."""
    may_call_tools: bool = False
    """Whether an answer may hold tool calls in place of the document; then it parses as None."""

    @override
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The document in the first generation; None while a partial one holds none."""
        generation = result[0]
        message = generation.message if isinstance(generation, ChatGeneration) else None
        metadata = message.response_metadata if message is not None else {}
        is_whole = not partial or "finish_reason" in metadata
        if self.may_call_tools and isinstance(message, AIMessage) and message.tool_calls:
            return None
        try:
            found = self._found(generation, message, is_whole=is_whole)
            return None if found is None else self._instance(found)
        except (ValueError, pydantic.ValidationError, pydantic.v1.ValidationError) as error:
            if not is_whole:
                return None
            raise _failure(
                error, generation, was_cut=metadata.get("finish_reason") == "length"
            ) from error

    def _found(self, generation: Generation, message: Any, *, is_whole: bool) -> Any:  # noqa: ANN401 - JSON
        if self.tool_name is None:
            text = generation.text
            if is_whole:
                return json.loads(text, strict=False)
            return parse_partial_json(text) if text.strip() else None
        calls = message.tool_calls if isinstance(message, AIMessage) else []
        found = next((call["args"] for call in calls if call["name"] == self.tool_name), None)
        if found is None and is_whole:
            raise ValueError(f"it holds no call of {self.tool_name!r}")
        return found

    def _instance(self, found: Any) -> Any:  # noqa: ANN401 - JSON in, an instance or JSON out
        if self.model_class is None:
            return found
        if issubclass(self.model_class, pydantic.BaseModel):
            return self.model_class.model_validate(found)
        return self.model_class.parse_obj(found)

    @override
    def parse(self, text: str) -> Any:
        """The document that `text` is."""
        return self.parse_result([Generation(text=text)])

    @property
    def _type(self) -> str:
        return "nanoserve_structured"


def _failure(error: Exception, generation: Generation, *, was_cut: bool) -> OutputParserException:
    if was_cut:
        reason = (
            "the answer reached its limit (finish_reason 'length') inside the document: expected "
            "it to end. Raise max_tokens, or leave close_json on."
        )
    else:
        reason = f"the answer is not what was asked for: {error}"
    return OutputParserException(
        f"no structured output: {reason} The answer: {generation.text!r}",
        llm_output=generation.text,
    )
