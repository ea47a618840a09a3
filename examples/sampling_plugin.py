"""A plugin that steers sampling: requests that ask for it never use the letter "e".

python examples/sampling_plugin.py --model examples/tiny_qwen3
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoTokenizer

from nanoserve_core import LLM, Request, SamplingParams, hookimpl

if TYPE_CHECKING:
    from nanoserve_core.request import LogitsProcessor

TINY = Path(__file__).resolve().parent / "tiny_qwen3"


class Lipogram:
    """Bans every token that contains a letter, for the requests whose random seed is odd."""

    def __init__(self, model: str, letter: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        texts = [tokenizer.decode([token_id]) for token_id in range(len(tokenizer))]
        self._banned = torch.tensor([i for i, text in enumerate(texts) if letter in text.lower()])

    @hookimpl
    def nanoserve_request_processor(self, request: Request) -> LogitsProcessor | None:
        """Called when a request is submitted: its own processor, or None to leave it alone."""
        return (
            self._ban if request.sampling.seed is not None and request.sampling.seed % 2 else None
        )

    def _ban(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, self._banned, float("-inf"))


def main() -> None:
    """The same prompt with and without the plugin's processor, in one batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=str(TINY), help="directory or hub id of a Qwen3 checkpoint"
    )
    arguments = parser.parse_args()

    params = [
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=40, seed=seed) for seed in (2, 3)
    ]
    with LLM(arguments.model, plugins=[Lipogram(arguments.model, "e")]) as llm:
        plain, steered = llm.generate(["The morning was"] * 2, params)
    print("plain:  ", repr(plain.text))
    print("steered:", repr(steered.text))
    assert "e" not in steered.text.lower(), "the plugin bans every token with this letter"


if __name__ == "__main__":
    main()
