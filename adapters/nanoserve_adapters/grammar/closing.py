"""`ClosingSearch`: a short way from where a matcher stands to the end of its output.

Not the shortest, but near it, and found in some tenths of a millisecond: what is forced is taken,
what closes (quotes, brackets) is preferred, and only where neither helps (a pattern, a list of
values, a number) a small search tries representatives of what is allowed::

    {"name": "Al          ->   "   , "age":   0   }
                            closes   forced  searched  closes
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanoserve_adapters.grammar.json_quotes import QuoteState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nanoserve_adapters.grammar.vocabulary import Vocabulary

    IsEnd = Callable[[list[int]], bool]
    Ids = np.ndarray[Any, np.dtype[np.int64]]  # Any: the shape
    Flags = np.ndarray[Any, np.dtype[np.bool_]]  # Any: the shape

MAX_TOKENS = 4096
"""No way longer than this is looked for."""
MAX_CUT = 5
"""Tokens that complete a cut character or escape, at most."""
_MAX_NODES = 200
"""Of one search for the next closing token."""
_MAX_TRIED = 16
_MAX_ALL_TRIED = 24
"""Up to so many allowed tokens are all tried; of more, representatives."""
_NUM_KINDS = (1, 3)
"""Last characters by which two places of a search are told apart: few first, which is cheap."""
_CLOSING_STRING = re.compile(rb'"[\]}]*')
_CLOSING = re.compile(rb'(?:\[\]|\{\}|""|[\]}])+')
_FILLING = re.compile(rb"[A-Za-z ]+")
_VALUES = (b"null", b"true", b"false", b"0", b"1", b"n", b"t", b"f", b'"', b"-", b"{", b"[")
_EXAMPLES = (
    "a@a.aa",
    "http://a.aa",
    "https://a.aa",
    "2000-01-01",
    "2000-01-01T00:00:00Z",
    "00:00:00Z",
    "00000000-0000-0000-0000-000000000000",
    "0.0.0.0",
    "::",
    "P0D",
)
"""Of formats, whose ends complete what has been begun."""
_LETTERS = (b"5", b"9", b"2", b"a", b"A", b"-", b".", b"_", b" ", b":", b"/", b"@", b"z")


@dataclass(frozen=True)
class Clues:
    """What helps in one grammar."""

    letters: bytes = b""
    """Characters that its patterns ask for: closing tries them."""
    found: dict[bytes, list[int]] = field(default_factory=dict)
    """Ways out that were found, by what was allowed where they began."""


class _Node(NamedTuple):
    """A place that the search has reached; ordered by the number of tokens, then by age."""

    num_tokens: int
    number: int
    way: list[int]
    matcher: Any  # Any: untyped
    allowed: Flags
    quotes: QuoteState


class ClosingSearch:
    """What closing looks up of a vocabulary. Immutable after construction; any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = vocabulary.token_bytes
        usable = [token for token in range(vocabulary.size) if not vocabulary.is_special[token]]
        ids = {texts[token]: token for token in reversed(usable)}

        def matching(pattern: re.Pattern[bytes]) -> list[int]:
            found = [token for token in usable if pattern.fullmatch(texts[token])]
            return sorted(found, key=lambda token: (-len(texts[token]), token))

        def known(*wanted: bytes) -> list[int]:
            return [ids[text] for text in wanted if text in ids]

        self._texts = texts
        self._eos_token_id = vocabulary.eos_token_id
        self._size = vocabulary.size
        self._closing = {
            QuoteState.OUTSIDE: _array(matching(_CLOSING)),
            QuoteState.INSIDE: _array(matching(_CLOSING_STRING)),
            QuoteState.ESCAPED: _array([]),
        }
        self._fillers = _array([*matching(_FILLING)[:4], *known(b"a")])
        self._content = known(b"a", b"Z", b" ", b";", b"~")
        self._structure = known(b",", b":", b", ", b": ")
        self._bytes = {byte: ids[bytes([byte])] for byte in range(256) if bytes([byte]) in ids}
        self._single = _array(
            [*known(b"n", b"0"), *(token for token in usable if len(texts[token]) == 1)]
        )
        endings = {text[start:] for text in _EXAMPLES for start in range(len(text))}
        encoded = [vocabulary.encode(text) for text in endings]
        self._endings = sorted(encoded, key=lambda way: (len(way), way))
        self._tried = _array([*known(*_VALUES, *_LETTERS), *self._fillers])

    def find(
        self,
        ll_matcher: Any,  # noqa: ANN401 - untyped
        quotes: QuoteState,
        clues: Clues,
        *,
        limit: int = MAX_TOKENS,
    ) -> list[int] | None:
        """Tokens that end the output, the end-of-sequence id last where it takes one.

        None when at most ``limit`` tokens do not suffice, or no way was found. ``quotes``: those of
        the text so far. ``ll_matcher`` stays as it is.
        """
        matcher, way = ll_matcher.deep_copy(), list[int]()
        while len(way) <= limit and not matcher.is_error():
            if matcher.is_stopped():
                return way
            if matcher.is_accepting():
                return [*way, self._eos_token_id]
            step = matcher.compute_ff_tokens() or self._next(
                matcher, quotes, clues, limit - len(way)
            )
            if not step or not matcher.consume_tokens(step):
                return None
            way += step
            quotes = self._after(quotes, step)
        return None

    def complete(self, ll_matcher: Any, way: list[int], is_end: IsEnd) -> list[int] | None:  # noqa: ANN401 - untyped
        """``way``, after what completes a character or an escape that was cut; None: no such.

        ``is_end``: whether the output may go on with some tokens and end there.
        """
        matcher, first = ll_matcher.deep_copy(), list[int]()
        for _ in range(MAX_CUT):
            allowed = allowed_flags(matcher, self._size)
            single = self._single[allowed[self._single]]
            if not single.size or not matcher.consume_token(int(single[0])):
                return None
            first.append(int(single[0]))
            if is_end([*first, *way]):
                return [*first, *way]
        return None

    def _next(
        self,
        matcher: Any,  # noqa: ANN401 - untyped
        quotes: QuoteState,
        clues: Clues,
        limit: int,
    ) -> list[int]:
        """What closes or leads on; [] when nothing does."""
        allowed = allowed_flags(matcher, self._size)
        closing = self._closing[quotes]
        if (found := closing[allowed[closing]]).size:
            return [int(found[0])]
        if not clues.letters and self._is_content(allowed):
            return [int(self._fillers[allowed[self._fillers]][0])]
        if quotes is QuoteState.OUTSIDE:
            for token in self._structure:
                if allowed[token]:
                    return [token]
        return self._way_out(_Node(0, 0, [], matcher, allowed, quotes), clues, limit)

    def _way_out(self, start: _Node, clues: Clues, limit: int) -> list[int]:
        key = bytes([start.quotes]) + start.allowed.tobytes()
        known = clues.found.get(key)
        if known is not None and self._leads_out(start, known, clues.letters):
            return known
        way = self._ending(start, clues.letters)
        for num_kinds in _NUM_KINDS:
            way = way or self._search(start, clues.letters, num_kinds, limit)
        if way:
            clues.found[key] = way
            return way
        if self._is_content(start.allowed):  # a length that is far away
            return [int(self._fillers[start.allowed[self._fillers]][0])]
        return []

    def _ending(self, start: _Node, letters: bytes) -> list[int]:
        """The end of an example that completes a formatted string; [] when none does."""
        if start.quotes is not QuoteState.INSIDE:
            return []
        endings = (way for way in self._endings if start.allowed[way[0]])
        return next((way for way in endings if self._leads_out(start, way, letters)), [])

    def _leads_out(self, start: _Node, way: list[int], letters: bytes) -> bool:
        matcher = start.matcher.deep_copy()
        if matcher.validate_tokens(way) < len(way) or not matcher.consume_tokens(way):
            return False
        if matcher.is_stopped() or matcher.is_accepting():
            return True
        quotes = self._after(start.quotes, way)
        allowed = allowed_flags(matcher, self._size)
        return self._is_way_out(_Node(len(way), 0, way, matcher, allowed, quotes), letters)

    def _search(self, start: _Node, letters: bytes, num_kinds: int, limit: int) -> list[int]:
        """The fewest tokens after which the output ends, or something closes or is forced.

        States cannot be compared. Of the ways of one length that allow the same next tokens one is
        followed for each kind of last ``num_kinds`` characters.
        """
        heap, seen = [start], set[tuple[int, bytes, bytes]]()
        number = count(1)
        while heap and len(seen) < _MAX_NODES:
            node = heapq.heappop(heap)
            if node.num_tokens and self._is_way_out(node, letters):
                return node.way
            if node.num_tokens >= limit:
                continue
            for token in self._candidates(node.allowed, letters):
                matcher = node.matcher.deep_copy()
                if not matcher.consume_token(token):
                    continue
                way = [*node.way, token]
                if matcher.is_stopped() or matcher.is_accepting():
                    return way
                allowed = allowed_flags(matcher, self._size)
                tail = b"".join(self._texts[each] for each in way[-num_kinds:])[-num_kinds:]
                key = len(way), allowed.tobytes(), _kinds(tail, letters)
                if key not in seen:
                    seen.add(key)
                    quotes = self._after(node.quotes, [token])
                    child = _Node(len(way), next(number), way, matcher, allowed, quotes)
                    heapq.heappush(heap, child)
        return []

    def _is_way_out(self, node: _Node, letters: bytes) -> bool:
        allowed = node.allowed
        return (
            bool(allowed[self._closing[node.quotes]].any())
            or bool(node.matcher.compute_ff_tokens())
            or (not letters and self._is_content(allowed))
            or (node.quotes is QuoteState.OUTSIDE and bool(allowed[self._structure].any()))
        )

    def _is_content(self, allowed: Flags) -> bool:
        return bool(self._content) and bool(allowed[self._content].all())

    def _candidates(self, allowed: Flags, letters: bytes) -> list[int]:
        """What is tried, the shortest values first: of equal lengths the first wins."""
        wanted = [self._bytes[byte] for byte in letters if byte in self._bytes]
        known = [token for token in [*wanted, *self._tried.tolist()] if allowed[token]]
        ids = allowed.nonzero()[0]
        others = ids.tolist() if ids.size <= _MAX_ALL_TRIED else ids[:4].tolist()
        opens = [token for token in known if self._texts[token] in (b"{", b"[")]
        first = [token for token in known if token not in opens][:_MAX_TRIED]
        return list(dict.fromkeys([*first, *sorted(others, key=self._opens), *opens]))

    def _opens(self, token: int) -> bool:
        return bool({b"{"[0], b"["[0]} & set(self._texts[token]))

    def _after(self, quotes: QuoteState, tokens: list[int]) -> QuoteState:
        for token in tokens:
            quotes = quotes.after(self._texts[token]) if token < self._size else quotes
        return quotes


def allowed_flags(matcher: Any, size: int) -> Flags:  # noqa: ANN401 - untyped
    """[size] bool: which tokens may come next."""
    packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)


def _kinds(text: bytes, letters: bytes) -> bytes:
    """``text`` with one digit for all digits and one letter for all that are not ``letters``."""
    return bytes(
        byte if byte in letters or not bytes([byte]).isalnum() else b"0a"[bytes([byte]).isalpha()]
        for byte in text
    )


def _array(tokens: Sequence[int]) -> Ids:
    return np.array(tokens, dtype=np.int64)
