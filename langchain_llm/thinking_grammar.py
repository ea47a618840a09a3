"""`ThinkingGrammar`: free thoughts first, no longer than allowed, then what another grammar wants.

It knows the three marks of a thinking block as tokens; it knows no JSON. `compile_grammar` makes
the grammar of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from langchain_llm.answer_start import THINK_CLOSE, THINK_OPEN, AnswerStart

if TYPE_CHECKING:
    from nanoserve_core.grammar import Bitmask, Grammar, GrammarMatcher
    from nanoserve_core.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ThinkMarks:
    """The tokens around thoughts: ``<think>``, ``</think>`` and the blank line behind it."""

    opened: int
    closed: int
    blank_line: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ThinkMarks | None:
        """The tokenizer's, or None where a mark is no token of its own."""
        opened, closed, blank_line = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (THINK_OPEN, THINK_CLOSE, "\n\n")
        )
        if len(opened) != 1 or len(closed) != 1:
            return None
        return cls(opened=opened[0], closed=closed[0], blank_line=tuple(blank_line))


@dataclass(frozen=True, kw_only=True)
class ThinkingGrammar:
    """A `Grammar`: thoughts as `start` has them, then `answer`. Any thread."""

    start: AnswerStart
    marks: ThinkMarks
    answer: Grammar | None = None
    """What follows the thoughts; None: anything."""
    must_answer: bool = False
    """Whether something must: thoughts then do not end the output, nor use up all of it."""
    budget: int | None = None
    """Most tokens of the thoughts; then the closing mark is the only token left."""
    end_ids: frozenset[int] = frozenset()
    """End-of-sequence ids."""
    closes: bool = True
    """Whether `answer` is told how many tokens are left, and so comes to its end in time."""

    def matcher(self) -> ThinkingMatcher:
        """See `Grammar.matcher`."""
        return ThinkingMatcher(self)

    def min_tokens(self) -> int:
        """See `Grammar.min_tokens`."""
        if not self.closes or self.answer is None or not self.must_answer:
            return 0
        is_open = self.start is AnswerStart.REASONING
        return self.answer.min_tokens() + (1 + len(self.marks.blank_line)) * is_open


class ThinkingMatcher:
    """See `nanoserve_core.grammar.GrammarMatcher`."""

    def __init__(self, grammar: ThinkingGrammar) -> None:
        self._grammar = grammar
        self._answer: GrammarMatcher | None = None
        if grammar.answer is not None:
            self._answer = grammar.answer.matcher()
        # Tokens that the answer and what stands before it need: from there on no thought is left.
        num_answer_tokens = 0 if grammar.answer is None else grammar.answer.min_tokens()
        self._num_reserved = num_answer_tokens + 1 + len(grammar.marks.blank_line)
        self._place = grammar.start
        self._num_thoughts = 0
        self._forced: list[int] = []

    def is_active(self, remaining: int | None) -> bool:
        """See `GrammarMatcher.is_active`."""
        if self._forced:
            return True
        if self._place is AnswerStart.REASONING:
            return self._grammar.must_answer or self._must_close(remaining)
        return self._answer is not None and self._answer.is_active(self._told(remaining))

    def fill_bitmask(self, row: Bitmask, remaining: int | None) -> None:
        """See `GrammarMatcher.fill_bitmask`."""
        if self._forced:
            _allow(row, self._forced[0])
        elif self._place is AnswerStart.REASONING:
            self._fill_thought(row, remaining)
        else:
            assert self._answer is not None, "only an answer's grammar is active here"
            self._answer.fill_bitmask(row, self._told(remaining))
            if self._place is AnswerStart.UNDECIDED and self._may_open(remaining):
                _allow(row, self._grammar.marks.opened)

    def accept(self, token_id: int) -> None:
        """See `GrammarMatcher.accept`."""
        marks = self._grammar.marks
        if self._forced:
            self._forced.pop(0)
        elif self._place is AnswerStart.REASONING:
            self._accept_thought(token_id)
        elif self._place is AnswerStart.UNDECIDED and token_id == marks.opened:
            self._place = AnswerStart.REASONING
        else:
            self._place = AnswerStart.ANSWER
            if self._answer is not None:
                self._answer.accept(token_id)

    def is_finished(self) -> bool:
        """See `GrammarMatcher.is_finished`."""
        is_answering = self._place is AnswerStart.ANSWER and not self._forced
        return is_answering and self._answer is not None and self._answer.is_finished()

    def _fill_thought(self, row: Bitmask, remaining: int | None) -> None:
        if self._must_close(remaining):
            _allow(row, self._grammar.marks.closed)
            return
        row[:] = -1
        for token_id in self._grammar.end_ids:  # this is only called where an answer must follow
            _forbid(row, token_id)

    def _accept_thought(self, token_id: int) -> None:
        if token_id != self._grammar.marks.closed:
            self._num_thoughts += 1
            return
        self._place = AnswerStart.ANSWER
        if self._grammar.must_answer or self._is_spent():
            self._forced = list(self._grammar.marks.blank_line)

    def _must_close(self, remaining: int | None) -> bool:
        is_late = remaining is not None and remaining <= self._num_reserved
        return self._is_spent() or (self._grammar.must_answer and is_late)

    def _may_open(self, remaining: int | None) -> bool:
        is_long = remaining is None or remaining > self._num_reserved + 1
        return is_long and not self._is_spent()

    def _is_spent(self) -> bool:
        budget = self._grammar.budget
        return budget is not None and self._num_thoughts >= budget

    def _told(self, remaining: int | None) -> int | None:
        return remaining if self._grammar.closes else None


def _allow(row: Bitmask, token_id: int) -> None:
    row.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def _forbid(row: Bitmask, token_id: int) -> None:
    row.view(np.uint32)[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
