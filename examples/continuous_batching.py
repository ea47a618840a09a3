"""transformers' continuous batching, unchanged, served by nanoserve: a batch, then a live manager.

python examples/continuous_batching.py --model examples/tiny_qwen3
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_generate_shim

TINY = Path(__file__).resolve().parent / "tiny_qwen3"
PROMPTS = [
    "It is a truth universally acknowledged, that",
    "She was",
    "The family of Dashwood had long",
]


def main() -> None:
    """Run `generate_batch`, then stream one request of a manager while others run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=str(TINY), help="directory or hub id of a Qwen3 checkpoint"
    )
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    prompts = tokenizer(PROMPTS).input_ids
    # transformers' own continuous batching drops the penalty, and the model's end of sequence.
    config = GenerationConfig(max_new_tokens=24, do_sample=False, repetition_penalty=1.2)

    ids = torch.tensor([prompts[0]])
    mask = torch.ones_like(ids)
    alone = model.generate(ids, attention_mask=mask, generation_config=config)[0, ids.shape[1] :]
    with hf_generate_shim.installed(model, tokenizer=tokenizer) as handle:
        results = model.generate_batch(prompts, generation_config=config)
        for result in results.values():
            print(result.request_id, repr(tokenizer.decode(result.generated_tokens)))
        is_same = results["req_0"].generated_tokens == alone.tolist()
        print("same tokens as generate alone:", is_same)

        with model.continuous_batching_context_manager(generation_config=config) as manager:
            manager.add_requests(prompts)
            streamed = manager.add_request(prompts[1], streaming=True, max_new_tokens=8)
            for output in manager.request_id_iter(streamed):
                print("...", repr(tokenizer.decode(output.generated_tokens)))
        print("served by the engine:", handle.counters.fast)


if __name__ == "__main__":
    main()
