"""Concurrent LangChain chains beside the bare engine, on a CUDA device with random weights.

    python examples/benchmarks/langchain_gpu.py                       64 and 256 chains, 0.6B
    python examples/benchmarks/langchain_gpu.py --device cpu --tiny   the same code in seconds

All chains of a run have one system prompt of 2,048 tokens, and no two runs have the same: one chain
computes it, the others find it in the prefix cache. Answers have exact lengths. "of bare" compares
with the bare engine beside as many busy Python threads; "rows" is the mean batch of the run's
steps. A busy row asks for a quarter of the tokens. Each route runs once untimed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from busy_threads import spin
from gpu import Clock, random_model
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from roofline import SHAPES

from langchain_llm import ChatNanoserve
from nanoserve_adapters.testing import tiny_model, tiny_tokenizer
from nanoserve_core import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from langchain_core.runnables import Runnable
    from transformers import PreTrainedTokenizerFast

    Chain: TypeAlias = Runnable[dict[str, str], str]

NUM_ONE_BY_ONE = 4
"""Calls that are timed one after another; the rate is the same for more of them."""
BUSY_SHARE = 4
"""Beside busy threads a run asks for one of so many tokens."""
MAX_MODEL_LEN = 4096
TINY_POOL_NBYTES = 64 << 20
_RUNS = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Load:
    """Questions of one run, and the chain that answers them."""

    chat: ChatNanoserve
    system: str
    questions: list[str]
    max_tokens: int
    temperature: float

    @property
    def chain(self) -> Chain:
        """Prompt, model with this run's lengths, parser."""
        prompt = ChatPromptTemplate.from_messages([("system", self.system), ("user", "{question}")])
        model = self.chat.bind(max_tokens=self.max_tokens, temperature=self.temperature)
        return prompt | model | StrOutputParser()

    @property
    def inputs(self) -> list[dict[str, str]]:
        """What the chain takes."""
        return [{"question": question} for question in self.questions]


def bare(load: Load) -> None:
    """The same prompts straight into the engine thread: no LangChain, no text."""
    sampling = SamplingParams(
        temperature=load.temperature, max_tokens=load.max_tokens, ignore_eos=True, detokenize=False
    )
    tokenizer = load.chat.engine.tokenizer
    requests = []
    for number, question in enumerate(load.questions):
        conversation = [
            {"role": "system", "content": load.system},
            {"role": "user", "content": question},
        ]
        text = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        name = f"bare-{next(_RUNS)}-{number}"
        requests.append(Request(request_id=name, prompt_token_ids=ids, sampling=sampling))
    with load.chat.engine.thread.stream(*requests) as stream:
        for _ in stream:
            pass


def gathered(load: Load) -> None:
    """One ``ainvoke`` for each question, in one event loop."""

    async def run() -> None:
        await asyncio.gather(*(load.chain.ainvoke(given) for given in load.inputs))

    asyncio.run(run())


def streamed(load: Load) -> None:
    """One ``astream`` for each question, in one event loop."""

    async def read(given: dict[str, str]) -> None:
        async for _ in load.chain.astream(given):
            pass

    async def run() -> None:
        await asyncio.gather(*(read(given) for given in load.inputs))

    asyncio.run(run())


def batched(load: Load) -> None:
    """One ``batch`` of all questions: a thread for each."""
    load.chain.batch(load.inputs)


def one_by_one(load: Load) -> None:
    """One ``invoke`` after another, for a few of the questions."""
    for given in load.inputs[:NUM_ONE_BY_ONE]:
        load.chain.invoke(given)


