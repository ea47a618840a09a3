"""Streamers see what transformers shows them, are ended whatever happens, and can cancel."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.generation import logits_process as hf

import hf_generate_shim
from nanoserve_adapters.testing import leak_check, settle, tiny_tokenizer
from nanoserve_core import hookimpl
from nanoserve_core.errors import RequestFailed
from tests.hf_generate_shim.calls import EOS, Options, batch, new_tokens, prompt, ragged

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle
    from nanoserve_core.hookspecs import StepStats
    from nanoserve_core.request import Request

FEW = list(range(40))


class Recorder:
    """A streamer that keeps what it is given, and with ``fail_at`` raises at that token."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.puts: list[torch.Tensor] = []
        self.threads: set[threading.Thread] = set()
        self.num_ends = 0
        self._fail_at = fail_at

    def put(self, value: torch.Tensor) -> None:
        """Record; the first is the prompt."""
        self.threads.add(threading.current_thread())
        self.puts.append(value)
        if len(self.puts) - 1 == self._fail_at:
            raise ConsumerGone

    def end(self) -> None:
        """Count."""
        self.num_ends += 1


class ConsumerGone(Exception):
    """The reader of a stream went away."""


class RaiseAtSecondToken(hf.LogitsProcessor):
    """A user's processor, and with `nanoserve_request_processor` a plugin's."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._length = num_prompt_tokens + 1

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Raise at the second token."""
        if input_ids.shape[1] >= self._length:
            raise ZeroDivisionError("no second token today")
        return scores


class BrokenPlugin:
    """Gives requests of a prompt with seven tokens the processor above."""

    @hookimpl
    def nanoserve_request_processor(
        self, request: Request
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """One processor per request."""
        return RaiseAtSecondToken(7) if len(request.prompt_token_ids) == 7 else None


@pytest.mark.parametrize(
    "options",
    [
        {**batch(prompt(6)), "max_new_tokens": 9},
        {**ragged(), "max_new_tokens": 9},
        {**ragged(), "max_new_tokens": 20, "eos_token_id": FEW},
        {**batch(prompt(4), prompt(4)), "max_new_tokens": 5},
        {**ragged(), "max_new_tokens": 9, "no_repeat_ngram_size": 2},
        {**ragged(), "max_new_tokens": 20, "eos_token_id": FEW, "no_repeat_ngram_size": 2},
    ],
)
def test_streamer_sees_what_transformers_shows(model: Qwen3ForCausalLM, options: Options) -> None:
    theirs, ours = Recorder(), Recorder()
    model.generate(**options, streamer=theirs)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64):
        output = model.generate(**options, streamer=ours)

    assert [put.tolist() for put in ours.puts] == [put.tolist() for put in theirs.puts]
    assert [put.dtype for put in ours.puts] == [put.dtype for put in theirs.puts]
    assert (ours.num_ends, ours.threads) == (1, {threading.current_thread()})
    assert torch.stack(ours.puts[1:], dim=1).tolist() == new_tokens(output, options)


def test_batch_is_streamed_in_steps_with_pads_after_the_end(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    options = {**ragged(4), "max_new_tokens": 24, "eos_token_id": FEW, "pad_token_id": 200}
    recorder = Recorder()

    output = model.generate(**options, streamer=recorder)

    assert recorder.puts[0].tolist() == options["input_ids"].tolist()
    assert {tuple(put.shape) for put in recorder.puts[1:]} == {(4,)}
    assert any(200 in put.tolist() for put in recorder.puts[1:])
    assert torch.stack(recorder.puts[1:], dim=1).tolist() == new_tokens(output, options)
    assert recorder.num_ends == 1
    assert handle.counters.fast == 1


def test_text_streamer_gives_the_text(model: Qwen3ForCausalLM, handle: Handle) -> None:
    tokenizer = tiny_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    options = {**batch(prompt(6)), "max_new_tokens": 12, "eos_token_id": EOS}

    with ThreadPoolExecutor(1) as executor:
        output = executor.submit(model.generate, **options, streamer=streamer)
        text = "".join(streamer)

    assert text == tokenizer.decode(new_tokens(output.result(), options)[0])
    assert handle.counters.fast == 1


@pytest.mark.parametrize("is_fast", [True, False])
def test_reader_is_released_when_a_processor_raises(model: Qwen3ForCausalLM, is_fast: bool) -> None:
    options: Options = {**batch(prompt(7)), "max_new_tokens": 12}
    streamer = TextIteratorStreamer(tiny_tokenizer(), timeout=20)
    plugins = (BrokenPlugin(),) if is_fast else ()
    if not is_fast:
        options["logits_processor"] = [RaiseAtSecondToken(7)]

    with (
        hf_generate_shim.installed(model, plugins=plugins, num_kvcache_blocks=64) as handle,
        ThreadPoolExecutor(1) as executor,
    ):
        _ = handle.thread
        call = executor.submit(model.generate, **options, streamer=streamer)
        pieces = list(streamer)  # would raise after its timeout
        error = call.exception(timeout=1.0)
        after = model.generate(**batch(prompt(5)), max_new_tokens=4)
        settle(handle.thread)
        handle.thread.call(leak_check)

    assert pieces
    assert "no second token today" in str(error)
    assert isinstance(error, RequestFailed if is_fast else ZeroDivisionError)
    assert after.shape == (1, 9)


def test_streamer_is_ended_when_the_call_is_refused(model: Qwen3ForCausalLM) -> None:
    recorder = Recorder()

    with (
        hf_generate_shim.installed(model, strict=True),
        pytest.raises(ValueError, match="num_beams"),
    ):
        model.generate(**ragged(), max_new_tokens=3, num_beams=2, streamer=recorder)

    assert recorder.num_ends == 1


def test_put_that_raises_cancels_its_call_and_no_other(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    other = {**batch(prompt(9)), "max_new_tokens": 60}
    expected = model.generate(**other).tolist()
    recorder = Recorder(fail_at=5)

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(model.generate, **other)
        with pytest.raises(ConsumerGone):
            model.generate(**ragged(), max_new_tokens=200, streamer=recorder)
        output = running.result(timeout=60)
    settle(handle.thread)

    assert output.tolist() == expected
    assert (len(recorder.puts), recorder.num_ends) == (6, 1)
    stats = handle.stats()
    assert stats.free_blocks == stats.num_blocks
    assert stats.finished_requests["abort"] == 4
    assert stats.generated_tokens < 4 * 200


class InterruptAtThirdStep:
    """Presses Ctrl-C."""

    def __init__(self) -> None:
        self.num_steps = 0

    @hookimpl
    def nanoserve_step_finished(self, stats: StepStats) -> None:
        """At the third step of the engine."""
        del stats
        self.num_steps += 1
        if self.num_steps == 3:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)


def test_interrupted_call_is_cancelled_and_the_next_one_works(model: Qwen3ForCausalLM) -> None:
    plugin = InterruptAtThirdStep()

    with hf_generate_shim.installed(model, plugins=(plugin,), num_kvcache_blocks=64) as handle:
        with pytest.raises(KeyboardInterrupt):
            model.generate(**ragged(), max_new_tokens=200)
        settle(handle.thread)
        handle.thread.call(leak_check)
        after = model.generate(**batch(prompt(5)), max_new_tokens=4)

    assert after.shape == (1, 9)
    assert plugin.num_steps < 200
