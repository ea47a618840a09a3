"""`AnswerStart`: where an answer begins, inside a thinking block or behind it."""

from __future__ import annotations

from enum import Enum

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class AnswerStart(Enum):
    """What the rendered prompt has left to the model."""

    REASONING = "reasoning"
    """The prompt ends with an opened thinking block."""
    ANSWER = "answer"
    """The prompt ends with a closed thinking block: what follows is the answer."""
    UNDECIDED = "undecided"
    """The prompt says nothing: the model opens a thinking block, or answers at once."""


def answer_start(prompt: str) -> AnswerStart:
    """Where the answer to the rendered `prompt` begins.

    Read from the end of the text and not from ``enable_thinking``: a template may not know that
    switch, may do without it, or may be told by the user's own words.
    """
    tail = prompt.rstrip()
    if tail.endswith(THINK_OPEN):
        return AnswerStart.REASONING
    return AnswerStart.ANSWER if tail.endswith(THINK_CLOSE) else AnswerStart.UNDECIDED
