"""Dialogues with tools: which tool, with which arguments, and what its result says.

Tools have invented names and parameters, so that a model can only copy them from the prompt. Knows
the JSON of tools and calls, not how a template writes them out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from examples.tiny_qwen3 import words
from examples.tiny_qwen3.chat_tasks import Task, assistant, chat_tasks, random_system, user
from examples.tiny_qwen3.example import Example, Message, Tool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from examples.tiny_qwen3.prose import Prose

# The values a JSON argument may have.
Value = str | int | float | bool

_VERBS = words.listed("""
    get find send make open close read move check buy sell plan list save load create update
    delete book order search show start stop add set measure convert translate count describe
""")
_NOUNS = words.listed("""
    weather train ticket note file light door price room table letter report song photo order
    customer account message timer alarm recipe map route meeting event task user record flight
    hotel book stock score temperature parcel invoice lucky_number joke
""")
_STRING_NAMES = words.listed("""
    city name title place text query person country topic language street label subject owner
    description location customer_name unit path key
""")
_INTEGER_NAMES = words.listed("""
    count number age size days input a b year amount limit page quantity x
""")
_NUMBER_NAMES = words.listed("price weight speed ratio height value temperature")
_BOOLEAN_NAMES = words.listed("urgent active hidden private open_now")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a tool: its name and JSON type; `choices` if only these are allowed."""

    name: str
    kind: str
    choices: tuple[str, ...] = ()

    def value(self, rng: Random) -> Value:
        """Some value of the right type."""
        if self.choices:
            return rng.choice(self.choices)
        if self.kind == "integer":
            return rng.randint(0, 10 ** rng.randint(1, 4))
        if self.kind == "number":
            return rng.randint(1, 999) / rng.choice((10, 100))
        return rng.random() < 0.5 if self.kind == "boolean" else words.value_string(rng)


@dataclass(frozen=True, kw_only=True)
class Function:
    """A tool: its name, what the user calls it, and its parameters."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]

    def arguments(self, rng: Random) -> dict[str, Value]:
        """Values for all parameters, in their order."""
        return {parameter.name: parameter.value(rng) for parameter in self.parameters}

    def tool(self, rng: Random) -> Tool:
        """The tool's JSON, in one of the key orders and with the extras found in practice."""
        properties: dict[str, Any] = {}  # JSON schema of each parameter: any JSON
        with_descriptions = rng.random() < 0.3
        for parameter in self.parameters:
            schema: dict[str, Any] = {"type": parameter.kind}  # any JSON
            if parameter.choices:
                schema["enum"] = list(parameter.choices)
            if with_descriptions:
                schema["description"] = f"The {parameter.name.replace('_', ' ')}."
            properties[parameter.name] = schema
        pieces = [
            ("type", "object"),
            ("properties", properties),
            ("required", [parameter.name for parameter in self.parameters]),
        ]
        rng.shuffle(pieces)
        is_documented = rng.random() < 0.2
        function = {
            "name": self.name,
            "description": self._docstring() if is_documented else self.description,
            "parameters": dict(pieces),
        }
        return {"type": "function", "function": function}

    def _docstring(self) -> str:
        """The description as Python's authors write it, which LangChain passes on as it stands."""
        lines = [f"{p.name}: The {p.name.replace('_', ' ')}." for p in self.parameters]
        listed = "\n".join(f"    {line}" for line in lines)
        return f"{self.description}\n\nArgs:\n{listed}\n\nReturns:\n    What came of it."


def random_function(rng: Random) -> Function:
    """A function named after what it does, or with an invented name."""
    verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
    if rng.random() < 0.25:
        noun = words.invented_word(rng)
    style = rng.random()
    if style < 0.7:
        name = f"{verb}_{noun}"
    elif style < 0.8:
        name = verb + noun.title().replace("_", "")
    else:
        name = noun.title().replace("_", "") if style < 0.9 else noun
    description = f"{verb.capitalize()} the {noun.replace('_', ' ')}."
    count = rng.choice((1, 1, 1, 2, 2, 3))
    return Function(
        name="".join(letter for letter in name if letter.isascii()),
        description=description,
        parameters=tuple(_parameters(rng, count)),
    )


def _parameters(rng: Random, count: int) -> list[Parameter]:
    parameters: dict[str, Parameter] = {}
    while len(parameters) < count:
        parameter = _parameter(rng)
        parameters[parameter.name] = parameter
    return list(parameters.values())


