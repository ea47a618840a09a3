"""Trains the tiny Qwen3 checkpoint in this folder, from nothing, in minutes on one GPU.

    python -m examples.tiny_qwen3.train --prose .corpus --output out/tiny_qwen3

`prose.py` says how to make `.corpus`. Writes a checkpoint that plain transformers loads, with a
README that holds what `evaluate.py` measured. A GPU is used if there is one. The same number of
steps and the same seed give the same text in the same order; `--minutes` ends a run early, with the
learning rate brought down in time.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from examples.tiny_qwen3.batches import Batch, Batches, Shape, StepDataset
from examples.tiny_qwen3.evaluate import evaluate
from examples.tiny_qwen3.model_card import Run, model_card
from examples.tiny_qwen3.prose import Prose, load_prose
from examples.tiny_qwen3.tokenizer import MAX_LENGTH, save_tokenizer, train_tokenizer
from examples.tiny_qwen3.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

HELD_OUT_SHAPE = Shape(chat_rows=48, tool_rows=16, prose_rows=16)
_LINE_SECONDS = 5
_HELD_OUT_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run is told: its length in steps, the minutes it may take at most, and the rest."""

    steps: int
    minutes: float
    seed: int
    workers: int
    shrink_batch: int

    def progress(self, step: int, seconds: float) -> float:
        """The share of the run that is over, from 0 to 1 and beyond."""
        return max(step / self.steps, seconds / (60 * self.minutes))


class ProgressLog:
    """Prints a line every few seconds, with held-out losses every half minute."""

    def __init__(self, trainer: Trainer, held_out: list[Batch]) -> None:
        """The clock starts now."""
        self.waited_seconds = 0.0  # for data, since the last line
        self._trainer = trainer
        self._held_out = held_out
        self._start = self._last_line = self._last_held_out = time.perf_counter()
        self._num_tokens = 0

    @property
    def seconds(self) -> float:
        """Since the log was made."""
        return time.perf_counter() - self._start

    def after_step(self, step: int, batches: list[Batch], losses: list[Tensor]) -> None:
        """Count a step; print a line if one is due."""
        self._num_tokens += sum(batch.token_ids.size for batch in batches)
        if time.perf_counter() - self._last_line >= _LINE_SECONDS:
            self._print_line(step, [loss.item() for loss in losses])
            self._last_line, self._num_tokens = time.perf_counter(), 0
            self.waited_seconds = 0.0

    def _print_line(self, step: int, losses: list[float]) -> None:
        seconds = time.perf_counter() - self._last_line
        line = f"{self.seconds:4.0f} s  step {step}  {_named(losses)}  "
        line += f"{self._num_tokens / seconds / 1e6:.3f} M tokens/s  "
        line += f"waiting for data {self.waited_seconds / seconds:.0%}"
        if time.perf_counter() - self._last_held_out >= _HELD_OUT_SECONDS:
            line += f"  held out: {_named(self._trainer.held_out_losses(self._held_out))}"
            self._last_held_out = time.perf_counter()
        print(line, flush=True)


def _named(losses: list[float]) -> str:
    names = ("chat", "tools", "prose")
    return " ".join(f"{name} {loss:.3f}" for name, loss in zip(names, losses, strict=True))


def train(folder: Path, sides: tuple[Prose, Prose], *, device: str, options: Options) -> Run:
    """Train a tokenizer and a model on the first side and write both to `folder`."""
    torch.manual_seed(options.seed)
    tokenizer = train_tokenizer(sides[0], seed=options.seed)
    save_tokenizer(tokenizer, folder)
    steps = _training_steps(folder / "tokenizer.json", sides[0], options)
    held_out = Batches(
        folder / "tokenizer.json",
        sides[1],
        shape=shrunk(HELD_OUT_SHAPE, options.shrink_batch),
        seed=options.seed,
        held_out=True,
    )
    trainer = Trainer(new_model(tokenizer), device=device)
    run = run_steps(trainer, steps, held_out.of_step(0), options)
    trainer.model.to(torch.bfloat16).save_pretrained(folder)
    return run


def _training_steps(tokenizer_file: Path, prose: Prose, options: Options) -> Iterator[list[Batch]]:
    """The steps, made by worker processes, which fork here, before CUDA wakes up."""
    shape = shrunk(Shape(), options.shrink_batch)
    batches = Batches(tokenizer_file, prose, shape=shape, seed=options.seed, held_out=False)
    return iter(
        DataLoader(
            StepDataset(batches),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=options.workers,
            prefetch_factor=8 if options.workers else None,
        )
    )


def _unchanged(batches: list[Batch]) -> list[Batch]:
    return batches


def run_steps(
    trainer: Trainer, steps: Iterator[list[Batch]], held_out: list[Batch], options: Options
) -> Run:
    """Train until the run is over. Compiling comes first and is not counted."""
    begin = time.perf_counter()
    batches = next(steps)
    trainer.warm_up(batches)
    print(f"{time.perf_counter() - begin:.0f} s to compile", flush=True)
    log, step, num_tokens = ProgressLog(trainer, held_out), 0, 0
    while (progress := options.progress(step, log.seconds)) < 1:
        losses = trainer.step(batches, progress)
        step += 1
        num_tokens += sum(batch.token_ids.size for batch in batches)
        log.after_step(step, batches, losses)
        asked = time.perf_counter()
        batches = next(steps)
        log.waited_seconds += time.perf_counter() - asked
    return Run(num_steps=step, num_tokens=num_tokens, seconds=log.seconds)


def new_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """A Qwen3 of 5.2 million parameters with fresh weights."""
    vocabulary = tokenizer.get_vocab()
    end_of_text, end_of_turn = vocabulary["<|endoftext|>"], vocabulary["<|im_end|>"]
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=end_of_text,
        eos_token_id=[end_of_turn, end_of_text],
        pad_token_id=end_of_text,
    )
    return model


def shrunk(shape: Shape, divisor: int) -> Shape:
    """The shape with all numbers of rows divided."""
    return Shape(
        chat_rows=max(1, shape.chat_rows // divisor),
        tool_rows=max(1, shape.tool_rows // divisor),
        prose_rows=max(1, shape.prose_rows // divisor),
    )


def parsed_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prose", type=Path, required=True, help="the novels' text (prose.py)")
    parser.add_argument("--output", type=Path, required=True, help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most, compiling apart")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 2))
    parser.add_argument("--shrink-batch", type=int, default=1, help="fewer rows, to try it out")
    parser.add_argument("--num-examples", type=int, default=200, help="a task, in the evaluation")
    return parser.parse_args()


def main() -> None:
    """Train, evaluate what was written, and write the README beside it."""
    arguments = parsed_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    sides = load_prose(arguments.prose)
    options = Options(
        steps=arguments.steps,
        minutes=arguments.minutes,
        seed=arguments.seed,
        workers=arguments.workers,
        shrink_batch=arguments.shrink_batch,
    )
    run = train(arguments.output, sides, device=arguments.device, options=options)
    evaluation = evaluate(
        arguments.output, sides[1], device=arguments.device, num_examples=arguments.num_examples
    )
    card = model_card(run, evaluation, arguments.device)
    (arguments.output / "README.md").write_text(card, encoding="utf-8")
    print(card)


if __name__ == "__main__":
    main()
