"""`compile_grammar`: what it refuses, what it caches, what tool calls and thoughts come out as."""

from __future__ import annotations

import json
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nanoserve_adapters.grammar import (
    AfterThinking,
    Choice,
    Either,
    GrammarSpec,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    ToolCalls,
    UnsupportedSchema,
    compile_grammar,
    grammar_backend_version,
)
from nanoserve_adapters.testing import tiny_tokenizer
from nanoserve_core.errors import UnsupportedOption

if TYPE_CHECKING:
    from nanoserve_core.grammar import GrammarMatcher

TOKENIZER: Any = tiny_tokenizer()
VOCAB_SIZE = len(TOKENIZER)
WEATHER = {
    "name": "weather",
    "parameters": {
        "$defs": {"Unit": {"enum": ["C", "F"]}},
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"$ref": "#/$defs/Unit"}},
        "required": ["city", "unit"],
    },
}
NOW = {"name": "now"}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def allowed(matcher: GrammarMatcher, remaining: int | None = None) -> set[int]:
    row = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    matcher.fill_bitmask(row, remaining)
    return set(np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def accepts(spec: GrammarSpec, text: str) -> bool:
    """Whether all of ``text`` may be sampled, and then the end."""
    matcher = compile_grammar(TOKENIZER, spec).matcher()
    for token in TOKENIZER.encode(text):
        if matcher.is_active(None) and token not in allowed(matcher):
            return False
        matcher.accept(token)
    return matcher.is_finished() or TOKENIZER.eos_token_id in allowed(matcher)


def sample(spec: GrammarSpec, max_tokens: int, seed: int) -> str:
    """Any allowed token, each as likely as the others."""
    rng, tokens = random.Random(seed), list[int]()
    matcher = compile_grammar(TOKENIZER, spec).matcher()
    while len(tokens) < max_tokens:
        remaining = max_tokens - len(tokens)
        choices = {*range(32, 127)}
        if matcher.is_active(remaining):
            choices = allowed(matcher, remaining)
        tokens.append(rng.choice(sorted(choices)))
        if tokens[-1] == TOKENIZER.eos_token_id:
            break
        matcher.accept(tokens[-1])
        if matcher.is_finished():
            break
    return str(TOKENIZER.decode(tokens))


@pytest.mark.parametrize(
    ("schema", "keyword", "path"),
    [
        ({"not": {"type": "string"}}, "not", "#"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "#"),
        ({"properties": {"a": {"if": {}}}}, "if", "#/properties/a"),
        ({"$defs": {"A": {"dependentRequired": {}}}}, "dependentRequired", "#/$defs/A"),
        ({"anyOf": [{}, {"propertyNames": {}}]}, "propertyNames", "#/anyOf/1"),
        ({"items": {"contains": {}}}, "contains", "#/items"),
        ({"oneOf": [{"minimum": 1}, {"type": "number"}]}, "oneOf", "#"),
        ({"type": "string", "format": "regex"}, "format", "#"),
        ({"$ref": "https://example.org/a"}, "$ref", "#"),
        ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "minProperties", "#"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_keyword_and_place(
    schema: dict[str, Any], keyword: str, path: str
) -> None:
    with pytest.raises(UnsupportedSchema, match="is not served in structured output") as caught:
        compile_grammar(TOKENIZER, JsonSchema(schema))

    assert (caught.value.keyword, caught.value.path) == (keyword, path)


@pytest.mark.parametrize(
    "spec",
    [
        JsonSchema({"type": "string", "pattern": "(?=a)b"}),
        Regex("[a"),
        Lark("start: nowhere"),
        JsonSchema({"type": "object", "properties": {"a": False}, "required": ["a"]}),
    ],
)
def test_a_malformed_grammar_is_refused_when_it_is_compiled(spec: GrammarSpec) -> None:
    with pytest.raises(UnsupportedSchema):
        compile_grammar(TOKENIZER, spec)


def test_equal_specs_are_compiled_once_and_the_order_of_properties_counts() -> None:
    def spec(*names: str) -> JsonSchema:
        return JsonSchema({"type": "object", "properties": {name: {} for name in names}})

    first = compile_grammar(TOKENIZER, spec("a", "b"))

    assert compile_grammar(TOKENIZER, spec("a", "b")) is first
    assert compile_grammar(TOKENIZER, spec("b", "a")) is not first
    assert compile_grammar(tiny_tokenizer(), spec("a", "b")) is not first


def test_without_llguidance_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)

    with pytest.raises(UnsupportedOption, match=r"nanoserve\[structured\]"):
        grammar_backend_version()


def test_objects_are_closed_unless_they_say_otherwise() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "boolean"}}}
    nested = {"type": "object", "properties": {"a": {"$ref": "#/$defs/I"}}, "$defs": {"I": inner}}

    assert accepts(JsonSchema(nested), '{"a": {"b": true}}')
    assert not accepts(JsonSchema(nested), '{"a": {"c": 1}}')
    assert not accepts(JsonSchema(nested), '{"c": 1}')
    assert accepts(JsonSchema({**inner, "additionalProperties": True}), '{"c": 1}')


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (JsonObject(), '{"a": [1, null]}', "[1]"),
        (Regex("a/b{2}"), "a/bb", "a/b"),
        (Choice(("yes", 'no"\n')), 'no"\n', "no"),
        (Lark('start: "a" "b"+'), "abb", "ba"),
        (JsonSchema({"type": "string", "format": "date"}), '"2024-02-29"', '"2023-02-29"'),
        (JsonSchema({"type": "string", "format": "email"}), '"a.b@c.de"', '"a@b"'),
        (ToolCalls((NOW,)), f"{CALL}\n{CALL}", "now"),
        (ToolCalls((NOW,), parallel=False), CALL, f"{CALL}\n{CALL}"),
        (Either(ToolCalls((NOW,)), JsonObject()), CALL, "text"),
        (Either(ToolCalls((NOW,)), JsonObject()), "{}", "[]"),
        (ToolCalls((NOW,), required=False), f"Well. {CALL} and {CALL}", "<tool_call>{"),
        (AfterThinking(Choice(("yes",))), "hm</think>\n\nyes", "hm</think>yes"),
    ],
)
def test_each_kind_of_spec_allows_what_it_says(spec: GrammarSpec, good: str, bad: str) -> None:
    assert accepts(spec, good)
    assert not accepts(spec, bad)


