"""`Budget`: keeps one sample's output closable with the tokens that remain.

It always knows, or can find, a way to the end. While far more tokens remain than that way takes,
nothing is done but counting. When they run short, the mask keeps only tokens after which a way is
known that still fits: not only the way itself, so that an answer that would have fitted is not
disturbed::

    remaining   |<-------------------- 40 -------------------->|
    way         |<--- 12 --->|                                    jump 20: not short yet
    ...         |<--- 12 --->|<-- slack 9 -->|                    short: tokens are checked

No token makes the way longer by more than ``jump``, which follows from the grammar.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoserve_adapters.grammar.closing import MAX_CUT
from nanoserve_adapters.grammar.json_quotes import QuoteState

if TYPE_CHECKING:
    from nanoserve_adapters.grammar.closing import Clues, Flags, Ids
    from nanoserve_adapters.grammar.vocabulary import Vocabulary
    from nanoserve_core.grammar import Bitmask

_RETRY_AFTER = 16
"""Tokens after which a way is looked for again when none was found."""
_MAX_CHECKED = 64  # all bytes that can continue a character are among them
"""Tokens that are checked one by one for a mask."""
_MAX_SEARCHES = 12
"""Of those, tokens for which a new way is looked for."""
_NUM_PROBES = 8
_MAX_OPENINGS = 6
"""Classes of tokens that open a string, for which a way is looked for."""


class Budget:
    """The way to the end of one sample, as far as it is known. One thread at a time."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        way: list[int] | None,
        *,
        clues: Clues,
        jump: int,
    ) -> None:
        """``way``: from the beginning; None when none was found."""
        self._vocabulary = vocabulary
        self._eos_token_id = vocabulary.eos_token_id
        self._search = vocabulary.closing
        self._clues = clues
        self._jump = jump
        self._quotes = QuoteState.OUTSIDE
        self._way = way
        self._cut_way: list[int] | None = None  # from before a cut character or escape
        self._ways: dict[int, list[int]] = {}  # after each checked token of the newest mask
        self._content_keeps_way = False
        self._num_free = 0  # tokens that may come before anything need be looked at

    def restrict(self, ll_matcher: Any, row: Bitmask, remaining: int) -> None:  # noqa: ANN401 - untyped
        """Take out of a mask what would leave no way that fits into ``remaining`` tokens.

        ``row``: as `GrammarMatcher.fill_bitmask` gives it, changed in place.
        """
        if self._num_free > 0:
            return
        self._way = self._current_way(ll_matcher)
        if not self._way:
            self._num_free = _RETRY_AFTER
            return
        slack = remaining - len(self._way)
        if slack > self._jump:
            self._num_free = slack // (self._jump + 1)
            return
        self._narrow(ll_matcher, row, self._way, slack)

    def _current_way(self, ll_matcher: Any) -> list[int] | None:  # noqa: ANN401 - untyped
        is_valid = partial(_is_valid, ll_matcher, self._eos_token_id)
        way = self._way
        if way is None and self._cut_way is not None:
            way = self._search.complete(ll_matcher, self._cut_way, is_valid)
        if not way or not is_valid(way):
            return self._search.find(ll_matcher, self._quotes, self._clues)
        while len(way) > 1 and is_valid(way[1:]):  # it need not fill up what has come by itself
            way = way[1:]
        return way

    def note(self, token_id: int) -> None:
        """The token that was sampled from the newest mask."""
        if token_id >= self._vocabulary.size:
            return
        self._cut_way = self._way if self._content_keeps_way else None
        if self._way is not None:
            self._way = self._way_after(token_id, self._way)
        self._quotes = self._quotes.after(self._vocabulary.token_bytes[token_id])
        self._num_free = max(0, self._num_free - 1)
        self._ways, self._content_keeps_way = {}, False

    def _way_after(self, token_id: int, way: list[int]) -> list[int] | None:
        if token_id in self._ways:
            return self._ways[token_id]
        if way and token_id == way[0]:
            return way[1:]
        keeps = self._content_keeps_way and self._vocabulary.is_content[token_id]
        return way if keeps else None

    def _narrow(self, ll_matcher: Any, row: Bitmask, way: list[int], slack: int) -> None:  # noqa: ANN401 - untyped
        size = min(self._vocabulary.size, 32 * len(row))
        allowed = np.unpackbits(row.view(np.uint8), count=size, bitorder="little").view(np.bool_)
        kept = np.zeros(32 * len(row), dtype=np.bool_)
        self._ways = {way[0]: way[1:]}
        if slack > 0:
            self._admit(ll_matcher, allowed, kept[:size], way, slack)
        kept[[token for token in self._ways if token < len(kept)]] = True
        row[:] = np.packbits(kept, bitorder="little").view(np.int32)

    def _admit(
        self,
        ll_matcher: Any,  # noqa: ANN401 - untyped
        allowed: Flags,
        kept: Flags,
        way: list[int],
        slack: int,
    ) -> None:
        """Tokens besides the way's own: text as a class, the others one by one."""
        vocabulary, rest, longest = self._vocabulary, allowed, len(way) + slack - 1
        is_content = allowed & vocabulary.is_content[: len(allowed)]
        content = is_content.nonzero()[0]
        if content.size > _MAX_CHECKED:
            is_valid = partial(_is_valid, ll_matcher, self._eos_token_id)
            if all(is_valid([token, *way]) for token in self._probes(content)):
                self._content_keeps_way = True
                kept |= is_content
                is_dangling = allowed & vocabulary.is_dangling[: len(allowed)]
                if slack > MAX_CUT:
                    kept |= is_dangling
                rest = allowed & ~is_content & ~is_dangling
        if rest.sum() > _MAX_CHECKED:
            rest = rest & ~self._admit_openings(ll_matcher, rest, longest)
        ranked = vocabulary.ranked[vocabulary.ranked < len(rest)]
        num_searches = 0
        for token in ranked[rest[ranked]][:_MAX_CHECKED].tolist():
            known = next(
                (
                    shorter
                    for shorter in (way, way[1:], way[2:])
                    if len(shorter) <= longest
                    and _is_valid(ll_matcher, self._eos_token_id, [token, *shorter])
                ),
                None,
            )
            if known is None and num_searches < _MAX_SEARCHES:
                num_searches += 1
                known = self._search_after(ll_matcher, token, longest)
            if known is not None:
                self._ways.setdefault(token, known)

    def _admit_openings(self, ll_matcher: Any, allowed: Flags, longest: int) -> Flags:  # noqa: ANN401 - untyped
        """Tokens that open a string and write into it, as classes by what stands up to the quote.

        Gives the members of the classes that were looked at, admitted or not.
        """
        openings = self._vocabulary.openings[: len(allowed)]
        is_member = allowed & (openings >= 0)
        seen = np.zeros(len(allowed), dtype=np.bool_)
        for opening in np.unique(openings[is_member])[:_MAX_OPENINGS].tolist():
            members = (is_member & (openings == opening)).nonzero()[0]
            seen[members] = True
            way = self._search_after(ll_matcher, int(members[0]), longest)
            if way is None:
                continue
            is_valid = partial(_is_valid, ll_matcher, self._eos_token_id)
            if all(is_valid([token, *way]) for token in self._probes(members)):
                self._ways.update(dict.fromkeys(members.tolist(), way))
        return seen

    def _probes(self, content: Ids) -> list[int]:
        """Some from everywhere, and the longest: where lengths are bounded they differ most."""
        spread = content[np.linspace(0, content.size - 1, _NUM_PROBES).astype(np.int64)]
        longest = content[self._vocabulary.lengths[content].argmax()]
        return [*spread.tolist(), int(longest)]

    def _search_after(self, ll_matcher: Any, token: int, longest: int) -> list[int] | None:  # noqa: ANN401 - untyped
        after = ll_matcher.deep_copy()
        if not after.consume_token(token):
            return None
        quotes = self._quotes.after(self._vocabulary.token_bytes[token])
        way = self._search.find(after, quotes, self._clues, limit=longest)
        return way if way is not None and len(way) <= longest else None


def _is_valid(ll_matcher: Any, eos_token_id: int, tokens: list[int]) -> bool:  # noqa: ANN401 - untyped
    """Whether the output may go on with ``tokens`` and end there."""
    if tokens[-1] != eos_token_id:
        tokens = [*tokens, eos_token_id]
    valid: bool = ll_matcher.validate_tokens(tokens) == len(tokens)
    return valid
