"""Many prompts, one call: `LLM.generate` batches them, `LLM.chat` renders the chat template.

python examples/offline_batch.py --model examples/tiny_qwen3
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nanoserve_core import LLM, SamplingParams

TINY = Path(__file__).resolve().parent / "tiny_qwen3"
PROMPTS = [
    "It is a truth universally acknowledged, that",
    "The family of Dashwood had",
    "She was the youngest of the two daughters",
    "No one who had ever seen Catherine Morland",
]


def main() -> None:
    """Continue four sentences greedily, sample two answers to one question, print the counters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=str(TINY), help="directory or hub id of a Qwen3 checkpoint"
    )
    arguments = parser.parse_args()

    with LLM(arguments.model, max_num_seqs=64) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32)):
            print(f"{output.prompt!r} -> {output.text!r} ({output.finish_reason})")

        question = [{"role": "user", "content": "What is 12 + 7?"}]
        params = SamplingParams(n=2, temperature=0.6, top_p=0.9, max_tokens=32, seed=7, logprobs=0)
        answer = llm.chat(question, params, enable_thinking=False)[0]
        for sample in answer.outputs:
            print(f"sample {sample.index}: {sample.text!r} ({sample.cumulative_logprob:.2f})")

        stats = llm.stats()
        print(f"{stats.generated_tokens} tokens, {stats.steps} steps, batch {stats.peak_batch}")


if __name__ == "__main__":
    main()