def test_a_reference_of_a_tool_points_into_its_own_parameters() -> None:
    arguments = json.dumps({"city": "Rio", "unit": "C"})
    call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'

    assert accepts(ToolCalls((NOW, WEATHER)), call)
    assert not accepts(ToolCalls((NOW, WEATHER)), call.replace('"C"', '"K"'))


def test_prose_is_free_and_costs_no_mask_until_a_call_begins() -> None:
    matcher = compile_grammar(TOKENIZER, ToolCalls((NOW,), required=False)).matcher()
    states = []

    for token in TOKENIZER.encode(f"a{CALL}b"):
        states.append(matcher.is_active(1000))
        matcher.accept(token)

    num_inside = len(TOKENIZER.encode(CALL)) - 1  # from the second token of the call on
    assert states == [False, False, *[True] * num_inside, False]


def test_a_call_that_would_not_fit_any_more_cannot_begin() -> None:
    matcher = compile_grammar(TOKENIZER, ToolCalls((NOW,), required=False)).matcher()
    least = len(TOKENIZER.encode(CALL))
    start = TOKENIZER.convert_tokens_to_ids("<tool_call>")

    assert not matcher.is_active(least)
    assert matcher.is_active(least - 1)
    assert set(range(VOCAB_SIZE)) - allowed(matcher, least - 1) == {start}


@pytest.mark.parametrize("seed", range(5))
def test_thoughts_end_in_time_for_the_answer(seed: int) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    text = sample(AfterThinking(JsonSchema(schema)), 60, seed)

    thought, _, answer = text.partition("</think>\n\n")
    assert len(thought) > 10
    assert set(json.loads(answer)) == {"a"}


@pytest.mark.parametrize("seed", range(5))
def test_a_budget_of_the_least_is_enough(seed: int) -> None:
    spec = ToolCalls((WEATHER, NOW))
    least = compile_grammar(TOKENIZER, spec).min_tokens()

    text = sample(spec, least + seed, seed)

    body = text.removeprefix("<tool_call>\n").split("\n</tool_call>")[0]
    assert json.loads(body)["name"] in {"weather", "now"}


def test_an_answer_that_fits_is_not_disturbed() -> None:
    spec = JsonSchema({"type": "object", "properties": {"a": {"type": "string"}, "b": {}}})
    tokens = TOKENIZER.encode('{"a": "Zürich, \\"Süd\\" und Nord", "b": [1, {"c": "ü"}]}')
    matcher = compile_grammar(TOKENIZER, spec).matcher()

    for number, token in enumerate(tokens):
        remaining = len(tokens) - number + 6  # a cut character needs some tokens to spare
        assert token in allowed(matcher, remaining), TOKENIZER.decode(tokens[: number + 1])
        matcher.accept(token)

    assert matcher.is_finished()
