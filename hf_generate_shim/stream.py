"""`LockstepFeed`: gives a streamer what transformers' loop would have given it, step by step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

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
