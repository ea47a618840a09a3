"""The simple tasks: each makes a conversation that one short answer is right for.

A task gets a random generator, some of them one side's prose too, and gives an `Example`; the
caller keeps it or draws again, by the side its key is on. Knows no tools, templates or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from examples.tiny_qwen3 import words
from examples.tiny_qwen3.example import Example, Message, is_held_out

if TYPE_CHECKING:
    from examples.tiny_qwen3.prose import Prose

Task = Callable[[Random], Example]

_ADD_FORMS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b} =",
    "Add {a} and {b}.",
    "How much is {a} + {b}?",
    "Calculate {a} + {b}.",
    "{who} has {a} {goods} and gets {b} more. How many {goods} has {who} now?",
)
_COPY_FORMS = (
    "Repeat the name: {x}",
    "Copy this: {x}",
    "Write exactly this: {x}",
    "Repeat: {x}",
    'Say "{x}".',
    "Say only this: {x}",
    "Copy the text between the marks: [{x}]",
)
_ECHO_FORMS = (
    "Repeat this sentence: {x}",
    "Repeat after me: {x}",
    "Echo: {x}",
    "Write this sentence again:\n{x}",
    "Copy the sentence.\n\n{x}",
)
_CONTINUE_FORMS = (
    "Continue: {x}",
    "Continue the sentence: {x}",
    "How does this go on? {x}",
    "Finish this sentence:\n{x}",
)
_STORY_FORMS = (
    "Tell me a story.",
    "Write a paragraph.",
    "Write a few sentences.",
    "Tell me something.",
    "Write a short text.",
    "Tell me a short story.",
)
_TEXT_FORMS = (
    "{text} {question}",
    "{text}\n{question}",
    "Text: {text}\nQuestion: {question}",
    "Read the text and answer.\n\n{text}\n\n{question}",
    "Answer from the context.\n\nContext: {text}\n\nQuestion: {question}",
    "Question: {question}\nContext: {text}",
)
_SYSTEM_FORMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer in one sentence.",
    "Be brief.",
    "You answer short questions.",
    "You are Tiny, a small language model.",
    "Answer the user.",
    "You are a friendly assistant.",
)


def user(text: str) -> Message:
    """A user's turn."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """An assistant's turn of text."""
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def random_system(rng: Random) -> tuple[Message, ...]:
    """Nothing, or a system message that changes no answer."""
    return (system(rng.choice(_SYSTEM_FORMS)),) if rng.random() < 0.35 else ()


def add(rng: Random) -> Example:
    """Add two numbers below 100; both orders of a pair are on the same side."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    form = rng.choice(_ADD_FORMS)
    text = form.format(a=a, b=b, who=words.person(rng), goods=rng.choice(words.GOODS))
    low, high = sorted((a, b))
    return Example(
        task="add",
        key=f"add {low} {high}",
        messages=(*random_system(rng), user(text)),
        answer=str(a + b),
        thought=_column_addition(a, b),
    )


def _column_addition(a: int, b: int) -> str:
    ones = f"{a % 10} + {b % 10} = {a % 10 + b % 10}"
    carry = (a % 10 + b % 10) // 10
    tens = f"{a // 10} + {b // 10} + {carry} = {a // 10 + b // 10 + carry}"
    return f"{ones}, {tens}."


def copy_name(rng: Random) -> Example:
    """Copy an invented name, a few words or a code."""
    kind = rng.random()
    if kind < 0.6:
        text = words.invented_name(rng)
    else:
        text = words.some_words(rng, 1, 6) if kind < 0.8 else words.code(rng)
    return _copy(rng, "copy_name", text)


def copy_unicode(rng: Random) -> Example:
    """Copy a string in a script that is spelled in bytes."""
    return _copy(rng, "copy_unicode", words.unicode_string(rng))


def _copy(rng: Random, task: str, text: str) -> Example:
    return Example(
        task=task,
        key=f"copy {text}",
        messages=(*random_system(rng), user(rng.choice(_COPY_FORMS).format(x=text))),
        answer=text,
        thought="I copy the text.",
    )


def echo(rng: Random, *, sentences: Sequence[str]) -> Example:
    """Repeat a sentence of the novels exactly."""
    sentence = rng.choice(sentences)
    return Example(
        task="echo",
        key=f"echo {sentence}",
        messages=(*random_system(rng), user(rng.choice(_ECHO_FORMS).format(x=sentence))),
        answer=sentence,
        thought="I repeat the sentence.",
    )


