"""`PromptEncoder`: prompts to ids, each long common beginning only once.

A chain's system prompt and an agent's history come again with every call. Tokenising 2,500 tokens
takes 3 ms, in which an event loop does nothing else: 64 calls at a time would hold it for 200 ms.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from langchain_llm.prompt import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_PIECE = 512
"""Characters from which on a piece is worth remembering."""
MAX_CHARACTERS = 2_000_000
"""Of all remembered pieces together; their ids take about ten bytes a character."""

# What might join over the end of a turn if the tokenizer did not cut there: spaces, newlines,
# letters, and marks that combine with the letter before them.
_PROBES = ("a", " a ", "\n", "\n\n  b", "e\u0301", "\u0301x", "日本", "\u200d\U0001f642", "1 2")


class PromptEncoder:
    """Ids of rendered conversations, equal to ``tokenizer.encode(text, add_special_tokens=False)``.

    Tokenizers of Qwen's kind cut the text at the token that ends a turn before anything else, so
    the parts can be encoded one by one. Where a trial shows that this one does not, texts are
    encoded whole. Any thread.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._turn = re.compile(f".*?{re.escape(end)}", re.S) if (end := _cut(tokenizer)) else None
        self._lock = threading.Lock()
        self._pieces: OrderedDict[str, list[int]] = OrderedDict()
        self._num_characters = 0

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens are those that it writes itself."""
        *pieces, rest = self._split(text)
        token_ids: list[int] = []
        for piece in pieces:
            token_ids += self._remembered(piece)
        return token_ids + encode_text(self._tokenizer, rest, special=False)

    def _split(self, text: str) -> list[str]:
        """Pieces of whole turns, `MIN_PIECE` characters or more, and what is left. A conversation
        that goes on keeps the pieces it had.
        """
        if self._turn is None or len(text) < MIN_PIECE:
            return [text]
        pieces, start = [], 0
        for turn in self._turn.finditer(text):
            if turn.end() - start >= MIN_PIECE:
                pieces.append(text[start : turn.end()])
                start = turn.end()
        return [*pieces, text[start:]]

    def _remembered(self, piece: str) -> list[int]:
        with self._lock:
            found = self._pieces.get(piece)
            if found is not None:
                self._pieces.move_to_end(piece)
                return found
        token_ids = encode_text(self._tokenizer, piece, special=False)
        with self._lock:
            if self._pieces.setdefault(piece, token_ids) is token_ids:
                self._num_characters += len(piece)
            while self._num_characters > MAX_CHARACTERS:
                self._num_characters -= len(self._pieces.popitem(last=False)[0])
        return token_ids


def _cut(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The token at whose end texts can be cut, or None."""
    end = tokenizer.eos_token
    if not end or not getattr(tokenizer, "is_fast", False):
        return None
    parts = [f"{before}{end}" for before in _PROBES]
    for after in _PROBES:
        whole = encode_text(tokenizer, "".join([*parts, after]), special=False)
        cut = [encode_text(tokenizer, part, special=False) for part in (*parts, after)]
        if whole != [token_id for part in cut for token_id in part]:
            return None
    return str(end)
