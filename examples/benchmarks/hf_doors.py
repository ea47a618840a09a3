"""64 prompts through the doors that transformers' users have, with and without nanoserve.

    python -m examples.benchmarks.hf_doors [--repeats 1]

one by one     `generate` for each prompt, one after another
pipeline       `pipeline("text-generation")` over the list, 16 prompts a batch
threads        16 threads that call `generate`, four prompts each
pipe threads   16 threads that call one pipeline, four prompts each

The shipped checkpoint, greedy, 24 new tokens for every prompt. Medians of wall time; "mean batch"
is tokens per step of the engine. Outputs with and without nanoserve are compared, and differences
are counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import hf_generate_shim

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKPOINT = Path(__file__).parent.parent / "tiny_qwen3"
NUM_PROMPTS, NUM_THREADS, BATCH_SIZE, NUM_TOKENS = 64, 16, 16, 24
_TEXT = "She walked to the window and asked him whether the carriage had come yet or "
PROMPTS = [_TEXT[: 20 + number % 57] for number in range(NUM_PROMPTS)]
PLAIN = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}

Model, Tokenizer, Texts = Any, Any, list[str]  # Any: transformers has no types


def doors(model: Model, tokenizer: Tokenizer) -> dict[str, Callable[[], Texts]]:
    """Each gives the 64 continuations in order."""
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    plain = {**PLAIN, "return_full_text": False}

    def call(prompt: str) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, **PLAIN)[0, inputs["input_ids"].shape[1] :]
        return str(tokenizer.decode(output, skip_special_tokens=True))

    def in_threads(one: Callable[[str], str]) -> Texts:
        with ThreadPoolExecutor(NUM_THREADS) as executor:
            return list(executor.map(one, PROMPTS))

    def piped(**options: int) -> Texts:
        return [each[0]["generated_text"] for each in pipe(PROMPTS, **options, **plain)]

    return {
        "one by one": lambda: [call(prompt) for prompt in PROMPTS],
        "pipeline": lambda: piped(batch_size=BATCH_SIZE),
        "threads": lambda: in_threads(call),
        "pipe threads": lambda: in_threads(lambda text: pipe(text, **plain)[0]["generated_text"]),
    }


def measure(door: Callable[[], Texts], repeats: int) -> tuple[float, Texts]:
    """Median seconds, and what came out the last time."""
    texts, seconds = [""], []
    for _ in range(repeats):
        start = time.perf_counter()
        texts = door()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), texts


def main() -> None:
    """Print a line for each door."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=1)
    repeats = parser.parse_args().repeats
    transformers.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT).float().eval()
    plain = {name: measure(door, repeats) for name, door in doors(model, tokenizer).items()}
    with hf_generate_shim.installed(model, tokenizer, enable_prefix_caching=False) as handle:
        for name, door in doors(model, tokenizer).items():
            before = handle.thread.stats()
            seconds, texts = measure(door, repeats)
            now = handle.thread.stats()
            batch = (now.generated_tokens - before.generated_tokens) / (now.steps - before.steps)
            other = sum(a != b for a, b in zip(texts, plain[name][1], strict=True))
            print(
                f"{name:13s} transformers {plain[name][0]:6.2f} s  nanoserve {seconds:6.2f} s  "
                f"ratio {plain[name][0] / seconds:5.2f}  mean batch {batch:5.1f}  differ {other}"
            )
        print(handle.counters)


if __name__ == "__main__":
    main()
