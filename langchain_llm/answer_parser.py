"""`AnswerParser`: a model's text, as it comes, taken apart into reasoning, prose and tool calls.

The form is Qwen3's: ``<think>...</think>`` first, if at all, and ``<tool_call>...</tool_call>``
anywhere behind it. What comes out does not depend on how the text was cut into pieces. It knows
text; it knows neither tokens nor the JSON inside a call.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from langchain_llm.answer_start import THINK_CLOSE, THINK_OPEN, AnswerStart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Reasoning:
    """A piece of what stands in the thinking block, which begins and ends without white space."""

    text: str


@dataclass(frozen=True)
class Prose:
    """A piece of the answer's plain text."""

    text: str


@dataclass(frozen=True)
class CallBlock:
    """What stands between the marks of one tool call; not closed: the text ended before the
    closing mark.
    """

    text: str
    is_closed: bool

    @property
    def written(self) -> str:
        """The block as the model wrote it, with its marks."""
        return f"{CALL_OPEN}{self.text}{CALL_CLOSE if self.is_closed else ''}"


Part: TypeAlias = Reasoning | Prose | CallBlock


class AnswerParser:
    """Give it text by `push` and the end by `finish`; parts come back as soon as they are certain.

    Text that may become a mark is held back, and so is white space that may stand before one: it
    belongs to neither side. Without ``parses_calls`` calls are prose. Prose behind a call goes on
    in a new line.
    """

    def __init__(
        self, start: AnswerStart = AnswerStart.ANSWER, *, parses_calls: bool = False
    ) -> None:
        self._parses_calls = parses_calls
        self._buffer = ""
        self._parts: list[Part] = []
        self._has_reasoning = self._has_prose = self._has_calls = False
        # The state: takes what is certain from the buffer; True when another state goes on.
        self._take: Callable[[], bool] = {
            AnswerStart.REASONING: self._take_reasoning,
            AnswerStart.ANSWER: self._take_prose,
            AnswerStart.UNDECIDED: self._take_nothing,
        }[start]

    def push(self, text: str) -> list[Part]:
        """Add text; the parts that are certain now, in order."""
        self._buffer += text
        while self._take():
            pass
        return self._taken()

    def finish(self) -> list[Part]:
        """The rest: no more text will come."""
        rest, self._buffer = self._buffer, ""
        if self._take == self._take_reasoning:
            self._add_reasoning(rest.rstrip())
        elif self._take == self._take_call:
            self._parts.append(CallBlock(rest, is_closed=False))
        elif self._take == self._take_space:
            self._add_prose(self._in_new_line(rest) if rest else "")
        else:
            self._add_prose(rest.rstrip() if self._has_calls else rest)
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # States.

    def _take_nothing(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK_OPEN):
            return self._go_on(self._take_reasoning, text[len(THINK_OPEN) :])
        if THINK_OPEN.startswith(text):  # it may become the mark; so may nothing at all
            return False
        return self._go_on(self._take_prose, self._buffer)

    def _take_reasoning(self) -> bool:
        if not self._has_reasoning:
            self._buffer = self._buffer.lstrip()
        thought, mark, rest = self._buffer.partition(THINK_CLOSE)
        if mark:
            self._add_reasoning(thought.rstrip())
            return self._go_on(self._take_space, rest)
        self._add_reasoning(self._cut(_num_certain(self._buffer, THINK_CLOSE)))
        return False

    def _take_space(self) -> bool:
        """Behind a thinking block or a call, whose white space belongs to nobody."""
        text = self._buffer = self._buffer.lstrip()
        if not text or (self._parses_calls and text != CALL_OPEN and CALL_OPEN.startswith(text)):
            return False
        is_call = self._parses_calls and text.startswith(CALL_OPEN)
        return self._go_on(self._take_prose, text if is_call else self._in_new_line(text))

    def _take_prose(self) -> bool:
        if not self._parses_calls:
            self._add_prose(self._cut(len(self._buffer)))
            return False
        prose, mark, rest = self._buffer.partition(CALL_OPEN)
        if mark:
            self._add_prose(prose.rstrip())
            self._has_calls = True
            return self._go_on(self._take_call, rest)
        self._add_prose(self._cut(_num_certain(self._buffer, CALL_OPEN)))
        return False

    def _take_call(self) -> bool:
        end = _end_of_call(self._buffer)
        if end is None:
            return False
        self._parts.append(CallBlock(self._buffer[:end], is_closed=True))
        return self._go_on(self._take_space, self._buffer[end + len(CALL_CLOSE) :])

    def _go_on(self, state: Callable[[], bool], buffer: str) -> bool:
        self._take, self._buffer = state, buffer
        return True

    # Parts.

    def _cut(self, size: int) -> str:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        return text

    def _in_new_line(self, text: str) -> str:
        return f"\n{text}" if self._has_calls and self._has_prose else text

    def _add_reasoning(self, text: str) -> None:
        if text:
            self._has_reasoning = True
            self._parts.append(Reasoning(text))

    def _add_prose(self, text: str) -> None:
        if text:
            self._has_prose = True
            self._parts.append(Prose(text))


def joined(parts: Sequence[Part]) -> list[Part]:
    """The parts in order, neighbouring pieces of one kind as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Prose) and isinstance(last, Prose):
            found[-1] = Prose(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + part.text)
        else:
            found.append(part)
    return found


def _num_certain(text: str, mark: str) -> int:
    """How many characters stand before what may be the beginning of `mark`, or white space before
    it.
    """
    held = next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
    return len(text[: len(text) - held].rstrip())


_DECODER = json.JSONDecoder(strict=False)


def _end_of_call(text: str) -> int | None:
    """Where the closing mark is; one inside a JSON string is a part of the string."""
    end = text.find(CALL_CLOSE)
    while end >= 0 and _ends_in_string(text[:end]):
        end = text.find(CALL_CLOSE, end + 1)
    return end if end >= 0 else None


def _ends_in_string(text: str) -> bool:
    try:
        _DECODER.raw_decode(text.lstrip())
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    return False
