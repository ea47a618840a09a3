"""Feeds, which give a streamer what a call's rows have become, on the caller's thread.

`LockstepFeed` gives what transformers' loop would have given, step by step; `RowFeed` gives a
`RowStreamer` each row's tokens at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hf_generate_shim.row_streamer import RowStreamer

if TYPE_CHECKING:
    from hf_generate_shim.call import HFObject
    from hf_generate_shim.results import Results
    from hf_generate_shim.task import Task


class LockstepFeed:
    """Feeds ``streamer`` on the caller's thread.

    Rows run freely in the engine; a step is put out once every row has its token or has ended:
    int64 [num_rows] on the CPU, the pad id for rows that have ended. transformers itself has put
    the prompt before.
    """

    def __init__(self, streamer: HFObject, results: Results, task: Task) -> None:
        self._streamer = streamer
        self._results = results
        self._task = task
        self._num_steps = 0

    def push(self) -> None:
        """Put out the steps that have become complete; what ``put`` raises passes through."""
        limit = self._task.time_limit.num_steps if self._task.time_limit else math.inf
        pad = self._task.pad_token_id or 0
        while self._num_steps < min(self._results.num_complete_steps, limit):
            rows = [sample.token_ids for sample in self._results.rows]
            step = [row[self._num_steps] if self._num_steps < len(row) else pad for row in rows]
            self._num_steps += 1
            self._streamer.put(torch.tensor(step, dtype=torch.long, device="cpu"))


class RowFeed:
    """Feeds a `RowStreamer`: rows need not wait for each other."""

    def __init__(self, streamer: RowStreamer, results: Results) -> None:
        self._streamer = streamer
        self._results = results
        self._num_put = [0] * len(results.rows)

    def push(self) -> None:
        """Put out all that is new; what ``put_rows`` raises passes through."""
        news = []
        for row, sample in enumerate(self._results.rows):
            start = self._num_put[row]
            if start < len(sample.token_ids) or sample.is_finished:
                news.append((row, sample.token_ids[start:], sample.is_finished))
            self._num_put[row] = len(sample.token_ids)
        self._streamer.put_rows(news)


def feed_of(streamer: HFObject, results: Results, task: Task) -> LockstepFeed | RowFeed | None:
    """The feed of a call's streamer, if it has one. With a time limit all rows are cut at the same
    step, which is only known afterwards: they go in step.
    """
    if streamer is None:
        return None
    if isinstance(streamer, RowStreamer) and task.time_limit is None:
        return RowFeed(streamer, results)
    return LockstepFeed(streamer, results, task)
