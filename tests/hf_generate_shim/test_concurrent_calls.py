"""Calls of several threads share one engine and one batch, and do not disturb each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import hf_generate_shim
from hf_generate_shim import TokenIdOutOfRange
from nanoserve_adapters.testing import AdmissionGate, leak_check, settle, tiny_tokenizer
from nanoserve_core import hookimpl
from nanoserve_core.errors import EngineClosed, EngineDead, RequestFailed
from tests.hf_generate_shim.calls import VOCAB_SIZE, Options, batch, prompt, ragged

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle
    from nanoserve_core.request import Request

PROMPTS = [prompt(3 + length, seed=7) for length in range(16)]


def test_sixteen_threads_join_one_batch(model: Qwen3ForCausalLM) -> None:
    calls: list[Options] = [{**batch(row), "max_new_tokens": 12} for row in PROMPTS]
    expected = [model.generate(**call).tolist() for call in calls]

    with (
        hf_generate_shim.installed(model, num_kvcache_blocks=256) as handle,
        ThreadPoolExecutor(16) as executor,
    ):
        with AdmissionGate(handle.thread, 16):
            futures = [executor.submit(model.generate, **call) for call in calls]
        outputs = [future.result(timeout=60).tolist() for future in futures]
        stats = handle.stats()

    assert outputs == expected
    assert stats.peak_batch == 16
    assert stats.generated_tokens / stats.steps > 4
    assert handle.counters.fast == 16


def test_calls_with_different_options_run_side_by_side(model: Qwen3ForCausalLM) -> None:
    """huggingface/transformers#48468, #43457: each keeps its own history and rules."""
    fast: list[Options] = [
        {**batch(prompt(6)), "repetition_penalty": 5.0},
        {**batch(prompt(8)), "bad_words_ids": [[97], [118, 61]]},
        {**batch(prompt(5)), "min_new_tokens": 5, "eos_token_id": list(range(90))},
        {**batch(prompt(7)), "eos_token_id": list(range(60)), "pad_token_id": 9},
        {**batch(prompt(6), prompt(9)), "do_sample": True, "top_k": 1},
        {**ragged(), "suppress_tokens": [97, 118]},
        {**batch(prompt(5)), "begin_suppress_tokens": [97], "forced_eos_token_id": 5},
        {**batch(prompt(4)), "stop_strings": ["a", "z"], "tokenizer": tiny_tokenizer()},
    ]
    lockstep: list[Options] = [
        {**ragged(), "no_repeat_ngram_size": 2},
        {**batch(prompt(3), prompt(8)), "no_repeat_ngram_size": 1, "repetition_penalty": 1.3},
    ]
    calls = [*fast, *lockstep]
    expected = [model.generate(**call, max_new_tokens=12).tolist() for call in calls]

    with (
        hf_generate_shim.installed(model, num_kvcache_blocks=256) as handle,
        ThreadPoolExecutor(len(calls)) as executor,
    ):
        num_rows = sum(len(call["input_ids"]) for call in calls)
        with AdmissionGate(handle.thread, num_rows):
            futures = [executor.submit(model.generate, **c, max_new_tokens=12) for c in calls]
        outputs = [future.result(timeout=60).tolist() for future in futures]

    assert outputs == expected
    assert (handle.counters.fast, handle.counters.lockstep) == (len(fast), len(lockstep))


def test_first_calls_may_come_at_once_after_a_while(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    start = threading.Barrier(3)

    def call(row: list[int]) -> torch.Tensor:
        start.wait(timeout=20)
        output: torch.Tensor = model.generate(**batch(row), max_new_tokens=4)
        return output

    with ThreadPoolExecutor(3) as executor:
        outputs = list(executor.map(call, PROMPTS[:3]))

    assert [output.shape[1] for output in outputs] == [7, 8, 9]
    assert handle.counters.fast == 3


def test_bad_id_in_one_call_leaves_the_others_untouched(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    call = {**batch(prompt(9)), "max_new_tokens": 40}
    expected = model.generate(**call).tolist()

    with ThreadPoolExecutor(2) as executor:
        running = [executor.submit(model.generate, **call) for _ in range(2)]
        with pytest.raises(TokenIdOutOfRange):
            model.generate(**batch([1, VOCAB_SIZE, 2]), max_new_tokens=4)
        outputs = [future.result(timeout=60).tolist() for future in running]

    assert outputs == [expected, expected]
    assert handle.counters.fast == 3


class RaiseAtThirdToken:
    """A plugin whose processors raise."""

    @hookimpl
    def nanoserve_request_processor(
        self, request: Request
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """For requests of four tokens or more."""
        length = len(request.prompt_token_ids)

        def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if length > 3 and input_ids.shape[1] >= length + 2:
                raise ZeroDivisionError("third token")
            return scores

        return process


def test_every_waiting_caller_hears_of_a_failure_with_its_cause(model: Qwen3ForCausalLM) -> None:
    plugins = (RaiseAtThirdToken(),)

    with (
        hf_generate_shim.installed(model, plugins=plugins, num_kvcache_blocks=64) as handle,
        ThreadPoolExecutor(4) as executor,
    ):
        with AdmissionGate(handle.thread, 4):
            futures = [
                executor.submit(model.generate, **batch(row), max_new_tokens=50)
                for row in PROMPTS[1:5]
            ]
        errors = [future.exception(timeout=20) for future in futures]
        after = model.generate(**batch(PROMPTS[0]), max_new_tokens=4)
        settle(handle.thread)
        handle.thread.call(leak_check)

    assert [type(error) for error in errors] == [RequestFailed] * 4
    assert all("third token" in str(error) for error in errors)
    assert [type(error.__cause__) for error in errors if error] == [ZeroDivisionError] * 4
    assert after.shape[1] == 7


def test_dead_engine_fails_all_who_wait_and_is_replaced(
    model: Qwen3ForCausalLM, handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = handle.thread
    expected = model.generate(**batch(PROMPTS[0]), max_new_tokens=4).tolist()

    def die() -> None:
        raise ZeroDivisionError("the device is gone")

    with ThreadPoolExecutor(4) as executor:
        with AdmissionGate(first, 4):
            monkeypatch.setattr(first.engine, "step", die)
            futures = [
                executor.submit(model.generate, **batch(row), max_new_tokens=50)
                for row in PROMPTS[:4]
            ]
        errors = [future.exception(timeout=20) for future in futures]
    after = model.generate(**batch(PROMPTS[0]), max_new_tokens=4).tolist()

    assert [type(error) for error in errors] == [EngineDead] * 4
    assert all("the device is gone" in str(error) for error in errors)
    assert after == expected
    assert handle.thread is not first


def test_uninstall_ends_waiting_calls(model: Qwen3ForCausalLM) -> None:
    handle = hf_generate_shim.install(model, num_kvcache_blocks=64)
    _ = handle.thread
    has_begun = threading.Event()

    class Streamer:
        """Says when the first token is there."""

        def put(self, value: torch.Tensor) -> None:
            """The prompt is two-dimensional."""
            if value.ndim == 1:
                has_begun.set()

        def end(self) -> None:
            """Nothing to do."""

    with ThreadPoolExecutor(1) as executor:
        call = executor.submit(
            model.generate, **batch(prompt(5)), max_new_tokens=250, streamer=Streamer()
        )
        assert has_begun.wait(timeout=20)
        hf_generate_shim.uninstall(model)
        error = call.exception(timeout=20)

    assert isinstance(error, EngineClosed)
