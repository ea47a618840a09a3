"""Turns the corpus into packed token arrays for the training loop.

A batch of dialogues packs several into a row and keeps them apart by their document number; a
batch of prose holds one window of running text a row. Step `n` of a seed is the same whichever
worker makes it. Knows token ids, not the model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset, get_worker_info

from examples.tiny_qwen3.corpus import ChatText, ExampleSource, random_thinking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from examples.tiny_qwen3.example import Example
    from examples.tiny_qwen3.prose import Prose

_OPEN_ROWS = 16
_CHUNK = 64  # examples tokenized at a time


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many rows of how many tokens a step holds of each kind of text."""

    chat_rows: int = 256
    chat_length: int = 256
    tool_rows: int = 32
    tool_length: int = 1024
    prose_rows: int = 3
    prose_length: int = 2048


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of `length + 1` tokens: what is read, and one later what is to be said.

    `weights` is how much the loss of saying the token counts. `documents` numbers the documents of
    a row, 0 where nothing stands; None where a row is one text.
    """

    token_ids: npt.NDArray[np.int16]
    weights: npt.NDArray[np.uint8]
    documents: npt.NDArray[np.uint8] | None


@dataclass(frozen=True, kw_only=True)
class _Document:
    prompt_ids: list[int]
    completion_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def weight(self) -> int:
        """Short answers count up to four times a token, or long ones would drown them."""
        return min(4, max(1, 16 // len(self.completion_ids)))


class Batches:
    """Makes the batches of a step from one side of the corpus."""

    def __init__(
        self, tokenizer_file: Path, prose: Prose, *, shape: Shape, seed: int, held_out: bool
    ) -> None:
        """`tokenizer_file` is the checkpoint's tokenizer.json; `prose` the side's text."""
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._source = ExampleSource(prose, held_out=held_out)
        self._text = ChatText()
        self._shape = shape
        self._seed = seed
        self._pad_id = self._tokenizer.get_vocab()["<|endoftext|>"]
        self._prose_ids, self._prose_starts = self._tokenize_prose(prose)

    def of_step(self, step: int) -> list[Batch]:
        """Chat, tools and prose, in this order."""
        rng, shape = Random(f"{self._seed}/{step}"), self._shape
        chat = self._packed(rng, self._source.draw_chat, shape.chat_length + 1)
        tools = self._packed(rng, self._source.draw_tool, shape.tool_length + 1)
        return [
            self._dialogues(chat, (shape.chat_rows, shape.chat_length + 1), emphasis=1),
            # Long prompts, short answers: without emphasis the tools would hardly count.
            self._dialogues(tools, (shape.tool_rows, shape.tool_length + 1), emphasis=2),
            self._prose(rng, (shape.prose_rows, shape.prose_length + 1)),
        ]

    def _dialogues(
        self, packed: Iterator[list[_Document]], size: tuple[int, int], *, emphasis: int
    ) -> Batch:
        token_ids = np.full(size, self._pad_id, dtype=np.int16)
        weights = np.zeros(size, dtype=np.uint8)
        documents = np.zeros(size, dtype=np.uint8)
        for row in range(size[0]):
            start = 0
            for number, document in enumerate(next(packed), 1):
                middle, end = start + len(document.prompt_ids), start + document.num_tokens
                token_ids[row, start:end] = document.prompt_ids + document.completion_ids
                weights[row, middle:end] = document.weight * emphasis
                documents[row, start:end] = number
                start = end
        return Batch(token_ids=token_ids, weights=weights, documents=documents)

    def _packed(
        self, rng: Random, draw: Callable[[Random], Example], capacity: int
    ) -> Iterator[list[_Document]]:
        """Rows of documents without end: first fit into a few open rows, the fullest goes first."""
        rows: list[list[_Document]] = [[] for _ in range(_OPEN_ROWS)]
        room = [capacity] * _OPEN_ROWS
        while True:
            for document in self._tokenized(rng, draw):
                size = document.num_tokens
                if size > capacity:
                    continue
                if size > max(room):
                    fullest = room.index(min(room))
                    yield rows[fullest]
                    rows[fullest], room[fullest] = [], capacity
                fitting = next(index for index, left in enumerate(room) if left >= size)
                rows[fitting].append(document)
                room[fitting] -= size

    def _tokenized(self, rng: Random, draw: Callable[[Random], Example]) -> list[_Document]:
        texts: list[str] = []
        for _ in range(_CHUNK):
            example = draw(rng)
            thinking = random_thinking(rng, example)
            texts.append(self._text.prompt(example, thinking))
            texts.append(self._text.completion(example, thinking))
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        return [
            _Document(prompt_ids=prompt, completion_ids=completion)
            for prompt, completion in zip(ids[::2], ids[1::2], strict=True)
        ]

    def _prose(self, rng: Random, size: tuple[int, int]) -> Batch:
        last = len(self._prose_ids) - size[1]
        starts = [min(rng.choice(self._prose_starts), last) for _ in range(size[0])]
        token_ids = np.stack([self._prose_ids[start : start + size[1]] for start in starts])
        return Batch(token_ids=token_ids, weights=np.ones(size, dtype=np.uint8), documents=None)

    def _tokenize_prose(self, prose: Prose) -> tuple[npt.NDArray[np.int16], list[int]]:
        """All chapters one after another, and where their paragraphs begin."""
        ids: list[int] = []
        for encoding in self._tokenizer.encode_batch_fast(list(prose.chapters)):
            ids += [*encoding.ids, self._pad_id]
        vocabulary = self._tokenizer.get_vocab()
        breaks = {number for token, number in vocabulary.items() if token.endswith("ĊĊ")}
        breaks.add(self._pad_id)
        starts = [0, *(at + 1 for at, token in enumerate(ids[:-1]) if token in breaks)]
        return np.array(ids, dtype=np.int16), starts


class StepDataset(IterableDataset[list[Batch]]):
    """The steps in order, shared out among a DataLoader's workers: each makes every n-th."""

    def __init__(self, batches: Batches) -> None:
        """The first step is 0; there is no last."""
        self._batches = batches

    def __iter__(self) -> Iterator[list[Batch]]:
        """Must run in a worker process: it turns off the tokenizer's own threads there."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        worker = get_worker_info()
        step, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        while True:
            yield self._batches.of_step(step)
            step += stride
