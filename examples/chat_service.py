"""A chat service in one process: 100 users talk to one model, and a table shows how it goes.

    python examples/chat_service.py --model examples/tiny_qwen3

No server, no queue of our own: each user is a coroutine that streams answers from the same
`ChatNanoserve`, and the engine runs all of them in one batch. Users arrive over some seconds, ask a
few questions with the whole conversation so far as the prompt, read at their own pace, and leave.
Some lose patience in the middle of an answer, which frees their share of the K/V cache at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections import Counter, deque
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from rich.console import Console
from rich.live import Live
from rich.table import Table

from langchain_llm import ChatNanoserve

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.messages import BaseMessage

    from nanoserve_core.engine_stats import EngineStats

TINY = Path(__file__).resolve().parent / "tiny_qwen3"
SYSTEM = (
    "You are the clerk of a small office in the country. You are patient with everybody, you "
    "answer what was asked and nothing else, and you keep your answers short."
)
WINDOW_SECONDS = 2.0
"""Span of the token rate in the table."""


@dataclass
class Ledger:
    """What the users have seen so far. One event loop."""

    talking: int = 0
    answers: int = 0
    left_early: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    batch_peaks: Counter[int] = field(default_factory=Counter)
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def note_tokens(self, total: int) -> None:
        """The engine has generated so many tokens by now."""
        now = time.monotonic()
        self._recent.append((now, total))
        while now - self._recent[0][0] > WINDOW_SECONDS:
            self._recent.popleft()

    @property
    def tokens_per_second(self) -> float:
        """Rate over the last `WINDOW_SECONDS`."""
        (start, first), (end, last) = self._recent[0], self._recent[-1]
        return (last - first) / (end - start) if end > start else 0.0

    def note_answer(self, last: AIMessageChunk, seconds: float) -> None:
        """An answer came to its end; its first piece after `seconds`."""
        self.answers += 1
        self.first_token_seconds.append(seconds)
        self.batch_peaks[last.response_metadata["batch_peak"]] += 1
        if last.usage_metadata is not None:
            self.prompt_tokens += last.usage_metadata["input_tokens"]
            self.cached_tokens += last.usage_metadata["input_token_details"]["cache_read"]


async def user(
    number: int, chat: ChatNanoserve, ledger: Ledger, arguments: argparse.Namespace
) -> None:
    """One user's visit: arrive, ask, read, ask again, leave."""
    dice = random.Random(number)
    await asyncio.sleep(dice.uniform(0, arguments.arrival_seconds))
    ledger.talking += 1
    history: list[BaseMessage] = [SystemMessage(SYSTEM)]
    for _ in range(arguments.questions):
        history.append(HumanMessage(question(dice)))
        patience = dice.randrange(2, 6) if dice.random() < arguments.impatient else None
        answer = await read_answer(chat, history, ledger, patience)
        if answer is None:
            break
        history.append(answer)
        await asyncio.sleep(dice.uniform(0, arguments.reading_seconds))
    ledger.talking -= 1


def question(dice: random.Random) -> str:
    """Something the small model can answer."""
    a, b = dice.randrange(1, 60), dice.randrange(1, 40)
    words = dice.choice(["the rain in May", "a quiet letter", "the old house by the sea"])
    return dice.choice([f"What is {a} + {b}?", f"Repeat: {words}", f"What is {a + b} - {b}?"])


async def read_answer(
    chat: ChatNanoserve, history: list[BaseMessage], ledger: Ledger, patience: int | None
) -> BaseMessage | None:
    """Stream one answer; None when the user left after ``patience`` pieces."""
    start, first_after, pieces = time.monotonic(), 0.0, []
    async with aclosing(chat.astream(history)) as stream:
        async for chunk in stream:
            first_after = first_after or time.monotonic() - start
            pieces.append(chunk)
            if len(pieces) == patience and chunk.chunk_position != "last":
                ledger.left_early += 1
                return None
    ledger.note_answer(pieces[-1], first_after)
    return sum(pieces[1:], pieces[0])


def table_of(ledger: Ledger, stats: EngineStats, seconds: float) -> Table:
    """The state of things, for the terminal."""
    table = Table(title=f"{seconds:4.1f} s", title_justify="left")
    for heading in ("users", "running", "waiting", "tokens/s", "ttft p50 / p95", "cached"):
        table.add_column(heading, justify="right", min_width=8)
    times = sorted(ledger.first_token_seconds) or [0.0]
    middle, late = statistics.median(times), times[int(0.95 * (len(times) - 1))]
    share = ledger.cached_tokens / ledger.prompt_tokens if ledger.prompt_tokens else 0.0
    table.add_row(
        str(ledger.talking),
        str(stats.running),
        str(stats.waiting),
        f"{ledger.tokens_per_second:,.0f}",
        f"{1e3 * middle:,.0f} / {1e3 * late:,.0f} ms",
        f"{share:.0%}",
    )
    return table


async def watch(
    chat: ChatNanoserve, ledger: Ledger, live: Live, seconds: Callable[[], float]
) -> None:
    """Refresh the table until cancelled."""
    while True:
        stats = await asyncio.to_thread(chat.stats)  # it waits for the step in progress
        ledger.note_tokens(stats.generated_tokens)
        live.update(table_of(ledger, stats, seconds()))
        await asyncio.sleep(0.25)


async def serve(chat: ChatNanoserve, arguments: argparse.Namespace, console: Console) -> Ledger:
    """Let all users come and go, under a live table."""
    ledger, start = Ledger(), time.monotonic()

    def seconds() -> float:
        return time.monotonic() - start

    with Live(console=console, refresh_per_second=8) as live:
        watcher = asyncio.ensure_future(watch(chat, ledger, live, seconds))
        await asyncio.gather(
            *(user(number, chat, ledger, arguments) for number in range(arguments.users))
        )
        watcher.cancel()
        live.update(table_of(ledger, await asyncio.to_thread(chat.stats), seconds()))
    return ledger


def report(ledger: Ledger, stats: EngineStats, console: Console) -> None:
    """What it came to."""
    console.print(
        f"{ledger.answers} answers, {ledger.left_early} users left in the middle of one; largest "
        f"batch {stats.peak_batch}, in {stats.steps} steps for {stats.generated_tokens} tokens"
    )
    console.print(
        f"prompt tokens from the cache: {ledger.cached_tokens} of {ledger.prompt_tokens}; K/V "
        f"blocks free at the end: {stats.free_blocks} of {stats.num_blocks}"
    )


def main() -> None:
    """Load the model, serve, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(TINY), help="directory or hub id of a checkpoint")
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--questions", type=int, default=4, help="of each user")
    parser.add_argument("--arrival-seconds", type=float, default=4.0)
    parser.add_argument("--reading-seconds", type=float, default=1.0, help="at most, an answer")
    parser.add_argument("--impatient", type=float, default=0.1, help="share of answers left early")
    arguments = parser.parse_args()

    console = Console()
    with ChatNanoserve(
        model=arguments.model, temperature=0.6, max_tokens=24, enable_thinking=False
    ) as chat:
        chat.warmup()
        # Everything loaded so far stays: the collector need not look at it again, which would hold
        # up all users for 0.2 s each time.
        gc.collect()
        gc.freeze()
        ledger = asyncio.run(serve(chat, arguments, console))
        report(ledger, chat.stats(), console)


if __name__ == "__main__":
    main()
