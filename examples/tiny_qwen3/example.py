"""One training or test example: a conversation, the answer to it, and the side it is on.

The side follows from the example's key alone, so that nothing a held-out example asks can occur
in training, in whatever words. Knows no task, no text form and no tokens.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

# A chat message or a tool as JSON: nested values of any JSON type.
Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A conversation up to the answer, and the answer.

    `key` names what is asked, apart from the wording. `answer` is the assistant's turn as it is
    written after the thinking block, tool calls included. `shown` are the keys of what the example
    contains beside its question. `is_exact`: no other answer is right.
    """

    task: str
    key: str
    messages: tuple[Message, ...]
    answer: str
    thought: str
    tools: tuple[Tool, ...] = ()
    shown: tuple[str, ...] = ()
    is_exact: bool = True


def is_trained_on(example: Example) -> bool:
    """Whether training may see the example: nothing in it is held out."""
    return not any(is_held_out(key) for key in (example.key, *example.shown))


def is_held_out(key: str, *, one_in: int = 8) -> bool:
    """Whether what `key` names is kept out of training: one key in `one_in`, fixed for ever."""
    return zlib.crc32(key.encode("utf-8")) % one_in == 0
