"""What LangChain, and what this package, add to a call and to a chunk: CPU time beside real work.

    python examples/benchmarks/langchain_overhead.py
    python examples/benchmarks/langchain_overhead.py --parts chains heartbeat

calls      an engine that answers at once: the caller's CPU time for each call and chunk, beside a
           chat model of LangChain's that does nothing at all
chains     64 chains on the shipped checkpoint, beside the same prompts in the bare engine
heartbeat  the longest time an event loop spends in one pass while 64 streams start and run
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable
from rich.console import Console
from rich.table import Table

from langchain_llm import ChatNanoserve, NanoserveLLM
from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.testing import FakeEngine, scripted, tiny_tokenizer
from nanoserve_core import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

Model = BaseChatModel | NanoserveLLM
Chain = Runnable[dict[str, str], str]

TINY = Path(__file__).resolve().parents[1] / "tiny_qwen3"
NUM_CHAINS = 64
NUM_CHUNKS = 16
NUM_AWAITED = 20
NUM_TOKENS = 48
SYSTEM = "You are a careful clerk in a small office in the country, and you answer briefly. "


class Nothing(BaseChatModel):
    """Says "x" at once, `NUM_CHUNKS` times in a stream: what is measured is LangChain itself."""

    @property
    def _llm_type(self) -> str:
        return "nothing"

    def _generate(self, *_: Any, **__: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content="x"))])

    async def _agenerate(self, *_: Any, **__: Any) -> ChatResult:
        return self._generate()

    def _stream(self, *_: Any, **__: Any) -> Iterator[ChatGenerationChunk]:
        for _number in range(NUM_CHUNKS):
            yield ChatGenerationChunk(message=AIMessageChunk(content="x"))

    async def _astream(self, *_: Any, **__: Any) -> AsyncIterator[ChatGenerationChunk]:
        for chunk in self._stream():
            yield chunk


def per_call(call: Callable[[Model], object], model: Model, repeats: int) -> float:
    """CPU seconds of this thread for one call, the best of five rounds."""
    call(model)
    rounds = []
    for _ in range(5):
        start = time.thread_time()
        for _ in range(repeats):
            call(model)
        rounds.append((time.thread_time() - start) / repeats)
    return min(rounds)


async def read(stream: AsyncIterator[Any]) -> int:
    """Number of chunks."""
    return len([chunk async for chunk in stream])


def per_chunk(start: Callable[[Model], Any], model: Model, *, is_async: bool) -> float:
    """CPU seconds of this thread for one chunk, the cost of the call itself spread over them."""

    def run(model: Model) -> int:
        return asyncio.run(read(start(model))) if is_async else len(list(start(model)))

    return per_call(run, model, 1) / run(model)


def chain_of(model: Model) -> Chain:
    """Prompt, model, parser."""
    return ChatPromptTemplate.from_messages([("user", "{question}")]) | model | StrOutputParser()


def many(model: Model | Chain, given: object) -> None:
    """Calls of a coroutine, one after another in one event loop."""

    async def run() -> None:
        for _ in range(NUM_AWAITED):
            await model.ainvoke(given)

    asyncio.run(run())


ASKED = {"question": "hi"}
CALLS: dict[str, tuple[Callable[[Model], object], int]] = {
    "invoke": (lambda model: model.invoke("hi"), 1),
    "ainvoke": (lambda model: many(model, "hi"), NUM_AWAITED),
    "chain.invoke": (lambda model: chain_of(model).invoke(ASKED), 1),
    "chain.ainvoke": (lambda model: many(chain_of(model), ASKED), NUM_AWAITED),
}
"""How to call, and how many calls that is."""
STREAMS: dict[str, tuple[Callable[[Model], Any], bool]] = {
    "stream": (lambda model: model.stream("hi"), False),
    "astream": (lambda model: model.astream("hi"), True),
    "chain.stream": (lambda model: chain_of(model).stream(ASKED), False),
    "chain.astream": (lambda model: chain_of(model).astream(ASKED), True),
}
"""How to stream, and whether that is async."""


def measure_calls(repeats: int) -> Table:
    """A row for each way of calling, with LangChain's own cost and ours."""
    at_once = FakeEngine(next_token=scripted([], then=120))
    # Slow enough that no two tokens come in one chunk, which they would otherwise.
    slow = FakeEngine(next_token=scripted([], then=120), seconds_per_step=0.001)
    tokenizer, nothing = tiny_tokenizer(), Nothing()
    table = Table("CPU of the caller", "LangChain alone", "with nanoserve", "added")
    with EngineThread(at_once) as thread, EngineThread(slow) as slow_thread:
        chat = ChatNanoserve(engine=thread, tokenizer=tokenizer, max_tokens=1)
        streaming = ChatNanoserve(engine=slow_thread, tokenizer=tokenizer, max_tokens=NUM_CHUNKS)
        llm = NanoserveLLM(engine=streaming.engine, max_tokens=NUM_CHUNKS)
        for name, (call, count) in CALLS.items():
            rounds = -(-repeats // count)
            pair = [per_call(call, model, rounds) / count for model in (nothing, chat)]
            table.add_row(f"{name}, a call", *in_ms(pair))
        for name, (start, is_async) in STREAMS.items():
            pair = [per_chunk(start, model, is_async=is_async) for model in (nothing, streaming)]
            table.add_row(f"{name}, a chunk", *in_ms(pair))
        cost = per_chunk(lambda model: model.stream("hi"), llm, is_async=False)
        table.add_row("llm.stream, a chunk", "", f"{1e3 * cost:.3f} ms", "")
    return table


def in_ms(pair: list[float]) -> list[str]:
    """Both times, and what the second adds."""
    plain, ours = pair
    return [f"{1e3 * seconds:.3f} ms" for seconds in (plain, ours, ours - plain)]


def bare(chat: ChatNanoserve, questions: list[str]) -> None:
    """The prompts of the chains straight into the engine thread."""
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = []
    for number, question in enumerate(questions):
        conversation = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ]
        ids = chat.engine.tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False
        )
        name = f"bare-{question}-{number}"
        requests.append(Request(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling))
    with chat.engine.thread.stream(*requests) as stream:
        for _ in stream:
            pass