def continue_sentence(rng: Random, *, sentences: Sequence[str]) -> Example:
    """Continue a sentence of the novels from somewhere in its first half."""
    sentence = rng.choice(sentences)
    pieces = sentence.split(" ")
    cut = rng.randint(3, max(3, len(pieces) // 2))
    return Example(
        task="continue",
        key=f"echo {sentence}",
        messages=(
            *random_system(rng),
            user(rng.choice(_CONTINUE_FORMS).format(x=" ".join(pieces[:cut]))),
        ),
        answer=" ".join(pieces[cut:]),
        thought="I continue the sentence.",
        is_exact=False,
    )


def story(rng: Random, *, paragraphs: Sequence[str]) -> Example:
    """Write a paragraph, of anything or with a name in it."""
    paragraph = rng.choice(paragraphs)
    names = [word.strip(".,;'\"") for word in paragraph.split(" ")[1:] if word[:1].isupper()]
    names = [name for name in names if len(name) > 3 and name.isalpha()]
    request = rng.choice(_STORY_FORMS)
    if names and rng.random() < 0.6:
        request = request[:-1] + f" about {rng.choice(names)}."
    return Example(
        task="story",
        key=f"story {paragraph}",
        messages=(*random_system(rng), user(request)),
        answer=paragraph,
        thought="I write a paragraph.",
        is_exact=False,
    )


def facts(rng: Random) -> Example:
    """Answer a question from a few sentences; the answer repeats one of the facts."""
    kind = rng.choice((_owner, _owner, _place, _home, _age, _trade))
    texts, question, answer, thought = kind(rng)
    text = " ".join(texts)
    if rng.random() < 0.15:
        messages: tuple[Message, ...] = (system(text), user(question))
    else:
        wrapped = rng.choice(_TEXT_FORMS).format(text=text, question=question)
        messages = (*random_system(rng), user(wrapped))
    return Example(
        task="facts",
        key=f"facts {' '.join(sorted(texts))} {question}",
        messages=messages,
        answer=answer,
        thought=thought,
    )


def _owner(rng: Random) -> tuple[list[str], str, str, str]:
    count = rng.randint(2, 5)
    names, things = words.people(rng, count), rng.sample(words.THINGS, count)
    colours = [rng.choice(words.COLOURS) for _ in names]
    texts = [
        f"{name} has a {colour} {thing}."
        for name, colour, thing in zip(names, colours, things, strict=True)
    ]
    at = rng.randrange(count)
    name, colour, thing = names[at], colours[at], things[at]
    question, answer = rng.choice(
        (
            (f"Who has the {thing}?", f"{name} has the {thing}."),
            (f"What does {name} have?", f"{name} has a {colour} {thing}."),
            (f"What colour is the {thing}?", f"The {thing} is {colour}."),
        )
    )
    return texts, question, answer, texts[at]


def _place(rng: Random) -> tuple[list[str], str, str, str]:
    count = rng.randint(2, 5)
    things, places = rng.sample(words.THINGS, count), rng.sample(words.PLACES, count)
    texts = [f"The {thing} is in the {place}." for thing, place in zip(things, places, strict=True)]
    at = rng.randrange(count)
    question = rng.choice((f"Where is the {things[at]}?", f"What is in the {places[at]}?"))
    return texts, question, texts[at], texts[at]


def _home(rng: Random) -> tuple[list[str], str, str, str]:
    count = rng.randint(2, 5)
    names, cities = words.people(rng, count), rng.sample(words.CITIES, count)
    texts = [f"{name} lives in {city}." for name, city in zip(names, cities, strict=True)]
    at = rng.randrange(count)
    question = rng.choice((f"Where does {names[at]} live?", f"Who lives in {cities[at]}?"))
    return texts, question, texts[at], texts[at]


def _age(rng: Random) -> tuple[list[str], str, str, str]:
    count = rng.randint(2, 5)
    names, ages = words.people(rng, count), rng.sample(range(5, 99), count)
    texts = [f"{name} is {age} years old." for name, age in zip(names, ages, strict=True)]
    at = rng.randrange(count)
    question = rng.choice((f"How old is {names[at]}?", f"Who is {ages[at]} years old?"))
    return texts, question, texts[at], texts[at]


def _trade(rng: Random) -> tuple[list[str], str, str, str]:
    count = rng.randint(2, 5)
    names, trades = words.people(rng, count), rng.sample(words.TRADES, count)
    texts = [f"{name} is a {trade}." for name, trade in zip(names, trades, strict=True)]
    at = rng.randrange(count)
    question = rng.choice((f"What is {names[at]}?", f"Who is the {trades[at]}?"))
    return texts, question, texts[at], texts[at]


def count_up(rng: Random) -> Example:
    """Count from one number to another."""
    first = rng.randint(0, 60)
    last = first + rng.randint(2, 20)
    form = rng.choice(("Count from {a} to {b}.", "Write the numbers from {a} to {b}."))
    return Example(
        task="count",
        key=f"count {first} {last}",
        messages=(*random_system(rng), user(form.format(a=first, b=last))),
        answer=", ".join(str(number) for number in range(first, last + 1)),
        thought=f"From {first} to {last}.",
    )


def repeat_word(rng: Random) -> Example:
    """Say a word a few times, then stop."""
    word = rng.choice(words.WORDS) if rng.random() < 0.7 else words.invented_word(rng)
    times = rng.randint(2, 6)
    form = rng.choice(('Say "{x}" {n} times.', "Write the word {x} {n} times."))
    return Example(
        task="repeat",
        key=f"repeat {word} {times}",
        messages=(*random_system(rng), user(form.format(x=word, n=times))),
        answer=" ".join([word] * times),
        thought=f"I say it {times} times.",
    )


def greet(rng: Random) -> Example:
    """Greet back by name and stop."""
    name = words.person(rng) if rng.random() < 0.5 else words.invented_name(rng)
    request, answer = rng.choice(
        (
            ("Hello, my name is {x}.", "Hello, {x}. How can I help you?"),
            ("Hi! I am {x}.", "Hello, {x}. How can I help you?"),
            ("My name is {x}.", "Hello, {x}. How can I help you?"),
            ("Say hello to {x}.", "Hello, {x}!"),
            ("Good morning, I am {x}.", "Good morning, {x}."),
            ("Say good night to {x}.", "Good night, {x}."),
            ("{x} says goodbye.", "Goodbye, {x}."),
        )
    )
    return Example(
        task="greet",
        key=f"name {name}",
        messages=(*random_system(rng), user(request.format(x=name))),
        answer=answer.format(x=name),
        thought=f"The name is {name}.",
    )


def remember(rng: Random) -> Example:
    """Give back a name that was said earlier, in the system message or in an earlier turn."""
    name = words.person(rng) if rng.random() < 0.5 else words.invented_name(rng)
    thought = f"The name is {name}."
    if rng.random() < 0.4:
        messages: tuple[Message, ...] = (system(f"Your name is {name}."), *_small_talk(rng))
        question, answer = "What is your name?", f"My name is {name}."
    else:
        told = (user(f"My name is {name}."), assistant(f"Hello, {name}. How can I help you?"))
        messages = (*random_system(rng), *told, *_small_talk(rng))
        question, answer = rng.choice(("What is my name?", "Who am I?")), f"Your name is {name}."
    return Example(
        task="remember",
        key=f"name {name}",
        messages=(*messages, user(question)),
        answer=answer,
        thought=thought,
    )


def _small_talk(rng: Random) -> tuple[Message, ...]:
    """No turn or one that has nothing to do with the question after it."""
    word = rng.choice([word for word in words.WORDS if not is_held_out(f"copy {word}")])
    turns = (
        (user("Thank you."), assistant("You are welcome.")),
        (user(f"Say only this: {word}"), assistant(word)),
        (user("How are you?"), assistant("I am well, thank you.")),
    )
    return rng.choice(turns) if rng.random() < 0.5 else ()


def write_json(rng: Random) -> Example:
    """Write what a sentence says as a JSON object with the keys asked for."""
    name, age, city = words.person(rng), rng.randint(5, 98), rng.choice(words.CITIES)
    said, record = f"{name} is {age} years old", {"name": name, "age": age}
    if rng.random() < 0.6:
        said, record = f"{said} and lives in {city}", {**record, "city": city}
    keys = ", ".join(record)
    form = rng.choice(
        (
            "Answer in JSON with the keys {keys}: {said}.",
            "{said}. Write this as JSON with the keys {keys}.",
            "Write JSON ({keys}). Text: {said}.",
        )
    )
    return Example(
        task="json",
        key=f"json {said}",
        messages=(*random_system(rng), user(form.format(keys=keys, said=said))),
        answer=json.dumps(record, ensure_ascii=False),
        thought=f"The keys are {keys}.",
    )


def chat_tasks(prose: Prose) -> dict[str, tuple[Task, float]]:
    """Each task on this side's prose, with its share of the chat examples."""
    return {
        "add": (add, 0.18),
        "copy_name": (copy_name, 0.12),
        "copy_unicode": (copy_unicode, 0.10),
        "echo": (partial(echo, sentences=_of_length(prose.sentences, 12, 150)), 0.12),
        "facts": (facts, 0.19),
        "continue": (
            partial(continue_sentence, sentences=_of_length(prose.sentences, 60, 300)),
            0.07,
        ),
        "story": (partial(story, paragraphs=_of_length(prose.paragraphs, 120, 500)), 0.05),
        "count": (count_up, 0.04),
        "repeat": (repeat_word, 0.03),
        "greet": (greet, 0.03),
        "remember": (remember, 0.04),
        "json": (write_json, 0.03),
    }


def _of_length(texts: Sequence[str], low: int, high: int) -> list[str]:
    """The texts of `low` to `high` characters."""
    return [text for text in texts if low <= len(text) <= high]
