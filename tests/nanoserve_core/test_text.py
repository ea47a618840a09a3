"""Text paths against plain strings and bytes: what comes out in pieces must equal what the whole
would give.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve_adapters.testing import tiny_tokenizer
from nanoserve_core import SamplingParams
from nanoserve_core.errors import ConfigError
from nanoserve_core.request import FinishReason, StepOutput
from nanoserve_core.text import (
    IncrementalDecoder,
    StopStrings,
    TextStop,
    TextStream,
    bad_words_to_ids,
)


class ByteTokenizer:
    """256 byte tokens and a special token 256: the hardest case for characters that span tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002  # protocol
        return list(text.encode())

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = False,  # protocol
        clean_up_tokenization_spaces: bool | None = None,  # noqa: ARG002  # protocol
    ) -> str:
        parts: list[str] = []
        run: list[int] = []
        for token_id in [*token_ids, 256]:
            if token_id < 256:
                run.append(token_id)
                continue
            parts.append(bytes(run).decode(errors="replace"))
            parts.append("" if skip_special_tokens else "<end>")
            run = []
        return "".join(parts[:-1])


class WordTokenizer(ByteTokenizer):
    """Ids index a list of pieces, so that a test can say where token borders lie."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = False,  # noqa: ARG002  # protocol
        clean_up_tokenization_spaces: bool | None = None,  # noqa: ARG002  # protocol
    ) -> str:
        return "".join(self.pieces[token_id] for token_id in token_ids)


def _cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(borders)]


@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_pieces_concatenate_to_the_text_for_every_cut(text: str, cuts: list[int]) -> None:
    decoder = IncrementalDecoder(ByteTokenizer())

    pieces = [decoder.push(part) for part in _cut(list(text.encode()), cuts)]

    assert "".join(pieces) + decoder.finish() == text


@given(data=st.binary(max_size=24))
def test_invalid_bytes_come_out_as_the_tokenizer_decodes_them(data: bytes) -> None:
    decoder = IncrementalDecoder(ByteTokenizer())

    text = "".join(decoder.push([byte]) for byte in data) + decoder.finish()

    assert text == data.decode(errors="replace")


class Spaced(ByteTokenizer):
    """Words joined by spaces that the first word of a text lacks, as SentencePiece decodes."""

    def decode(self, token_ids: list[int], **_options: object) -> str:  # type: ignore[override]  # options are not read
        return " ".join(f"w{token_id}" for token_id in token_ids)


def test_a_decoding_that_depends_on_the_left_neighbour_is_right() -> None:
    decoder = IncrementalDecoder(Spaced())

    assert [decoder.push([i]) for i in range(4)] == ["w0", " w1", " w2", " w3"]


@given(text=st.text(max_size=12))
def test_a_byte_level_tokenizer_gives_the_whole_text_token_by_token(text: str) -> None:
    tokenizer = tiny_tokenizer()
    decoder = IncrementalDecoder(tokenizer)

    pieces = [decoder.push([token_id]) for token_id in tokenizer.encode(text)]

    assert "".join(pieces) + decoder.finish() == text


def test_a_character_of_four_bytes_is_never_split() -> None:
    decoder = IncrementalDecoder(ByteTokenizer())

    pieces = [decoder.push([byte]) for byte in "a🙂b".encode()]

    assert pieces == ["a", "", "", "", "🙂", "b"]


def test_special_tokens_are_skipped_only_when_asked() -> None:
    skipping = IncrementalDecoder(ByteTokenizer())
    keeping = IncrementalDecoder(ByteTokenizer(), skip_special_tokens=False)

    assert skipping.push([104, 105, 256]) == "hi"
    assert keeping.push([104, 105, 256]) == "hi<end>"


def test_text_that_may_become_a_stop_string_is_held_back_and_dropped() -> None:
    stops = StopStrings(["DEFGH"])

    pieces = [stops.push(piece) for piece in ("D", "EF", "G", "H")]

    assert pieces == ["", "", "", ""]
    assert stops.finish() == ""
    assert stops.stopped == "DEFGH"


def test_held_back_text_comes_out_once_it_is_decided() -> None:
    stops = StopStrings(["DEFGH"])

    pieces = [stops.push(piece) for piece in ("D", "EF", "X")]

    assert pieces == ["", "", "DEFX"]
    assert stops.stopped is None


def test_text_after_a_stop_string_never_comes_out() -> None:
    stops = StopStrings(["END"])

    assert stops.push("one END two") == "one "
    assert stops.push(" three") == ""


def test_the_stop_string_is_kept_when_asked() -> None:
    assert StopStrings(["END"], include=True).push("one END two") == "one END"


def _first_stop(text: str, stops: list[str]) -> str:
    """By definition: the shortest prefix of the text that ends in a stop string, without the
    longest such stop.
    """
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - len(max(matching, key=len))]
    return text


@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 50), max_size=10),
)
def test_the_cut_is_the_same_for_every_size_of_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopStrings(stops)
    borders = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})

    pieces = [matcher.push(text[a:b]) for a, b in itertools.pairwise(borders)]

    assert "".join(pieces) + matcher.finish() == _first_stop(text, stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty string"):
        StopStrings(["x", ""])


def test_a_stream_stops_in_the_middle_of_a_token() -> None:
    stream = TextStream(
        WordTokenizer("on", "e EN", "D two", "three"), SamplingParams(stop=("END",))
    )

    assert [stream.push([0, 1]), stream.push([2]), stream.push([3])] == ["one ", "", ""]
    assert stream.stopped == "END"


def test_stop_strings_are_not_searched_in_the_first_min_tokens() -> None:
    stream = TextStream(WordTokenizer("x", "y"), SamplingParams(stop=("x",), min_tokens=2))

    assert stream.push([0, 0, 1, 0, 1]) == "xxy"
    assert stream.stopped == "x"


def test_the_token_that_ended_the_sample_is_not_text() -> None:
    stream = TextStream(WordTokenizer("yes", "."), SamplingParams())
    last = StepOutput(
        request_id="r",
        token_ids=(0, 1),
        finish_reason=FinishReason.STOP,
        ends_with_stop_token=True,
        request_finished=True,
    )

    assert stream.feed(last) == "yes"


def test_the_last_output_releases_held_back_text() -> None:
    stream = TextStream(WordTokenizer("alpha ", "gam"), SamplingParams(stop=("gamma!",)))
    first = StepOutput(request_id="r", token_ids=(0, 1))
    last = StepOutput(request_id="r", finish_reason=FinishReason.LENGTH, request_finished=True)

    assert [stream.feed(first), stream.feed(last)] == ["alpha ", "gam"]


def test_each_sample_has_its_own_stop_state() -> None:
    stop = TextStop(WordTokenizer("a", "b"), SamplingParams(stop=("ab",), n=2))

    assert not stop(0, [0])
    assert not stop(1, [1])
    assert stop(0, [0, 1])
    assert not stop(1, [1, 1])


def test_bad_words_are_encoded_with_and_without_a_leading_space() -> None:
    assert bad_words_to_ids(ByteTokenizer(), ["hi"]) == ((104, 105), (32, 104, 105))