def _parameter(rng: Random) -> Parameter:
    kind = rng.random()
    if kind < 0.5:
        name = rng.choice(_STRING_NAMES) if rng.random() < 0.8 else rng.choice(words.WORDS)
        return Parameter(name=name, kind="string")
    if kind < 0.6:
        choices = tuple(rng.sample(words.COLOURS + words.WORDS, 3))
        return Parameter(name=rng.choice(_STRING_NAMES), kind="string", choices=choices)
    if kind < 0.85:
        return Parameter(name=rng.choice(_INTEGER_NAMES), kind="integer")
    if kind < 0.93:
        return Parameter(name=rng.choice(_NUMBER_NAMES), kind="number")
    return Parameter(name=rng.choice(_BOOLEAN_NAMES), kind="boolean")


def random_functions(rng: Random) -> list[Function]:
    """One to three functions with different names."""
    functions: dict[str, Function] = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        function = random_function(rng)
        functions[function.name] = function
    return list(functions.values())


def request_for(rng: Random, function: Function, arguments: dict[str, Value]) -> str:
    """A user's words that name the function or what it does, and every value."""
    parts = [f"{name.replace('_', ' ')} {_spoken(v)}" for name, v in arguments.items()]
    spoken = " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    values = ", ".join(_spoken(value) for value in arguments.values())
    named = ", ".join(f"{name}={_spoken(value)}" for name, value in arguments.items())
    task = function.description[:-1]
    forms = (
        f"{task} with {spoken}.",
        f"Please {task[0].lower()}{task[1:]} with {spoken}.",
        f"{task}: {spoken}.",
        f"Call {function.name} with {named}.",
        f"Use {function.name}: {spoken}.",
        f"{task} for {values}.",
        f"What is the value of {function.name}({values})? Use the tool.",
        f"What is {function.name} for {values}?",
    )
    return rng.choice(forms)


def _spoken(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def call_text(name: str, arguments: dict[str, Value]) -> str:
    """A call as the assistant writes it."""
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A request, the calls it needs, their results, and what the assistant says then."""

    request: str
    calls: tuple[tuple[str, dict[str, Value]], ...]
    results: tuple[str, ...]
    answer: str

    @property
    def key(self) -> str:
        """What is asked, whatever the words."""
        return " ".join(self.call_keys)

    @property
    def call_keys(self) -> tuple[str, ...]:
        """Each call's key, the same as that of an exchange with this call only."""
        return tuple(f"call {json.dumps(call, ensure_ascii=False)}" for call in self.calls)

    @property
    def call_texts(self) -> str:
        """All calls as the assistant writes them."""
        return "\n".join(call_text(*call) for call in self.calls)

    @property
    def thought(self) -> str:
        """What the assistant thinks before it calls."""
        names = {name: None for name, _ in self.calls}
        return f"I call {' and '.join(names)}."

    def calling_turns(self, rng: Random, *, may_think: bool) -> tuple[Message, ...]:
        """The request, the calls and the results as messages."""
        calls = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in self.calls
        ]
        calling: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        if may_think and rng.random() < 0.5:
            calling["reasoning_content"] = self.thought
        results = ({"role": "tool", "content": result} for result in self.results)
        return (user(self.request), calling, *results)


def random_exchange(rng: Random, functions: list[Function], *, num_calls: int) -> Exchange:
    """An exchange about one or two of the functions."""
    chosen = [rng.choice(functions) for _ in range(num_calls)]
    calls = [(function.name, function.arguments(rng)) for function in chosen]
    requests = [
        request_for(rng, function, arguments)
        for function, (_, arguments) in zip(chosen, calls, strict=True)
    ]
    outcomes = [_outcome(rng) for _ in calls]
    return Exchange(
        request=rng.choice((" ", " Then: ", " And: ")).join(requests),
        calls=tuple(calls),
        results=tuple(result for result, _ in outcomes),
        answer=" ".join(answer for _, answer in outcomes),
    )


def _outcome(rng: Random) -> tuple[str, str]:
    """What a tool gives back, and what the assistant says about it."""
    parameter = _parameter(rng)
    value = parameter.value(rng)
    spoken = _spoken(value)
    kind = rng.random()
    if kind < 0.4:
        result = json.dumps({parameter.name: value}, ensure_ascii=False)
        return result, f"The {parameter.name.replace('_', ' ')} is {spoken}."
    if kind < 0.8:
        return spoken, f"The result is {spoken}."
    if kind < 0.9:
        return "ok", "Done."
    reason = words.some_words(rng, 1, 3)
    return f"Error: {reason}", f"That did not work: {reason}."


