"""`StepPart`: what of a step is captured as one graph, and which of them are made ready beforehand.

It knows sizes only.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from nanoserve_core.cuda_graphs import bucket_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanoserve_core.prompt_inputs import PromptShape

_FIRST_PROMPT_TOKENS = 128
"""Prompts of more tokens need no kernel that those up to here do not."""


class Then(Enum):
    """What a part does with its logits."""

    NOTHING = "nothing"
    """The host's sampler goes on."""
    SAMPLE = "sample"
    FILTER = "filter"
    """Sample, some rows behind a cut (top-k, top-p, min-p)."""


class StepPart(NamedTuple):
    """A key: equal parts are one graph."""

    size: int | PromptShape
    """Decode rows, padding included, or the shape of prompts."""
    is_special: bool
    """Rows that share blocks read them together; or prompts are the first step of a long one."""
    then: Then


def usual_parts(
    buckets: tuple[int, ...],
    shapes: Iterable[PromptShape],
    *,
    max_num_rows: int,
    can_share: bool,
) -> list[StepPart]:
    """For prompts of some shapes and any number of decode rows up to ``max_num_rows``.

    ``can_share``: whether rows may read blocks together.
    """
    most = bucket_of(min(max_num_rows, buckets[-1]), buckets)
    sizes: list[tuple[int | PromptShape, bool]] = [(shape, False) for shape in shapes]
    sizes += [(rows, False) for rows in buckets if rows <= most]
    if can_share:
        sizes += [(rows, True) for rows in buckets if 1 < rows <= most]
    return [
        StepPart(size, is_special, then)
        for size, is_special in sizes
        for then in (Then.SAMPLE, Then.FILTER)
    ]


def first_parts(shapes: list[PromptShape]) -> list[StepPart]:
    """For one prompt of any length, and one row. ``shapes``: of steps, the smallest first."""
    alone = [shape for shape in shapes if shape.num_rows == 1]
    most = max(i for i, s in enumerate(alone) if i == 0 or s.num_tokens <= _FIRST_PROMPT_TOKENS)
    return usual_parts(
        (1,), dict.fromkeys((alone[0], alone[most])), max_num_rows=1, can_share=False
    )
