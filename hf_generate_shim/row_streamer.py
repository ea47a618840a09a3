"""`RowStreamer`: the text of every row of a batch while it is generated.

    streamer = RowStreamer(tokenizer)
    thread = Thread(target=model.generate, kwargs={**inputs, "streamer": streamer})
    thread.start()
    for row, text in streamer:
        print(row, text)

transformers' own text streamers take one row. This one works with its loop too; served by the
engine, a row is not held back by slower ones.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from transformers.generation.streamers import BaseStreamer

from hf_generate_shim.errors import GenerationCancelled
from nanoserve_core.text import IncrementalDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from hf_generate_shim.call import HFObject

RowEvent: TypeAlias = "tuple[int, str | list[int]]"
"""A row of the output and its new text, never half a character; or its new token ids."""


class RowStreamer(BaseStreamer):  # type: ignore[misc]  # transformers has no types
    """A streamer for any number of rows. One thread generates, another iterates.

    ``tokenizer`` None: events hold token ids instead of text. ``eos_token_id``: an id or several;
    transformers' loop puts pads after them, which are left out. Default: the tokenizer's. The
    engine says itself when a row ends. ``timeout``: seconds that the iterator waits for news before
    it raises `queue.Empty`.
    """

    def __init__(
        self,
        tokenizer: HFObject = None,
        *,
        eos_token_id: int | Iterable[int] | None = None,
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = _ids(
            getattr(tokenizer, "eos_token_id", None) if eos_token_id is None else eos_token_id
        )
        self._skip_special_tokens = skip_special_tokens
        self._timeout = timeout
        self._events: SimpleQueue[RowEvent | None] = SimpleQueue()
        self._decoders: list[IncrementalDecoder | None] = []
        self._ended: set[int] = set()
        self._has_prompt = False
        self._is_cancelled = False

    def put(self, value: torch.Tensor) -> None:
        """transformers' protocol: first the prompts, [num_rows, width], which are left out; then
        one id per row, [num_rows], for every step. Raises `GenerationCancelled` after `cancel`.
        """
        self._require_reader()
        if not self._has_prompt:
            self._has_prompt = True
            return
        for row, token_id in enumerate(value.flatten().tolist()):
            is_last = token_id in self._eos_token_ids
            self._put_row(row, [token_id], is_last=is_last)

    def put_rows(self, news: Iterable[tuple[int, Sequence[int], bool]]) -> None:
        """For the engine: (row, its new ids, whether they are its last). Raises as `put` does."""
        self._require_reader()
        for row, token_ids, is_last in news:
            self._put_row(row, token_ids, is_last=is_last)

    def end(self) -> None:
        """No more is coming, be it that all rows are complete or that the call has failed."""
        for row in range(len(self._decoders)):
            self._put_row(row, [], is_last=True)
        self._events.put(None)

    def cancel(self) -> None:
        """End the call that feeds this streamer: the next `put` raises there. Any thread."""
        self._is_cancelled = True

    def __iter__(self) -> Iterator[RowEvent]:
        """Events as they come, until `end`. To be used once."""
        while (event := self._events.get(timeout=self._timeout)) is not None:
            yield event

    def _put_row(self, row: int, token_ids: Sequence[int], *, is_last: bool) -> None:
        if row in self._ended:
            return
        if is_last:
            self._ended.add(row)
        piece = self._piece(row, token_ids, is_last=is_last)
        if piece:
            self._events.put((row, piece))

    def _piece(self, row: int, token_ids: Sequence[int], *, is_last: bool) -> str | list[int]:
        decoder = self._decoder(row)
        if decoder is None:
            return list(token_ids)
        text = decoder.push(token_ids) if token_ids else ""
        return text + decoder.finish() if is_last else text

    def _decoder(self, row: int) -> IncrementalDecoder | None:
        while len(self._decoders) <= row:
            self._decoders.append(
                None
                if self._tokenizer is None
                else IncrementalDecoder(
                    self._tokenizer, skip_special_tokens=self._skip_special_tokens
                )
            )
        return self._decoders[row]

    def _require_reader(self) -> None:
        if self._is_cancelled:
            raise GenerationCancelled(
                "the reader of this call's streamer has cancelled it: expected it to read to the "
                "end. Call generate again."
            )


def stream_rows(
    generate: Callable[..., object], streamer: RowStreamer, arguments: Mapping[str, HFObject]
) -> Iterator[RowEvent]:
    """The events of one call of ``generate``, which runs in a thread of its own.

    An error of the call is raised here, after the events before it. Closing the iterator cancels
    the call and waits for its end.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="stream_rows") as executor:
        call = executor.submit(generate, **arguments, streamer=streamer)
        call.add_done_callback(lambda _: streamer.end())  # also when it failed before its first put
        try:
            yield from streamer
        finally:
            streamer.cancel()
        call.result()


def _ids(given: int | Iterable[int] | None) -> frozenset[int]:
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else given)