def measure_chains(chat: ChatNanoserve, repeats: int) -> Table:
    """Tokens per second of 64 chains by each route, and their ratio to the bare engine's."""
    prompt = ChatPromptTemplate.from_messages([("system", SYSTEM), ("user", "{question}")])
    chain: Any = prompt | chat | StrOutputParser()

    async def gathered(questions: list[str]) -> None:
        await asyncio.gather(*(chain.ainvoke({"question": q}) for q in questions))

    async def streamed(questions: list[str]) -> None:
        await asyncio.gather(*(read(chain.astream({"question": q})) for q in questions))

    routes: dict[str, Callable[[list[str]], object]] = {
        "bare engine": lambda questions: bare(chat, questions),
        "chain.batch": lambda questions: chain.batch([{"question": q} for q in questions]),
        "gather(chain.ainvoke)": lambda questions: asyncio.run(gathered(questions)),
        "gather(chain.astream)": lambda questions: asyncio.run(streamed(questions)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in routes}
    for repeat in range(repeats + 1):  # routes take turns, so that a busy minute hits all of them
        for name, run in routes.items():
            questions = [f"{name} {repeat}: what is line {n}?" for n in range(NUM_CHAINS)]
            start = time.perf_counter()
            run(questions)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    table = Table(f"{NUM_CHAINS} chains x {NUM_TOKENS} tokens", "tokens/s", "of the bare engine")
    for name, median in medians.items():
        rate = f"{NUM_CHAINS * NUM_TOKENS / median:,.0f}"
        table.add_row(name, rate, f"{medians['bare engine'] / median:.2f}")
    return table


class WatchedLoop(asyncio.SelectorEventLoop):
    """Remembers the longest pass: in wall time without the wait for events, and in CPU time."""

    wall = cpu = idle = 0.0

    def __init__(self) -> None:
        super().__init__()
        select = self._selector.select

        def timed(timeout: float | None = None) -> list[Any]:
            start = time.perf_counter()
            events = select(timeout)
            self.idle = time.perf_counter() - start
            return events

        self._selector.select = timed

    def _run_once(self) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        super()._run_once()
        self.wall = max(self.wall, time.perf_counter() - wall - self.idle)
        self.cpu = max(self.cpu, time.thread_time() - cpu)


def measure_heartbeat(chat: ChatNanoserve, repeats: int) -> Table:
    """The longest pass of the loop under 64 streams, of the model and of a chain."""
    prompt = ChatPromptTemplate.from_messages([("system", "{system}"), ("user", "{question}")])
    chain: Any = prompt | chat | StrOutputParser()
    table = Table("longest pass of the event loop", "CPU", "wall (median, worst)")
    for words, system in (("short", SYSTEM), ("long", SYSTEM * 40)):
        asked = [{"system": system, "question": f"{n}?"} for n in range(NUM_CHAINS)]
        ways: dict[str, Callable[[int], Any]] = {
            "chat.astream": lambda n, asked=asked: chat.astream(prompt.invoke(asked[n])),
            "chain.astream": lambda n, asked=asked: chain.astream(asked[n]),
        }
        for name, start in ways.items():

            async def streams(start: Callable[[int], Any] = start) -> None:
                await asyncio.gather(*(read(start(number)) for number in range(NUM_CHAINS)))

            found: list[WatchedLoop] = []
            for _ in range(repeats + 1):
                loop = WatchedLoop()
                loop.run_until_complete(streams())
                loop.close()
                found.append(loop)
            walls = [1e3 * loop.wall for loop in found[1:]]
            cpu = statistics.median(1e3 * loop.cpu for loop in found[1:])
            table.add_row(
                f"{NUM_CHAINS} x {name}, {words} prompt",
                f"{cpu:.0f} ms",
                f"{statistics.median(walls):.0f} ms, {max(walls):.0f} ms",
            )
    return table


def main() -> None:
    """Print the chosen tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parts = ("calls", "chains", "heartbeat")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default=str(TINY), help="directory of a Qwen3 checkpoint")
    arguments = parser.parse_args()
    console = Console()
    if "calls" in arguments.parts:
        console.print(measure_calls(20 * arguments.repeats))
    if {"chains", "heartbeat"}.isdisjoint(arguments.parts):
        return
    with ChatNanoserve(
        model=arguments.model, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True
    ) as chat:
        chat.warmup()
        gc.collect()
        gc.freeze()  # a full collection would look at all that was loaded: 0.2 s in one pass
        if "chains" in arguments.parts:
            console.print(measure_chains(chat, arguments.repeats))
        if "heartbeat" in arguments.parts:
            console.print(measure_heartbeat(chat, arguments.repeats))


if __name__ == "__main__":
    main()
