"""Draws training and held-out examples and writes them as text in the chat template's form.

Deterministic: the same random generator gives the same examples. Held-out examples never occur in
training: an example's key decides its side (`example.py`), its prose comes from that side's
chapters. Knows no token ids.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jinja2.sandbox import ImmutableSandboxedEnvironment

from examples.tiny_qwen3.chat_tasks import Task, assistant, chat_tasks
from examples.tiny_qwen3.example import Example, Message, is_held_out, is_trained_on
from examples.tiny_qwen3.record_tasks import record_tasks
from examples.tiny_qwen3.tool_tasks import tool_tasks

if TYPE_CHECKING:
    from random import Random

    from examples.tiny_qwen3.prose import Prose

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")

# "on": the model writes a thinking block. "off": the prompt already holds an empty one.
# "declined": the user said /no_think, so the model writes an empty one.
Thinking = Literal["on", "off", "declined"]
_THINKING: tuple[Thinking, ...] = ("on", "off", "declined")
_THINKING_SHARES = (0.46, 0.46, 0.08)
_HISTORY_TASKS = ("add", "copy_name", "facts", "greet", "echo")


class ExampleSource:
    """Draws the examples of one side, training or held out."""

    def __init__(self, prose: Prose, *, held_out: bool) -> None:
        """`prose` is the text of the same side."""
        self._held_out = held_out
        self._chat = chat_tasks(prose)
        self._tools = {**tool_tasks(prose), **record_tasks()}
        self._tasks = {**self._chat, **self._tools}

    @property
    def task_names(self) -> list[str]:
        """The simple tasks, then the tasks with tools."""
        return list(self._tasks)

    def draw(self, task: str, rng: Random) -> Example:
        """An example of `task` on this side."""
        make, _ = self._tasks[task]
        while True:
            example = make(rng)
            if is_held_out(example.key) if self._held_out else is_trained_on(example):
                return example

    def draw_chat(self, rng: Random) -> Example:
        """An example of some simple task; one in six follows one or two earlier turns."""
        example = self.draw(_choose(rng, self._chat), rng)
        if rng.random() > 1 / 6 or self._held_out:
            return example
        earlier = [self.draw(rng.choice(_HISTORY_TASKS), rng) for _ in range(rng.randint(1, 2))]
        return _with_history(example, earlier)

    def draw_tool(self, rng: Random) -> Example:
        """An example of some task with tools."""
        return self.draw(_choose(rng, self._tools), rng)


def _choose(rng: Random, tasks: dict[str, tuple[Task, float]]) -> str:
    return rng.choices(list(tasks), [share for _, share in tasks.values()])[0]


def _with_history(example: Example, earlier: list[Example]) -> Example:
    """The example after the earlier ones' questions and answers; its own system message leads."""
    history: list[Message] = []
    for past in earlier:
        history += (past.messages[-1], assistant(past.answer))
    is_led = example.messages[0]["role"] == "system"
    head, rest = example.messages[:is_led], example.messages[is_led:]
    return replace(example, messages=(*head, *history, *rest))


class ChatText:
    """Writes examples as a prompt and its completion, exactly as `apply_chat_template` would."""

    def __init__(self) -> None:
        """Compiles the template; rendering through transformers would take longer than training."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(TEMPLATE_FILE.read_text(encoding="utf-8"))

    def prompt(self, example: Example, thinking: Thinking) -> str:
        """The text up to where the model goes on."""
        messages = example.messages
        if thinking == "declined":
            last = messages[-1]
            messages = (*messages[:-1], {**last, "content": f"{last['content']} /no_think"})
        return self._template.render(
            messages=messages,
            tools=list(example.tools),
            add_generation_prompt=True,
            enable_thinking=thinking != "off",
        )

    def completion(self, example: Example, thinking: Thinking) -> str:
        """What the model is to write, with the token that ends its turn."""
        thought = {"on": f"<think>\n{example.thought}\n</think>\n\n", "off": ""}.get(
            thinking, "<think>\n\n</think>\n\n"
        )
        return f"{thought}{example.answer}<|im_end|>"


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def random_thinking(rng: Random, example: Example) -> Thinking:
    """A thinking mode that suits the example: only a user can decline."""
    thinking = rng.choices(_THINKING, _THINKING_SHARES)[0]
    is_question = example.messages[-1]["role"] == "user"
    return thinking if is_question or thinking != "declined" else "off"
