"""Speed of nanoserve beside transformers' `generate`, on the same requests in the same run.

    python examples/benchmarks/bench.py                      # CPU: the shipped checkpoint, float32
    python examples/benchmarks/bench.py --workloads single ragged16 --json out/bench.json
    python examples/benchmarks/bench.py --device cuda        # random weights, 0.6B and 8B, floors

Only the ratios of one run mean anything on a shared machine. The table counts tokens that requests
asked for; what a padded batch computes beyond them does not count.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from workloads import CPU_WORKLOADS, GPU_WORKLOADS, Workload

from langchain_llm import ChatNanoserve
from nanoserve_core import LLM, Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

TINY = Path(__file__).resolve().parents[1] / "tiny_qwen3"
PAD = 0
NUM_CHATS, CHAT_TOKENS = 64, 32
LANGCHAIN = "langchain64"

Run: TypeAlias = "Callable[[int], int]"
"""Runs one repeat of a workload and returns how many of its tokens count."""


@dataclass(frozen=True)
class Measurement:
    """One engine on one workload: median over the repeats."""

    workload: str
    engine: str
    seconds: float
    tokens_per_second: float


def generate_one_by_one(model: PreTrainedModel, workload: Workload) -> None:
    """transformers: one request after another."""
    for prompt, output_len in zip(workload.prompts, workload.output_lens, strict=True):
        ids = torch.tensor([prompt])
        _generate(model, ids, torch.ones_like(ids), output_len)


def generate_padded_batch(model: PreTrainedModel, workload: Workload) -> None:
    """transformers: all requests as one left-padded batch that runs to the longest output."""
    width = max(map(len, workload.prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in workload.prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in workload.prompts])
    _generate(model, ids, mask, max(workload.output_lens))


def generate_nanoserve(llm: LLM, workload: Workload) -> None:
    """The engine through its offline door."""
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in workload.output_lens
    ]
    outputs = llm.generate(workload.prompts, params, use_tqdm=False)
    lengths = [len(output.token_ids) for output in outputs]
    assert lengths == workload.output_lens, "the engine stopped early"


def _generate(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, num_tokens: int
) -> None:
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=PAD,
    )
    assert out.shape[1] == ids.shape[1] + num_tokens, "generate stopped early"


def chat_texts(repeat: int) -> list[str]:
    """64 questions that no other repeat asks."""
    return [f"Round {repeat}: what is the {i}th line of the letter?" for i in range(NUM_CHATS)]


def chat_batch(chat: ChatNanoserve, repeat: int) -> int:
    """LangChain: one `batch` of all questions."""
    answers = chat.batch(chat_texts(repeat))
    return sum(answer.usage_metadata["output_tokens"] for answer in answers)


def bare_batch(chat: ChatNanoserve, repeat: int) -> int:
    """The same prompts straight into the engine thread, without LangChain and without text."""
    sampling = SamplingParams(temperature=0, max_tokens=CHAT_TOKENS, ignore_eos=True)
    requests = []
    for i, text in enumerate(chat_texts(repeat)):
        ids = chat.engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        name = f"bare-{repeat}-{i}"
        requests.append(Request(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling))
    with chat.engine.thread.stream(*requests) as stream:
        return sum(len(output.token_ids) for outputs in stream for output in outputs)


def measure(workload: str, engine: str, run: Run, repeats: int) -> Measurement:
    """Median of ``repeats`` timed runs after one warm-up on other ids."""
    run(repeats)
    seconds, num_tokens = [], 0
    for repeat in range(repeats):
        start = time.perf_counter()
        num_tokens = run(repeat)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return Measurement(workload, engine, median, num_tokens / median)


def compare_engines(model: PreTrainedModel, llm: LLM, name: str, repeats: int) -> list[Measurement]:
    """transformers and nanoserve on one workload."""
    base, vocab_size = CPU_WORKLOADS[name](), model.config.vocab_size

    def repeated(run: Callable[[Workload], None]) -> Run:
        def run_repeat(repeat: int) -> int:
            run(base.with_repeat(repeat, vocab_size))
            return base.num_output_tokens

        return run_repeat

    engines: dict[str, Callable[[Workload], None]] = {
        "generate, one by one": lambda workload: generate_one_by_one(model, workload),
        "generate, padded batch": lambda workload: generate_padded_batch(model, workload),
        "nanoserve": lambda workload: generate_nanoserve(llm, workload),
    }
    if len(base.prompts) == 1:
        del engines["generate, padded batch"]
    return [measure(name, engine, repeated(run), repeats) for engine, run in engines.items()]


def compare_langchain(path: str, repeats: int) -> list[Measurement]:
    """`ChatNanoserve.batch` beside the bare engine; no question is asked twice of either."""
    chat = ChatNanoserve(model=path, temperature=0, max_tokens=CHAT_TOKENS, ignore_eos=True)
    try:
        bare = measure(LANGCHAIN, "bare engine", lambda r: bare_batch(chat, r), repeats)
        shift = repeats + 1
        chained = measure(
            LANGCHAIN, "ChatNanoserve.batch", lambda r: chat_batch(chat, r + shift), repeats
        )
    finally:
        chat.close()
    return [bare, chained]


def table_of(found: Sequence[Measurement]) -> Table:
    """Tokens per second of each engine, and its ratio to the first engines of its workload."""
    table = Table("workload", "engine", "seconds", "tokens/s", "ratio to the rows above")
    for item in found:
        rows = [other for other in found if other.workload == item.workload]
        above = rows[: rows.index(item)]
        ratios = ", ".join(f"{item.tokens_per_second / o.tokens_per_second:.2f}" for o in above)
        numbers = f"{item.seconds:.2f}", f"{item.tokens_per_second:.0f}"
        table.add_row(item.workload, item.engine, *numbers, ratios or "-")
    return table


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "processor": platform.processor() or platform.machine(),
    }


def main() -> None:
    """Run the chosen workloads, print the table, write JSON when asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*CPU_WORKLOADS, LANGCHAIN]
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default=str(TINY), help="directory of a Qwen3 checkpoint (CPU)")
    parser.add_argument("--model-sizes", nargs="+", default=["0.6B", "8B"], help="CUDA")
    parser.add_argument("--workloads", nargs="+", choices=sorted({*names, *GPU_WORKLOADS}))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds (CUDA)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()

    console = Console()
    if arguments.device == "cuda":
        figures = bench_card(console, arguments)
    else:
        arguments.workloads = [n for n in names if n in (arguments.workloads or names)]
        figures = bench_cpu(console, arguments)
    console.print(machine())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2))


