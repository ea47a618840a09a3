"""How many tokens of an answer were thought and not said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_llm.answer_start import THINK_CLOSE, THINK_OPEN, AnswerStart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanoserve_core.text import Tokenizer


def num_reasoning_tokens(
    tokenizer: Tokenizer, token_ids: Sequence[int], start: AnswerStart, reasoning: str
) -> int:
    """How many of `token_ids` stand in the thinking block, its marks left out.

    Where the marks are spelled by other tokens than their own: how many tokens `reasoning`, the
    block's text, makes.
    """
    opened, closed = (_only_token(tokenizer, mark) for mark in (THINK_OPEN, THINK_CLOSE))
    ids = list(token_ids)
    is_spelled = start is AnswerStart.UNDECIDED and opened not in ids
    if is_spelled or opened is None or closed is None:
        return min(len(tokenizer.encode(reasoning, add_special_tokens=False)), len(ids))
    first = ids.index(opened) + 1 if start is AnswerStart.UNDECIDED else 0
    return (ids.index(closed) if closed in ids else len(ids)) - first


def _only_token(tokenizer: Tokenizer, mark: str) -> int | None:
    token_ids = tokenizer.encode(mark, add_special_tokens=False)
    return token_ids[0] if len(token_ids) == 1 else None
