"""Grammars that say nothing until a mark appears: `AutoCallsGrammar`, `AfterThinkingGrammar`.

While they say nothing they cost nothing. Only when so few tokens are left that the shortest output
behind the mark would no longer fit, they speak up: one forbids the mark, the other forces it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoserve_adapters.grammar.document import DocumentGrammar
from nanoserve_adapters.grammar.jumps import jump_of
from nanoserve_adapters.grammar.lark_text import CALL_START, call_tail_text

if TYPE_CHECKING:
    from nanoserve_adapters.grammar.document import DocumentMatcher
    from nanoserve_adapters.grammar.specs import ToolCalls
    from nanoserve_adapters.grammar.vocabulary import Vocabulary
    from nanoserve_core.grammar import Bitmask, Grammar, GrammarMatcher

THINK_END = "</think>"
BLANK_LINE = "\n\n"
_SHARE = 4
"""The answer is left so many times its shortest form, or half of all tokens."""


class AutoCallsGrammar:
    """Free text, and calls wherever ``<tool_call>`` is sampled; see `Grammar`. Any thread."""

    def __init__(self, vocabulary: Vocabulary, spec: ToolCalls) -> None:
        """Raises `UnsupportedSchema`."""
        self._vocabulary = vocabulary
        text = call_tail_text(spec, vocabulary.has_token)
        self._call = DocumentGrammar(vocabulary, text, jump=jump_of(spec))
        self._is_parallel = spec.parallel

    def matcher(self) -> AutoCallsMatcher:
        """See `Grammar.matcher`."""
        return AutoCallsMatcher(self._vocabulary, self._call, is_parallel=self._is_parallel)

    def min_tokens(self) -> int:
        """None need be made."""
        return 0


class AutoCallsMatcher:
    """See `GrammarMatcher`. Without parallel calls the first one ends the sample."""

    def __init__(self, vocabulary: Vocabulary, call: DocumentGrammar, *, is_parallel: bool) -> None:
        self._call = call
        self._is_parallel = is_parallel
        self._start = Mark(vocabulary, CALL_START)
        self._start_token = vocabulary.marks.get(CALL_START)
        self._open: DocumentMatcher | None = None
        self._num_calls = 0

    def is_active(self, remaining: int | None) -> bool:
        """Inside a call, and where none would fit any more."""
        if self._open is not None:
            return self._open.is_active(remaining)
        is_short = remaining is not None and remaining <= self._call.min_tokens()
        return is_short and self._start_token is not None

    def fill_bitmask(self, row: Bitmask, remaining: int | None) -> None:
        """See `GrammarMatcher.fill_bitmask`."""
        if self._open is not None:
            self._open.fill_bitmask(row, remaining)
            return
        assert self._start_token is not None, "active outside a call only with a token to forbid"
        row[:] = -1
        row[self._start_token >> 5] ^= _bit(self._start_token)

    def accept(self, token_id: int) -> None:
        """See `GrammarMatcher.accept`."""
        if self._open is None:
            if self._start.is_ended_by(token_id):
                self._open = self._call.matcher()
            return
        self._open.accept(token_id)
        if self._open.is_finished():
            self._open = None
            self._num_calls += 1

    def is_finished(self) -> bool:
        """See `GrammarMatcher.is_finished`."""
        return self._num_calls > 0 and not self._is_parallel


class AfterThinkingGrammar:
    """Free text up to ``</think>``, a blank line, then ``inner``; see `Grammar`. Any thread."""

    def __init__(self, vocabulary: Vocabulary, inner: Grammar) -> None:
        self._vocabulary = vocabulary
        self._inner = inner
        self._bridge = [*vocabulary.encode(THINK_END), *vocabulary.encode(BLANK_LINE)]

    def matcher(self) -> AfterThinkingMatcher:
        """See `Grammar.matcher`."""
        return AfterThinkingMatcher(
            self._vocabulary, self._inner.matcher(), min_tokens=self.min_tokens()
        )

    def min_tokens(self) -> int:
        """See `Grammar.min_tokens`: an empty thought and the shortest answer."""
        needed = self._inner.min_tokens()
        return len(self._bridge) + needed if needed else 0


class AfterThinkingMatcher:
    """See `GrammarMatcher`. Forced tokens are taken one after the other from ``_forced``."""

    def __init__(self, vocabulary: Vocabulary, inner: GrammarMatcher, *, min_tokens: int) -> None:
        self._inner = inner
        self._min_tokens = min_tokens
        self._end = Mark(vocabulary, THINK_END)
        self._end_tokens = vocabulary.encode(THINK_END)
        self._blank_line = vocabulary.encode(BLANK_LINE)
        self._forced: list[int] = []
        self._is_thinking = True
        self._reserved: int | None = None

    def is_active(self, remaining: int | None) -> bool:
        """From ``</think>`` on as ``inner`` is, and where it must come now."""
        if self._forced:
            return True
        if not self._is_thinking:
            return self._inner.is_active(remaining)
        if not self._min_tokens or remaining is None:
            return False
        if self._reserved is None:  # more than the least, so that the answer is not cut to it
            self._reserved = max(self._min_tokens, min(_SHARE * self._min_tokens, remaining // 2))
        return remaining <= self._reserved

    def fill_bitmask(self, row: Bitmask, remaining: int | None) -> None:
        """See `GrammarMatcher.fill_bitmask`."""
        if self._is_thinking and not self._forced:
            self._forced = list(self._end_tokens)
        if self._forced:
            row[self._forced[0] >> 5] |= _bit(self._forced[0])
        else:
            self._inner.fill_bitmask(row, remaining)

    def accept(self, token_id: int) -> None:
        """See `GrammarMatcher.accept`."""
        if self._forced:
            self._forced = self._forced[1:]
        elif not self._is_thinking:
            self._inner.accept(token_id)
        if self._is_thinking and self._end.is_ended_by(token_id):
            self._is_thinking = False
            self._forced = list(self._blank_line)

    def is_finished(self) -> bool:
        """See `GrammarMatcher.is_finished`."""
        return not self._is_thinking and not self._forced and self._inner.is_finished()


class Mark:
    """Notices a mark in what is sampled: by its token, or by its text where it has none."""

    def __init__(self, vocabulary: Vocabulary, mark: str) -> None:
        self._vocabulary = vocabulary
        self._token = vocabulary.marks.get(mark)
        self._text = mark.encode()
        self._tail = b""

    def is_ended_by(self, token_id: int) -> bool:
        """Whether the mark is complete with this token; every token must be told, in order."""
        if self._token is not None:
            return token_id == self._token
        self._tail = (self._tail + self._vocabulary.bytes_of(token_id))[-len(self._text) :]
        return self._tail == self._text


def _bit(token_id: int) -> int:
    """The token's bit in its word, as an int32."""
    bit = 1 << (token_id & 31)
    return bit - 2**32 if bit >= 2**31 else bit
