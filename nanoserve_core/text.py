"""Token ids to text, piece by piece: characters are never split, stop strings never leak.

A token is bytes, not characters. A character may need several tokens, a stop string may begin in
one token and end in the middle of another, and text that could still become a stop string is held
back until that is decided. The pieces that come out always concatenate to the final text, whatever
the sizes of the pieces that went in.

This file knows tokenizers and strings; it knows no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from nanoserve_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nanoserve_core.request import StepOutput
    from nanoserve_core.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """The part of a HuggingFace tokenizer that nanoserve uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``."""
        ...

    def decode(
        self,
        token_ids: Any,  # noqa: ANN401 - HuggingFace accepts one id or a list of them
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Text of the ids; bytes that are no character come out as U+FFFD."""
        ...


class IncrementalDecoder:
    """Decodes a growing list of ids; `push` returns the text that is certain.

    ::

        ids      [ ...already emitted... | context | new ...          ]
                                         0         num_context

    The window is decoded with and without the new ids and the difference is the new text, so that
    tokenizers whose decoding depends on the left neighbour (leading spaces) are right too; a
    byte-level one needs no context. Text that ends in U+FFFD may be half a character and waits.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._needs_context = not _is_byte_level(tokenizer)
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids, return the text they complete ("" while a character is incomplete)."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._context_text):
            return ""
        return self._accept(text)

    def finish(self) -> str:
        """The rest: an incomplete character comes out as U+FFFD."""
        return self._accept(self._decode(self._window))

    def _accept(self, text: str) -> str:
        new = text[len(self._context_text) :]
        self._window = self._window[self._num_context :] if self._needs_context else []
        self._num_context = len(self._window)
        self._context_text = self._decode(self._window)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """True for tokenizers (Qwen's among them) whose tokens are bytes whatever stands before."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"


class StopStrings:
    """Cuts text at the first stop string to be completed; ``stopped`` names it.

    Where several are completed at the same character the longest counts. The outcome does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if "" in stops:
            raise ConfigError(
                "stop contains an empty string, which would end every text at once. Remove it."
            )
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Add text, return what can no longer become part of a stop string; "" once stopped."""
        if self.stopped is not None:
            return ""
        self._held += text
        match = self._first_completed()
        if match is not None:
            start, self.stopped = match
            emitted = self._held[: start + (len(self.stopped) if self._include else 0)]
            self._held = ""
            return emitted
        keep = self._undecided_length()
        emitted, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return emitted

    def finish(self) -> str:
        """Release what was held back: no more text will come."""
        emitted, self._held = self._held, ""
        return emitted

    def _first_completed(self) -> tuple[int, str] | None:
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _undecided_length(self) -> int:
        longest = min(len(self._held), len(self._stops[0]) - 1) if self._stops else 0
        for length in range(longest, 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class TextStream:
    """Text of one sample: incremental decoding and stop strings together.

    The first ``sampling.min_tokens`` tokens are not searched for stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._decoder = IncrementalDecoder(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens
        )
        self._stops = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
        self._has_stops = bool(sampling.stop)
        self._num_unsearched = sampling.min_tokens
        self._include_stop_token = sampling.include_stop_str_in_output

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids, return the text that is certain. With stop strings each id is searched on its
        own, in order.
        """
        if not self._has_stops:
            return self._decoder.push(token_ids)
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def feed(self, output: StepOutput) -> str:
        """Add what the engine delivered, return the new text; the last output of a sample releases
        all text.

        The token that stopped the sample (end of sequence or stop id) is not part of the text.
        """
        token_ids = output.token_ids
        if output.ends_with_stop_token and not self._include_stop_token:
            token_ids = token_ids[:-1]
        text = self.push(token_ids)
        return text if output.finish_reason is None else text + self.finish()

    def finish(self) -> str:
        """Release what was held back: no more tokens will come."""
        if self.stopped is not None:
            return ""
        return self._stops.push(self._decoder.finish()) + self._stops.finish()

    def _push_one(self, token_id: int) -> str:
        if self.stopped is not None:
            return ""
        text = self._decoder.push((token_id,))
        if self._num_unsearched > 0:
            self._num_unsearched -= 1
            return text
        return self._stops.push(text)


class TextStop:
    """A `StopCheck` for `Request.should_stop`: ends a sample with the token that completes one of
    its stop strings.

    Holds one `TextStream` per sample; called on the engine's thread.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._new_stream: Callable[[], TextStream] = lambda: TextStream(tokenizer, sampling)
        self._streams: dict[int, TextStream] = {}
        self._num_seen: dict[int, int] = {}

    def __call__(self, index: int, token_ids: list[int]) -> bool:
        """True when the text of sample ``index`` now contains a stop string."""
        stream = self._streams.setdefault(index, self._new_stream())
        stream.push(token_ids[self._num_seen.get(index, 0) :])
        self._num_seen[index] = len(token_ids)
        return stream.stopped is not None


def bad_words_to_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the words, each as written and with one leading space, as it appears
    inside a sentence.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip(" ")):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if token_ids:
                found.setdefault(token_ids)
    return tuple(found)
