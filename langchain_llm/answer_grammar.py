"""What a call's answer must match, as a grammar: its tool calls, its JSON, the end of its thoughts.

Schemas are checked where they are bound, and compiled where the request is made.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from langchain_llm.answer_start import AnswerStart
from langchain_llm.response_schema import ANY_OBJECT
from langchain_llm.thinking_grammar import ThinkingGrammar, ThinkMarks
from nanoserve_adapters.grammar import (
    Either,
    JsonObject,
    JsonSchema,
    ToolCalls,
    compile_grammar,
)
from nanoserve_adapters.grammar.schema import prepare_schema
from nanoserve_core.errors import UnsupportedOption

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from langchain_llm.options import CallOptions
    from nanoserve_adapters.grammar import GrammarSpec
    from nanoserve_core.grammar import Grammar


def check_schemas(options: CallOptions) -> None:
    """Raise `UnsupportedSchema`, which names keyword and place, for what no grammar can honour.

    Needs neither tokenizer nor engine.
    """
    for function in _functions(options):
        prepare_schema(function["parameters"])
    if options.response_schema is not None:
        prepare_schema(options.response_schema)


def answer_grammar(
    tokenizer: PreTrainedTokenizerBase,
    options: CallOptions,
    start: AnswerStart,
    end_ids: frozenset[int],
) -> Grammar | None:
    """The grammar of a call whose answer begins at `start`; None where anything goes.

    ``end_ids``: the model's end-of-sequence ids. Raises `UnsupportedOption` where the extra
    ``structured`` is missing, or where thoughts are to be limited and the tokenizer has no marks.
    Any thread; the first call for a tokenizer takes long (0.1 s to some seconds).
    """
    spec = answer_spec(options)
    answer = compile_grammar(tokenizer, spec) if spec is not None else None
    is_thoughtless = start is AnswerStart.ANSWER and options.close_json
    if is_thoughtless or (answer is None and options.thinking_budget is None):
        return answer
    marks = ThinkMarks.of(tokenizer)
    if marks is None and (start is AnswerStart.REASONING or options.thinking_budget is not None):
        raise UnsupportedOption(
            f"thinking_budget={options.thinking_budget!r}, or a format for an answer behind "
            "thoughts, needs <think> and </think> as tokens: expected a tokenizer that has them. "
            "Leave it out, or pass enable_thinking=False."
        )
    if marks is None:
        return answer
    return ThinkingGrammar(
        start=start,
        marks=marks,
        answer=answer,
        must_answer=_must_answer(spec),
        budget=_thinking_budget(options, must_answer=_must_answer(spec)),
        end_ids=end_ids,
        closes=options.close_json,
    )


def answer_spec(options: CallOptions) -> GrammarSpec | None:
    """What the answer must match behind its thoughts."""
    document = _document(options.response_schema)
    functions = tuple(_functions(options))
    if not functions:
        return document
    is_required = options.tools.choice == "required"
    calls = ToolCalls(tools=functions, required=is_required, parallel=options.tools.is_parallel)
    if document is None or is_required:
        # Without a backend calls that the model makes of itself are parsed, but not checked.
        return calls if is_required or has_grammar_backend() else None
    return Either(calls, document)


def wants_grammar(options: CallOptions) -> bool:
    """Whether the call's answer will have a grammar to compile."""
    return answer_spec(options) is not None


def has_grammar_backend() -> bool:
    """Whether the extra ``structured`` is installed."""
    return importlib.util.find_spec("llguidance") is not None


def _must_answer(spec: GrammarSpec | None) -> bool:
    return spec is not None and not (isinstance(spec, ToolCalls) and not spec.required)


def _document(schema: Any) -> JsonSchema | JsonObject | None:  # noqa: ANN401 - JSON
    if schema is None:
        return None
    return JsonObject() if schema == ANY_OBJECT else JsonSchema(schema)


def _functions(options: CallOptions) -> list[dict[str, Any]]:  # Any: JSON
    """Name and parameters of the tools that may be called; any object for those with ``strict``
    False.
    """
    return [
        {
            "name": function["name"],
            "parameters": ANY_OBJECT
            if function.get("strict") is False
            else function.get("parameters") or {},
        }
        for function in options.tools.callable_functions
    ]


def _thinking_budget(options: CallOptions, *, must_answer: bool) -> int | None:
    """Half of the tokens at most where an answer must follow: thoughts would leave it too few."""
    budget, limit = options.thinking_budget, options.sampling.max_tokens
    if not must_answer or limit is None:
        return budget
    return limit // 2 if budget is None else min(budget, limit // 2)
