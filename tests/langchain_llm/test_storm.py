"""Random cancels by every way there is: no block is left behind, and neighbours keep their tokens.

CI runs a hundred; ``NANOSERVE_STORM=1000 pytest tests/langchain_llm/test_storm.py`` is thorough.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from nanoserve_core import RequestTooLong
from tests.langchain_llm.doors import RealDoor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedTokenizerFast

NUM_CANCELS = int(os.environ.get("NANOSERVE_STORM", "100"))
NUM_THREADS = 4
NUM_TOKENS = 40
TOO_LONG = "too long " * 60

Model = Any  # ChatNanoserve or NanoserveLLM: the storm treats them alike


def content_of(piece: object) -> str:
    return piece if isinstance(piece, str) else str(getattr(piece, "content", ""))


class Storm:
    """Callers that leave early, each in a way of its own."""

    def __init__(self, models: list[Model], seed: int) -> None:
        self._models = models
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.sync_ways: dict[str, Callable[[Model, str], None]] = {
            "close": self.close,
            "del": self.drop,
            "throw": self.interrupt,
            "timeout option": self.time_out,
            "batch sibling": self.fail_a_sibling,
            "loop closed": self.close_a_loop,
        }
        self.async_ways: dict[str, Callable[[Model, str], Any]] = {
            "task.cancel": self.cancel_task,
            "wait_for": self.wait_too_short,
            "aclose": self.aclose,
            "break": self.break_out,
            "abatch cancel": self.cancel_abatch,
        }

    def roll(self, limit: int) -> int:
        with self._lock:
            return self._dice.randrange(limit)

    def start(self, ways: dict[str, Any]) -> tuple[Any, Model, str]:
        """A way, a model and a prompt; some prompts share their beginning."""
        with self._lock:
            way = self._dice.choice(sorted(ways))
            model = self._dice.choice(self._models)
            self.counts[way] += 1
            number = self._dice.randrange(9)
        return ways[way], model, f"shared words, more or less {number % 3} " * (number // 3 + 1)

    # Ways of threads.

    def close(self, model: Model, prompt: str) -> None:
        stream = model.stream(prompt)
        for _ in range(1 + self.roll(4)):
            next(stream, None)
        stream.close()

    def drop(self, model: Model, prompt: str) -> None:
        stream = model.stream(prompt)
        next(stream, None)
        del stream

    def interrupt(self, model: Model, prompt: str) -> None:
        stream = model.stream(prompt)
        next(stream, None)
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt())

    def time_out(self, model: Model, prompt: str) -> None:
        try:
            model.invoke(prompt, timeout=self.roll(20) / 1000)
        except TimeoutError:
            return

    def fail_a_sibling(self, model: Model, prompt: str) -> None:
        with pytest.raises(RequestTooLong):
            model.batch([prompt, TOO_LONG, prompt], {"max_concurrency": 8})

    def close_a_loop(self, model: Model, prompt: str) -> None:
        loop = asyncio.new_event_loop()
        stream = model.astream(prompt)
        loop.run_until_complete(anext(stream, None))
        loop.close()
        del stream

    # Ways of coroutines.

    async def cancel_task(self, model: Model, prompt: str) -> None:
        task = asyncio.ensure_future(model.ainvoke(prompt))
        for _ in range(self.roll(200)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def wait_too_short(self, model: Model, prompt: str) -> None:
        try:
            await asyncio.wait_for(model.ainvoke(prompt), self.roll(20) / 1000)
        except asyncio.TimeoutError:
            return

    async def aclose(self, model: Model, prompt: str) -> None:
        stream = model.astream(prompt)
        for _ in range(1 + self.roll(4)):
            await anext(stream, None)
        await stream.aclose()

    async def break_out(self, model: Model, prompt: str) -> None:
        async for _ in model.astream(prompt):
            break

    async def cancel_abatch(self, model: Model, prompt: str) -> None:
        task = asyncio.ensure_future(model.abatch([prompt, f"{prompt}!"], {"max_concurrency": 2}))
        for _ in range(self.roll(200)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    # The storm itself.

    def blow_in_threads(self, num_cancels: int) -> list[BaseException]:
        """A part of the cancels, from threads; what went wrong in them."""
        errors: list[BaseException] = []

        def run() -> None:
            for _ in range(-(-num_cancels // NUM_THREADS)):
                way, model, prompt = self.start(self.sync_ways)
                try:
                    way(model, prompt)
                except BaseException as error:  # noqa: BLE001 - reported by the test
                    errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    async def blow_in_a_loop(self, num_cancels: int) -> None:
        """A part of the cancels, twenty at a time."""
        gate = asyncio.Semaphore(20)

        async def one() -> None:
            async with gate:
                way, model, prompt = self.start(self.async_ways)
                await way(model, prompt)

        await asyncio.gather(*(one() for _ in range(num_cancels)))


@pytest.fixture(params=[(2000, 0), (40, 0), (40, 2)], ids=["roomy", "short", "short and late"])
def door(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> Iterator[RealDoor]:
    """Engines with blocks to spare and with too few, with results at once and two steps late."""
    num_blocks, run_ahead = request.param
    made = RealDoor(tokenizer, num_blocks=num_blocks, run_ahead=run_ahead)
    yield made
    made.thread.close()


# LangChain's own astream wants to await a callback when it is dropped with its loop, and cannot.
@pytest.mark.filterwarnings(
    "ignore:coroutine .*on_llm_error:RuntimeWarning",
    "ignore:coroutine method 'aclose':RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
@pytest.mark.timeout(120 + NUM_CANCELS // 2)
def test_storm_of_cancels_leaves_no_block_and_changes_no_neighbour(door: RealDoor) -> None:
    chat, llm = door.chat(max_tokens=NUM_TOKENS), door.llm(max_tokens=NUM_TOKENS)
    storm = Storm([chat, llm], seed=door.thread.stats().num_blocks)
    prompts = [f"neighbour {number}" for number in range(6)]
    alone = [chat.invoke(prompt).text for prompt in prompts]

    async def storm_with_neighbours() -> tuple[list[Any], list[str], list[BaseException]]:
        threads = asyncio.to_thread(storm.blow_in_threads, NUM_CANCELS // 2)
        invoked = chat.abatch(prompts)
        streamed = asyncio.gather(*(joined(chat, prompt) for prompt in prompts))
        blowing = storm.blow_in_a_loop(NUM_CANCELS // 2)
        answers, texts, errors, _ = await asyncio.gather(invoked, streamed, threads, blowing)
        return answers, texts, errors

    answers, texts, errors = asyncio.run(storm_with_neighbours())
    after = [answer.text for answer in chat.batch(prompts)]

    gc.collect()
    assert not errors
    assert [answer.text for answer in answers] == texts == after == alone
    door.assert_nothing_left()
    assert storm.counts.keys() == storm.sync_ways.keys() | storm.async_ways.keys()
    assert storm.counts.total() >= NUM_CANCELS
    assert door.thread.stats().finished_requests["abort"] > NUM_CANCELS // 5


async def joined(model: Model, prompt: str) -> str:
    return "".join([content_of(piece) async for piece in model.astream(prompt)])
