"""`model.generate`, unchanged, served by nanoserve: same tokens, one running batch for all threads.

python examples/hf_generate.py --model examples/tiny_qwen3
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_generate_shim

TINY = Path(__file__).resolve().parent / "tiny_qwen3"
PROMPTS = [
    "It is a truth universally acknowledged, that",
    "She was",
    "The family of Dashwood had long",
]


def main() -> None:
    """Compare transformers' own loop with the shim, then call `generate` from sixteen threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=str(TINY), help="directory or hub id of a Qwen3 checkpoint"
    )
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 24, "do_sample": False}

    expected = model.generate(**inputs, **options)
    with hf_generate_shim.installed(model, tokenizer=tokenizer) as handle:
        tokens = model.generate(**inputs, **options)
        print("same tokens as transformers:", torch.equal(tokens, expected))
        for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
            print(" ", repr(text))

        single = tokenizer(PROMPTS[0], return_tensors="pt")
        with ThreadPoolExecutor(16) as pool:
            calls = [pool.submit(model.generate, **single, **options) for _ in range(16)]
            answers = [call.result() for call in calls]
        print("16 threads agree:", all(torch.equal(answer, answers[0]) for answer in answers))
        print("peak batch:", handle.stats().peak_batch, "| fast calls:", handle.counters.fast)


if __name__ == "__main__":
    main()
