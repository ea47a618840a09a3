"""`DocumentGrammar`: output that is constrained from its first token to its last.

llguidance does the matching; this file keeps its state per sample and turns its errors into ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nanoserve_adapters.grammar.budget import Budget
from nanoserve_adapters.grammar.closing import Clues
from nanoserve_adapters.grammar.json_quotes import QuoteState
from nanoserve_adapters.grammar.schema import UnsupportedSchema
from nanoserve_adapters.grammar.vocabulary import Vocabulary, import_backend
from nanoserve_core.errors import RequestFailed

if TYPE_CHECKING:
    from nanoserve_core.grammar import Bitmask


_LEAST_JUMP = 12
"""Tokens by which a way can grow in any grammar: escapes, the order of what is found."""


class DocumentGrammar:
    """A compiled Lark grammar; see `nanoserve_core.grammar.Grammar`. Any thread."""

    def __init__(
        self, vocabulary: Vocabulary, text: str, *, letters: bytes = b"", jump: int = 0
    ) -> None:
        """``letters``: see `Clues`; ``jump``: see `Budget`.

        Raises `UnsupportedSchema` for a grammar that llguidance refuses.
        """
        matcher_type = import_backend().LLMatcher
        grammar = matcher_type.grammar_from_lark(text)
        self._vocabulary = vocabulary
        self._start = matcher_type(vocabulary.ll, grammar, log_level=0)
        if self._start.is_error():
            raise UnsupportedSchema("the grammar", "#", first_line(self._start.get_error()))
        self._clues = Clues(letters)
        self._shortest: list[int] | None = vocabulary.closing.find(
            self._start, QuoteState.OUTSIDE, self._clues
        )
        self._jump = self._num_tokens(jump)

    def _num_tokens(self, jump: int) -> int:
        """``jump`` bytes in tokens such as those of the shortest way, and half as much again."""
        way = self._shortest or []
        num_bytes = sum(len(self._vocabulary.bytes_of(token)) for token in way)
        return _LEAST_JUMP + int(1.5 * jump * len(way) / max(1, num_bytes, len(way)))

    def matcher(self) -> DocumentMatcher:
        """See `Grammar.matcher`."""
        vocabulary = self._vocabulary
        # Its own copy: what other samples have found must not change what this one may say.
        clues = Clues(self._clues.letters, dict(self._clues.found))
        budget = Budget(vocabulary, self._shortest, clues=clues, jump=self._jump)
        return DocumentMatcher(self._start.deep_copy(), budget)

    def min_tokens(self) -> int:
        """See `Grammar.min_tokens`: of the shortest way that was found; 0 when none was."""
        return len(self._shortest or ())


class DocumentMatcher:
    """See `nanoserve_core.grammar.GrammarMatcher`."""

    def __init__(self, ll_matcher: Any, budget: Budget) -> None:  # noqa: ANN401 - untyped
        self._ll = ll_matcher
        self._budget = budget

    def is_active(self, remaining: int | None) -> bool:
        """Always."""
        del remaining
        return True

    def fill_bitmask(self, row: Bitmask, remaining: int | None) -> None:
        """See `GrammarMatcher.fill_bitmask`. Raises `RequestFailed` when llguidance gives up."""
        words = np.frombuffer(self._ll.compute_bitmask(), dtype=np.int32)
        size = min(len(words), len(row))
        row[:size] = words[:size]
        self._check()
        if remaining is not None:
            self._budget.restrict(self._ll, row, remaining)

    def accept(self, token_id: int) -> None:
        """See `GrammarMatcher.accept`. Raises `RequestFailed` for a token that was not allowed."""
        self._ll.consume_token(token_id)
        self._check()
        self._budget.note(token_id)

    def is_finished(self) -> bool:
        """See `GrammarMatcher.is_finished`."""
        finished: bool = self._ll.is_stopped()
        return finished

    def _check(self) -> None:
        if self._ll.is_error():
            raise RequestFailed(
                f"the grammar's matcher failed: {first_line(self._ll.get_error())}. Expected a "
                "token that the grammar allows. Simplify the grammar if it is too complex."
            )


def first_line(message: str) -> str:
    """llguidance's message without its dump of the state."""
    return message.split("<state>")[0].strip()
