"""Rows of a batch are streamed apart, with and without the engine, and can be cancelled."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import Empty
from typing import TYPE_CHECKING

import pytest
import torch

import hf_generate_shim
from hf_generate_shim import GenerationCancelled, RowStreamer, TokenIdOutOfRange
from nanoserve_adapters.testing import leak_check, settle, tiny_tokenizer
from nanoserve_core.errors import RequestFailed
from tests.hf_generate_shim.calls import EOS, PAD, VOCAB_SIZE, batch, new_tokens, prompt, ragged

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle
    from hf_generate_shim.row_streamer import RowEvent

FEW = list(range(40))
CALL = {**ragged(), "max_new_tokens": 24, "eos_token_id": FEW, "pad_token_id": PAD}


def texts(events: Iterable[RowEvent]) -> dict[int, str]:
    """The text of each row."""
    rows: dict[int, str] = defaultdict(str)
    for row, piece in events:
        assert isinstance(piece, str)
        rows[row] += piece
    return dict(rows)


def without_pads(tokens: list[list[int]]) -> list[list[int]]:
    """The tokens up to the first of `FEW`."""
    ends = [next((i + 1 for i, t in enumerate(row) if t in FEW), len(row)) for row in tokens]
    return [row[:end] for row, end in zip(tokens, ends, strict=True)]


@pytest.mark.parametrize("is_installed", [True, False])
def test_rows_arrive_as_text_without_prompts_and_pads(
    model: Qwen3ForCausalLM, is_installed: bool
) -> None:
    tokenizer = tiny_tokenizer()
    if is_installed:
        hf_generate_shim.install(model, num_kvcache_blocks=64)
    streamer = RowStreamer(tokenizer, eos_token_id=FEW, timeout=20)

    with ThreadPoolExecutor(1) as executor:
        call = executor.submit(model.generate, **CALL, streamer=streamer)
        rows = texts(streamer)
    hf_generate_shim.uninstall(model)

    tokens = without_pads(new_tokens(call.result(), CALL))
    assert rows == {row: tokenizer.decode(ids) for row, ids in enumerate(tokens)}


def test_without_a_tokenizer_rows_arrive_as_ids(model: Qwen3ForCausalLM, handle: Handle) -> None:
    streamer = RowStreamer(timeout=20)

    output = model.generate(**CALL, streamer=streamer)

    rows: dict[int, list[int]] = defaultdict(list)
    for row, piece in streamer:
        rows[row] += piece
    assert [rows[row] for row in range(4)] == without_pads(new_tokens(output, CALL))
    assert handle.counters.fast == 1


def test_row_is_not_held_back_by_slower_ones() -> None:
    streamer = RowStreamer(tiny_tokenizer())

    streamer.put(torch.zeros(2, 3))
    streamer.put_rows([(1, list(b"fast"), False)])
    streamer.put_rows([(1, list(b"er"), True), (0, list(b"slow"), False)])
    streamer.put_rows([(1, list(b"never"), True)])
    streamer.end()

    assert list(streamer) == [(1, "fast"), (1, "er"), (0, "slow")]


def test_characters_are_whole_and_an_incomplete_one_comes_at_the_end() -> None:
    streamer = RowStreamer(tiny_tokenizer())
    first, second = "é".encode()

    streamer.put(torch.zeros(2, 3))
    streamer.put(torch.tensor([first, 97]))
    streamer.put(torch.tensor([second, first]))
    streamer.end()

    assert list(streamer) == [(1, "a"), (0, "é"), (1, "\ufffd")]


def test_reader_that_waits_too_long_is_told() -> None:
    with pytest.raises(Empty):
        next(iter(RowStreamer(timeout=0.01)))


def test_cancelled_streamer_ends_its_call_and_frees_its_blocks(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    streamer = RowStreamer(timeout=20)

    with ThreadPoolExecutor(1) as executor:
        call = executor.submit(model.generate, **ragged(), max_new_tokens=200, streamer=streamer)
        events = iter(streamer)
        next(events)
        streamer.cancel()
        error = call.exception(timeout=20)
    settle(handle.thread)
    handle.thread.call(leak_check)

    assert isinstance(error, GenerationCancelled)
    assert list(events)[-1] is not None
    assert handle.stats().finished_requests["abort"] == 4


def test_time_limit_cuts_all_rows_at_one_step(model: Qwen3ForCausalLM, handle: Handle) -> None:
    streamer = RowStreamer(timeout=20)

    output = model.generate(**ragged(), max_new_tokens=200, max_time=0.05, streamer=streamer)

    rows: dict[int, list[int]] = defaultdict(list)
    for row, piece in streamer:
        rows[row] += piece
    assert [rows[row] for row in range(4)] == new_tokens(output, ragged())
    assert handle.counters.fast == 1


def test_handle_streams_a_call_in_text(model: Qwen3ForCausalLM) -> None:
    tokenizer = tiny_tokenizer()
    expected = without_pads(new_tokens(model.generate(**CALL), CALL))

    with hf_generate_shim.installed(model, tokenizer, num_kvcache_blocks=64) as handle:
        rows = texts(handle.stream(**CALL))

    assert rows == {row: tokenizer.decode(ids) for row, ids in enumerate(expected)}


def test_closed_stream_of_a_handle_cancels_its_call(handle: Handle) -> None:
    stream = handle.stream(**ragged(), max_new_tokens=200, eos_token_id=EOS)
    first = next(stream)

    stream.close()  # type: ignore[attr-defined]  # a generator
    settle(handle.thread)

    assert first[0] in range(4)
    assert handle.stats().finished_requests["abort"] == 4


def test_error_of_a_streamed_call_is_raised_to_its_reader(handle: Handle) -> None:
    with pytest.raises(TokenIdOutOfRange):
        list(handle.stream(**batch([1, VOCAB_SIZE]), max_new_tokens=3))
    with pytest.raises(ValueError, match="temprature"):
        list(handle.stream(**batch(prompt(4)), temprature=3))

    assert handle.counters.fast == 0


def test_cancel_ends_all_running_calls_and_no_later_one(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    handle.cancel()
    streamers = [RowStreamer(timeout=20) for _ in range(3)]

    with ThreadPoolExecutor(3) as executor:
        calls = [
            executor.submit(model.generate, **batch(prompt(4 + i)), max_new_tokens=240, streamer=s)
            for i, s in enumerate(streamers)
        ]
        for streamer in streamers:
            next(iter(streamer))
        handle.cancel()
        errors = [call.exception(timeout=20) for call in calls]
    after = model.generate(**batch(prompt(5)), max_new_tokens=4)

    assert [type(error) for error in errors] == [RequestFailed] * 3
    assert after.shape == (1, 9)
