"""`Vocabulary`: a tokenizer as llguidance needs it, with what closing and triggers look up.

Made once per tokenizer (0.1 s at 4,096 tokens, some seconds at 151,936) and kept as long as it.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from nanoserve_adapters.grammar.closing import ClosingSearch
from nanoserve_core.errors import UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

    from nanoserve_adapters.grammar.closing import Flags, Ids

_made: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()  # Any: a tokenizer
_lock = threading.Lock()
_CONTENT = re.compile(rb'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})+')
_OPENING = re.compile(rb'([^"\\]*")([^"\\\x00-\x1f]+)', re.DOTALL)
_LOOSE_CONTENT = re.compile(rb'(?:[^"\x00-\x1f]|\\")+')


class Vocabulary:
    """The tokens of one tokenizer. Immutable; any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises `UnsupportedOption` without llguidance, or for a tokenizer that it cannot read."""
        from transformers import PreTrainedTokenizerFast

        backend = import_backend()
        if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.eos_token_id is None:
            raise UnsupportedOption(
                f"a grammar was asked for with tokenizer {type(tokenizer).__name__}: expected a "
                "fast tokenizer (PreTrainedTokenizerFast) with an eos_token. Load it as such."
            )
        self.ll = backend.hf.from_tokenizer(tokenizer)
        self.eos_token_id = int(tokenizer.eos_token_id)
        self.marks: dict[str, int] = dict(tokenizer.get_added_vocab())
        self.size: int = self.ll.vocab_size

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
        """The vocabulary of ``tokenizer``, made at the first call."""
        with _lock:
            found = _made.get(tokenizer)
            if found is None:
                found = _made[tokenizer] = cls(tokenizer)
            return found

    def has_token(self, mark: str) -> bool:
        """Whether ``mark`` is one added token."""
        return mark in self.marks

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``; marks are read as their tokens."""
        tokens: list[int] = self.ll.tokenize_str(text, parse_special=True)
        return tokens

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes; b"" for an id that the tokenizer does not know."""
        found: bytes = self.ll.decode_bytes([token_id]) if token_id < self.size else b""
        return found

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Each token's bytes; of special tokens, their name."""
        return [self.ll.decode_bytes([token]) for token in range(self.size)]

    @cached_property
    def is_content(self) -> Flags:
        """[size]: whether a token is text inside a JSON string, whole characters and escapes."""
        return self._flags(lambda text: bool(_CONTENT.fullmatch(text)) and _is_text(text))

    @cached_property
    def is_dangling(self) -> Flags:
        """[size]: such text, but its first or last character or escape is cut."""
        return self._flags(
            lambda text: (
                bool(_LOOSE_CONTENT.fullmatch(text))
                and not (_CONTENT.fullmatch(text) and _is_text(text))
            )
        )

    @cached_property
    def openings(self) -> Ids:
        """[size]: a number for each text up to a quote, of tokens that go on with content; or -1.

        The texts that most tokens share have the smallest numbers.
        """
        found = [_OPENING.fullmatch(text) for text in self.token_bytes]
        heads = [match[1] if match and _is_text(match[2]) else None for match in found]
        common = [head for head, _ in Counter(filter(None, heads)).most_common()]
        numbers = {head: number for number, head in enumerate(common)}
        return np.array([numbers.get(head, -1) if head else -1 for head in heads], dtype=np.int64)

    @cached_property
    def lengths(self) -> Ids:
        """[size]: bytes of each token."""
        return np.array([len(text) for text in self.token_bytes], dtype=np.int64)

    @cached_property
    def ranked(self) -> Ids:
        """All ids, those with quotes first, then by length."""
        texts = self.token_bytes
        order = sorted(range(self.size), key=lambda t: (b'"' not in texts[t], len(texts[t]), t))
        return np.array(order, dtype=np.int64)

    @cached_property
    def closing(self) -> ClosingSearch:
        """The search for ways to the end."""
        return ClosingSearch(self)

    def _flags(self, holds: Callable[[bytes], bool]) -> Flags:
        flags = [holds(text) for text in self.token_bytes]
        return np.array(flags, dtype=np.bool_) & ~self.is_special

    @cached_property
    def is_special(self) -> Flags:
        """[size]: whether a token stands for no text."""
        special = [self.ll.is_special_token(token) for token in range(self.size)]
        return np.array(special, dtype=np.bool_)


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def import_backend() -> Any:  # noqa: ANN401 - an untyped module
    """llguidance; raises `UnsupportedOption` that says what to install."""
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise UnsupportedOption(
            "a grammar was asked for, but llguidance is not installed: expected it. "
            "Run `pip install nanoserve[structured]`."
        ) from error
    return llguidance
