"""Thoughts before an answer: free, limited, closed in time, and never in place of the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from langchain_llm.answer_start import AnswerStart
from langchain_llm.thinking_grammar import ThinkingGrammar, ThinkMarks
from tests.langchain_llm.doors import IM_END, new_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanoserve_core.grammar import Bitmask, GrammarMatcher

VOCAB_SIZE = 263
MARKS = ThinkMarks(opened=259, closed=260, blank_line=(10, 10))
THOUGHT = ord("t")


class Says:
    """A grammar of one text; forgets the limit, but for what `told` keeps."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.told: list[int | None] = []

    def matcher(self) -> SaysMatcher:
        return SaysMatcher(self)

    def min_tokens(self) -> int:
        return len(self.text)


class SaysMatcher:
    def __init__(self, grammar: Says) -> None:
        self._grammar = grammar
        self._position = 0

    def is_active(self, remaining: int | None) -> bool:
        del remaining
        return True

    def fill_bitmask(self, row: Bitmask, remaining: int | None) -> None:
        self._grammar.told.append(remaining)
        token_id = self._grammar.text[self._position]
        row.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))

    def accept(self, token_id: int) -> None:
        assert token_id == self._grammar.text[self._position]
        self._position += 1

    def is_finished(self) -> bool:
        return self._position == len(self._grammar.text)


def allowed(matcher: GrammarMatcher, remaining: int | None = None) -> list[int] | None:
    """The tokens that may come next, or None for all."""
    if not matcher.is_active(remaining):
        return None
    row = np.zeros((VOCAB_SIZE + 31) // 32, dtype=np.int32)
    matcher.fill_bitmask(row, remaining)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def grammar(
    start: AnswerStart, *, text: bytes | None = None, budget: int | None = None
) -> ThinkingGrammar:
    return ThinkingGrammar(
        start=start,
        marks=MARKS,
        answer=None if text is None else Says(text),
        must_answer=text is not None,
        budget=budget,
        end_ids=frozenset({IM_END}),
    )


def after(made: ThinkingGrammar, token_ids: Sequence[int]) -> GrammarMatcher:
    matcher = made.matcher()
    for token_id in token_ids:
        matcher.accept(token_id)
    return matcher


def test_marks_are_the_tokenizers_own() -> None:
    assert ThinkMarks.of(new_tokenizer()) == MARKS


def test_thoughts_are_free_until_the_budget_is_spent_and_the_mark_is_forced() -> None:
    made = grammar(AnswerStart.REASONING, budget=3)

    assert allowed(after(made, [THOUGHT] * 2)) is None
    assert allowed(after(made, [THOUGHT] * 3)) == [MARKS.closed]
    assert allowed(after(made, [THOUGHT] * 3 + [MARKS.closed])) == [10]
    assert allowed(after(made, [THOUGHT] * 3 + [MARKS.closed, 10])) == [10]
    assert allowed(after(made, [THOUGHT] * 3 + [MARKS.closed, 10, 10])) is None


def test_thoughts_that_end_in_time_are_left_alone() -> None:
    matcher = after(grammar(AnswerStart.REASONING, budget=3), [THOUGHT, MARKS.closed])

    assert allowed(matcher) is None
    assert not matcher.is_finished()


def test_budget_counts_only_where_the_model_opens_a_block() -> None:
    made = grammar(AnswerStart.UNDECIDED, budget=0)

    assert allowed(after(made, [])) is None
    assert allowed(after(made, [MARKS.opened])) == [MARKS.closed]
    assert allowed(after(made, [THOUGHT] * 5)) is None


def test_answer_that_must_come_waits_for_the_thoughts_and_the_blank_line() -> None:
    made = grammar(AnswerStart.REASONING, text=b"ab")

    thinking = allowed(after(made, [THOUGHT]))
    assert thinking is not None
    assert len(thinking) == VOCAB_SIZE - 1
    assert IM_END not in thinking
    ended = [THOUGHT, MARKS.closed, 10, 10]
    assert allowed(after(made, ended)) == [ord("a")]
    assert allowed(after(made, [*ended, ord("a")])) == [ord("b")]
    assert after(made, [*ended, *b"ab"]).is_finished()
    assert not after(made, [*ended, *b"a"]).is_finished()


def test_undecided_model_may_think_or_answer() -> None:
    made = grammar(AnswerStart.UNDECIDED, text=b"ab")

    assert allowed(after(made, [])) == [ord("a"), MARKS.opened]
    assert allowed(after(made, [ord("a")])) == [ord("b")]
    assert allowed(after(made, [MARKS.opened, THOUGHT, MARKS.closed])) == [10]


@pytest.mark.parametrize(("remaining", "is_free"), [(6, True), (5, False), (4, False)])
def test_thoughts_end_where_the_answer_needs_what_is_left(remaining: int, is_free: bool) -> None:
    matcher = after(grammar(AnswerStart.REASONING, text=b"ab"), [THOUGHT])

    found = allowed(matcher, remaining)

    assert found is not None
    assert (len(found) > 1) == is_free
    assert is_free or found == [MARKS.closed]


def test_undecided_model_may_not_think_where_it_has_no_room_for_it() -> None:
    made = grammar(AnswerStart.UNDECIDED, text=b"ab")

    assert allowed(after(made, []), remaining=6) == [ord("a")]
    assert allowed(after(made, []), remaining=7) == [ord("a"), MARKS.opened]


@pytest.mark.parametrize(("closes", "told"), [(True, [9]), (False, [None])])
def test_answer_is_told_what_is_left_only_if_it_is_to_close(
    closes: bool, told: list[int | None]
) -> None:
    answer = Says(b"ab")
    made = ThinkingGrammar(
        start=AnswerStart.ANSWER, marks=MARKS, answer=answer, must_answer=True, closes=closes
    )

    allowed(made.matcher(), remaining=9)

    assert answer.told == told
    assert made.min_tokens() == (2 if closes else 0)


@pytest.mark.parametrize(
    ("start", "expected"),
    [(AnswerStart.REASONING, 5), (AnswerStart.UNDECIDED, 2), (AnswerStart.ANSWER, 2)],
)
def test_fewest_tokens_count_the_end_of_a_block_that_is_open(
    start: AnswerStart, expected: int
) -> None:
    assert grammar(start, text=b"ab").min_tokens() == expected
    assert grammar(start).min_tokens() == 0