def tool_call(rng: Random, *, num_calls: int) -> Example:
    """Call the right tool with the values of the request."""
    functions = random_functions(rng)
    exchange = random_exchange(rng, functions, num_calls=num_calls)
    return Example(
        task="tool_call" if num_calls == 1 else "tool_calls",
        key=exchange.key,
        shown=exchange.call_keys,
        messages=(*random_system(rng), user(exchange.request)),
        answer=exchange.call_texts,
        thought=exchange.thought,
        tools=tuple(function.tool(rng) for function in functions),
    )


def tool_answer(rng: Random) -> Example:
    """Say what the tool's result is, or the results of two calls."""
    functions = random_functions(rng)
    exchange = random_exchange(rng, functions, num_calls=rng.choice((1, 1, 1, 2)))
    return Example(
        task="tool_answer",
        key=f"{exchange.key} {exchange.answer}",
        shown=exchange.call_keys,
        messages=(*random_system(rng), *exchange.calling_turns(rng, may_think=True)),
        answer=exchange.answer,
        thought="The tool has answered.",
        tools=tuple(function.tool(rng) for function in functions),
    )


def tool_next(rng: Random) -> Example:
    """Call a tool again, after one or two exchanges that are over."""
    functions = random_functions(rng)
    earlier = [random_exchange(rng, functions, num_calls=1) for _ in range(rng.choice((1, 1, 2)))]
    history: list[Message] = []
    for past in earlier:
        history += (*past.calling_turns(rng, may_think=False), assistant(past.answer))
    exchange = random_exchange(rng, functions, num_calls=1)
    return Example(
        task="tool_next",
        key=exchange.key,
        shown=tuple(key for past in earlier for key in past.call_keys),
        messages=(*random_system(rng), *history, user(exchange.request)),
        answer=exchange.call_texts,
        thought=exchange.thought,
        tools=tuple(function.tool(rng) for function in functions),
    )


def tool_unused(rng: Random, *, tasks: Sequence[Task]) -> Example:
    """Answer a simple task without the tools that are there."""
    example = rng.choice(tasks)(rng)
    functions = random_functions(rng)
    return Example(
        task="tool_unused",
        key=example.key,
        messages=example.messages,
        answer=example.answer,
        thought=example.thought,
        tools=tuple(function.tool(rng) for function in functions),
    )


def tool_free(rng: Random, *, sentences: Sequence[str]) -> Example:
    """Fill the parameters of a tool with sentences of one's own: a joke's setup and punchline."""
    names = rng.choice((("setup", "punchline"), ("title", "text"), ("summary",), ("answer",)))
    function = Function(
        name=rng.choice(("Joke", "Story", "Note", "Answer", "write_note", "tell_joke", "Summary")),
        description=rng.choice(("Write it down.", "A joke for a friend.", "A short text.")),
        parameters=tuple(Parameter(name=name, kind="string") for name in names),
    )
    topic = rng.choice(words.THINGS + words.WORDS)
    form = rng.choice(("Tell me a joke about {x}.", "Write about {x}s.", "Tell me about the {x}."))
    arguments: dict[str, Value] = {name: rng.choice(sentences) for name in names}
    return Example(
        task="tool_free",
        key=f"free {topic} {sorted(arguments.items())}",
        messages=(*random_system(rng), user(form.format(x=topic))),
        answer=call_text(function.name, arguments),
        thought=f"I call {function.name}.",
        tools=(function.tool(rng),),
        is_exact=False,
    )


def tool_tasks(prose: Prose) -> dict[str, tuple[Task, float]]:
    """Each task on this side's prose, with its share of the tool examples."""
    chat = chat_tasks(prose)
    simple = [chat[name][0] for name in ("add", "copy_name", "echo", "facts", "greet", "json")]
    short = [text for text in prose.sentences if len(text) < 80 and '"' not in text]
    return {
        "tool_call": (partial(tool_call, num_calls=1), 0.35),
        "tool_calls": (partial(tool_call, num_calls=2), 0.13),
        "tool_answer": (tool_answer, 0.24),
        "tool_next": (tool_next, 0.13),
        "tool_unused": (partial(tool_unused, tasks=simple), 0.1),
        "tool_free": (partial(tool_free, sentences=short), 0.05),
    }
