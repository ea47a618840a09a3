"""Grammars for `Request.grammar`: JSON schemas, tool calls, regular expressions, compiled by
llguidance for a tokenizer.

    from nanoserve_adapters.grammar import JsonSchema, compile_grammar

    grammar = compile_grammar(tokenizer, JsonSchema(Person.model_json_schema()))
    Request(..., grammar=grammar)

Importable without llguidance (extra ``structured``); `compile_grammar` then says what to install.
"""

from nanoserve_adapters.grammar.compiler import compile_grammar, grammar_backend_version
from nanoserve_adapters.grammar.schema import UnsupportedSchema
from nanoserve_adapters.grammar.specs import (
    AfterThinking,
    Choice,
    Either,
    GrammarSpec,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    ToolCalls,
)

__all__ = [
    "AfterThinking",
    "Choice",
    "Either",
    "GrammarSpec",
    "JsonObject",
    "JsonSchema",
    "Lark",
    "Regex",
    "ToolCalls",
    "UnsupportedSchema",
    "compile_grammar",
    "grammar_backend_version",
]
