"""Measures a checkpoint with plain transformers: loss on held-out prose, rates on held-out tasks.

    python -m examples.tiny_qwen3.evaluate --prose .corpus

Knows nothing of training.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as TokenizerBase

from examples.tiny_qwen3.corpus import ExampleSource, Thinking
from examples.tiny_qwen3.prose import Prose, load_prose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from examples.tiny_qwen3.example import Example

_MAX_NEW_TOKENS = 192
_ROWS = 200  # prompts generated for at a time
_WINDOW = 1024  # tokens of prose read at a time


@dataclass(frozen=True, kw_only=True)
class Score:
    """How many of a task's examples were answered exactly, and how many ended by themselves.

    `num_exact` is None for a task with more than one right answer.
    """

    task: str
    thinking: Thinking
    num_examples: int
    num_exact: int | None
    num_stopped: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Nats a token and bits a byte on held-out prose, and every task's scores."""

    prose_loss: float
    prose_bits_per_byte: float
    scores: tuple[Score, ...]

    def exact_rate(self, *, tools: bool) -> float:
        """The share answered exactly, over the simple tasks or over those with tools."""
        counted = [
            score
            for score in self.scores
            if score.num_exact is not None and score.task.startswith("tool") == tools
        ]
        exact = sum(score.num_exact or 0 for score in counted)
        return exact / sum(score.num_examples for score in counted)

    def table(self) -> str:
        """The scores as a Markdown table, a row a task; first without thinking, then with."""
        lines = [
            "| task | exact | exact, thinking | ends | ends, thinking |",
            "|---|--:|--:|--:|--:|",
        ]
        for task in dict.fromkeys(score.task for score in self.scores):
            scores = [score for score in self.scores if score.task == task]
            exact = [_share(score.num_exact, score.num_examples) for score in scores]
            stopped = [_share(score.num_stopped, score.num_examples) for score in scores]
            lines.append(f"| {' | '.join((task, *exact, *stopped))} |")
        return "\n".join(lines)


def _share(part: int | None, whole: int) -> str:
    return "" if part is None else f"{part / whole:.1%}"


def evaluate(folder: Path, prose: Prose, *, device: str, num_examples: int) -> Evaluation:
    """Load the checkpoint in `folder` as any user would and measure it.

    `prose` is the held-out side; `num_examples` are drawn for each task and way of thinking.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).to(device)
    loss, bits_per_byte = prose_loss(model, tokenizer, prose)
    source = ExampleSource(prose, held_out=True)
    scores = []
    for task in source.task_names:
        rng = Random(f"evaluate {task}")
        examples = [source.draw(task, rng) for _ in range(num_examples)]
        ways: tuple[Thinking, ...] = ("off", "on")
        scores += [score(model, tokenizer, examples, task=task, thinking=way) for way in ways]
    return Evaluation(prose_loss=loss, prose_bits_per_byte=bits_per_byte, scores=tuple(scores))


def prose_loss(
    model: PreTrainedModel, tokenizer: TokenizerBase, prose: Prose
) -> tuple[float, float]:
    """Mean negative log likelihood on running text: nats a token, bits a byte."""
    total, num_tokens, num_bytes = 0.0, 0, 0
    for chapter in prose.chapters:
        ids = torch.tensor(tokenizer(chapter, verbose=False)["input_ids"], device=model.device)
        for first in range(0, len(ids), _WINDOW):
            window = ids[first : first + _WINDOW]
            if len(window) > 1:
                with torch.inference_mode():
                    loss = model(input_ids=window[None], labels=window[None]).loss
                total += loss.item() * (len(window) - 1)
                num_tokens += len(window) - 1
                num_bytes += len(tokenizer.decode(window[1:]).encode("utf-8"))
    return total / num_tokens, total / num_bytes / math.log(2)


def score(
    model: PreTrainedModel,
    tokenizer: TokenizerBase,
    examples: Sequence[Example],
    *,
    task: str,
    thinking: Thinking,
) -> Score:
    """The score of one task's examples, answered greedily."""
    answers: list[str | None] = []
    for first in range(0, len(examples), _ROWS):
        part = examples[first : first + _ROWS]
        answers += greedy_answers(model, tokenizer, part, thinking=thinking)
    pairs = list(zip(answers, examples, strict=True))
    exact = sum(answer == example.answer for answer, example in pairs)
    is_exact = all(example.is_exact for example in examples)
    return Score(
        task=task,
        thinking=thinking,
        num_examples=len(examples),
        num_exact=exact if is_exact else None,
        num_stopped=sum(answer is not None for answer in answers),
    )


def greedy_answers(
    model: PreTrainedModel,
    tokenizer: TokenizerBase,
    examples: Sequence[Example],
    *,
    thinking: Thinking,
) -> list[str | None]:
    """What follows the thinking block of each answer; None for an answer without end."""
    prompts = [
        tokenizer.apply_chat_template(
            list(example.messages),
            tools=list(example.tools) or None,
            add_generation_prompt=True,
            enable_thinking=thinking != "off",
            tokenize=False,
        )
        for example in examples
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    with torch.inference_mode():
        outputs = model.generate(
            **inputs.to(model.device), max_new_tokens=_MAX_NEW_TOKENS, do_sample=False
        )
    texts = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :])
    return [_answer_of(text) for text in texts]


def _answer_of(text: str) -> str | None:
    if "<|im_end|>" not in text:
        return None
    return text.split("<|im_end|>")[0].split("</think>")[-1].lstrip("\n")


def main() -> None:
    """Print a checkpoint's losses and rates."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).parent)
    parser.add_argument("--prose", type=Path, required=True, help="the novels' text (prose.py)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-examples", type=int, default=100)
    arguments = parser.parse_args()
    _, held_out = load_prose(arguments.prose)
    evaluation = evaluate(
        arguments.checkpoint,
        held_out,
        device=arguments.device,
        num_examples=arguments.num_examples,
    )
    print(evaluation.table())
    print(f"prose: {evaluation.prose_loss:.3f} nats/token, ", end="")
    print(f"{evaluation.prose_bits_per_byte:.3f} bits/byte")


if __name__ == "__main__":
    main()
