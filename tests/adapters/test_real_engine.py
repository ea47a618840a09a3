"""The engine thread on the real engine: tokens of transformers, no block left, late results."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.registry import EngineRegistry, load_engine
from nanoserve_adapters.testing import (
    AdapterContract,
    DelayedRunner,
    StepGate,
    leak_check,
    settle,
    tiny_model,
)
from nanoserve_core.config import EngineConfig
from nanoserve_core.engine import Engine
from nanoserve_core.errors import EngineDead
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.plugins import PluginManager
from tests.adapters.support import new_request, run_threads, tokens_in

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from transformers import Qwen3ForCausalLM

    from nanoserve_core.model_runner import InFlight
    from nanoserve_core.plan import StepPlan

CONFIG = EngineConfig(max_num_seqs=8, max_model_len=256, num_kvcache_blocks=96, device="cpu")


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    """A random model that never ends by itself."""
    model = tiny_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


@pytest.fixture(params=[0, 1, 2], ids=lambda steps: f"run_ahead={steps}")
def thread(request: pytest.FixtureRequest, model: Qwen3ForCausalLM) -> Iterator[EngineThread]:
    """A thread on an engine whose results come 0, 1 or 2 steps late; checked for leaks."""
    plugins = PluginManager(CONFIG.plugins, CONFIG.allowed_plugins)
    runner = ModelRunner.create(model, CONFIG, plugins)
    late = DelayedRunner(runner, request.param) if request.param else runner
    with EngineThread(Engine.from_runner(late, CONFIG, plugins)) as thread:
        yield thread
        if thread.is_alive:
            settle(thread)
            thread.call(leak_check)


def generated(model: Qwen3ForCausalLM, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens by transformers' own loop."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


class ThreadAdapter:
    """The thinnest adapter."""

    def __init__(self, thread: EngineThread, model: Qwen3ForCausalLM) -> None:
        self.thread = thread
        self._model = model

    def complete(self, prompt_token_ids: list[int], *, max_tokens: int) -> list[int]:
        """One blocking call."""
        return tokens_in(self.thread.stream(new_request(prompt_token_ids, max_tokens=max_tokens)))

    def stream(
        self, prompt_token_ids: list[int], *, max_tokens: int
    ) -> Generator[list[int], None, None]:
        """The same in pieces."""
        with self.thread.stream(new_request(prompt_token_ids, max_tokens=max_tokens)) as stream:
            for outputs in stream:
                yield tokens_in([outputs])

    def expected(self, prompt_token_ids: list[int], *, max_tokens: int) -> list[int]:
        """By transformers."""
        return generated(self._model, prompt_token_ids, max_tokens)


class TestContractOnTheRealEngine(AdapterContract):
    """The whole contract, also with late results."""

    @pytest.fixture
    def adapter(self, thread: EngineThread, model: Qwen3ForCausalLM) -> ThreadAdapter:
        """On the engine of the fixture ``thread``."""
        return ThreadAdapter(thread, model)


def test_callers_of_threads_and_loops_get_the_tokens_of_transformers(
    thread: EngineThread, model: Qwen3ForCausalLM
) -> None:
    prompts = [[65 + i, 66, 67 + i] * (1 + i % 3) for i in range(12)]
    tokens: dict[int, list[int]] = {}

    async def read_in_loop(numbers: range) -> None:
        streams = [thread.astream(new_request(prompts[i], max_tokens=10)) for i in numbers]
        for i, stream in zip(numbers, streams, strict=True):
            tokens[i] = tokens_in([outputs async for outputs in stream])

    def read_in_thread(i: int) -> None:
        tokens[i] = tokens_in(thread.stream(new_request(prompts[i], max_tokens=10)))

    run_threads(
        *[threading.Thread(target=read_in_thread, args=(i,)) for i in range(4)],
        threading.Thread(target=lambda: asyncio.run(read_in_loop(range(4, 8)))),
        threading.Thread(target=lambda: asyncio.run(read_in_loop(range(8, 12)))),
    )

    assert tokens == {i: generated(model, prompt, 10) for i, prompt in enumerate(prompts)}


def test_cancelled_streams_leave_no_block_and_change_no_tokens(
    thread: EngineThread, model: Qwen3ForCausalLM
) -> None:
    prompt = [72, 73, 74]
    with StepGate(thread, at_step=5):
        leaving = thread.stream_many(new_request((i, 9), max_tokens=100) for i in range(6))
        staying = thread.stream(new_request(prompt, max_tokens=20))
        for stream in leaving:
            next(stream)
            stream.close()

    tokens = tokens_in(staying)

    assert tokens == generated(model, prompt, 20)
    settle(thread)
    assert thread.stats().finished_requests == {"abort": 6, "length": 1}


class BrokenRunner(DelayedRunner):
    """Its third launch fails, as when the device is out of memory."""

    def launch(self, plan: StepPlan) -> InFlight:
        """Launch, twice."""
        if self.num_launched == 2:
            raise MemoryError("no room for a step")
        return super().launch(plan)


def test_runner_that_raises_kills_the_engine_and_tells_everybody(model: Qwen3ForCausalLM) -> None:
    plugins = PluginManager(CONFIG.plugins, CONFIG.allowed_plugins)
    runner = BrokenRunner(ModelRunner.create(model, CONFIG, plugins), run_ahead=1)
    with EngineThread(Engine.from_runner(runner, CONFIG, plugins)) as thread:
        streams = thread.stream_many(new_request((i, 9), max_tokens=50) for i in range(3))

        for stream in streams:
            with pytest.raises(EngineDead, match="no room for a step") as dead:
                tokens_in(stream)
            assert isinstance(dead.value.__cause__, MemoryError)


def test_idle_engine_of_a_dropped_model_goes_with_it() -> None:
    model = tiny_model()
    engines = EngineRegistry(load_engine)
    model.nanoserve_handle = handle = engines.acquire(model, num_kvcache_blocks=8, max_model_len=64)
    tokens_in(handle.thread.stream(new_request(max_tokens=2)))
    (engine_thread,) = [t for t in threading.enumerate() if t.name == "nanoserve-engine"]
    reference = weakref.ref(model)

    del model, handle
    gc.collect()
    engine_thread.join(20)
    gc.collect()

    assert reference() is None
    assert not engine_thread.is_alive()