def bench_cpu(console: Console, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """transformers and nanoserve, side by side; the figures for JSON."""
    transformers.utils.logging.set_verbosity_error()  # it warns at every call that has no EOS
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    found: list[Measurement] = []
    with LLM(arguments.model, dtype="float32") as llm:
        for name in arguments.workloads:
            console.print(f"[dim]{name} ...")
            if name != LANGCHAIN:
                found += compare_engines(model, llm, name, arguments.repeats)
    if LANGCHAIN in arguments.workloads:
        found += compare_langchain(arguments.model, arguments.repeats)
    console.print(table_of(found))
    return [asdict(item) for item in found]


def bench_card(console: Console, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """The engine on a CUDA device against the floors; the figures for JSON."""
    from bench_gpu import card_table, measure_card

    rows = []
    names = arguments.workloads or list(GPU_WORKLOADS)
    for row in measure_card(
        arguments.model_sizes, names, repeats=arguments.repeats, budget=arguments.budget
    ):
        rows.append(row)
        console.print(f"[dim]{row.model_size} {row.workload}: {row.rate:,.0f} tokens/s")
    console.print(f"{torch.cuda.get_device_name()}, temperature 0.6")
    console.print(card_table(rows))
    return [asdict(row) for row in rows]


if __name__ == "__main__":
    main()
