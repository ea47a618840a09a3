"""Dialogues in which a name of any script, in quotes and among words, goes into a tool's call.

What `tool_tasks` lacks: values that are marked in the request by quotes, with a translation behind
them that is not part of the value, and a second value that is the rest of the sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from examples.tiny_qwen3 import words
from examples.tiny_qwen3.chat_tasks import Task, random_system, user
from examples.tiny_qwen3.example import Example
from examples.tiny_qwen3.tool_tasks import Function, Parameter, call_text, random_functions

if TYPE_CHECKING:
    from random import Random

    from examples.tiny_qwen3.tool_tasks import Value

_VERBS = words.listed("register add save enter record list open make note")
_NOUNS = words.listed("""
    shop club school band team ship hotel garden partner supplier tenant guest member author
    street cafe library farm school brand
""")
_NOTES = words.listed("description note details comment about remark kind")
_CALLED = ("named", "called", "with the name", "by the name of", "")
_QUOTES = (("'", "'"), ('"', '"'), ("“", "”"), ("«", "»"), ("「", "」"), ("[", "]"))
_JOINTS = (" - ", " — ", ": ", ", ", "; ", ". ")


def tool_record(rng: Random) -> Example:
    """Call the tool with the quoted name, and with the note where the tool has a place for it."""
    function = _random_record(rng)
    name = words.unicode_name(rng) if rng.random() < 0.75 else words.invented_name(rng)
    values = (name, _note(rng))
    arguments: dict[str, Value] = {
        parameter.name: value for parameter, value in zip(function.parameters, values, strict=False)
    }
    functions = [function]
    if rng.random() < 0.4:
        functions += [other for other in random_functions(rng) if other.name != function.name]
        rng.shuffle(functions)
    answer = call_text(function.name, arguments)
    return Example(
        task="tool_record",
        key=f"copy {name}",
        messages=(*random_system(rng), user(_request(rng, function, *values))),
        answer=answer,
        thought=f"I call {function.name}.",
        tools=tuple(one.tool(rng) for one in functions),
    )


def _random_record(rng: Random) -> Function:
    verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
    name = rng.choice((f"{verb}_{noun}", f"new_{noun}", f"{noun}_{verb}", f"{verb}{noun.title()}"))
    parameters = [rng.choice(("name", "title", "label", f"{noun}_name"))]
    if rng.random() < 0.7:
        parameters.append(rng.choice(_NOTES))
    return Function(
        name="".join(letter for letter in name if letter.isascii()),
        description=f"{verb.capitalize()} a {noun}.",
        parameters=tuple(
            Parameter(name="".join(letter for letter in one if letter.isascii()), kind="string")
            for one in parameters
        ),
    )


def _note(rng: Random) -> str:
    """A few words on something: "a red boat in Oslo", "the painter's blue cup"."""
    colour, thing = rng.choice(words.COLOURS), rng.choice(words.THINGS)
    return rng.choice(
        (
            f"a {colour} {thing} in {rng.choice(words.CITIES)}",
            f"the {rng.choice(words.TRADES)}'s {colour} {thing}",
            f"a {rng.choice(words.TRADES)} from {rng.choice(words.CITIES)}",
            words.some_words(rng, 2, 5),
        )
    )


def _request(rng: Random, function: Function, name: str, note: str) -> str:
    """The function's own words, the name in quotes, perhaps its translation, perhaps the note."""
    opened, closed = rng.choice(_QUOTES)
    gloss = f" ({words.some_words(rng, 1, 2).title()})" if rng.random() < 0.5 else ""
    called = rng.choice(_CALLED)
    task = function.description[:-1]
    if rng.random() < 0.2:
        task = f"Please {task[0].lower()}{task[1:]}"
    text = " ".join(filter(None, (task, called, f"{opened}{name}{closed}{gloss}")))
    if len(function.parameters) > 1 or rng.random() < 0.3:
        text += f"{rng.choice(_JOINTS)}{note}"
    return text


def record_tasks() -> dict[str, tuple[Task, float]]:
    """The task, with its share of the tool examples."""
    return {"tool_record": (tool_record, 0.14)}
