"""`Outcomes`: launched steps whose tokens are on their way to the host.

What is read here was enqueued behind its own step, so that reading it waits for no later one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from nanoserve_core.device_rows import RING_LENGTH
from nanoserve_core.errors import RequestFailed
from nanoserve_core.kernels.slot_tables import FAILED
from nanoserve_core.model_runner import StepResult

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve_core.cuda_stream import HostInts, Mark, StepStream
    from nanoserve_core.layers.attention import IntArray
    from nanoserve_core.request import PositionLogprobs
    from nanoserve_core.sampler import SamplerOutput

MAX_UNREAD_STEPS = RING_LENGTH // 2 - 1
"""Steps whose tokens may be unread when another is launched: the ring holds two entries of each."""


class Outcomes:
    """Steps that are launched and not read, and the host memory their tokens come to."""

    def __init__(self, max_num_rows: int, stream: StepStream) -> None:
        self._stream = stream
        buffers = [stream.host_buffer(max_num_rows) for _ in range(MAX_UNREAD_STEPS + 1)]
        self._buffers = [(buffer, buffer.numpy(), stream.make_mark()) for buffer in buffers]
        self._next = 0
        self._unread: deque[Launched | LaunchedByHost] = deque()

    def make_room(self) -> None:
        """Read the oldest steps when more were launched than the ring and the buffers hold."""
        while self._unread and (
            self._unread[0].is_read or len(self._unread) > MAX_UNREAD_STEPS - 1
        ):
            self._unread.popleft().wait()

    def take(self, tokens: list[tuple[Tensor, int]], order: IntArray | None = None) -> Launched:
        """A step of the device: its tokens are the first of each tensor, one after the other.

        ``order``: the places in the plan of the first of them, where they are in another order.
        """
        buffer, array, mark = self._turn()
        if tokens:
            self._stream.download(buffer, tokens, mark)
        step = Launched(array[: sum(num_tokens for _, num_tokens in tokens)], mark, order)
        self._unread.append(step)
        return step

    def take_eager(
        self, output: SamplerOutput | None, prompt_logprobs: dict[int, list[PositionLogprobs]]
    ) -> LaunchedByHost:
        """A step of the host's sampler."""
        _, _, mark = self._turn()
        output = output.on_its_way() if output is not None else None
        self._stream.set(mark)
        step = LaunchedByHost(output, prompt_logprobs, mark)
        self._unread.append(step)
        return step

    def _turn(self) -> tuple[Tensor, HostInts, Mark]:
        self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next]


class _Unread(ABC):
    """A step that is launched; see `InFlight`."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._result: StepResult | None = None

    @property
    def is_read(self) -> bool:
        """Whether its buffer may be used again."""
        return self._result is not None

    def is_done(self) -> bool:
        """See `InFlight`."""
        return self._result is not None or self._mark.is_done()

    def wait(self) -> StepResult:
        """See `InFlight`."""
        if self._result is None:
            self._mark.wait()
            self._result = self._read()
        return self._result

    @abstractmethod
    def _read(self) -> StepResult:
        """The result, once the mark is done."""


class Launched(_Unread):
    """A step whose tokens are on their way."""

    def __init__(self, tokens: HostInts, mark: Mark, order: IntArray | None) -> None:
        super().__init__(mark)
        self._tokens = tokens
        self._order = order

    def _read(self) -> StepResult:
        token_ids = self._tokens.astype(np.int64)
        if self._order is not None:
            token_ids[self._order] = self._tokens[: len(self._order)]
        return StepResult(
            token_ids=token_ids,
            logprobs=(None,) * len(token_ids),
            errors={int(row): _no_token(token_ids[row]) for row in np.flatnonzero(token_ids < 0)},
        )


class LaunchedByHost(_Unread):
    """A step of the host's sampler."""

    def __init__(
        self,
        output: SamplerOutput | None,
        prompt_logprobs: dict[int, list[PositionLogprobs]],
        mark: Mark,
    ) -> None:
        super().__init__(mark)
        self._output = output
        self._prompt_logprobs = prompt_logprobs

    def _read(self) -> StepResult:
        output = self._output
        if output is None:
            empty = np.zeros(0, dtype=np.int64)
            return StepResult(token_ids=empty, prompt_logprobs=self._prompt_logprobs)
        return StepResult(
            token_ids=output.token_ids.numpy(),
            logprobs=output.read_logprobs(),
            prompt_logprobs=self._prompt_logprobs,
            logits=output.logits,
            scores=output.scores,
            errors=dict(output.read_errors()),
        )


def _no_token(token: int) -> RequestFailed:
    if token == FAILED:
        return RequestFailed(
            "no token can be drawn: the logits contain NaN or +inf. Expected finite ones. Look at "
            "the weights, or run in float32."
        )
    return RequestFailed(
        "the device took the sequence for ended or lacked a block for it: expected the scheduler "
        "and the device to agree. Please report this."
    )
