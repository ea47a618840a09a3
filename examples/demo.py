"""The story of nanoserve in two minutes, on the shipped checkpoint: no network, no GPU needed.

    make demo        or        python examples/demo.py --model examples/tiny_qwen3

(1) `model.generate` through transformers and through the installed shim: the same tokens. (2) 64
concurrent LangChain calls in one running batch. (3) A hook that logs, a hook that steers sampling.
(4) A picture of what the engine did.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from logging_plugin import RequestLog
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from sampling_plugin import Lipogram
from timeline_plugin import Timeline
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_generate_shim
from langchain_llm import ChatNanoserve
from nanoserve_core import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.runnables import Runnable

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = [
    "It is a truth universally acknowledged, that",
    "She was the youngest of the two daughters",
    "The family of Dashwood had long been settled",
    "No one who had ever seen Catherine",
    "Sir Walter Elliot, of Kellynch Hall,",
    "Emma Woodhouse, handsome, clever,",
    "About thirty years ago",
    "My dear sister",
] * 2
SYSTEM = (
    "You are a careful clerk in a small office in the country. You read every question twice, you "
    "answer with the number only, and you never add a word that was not asked for. "
) * 3


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What ``run`` returns, and the seconds it took."""
    start = time.perf_counter()
    return run(), time.perf_counter() - start


def show_generate(model_path: str, console: Console) -> None:
    """The same call with and without the shim: same tokens, other times."""
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 64, "do_sample": False}

    def generate() -> torch.Tensor:
        return model.generate(**inputs, **options)

    generate()  # warm: neither side pays first-use costs
    plain, plain_seconds = timed(generate)
    with hf_generate_shim.installed(model, tokenizer=tokenizer) as handle:
        generate()
        handle.thread.call(lambda engine: engine.weights_changed())  # forget the prompts: no hits
        served, served_seconds = timed(generate)
        counters = handle.counters

    table = Table("model.generate, 16 prompts x 64 tokens", "seconds", "tokens")
    table.add_row("transformers' own loop", f"{plain_seconds:.2f}", "-")
    same = "identical" if torch.equal(plain, served) else "DIFFERENT"
    table.add_row("hf_generate_shim installed", f"{served_seconds:.2f}", same)
    console.print(table)
    console.print(f"calls by path: {counters.fast} fast, {counters.fallback} by transformers' loop")
    for text in tokenizer.batch_decode(served[:3], skip_special_tokens=True):
        console.print(f"  [italic]{text!r}")


def show_langchain(model_path: str, console: Console) -> None:
    """64 concurrent calls of one chain against the same calls one after another."""
    prompt = ChatPromptTemplate.from_messages([("system", SYSTEM), ("user", "What is {a} + {b}?")])
    with ChatNanoserve(
        model=model_path, temperature=0, max_tokens=24, enable_thinking=False
    ) as chat:
        chain: Runnable[dict[str, int], str] = prompt | chat | StrOutputParser()
        sums = [{"a": 10 + i, "b": 3 + i % 40} for i in range(64)]
        chain.invoke(sums[0])
        together, concurrent_seconds = timed(lambda: asyncio.run(_ask_all(chain, sums)))
        stats = chat.stats()
        alone, serial_seconds = timed(lambda: [chain.invoke(question) for question in sums])

    table = Table("64 LangChain calls, one system prompt", "seconds")
    table.add_row("one after another", f"{serial_seconds:.2f}")
    table.add_row("64 x ainvoke at a time", f"{concurrent_seconds:.2f}")
    console.print(table)
    console.print(
        f"peak batch {stats.peak_batch}, prefix-cache hit rate {stats.prefix_cache_hit_rate:.0%}, "
        f"same answers both ways: {together == alone}"
    )
    answers = [(text.strip(" ."), q["a"] + q["b"]) for text, q in zip(together, sums, strict=True)]
    right = sum(text == str(total) for text, total in answers)
    console.print(f"'What is 10 + 3?' -> {together[0]!r}; {right} of 64 sums are right")


async def _ask_all(chain: Runnable[dict[str, int], str], sums: list[dict[str, int]]) -> list[str]:
    return await asyncio.gather(*(chain.ainvoke(question) for question in sums))


def show_hooks(model_path: str, console: Console) -> None:
    """A logging plugin and a sampling plugin, in the same engine."""
    logger = logging.getLogger("nanoserve.example")
    logger.addHandler(RichHandler(console=console, show_path=False, show_time=False))
    logger.setLevel(logging.INFO)
    plugins = [RequestLog(), Lipogram(model_path, letter="e")]
    params = [SamplingParams(temperature=0.8, top_p=0.9, max_tokens=32, seed=s) for s in (2, 3)]
    with LLM(model_path, plugins=plugins) as llm:
        plain, steered = llm.generate(["The morning was"] * 2, params, use_tqdm=False)
    console.print(f"sampled:                 [italic]{plain.text!r}")
    console.print(f"steered, no letter 'e':  [italic]{steered.text!r}")


def show_timeline(model_path: str, out: Path, console: Console) -> None:
    """32 requests in a pool too small for them, drawn."""
    timeline = Timeline()
    prompts = [f"{SYSTEM} Chapter {number}: {PROMPTS[number % 8]}" for number in range(32)]
    params = [
        SamplingParams(temperature=0, max_tokens=16 + 8 * (number % 5), ignore_eos=True)
        for number in range(32)
    ]
    options = {"num_kvcache_blocks": 46, "max_num_batched_tokens": 192, "max_num_seqs": 16}
    with LLM(model_path, plugins=[timeline], **options) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    trace, picture = timeline.save(out)
    console.print(f"{stats.steps} steps, {stats.preemptions} preemptions")
    console.print(f"picture: {picture}\ntrace (open it in Perfetto): {trace}")


def main() -> None:
    """Tell the story."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(ROOT / "examples" / "tiny_qwen3"))
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures")
    arguments = parser.parse_args()

    console = Console()
    console.rule("[bold]1. model.generate, unchanged")
    show_generate(arguments.model, console)
    console.rule("[bold]2. LangChain: many calls, one running batch")
    show_langchain(arguments.model, console)
    console.rule("[bold]3. hooks: one logs, one steers sampling")
    show_hooks(arguments.model, console)
    console.rule("[bold]4. what the engine did")
    show_timeline(arguments.model, arguments.out, console)


if __name__ == "__main__":
    main()
