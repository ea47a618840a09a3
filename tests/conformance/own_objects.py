"""What users hand to `generate`: processors, criteria, functions and streamers of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.generation import LogitsProcessor, StoppingCriteria

if TYPE_CHECKING:
    from collections.abc import Sequence


class NoThrees(LogitsProcessor):
    """Forbids ids that three divides."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """In place."""
        del input_ids
        scores[:, ::3] = -float("inf")
        return scores


class RowAutomaton(LogitsProcessor):
    """Walks a state per row; breaks when rows are missing, reordered or skipped.

    After an even token it prefers the upper half of the vocabulary, in row ``i`` by ``i + 1``.
    """

    def __init__(self) -> None:
        self.shape: tuple[int, int] | None = None
        self.prompts: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Not in place."""
        if self.shape is None:
            self.prompts = input_ids.clone()
        else:
            assert self.prompts is not None, "the first call has set it"
            assert tuple(input_ids.shape) == (self.shape[0], self.shape[1] + 1)
            assert torch.equal(input_ids[:, : self.prompts.shape[1]], self.prompts)
        self.shape = (int(input_ids.shape[0]), int(input_ids.shape[1]))
        assert scores.dtype == torch.float32
        bonus = torch.zeros_like(scores)
        bonus[:, scores.shape[1] // 2 :] = 1.0
        rows = torch.arange(1, len(scores) + 1).to(scores)
        return scores + bonus * (rows * (input_ids[:, -1] % 2 == 0))[:, None]


class AtColumn(StoppingCriteria):
    """Ends all rows when the sequence has ``column`` columns; answers in one of three shapes."""

    def __init__(self, column: int, answer: str) -> None:
        self.column = column
        self.answer = answer

    def __call__(
        self, input_ids: torch.Tensor, scores: object, **kwargs: object
    ) -> torch.Tensor | bool:
        """A bool, [num_rows] or [num_rows, 1], as transformers allows."""
        del scores, kwargs
        done = input_ids.shape[1] >= self.column
        if self.answer == "bool":
            return done
        rows = torch.full((len(input_ids),), done)
        return rows if self.answer == "rows" else rows[:, None]


class AfterEven(StoppingCriteria):
    """Ends a row at an even token from ``column`` on: rows end at different steps."""

    def __init__(self, column: int) -> None:
        self.column = column

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """[num_rows] bool."""
        del scores, kwargs
        is_late = input_ids.shape[1] >= self.column
        return (input_ids[:, -1] % 2 == 0) & is_late


def allow_by_row(batch_id: int, input_ids: torch.Tensor) -> Sequence[int]:
    """`prefix_allowed_tokens_fn`: other ids in each row and after each token."""
    start = (7 * batch_id + int(input_ids[-1])) % 40
    return list(range(start, 256, 3))


class Recorder:
    """A streamer that keeps what it was given."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def put(self, value: torch.Tensor) -> None:
        """Prompt or step, as a list."""
        assert value.device.type == "cpu"
        self.events.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        """The end."""
        self.events.append("end")
