"""`StopStrings`: transformers' `StopStringCriteria`, answered from the text of the last few tokens.

transformers prepares a table over the whole vocabulary for each new set of strings: more than a
second for 150,000 tokens. Here a token's text is looked up when the token is first met, so that
nothing depends on the size of the vocabulary.

A row ends with the token whose text holds the last byte of a stop string. The string may begin in
any earlier token, in the prompt too; one that ended before the newest token does not count.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import torch
from transformers.generation.stopping_criteria import StoppingCriteria, StopStringCriteria

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hf_generate_shim.call import HFObject

_ANCHOR = "abcdef"
"""Text before a token that is decoded: some decoders treat the first token of a text apart."""


class TokenTexts:
    """The bytes that each token stands for, looked up once. Any thread."""

    def __init__(self, tokenizer: HFObject) -> None:
        self._tokenizer = tokenizer
        self._decoders = set(_decoder_types(tokenizer))
        self._has_byte_tokens = "ByteLevel" in self._decoders
        self._known: dict[int, bytes | None] = {}

    def __getitem__(self, token_id: int) -> bytes | None:
        """The token's text in UTF-8, maybe cut within a character; None outside the vocabulary."""
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id)
        return self._known[token_id]

    def has_last_of(self, text: str) -> bool:
        """Whether the last byte (without byte tokens: the last character) is a token itself."""
        last = text.encode()[-1:] if self._has_byte_tokens else text[-1].encode()
        token = _char_of_byte()[last[0]] if self._has_byte_tokens else text[-1]
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        return token_id is not None and self[token_id] == last

    def _look_up(self, token_id: int) -> bytes | None:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return None
        if "ByteFallback" in self._decoders:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes.fromhex(token[3:5])
        elif self._has_byte_tokens and _byte_of_char().keys() >= set(token):
            return bytes(_byte_of_char()[char] for char in token)
        return self._decoded(token)

    def _decoded(self, token: str) -> bytes:
        anchor = self._tokenizer(_ANCHOR, add_special_tokens=False)["input_ids"]
        tokens = [*self._tokenizer.convert_ids_to_tokens(anchor), token]
        text: str = self._tokenizer.convert_tokens_to_string(tokens)
        return text[text.index(_ANCHOR) + len(_ANCHOR) :].encode()


class StopStrings(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """The stop strings of one call, for a row in the engine (`is_completed_by`) and, as a criterion
    of transformers, for a batch. Any thread.

    ``tokenizer``: a HuggingFace tokenizer. ``strings``: at least one, none empty.
    """

    def __init__(self, tokenizer: HFObject, strings: Sequence[str]) -> None:
        self.stop_strings = tuple(strings)
        self._texts = TokenTexts(tokenizer)
        self._stops = [string.encode() for string in strings]
        self._last_bytes = {stop[-1] for stop in self._stops}
        self._may_end: dict[int, bool] = {}
        self._reach = max(map(len, self._stops)) - 1

    @property
    def num_tokens(self) -> int:
        """The most tokens whose text can matter: one per byte of the longest string."""
        return self._reach + 1

    @property
    def can_be_completed(self) -> bool:
        """True when some token surely ends one of the strings."""
        return any(self._texts.has_last_of(string) for string in self.stop_strings)

    def is_completed_by(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of ``token_ids`` completes a stop string; they are the newest tokens of
        a row, `num_tokens` of them or all there are.
        """
        if not self._may_end_with(token_ids[-1]):
            return False
        newest = self._texts[token_ids[-1]] or b""
        before = self._before(token_ids)
        return any(
            stop in before[max(0, len(before) - len(stop) + 1) :] + newest for stop in self._stops
        )

    def after(self, prompt: Sequence[int]) -> Callable[[int, list[int]], bool]:
        """A `StopCheck` for the requests of one prompt."""
        tail = list(prompt[-self.num_tokens :])

        def should_stop(index: int, output_token_ids: list[int]) -> bool:
            del index
            if not self._may_end_with(output_token_ids[-1]):
                return False
            newest = output_token_ids[-self.num_tokens :]
            return self.is_completed_by(
                newest if len(newest) == self.num_tokens else (tail + newest)[-self.num_tokens :]
            )

        return should_stop

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """[num_rows] bool on the device of ``input_ids`` [num_rows, length]."""
        del scores, kwargs
        rows = input_ids[:, -self.num_tokens :].tolist()
        done = [self.is_completed_by(row) for row in rows]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)

    def _may_end_with(self, token_id: int) -> bool:
        """Whether the token holds the last byte of a string; most tokens do not."""
        may_end = self._may_end.get(token_id)
        if may_end is None:
            text = self._texts[token_id] or b""
            may_end = self._may_end[token_id] = not self._last_bytes.isdisjoint(text)
        return may_end

    def _before(self, token_ids: Sequence[int]) -> bytes:
        """The text before the newest token as far as it can matter."""
        before = b""
        for token_id in reversed(token_ids[:-1]):
            text = self._texts[token_id]
            if text is None or len(before) >= self._reach:
                break
            before = text + before
        return before


def light_criteria(
    original: Callable[..., HFObject],
    generation_config: HFObject,
    stopping_criteria: HFObject,
    tokenizer: HFObject,
) -> HFObject:
    """What transformers' ``original`` `_get_stopping_criteria` returns, with `StopStrings` in place
    of a `StopStringCriteria` that it would build.

    ``generation_config`` is the merged one of a call, which nobody else holds. What transformers
    would refuse, or would let the user's own criterion replace, is left to it.
    """
    given = generation_config.stop_strings
    strings = _stop_strings(given, tokenizer)
    is_replaced = any(type(own) is StopStringCriteria for own in stopping_criteria or ())
    if strings is None or is_replaced:
        return original(generation_config, stopping_criteria, tokenizer=tokenizer)
    generation_config.stop_strings = None
    try:
        criteria = original(generation_config, stopping_criteria, tokenizer=tokenizer)
    finally:
        generation_config.stop_strings = given
    criteria.append(strings)
    return criteria


def _stop_strings(given: HFObject, tokenizer: HFObject) -> StopStrings | None:
    strings = [given] if isinstance(given, str) else given
    if not strings or not all(strings) or tokenizer is None:
        return None
    criterion = StopStrings(tokenizer, strings)
    return criterion if criterion.can_be_completed else None


def _decoder_types(tokenizer: HFObject) -> Iterator[str]:
    """The types of a fast tokenizer's decoder and of those inside it."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return
    todo = [json.loads(decoder.__getstate__())]
    while todo:
        state = todo.pop()
        yield state["type"]
        todo += state.get("decoders", ())


@cache
def _char_of_byte() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2, src/encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(256 + number) for number, byte in enumerate(others)}
    return {**{byte: chr(byte) for byte in printable}, **stand_ins}


@cache
def _byte_of_char() -> dict[str, int]:
    return {char: byte for byte, char in _char_of_byte().items()}