ROUTES: dict[str, Callable[[Load], None]] = {
    "bare engine": bare,
    "gather(ainvoke)": gathered,
    "gather(astream)": streamed,
    "batch": batched,
    "one by one": one_by_one,
}
BUSY_ROUTES = ("bare engine", "gather(ainvoke)", "gather(astream)")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One timed run."""

    seconds: float
    num_tokens: int
    num_steps: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


@contextmanager
def busy_threads(num_busy: int) -> Iterator[None]:
    """Pure Python on so many threads while the block runs."""
    stop = threading.Event()
    threads = [threading.Thread(target=spin, args=(stop,)) for _ in range(num_busy)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Bench:
    """A model on its engine, and the loads for it."""

    def __init__(self, chat: ChatNanoserve, args: argparse.Namespace) -> None:
        self._chat = chat
        self._args = args

    def load(self, num_chains: int, max_tokens: int) -> Load:
        """Questions and a system prompt that no other run has."""
        dice = Random(next(_RUNS))
        letters = "abcdefghijklmnopqrstuvwxyz      "
        system = "".join(dice.choices(letters, k=self._args.prefix_len))
        return Load(
            chat=self._chat,
            system=system,
            questions=[f"question {number:4}" for number in range(num_chains)],
            max_tokens=max_tokens,
            temperature=self._args.temperature,
        )

    def run(self, route: Callable[[Load], None], num_chains: int, num_busy: int) -> Figure:
        """One timed run."""
        length = self._args.output_len
        load = self.load(num_chains, max(length // BUSY_SHARE, 1) if num_busy else length)
        before = self._chat.stats()
        with busy_threads(num_busy):
            start = time.perf_counter()
            route(load)
            seconds = time.perf_counter() - start
        after = self._chat.stats()
        return Figure(
            seconds=seconds,
            num_tokens=after.generated_tokens - before.generated_tokens,
            num_steps=after.steps - before.steps,
        )

    def print_table(self, clock: Clock) -> None:
        """All chains, routes and busy threads, as far as the time goes."""
        print(f"{'chains':>6} {'busy':>4} {'route':16} {'tokens/s':>9} {'of bare':>7} {'rows':>6}")
        for num_chains, num_busy in itertools.product(self._args.chains, self._args.busy):
            names: Sequence[str] = BUSY_ROUTES if num_busy else tuple(ROUTES)
            reference, guess = 0.0, 20.0 if num_busy else 5.0
            for name in names:
                if not clock.has(guess, f"{num_chains} chains, {num_busy} busy, {name}"):
                    continue
                figure = self.run(ROUTES[name], num_chains, num_busy)
                reference = reference or figure.rate
                guess = 2 * figure.seconds
                print(
                    f"{num_chains:6} {num_busy:4} {name:16} {figure.rate:9,.0f}"
                    f" {figure.rate / reference:7.2f} {figure.num_tokens / figure.num_steps:6.1f}",
                    flush=True,
                )


def wide_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Bytes and ChatML as in the tests' tokenizer, and a made-up word for every other id, so that
    all that a random model says has a text.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f" w{number:x}" for number in range(vocab_size - len(tokenizer))])
    tokenizer.model_max_length = MAX_MODEL_LEN
    return tokenizer


def make_chat(args: argparse.Namespace) -> ChatNanoserve:
    """A chat model on random weights of the true shape, or of a tiny one."""
    options: dict[str, object] = {
        "max_num_seqs": max(args.chains),
        "max_model_len": MAX_MODEL_LEN,
        "switch_interval": args.switch_interval,
    }
    if args.tiny:
        model = tiny_model(max_position_embeddings=MAX_MODEL_LEN).to(args.device)
        options["kv_cache_memory_bytes"] = TINY_POOL_NBYTES
    else:
        model = random_model(SHAPES["0.6B"])
    tokenizer = wide_tokenizer(model.config.vocab_size)
    return ChatNanoserve.from_hf(model, tokenizer, engine_options=options, ignore_eos=True)


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="of the tiny model; the other is on cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, short prompts")
    parser.add_argument("--chains", type=int, nargs="+", default=None, help="64 256; tiny: 4 8")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1], help="busy Python threads")
    parser.add_argument("--prefix-len", type=int, default=None, help="2048; tiny: 128")
    parser.add_argument("--output-len", type=int, default=None, help="128; tiny: 16")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--switch-interval", type=float, default=None, help="of the engine")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds, of the whole run")
    args = parser.parse_args()
    args.chains = args.chains or ([4, 8] if args.tiny else [64, 256])
    args.prefix_len = args.prefix_len or (128 if args.tiny else 2048)
    args.output_len = args.output_len or (16 if args.tiny else 128)
    return args


def main() -> None:
    """Warm every route, then measure it."""
    args = parse_arguments()
    clock = Clock(args.budget)
    with make_chat(args) as chat:
        chat.warmup()
        bench = Bench(chat, args)
        start = time.perf_counter()
        for num_chains, route in itertools.product(args.chains, ROUTES.values()):
            bench.run(route, num_chains, num_busy=0)
        print(f"warm after {time.perf_counter() - start:.1f} s", flush=True)
        bench.print_table(clock)
        stats = chat.stats()
        print(
            f"largest batch {stats.peak_batch}, {stats.preemptions} preemptions, prompt tokens from"
            f" the cache {stats.prefix_cache_hit_rate:.0%}; {dict(stats.backends)}"
        )


if __name__ == "__main__":
    main()
