"""`CudaStream`: the one stream a runner computes on, and its traffic with the host.

::

    caller's stream --(waits)--> own stream: deltas, steps --(waits)--> copy stream: tokens

What the host must not touch yet is told by a `Mark`. Nothing here lets go of the GIL except
`Mark.wait`. It knows no model and no plan.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nanoserve_core.cuda_calls import CudaCalls

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import numpy as np
    from torch import Tensor

    HostInts = np.ndarray[Any, np.dtype[np.int32]]  # Any: the shape


_INT_NBYTES = 4


class Mark(Protocol):
    """A point in the device's work; done until it is first set."""

    def is_done(self) -> bool:
        """Whether the device has passed it; never waits."""
        ...

    def wait(self) -> None:
        """Return once it has."""
        ...


class StepStream(Protocol):
    """What the runner needs of a device's queue. Without a device everything happens at once."""

    def entered(self) -> AbstractContextManager[None]:
        """Within it, torch works on this stream, after what the caller's stream holds."""
        ...

    def host_buffer(self, num_ints: int) -> Tensor:
        """[num_ints] int32 on the host, page-locked."""
        ...

    def make_mark(self) -> Mark:
        """A new mark, done."""
        ...

    def upload(self, target: int, source: int, nbytes: int, mark: Mark) -> None:
        """Copy page-locked memory, which must not change before ``mark`` is done, to the device.

        ``target``, ``source``: addresses; a view of a tensor would let go of the GIL.
        """
        ...

    def download(self, buffer: Tensor, parts: list[tuple[Tensor, int]], mark: Mark) -> None:
        """Copy the first ints, as many as the number says, of device tensors as they are now to a
        host buffer, one after the other. This happens beside what follows on the stream, which must
        leave the sources alone until ``mark`` is done.
        """
        ...

    def set(self, mark: Mark) -> None:
        """``mark`` is done when what the stream holds now is done."""
        ...

    def close(self) -> None:
        """Wait for all of it, and give events and streams back."""
        ...

    def give_back_memory(self) -> None:
        """Give the device what no tensor needs any more; once closed."""
        ...


class CudaMark:
    """`Mark` of a CUDA device: an event."""

    __slots__ = ("_calls", "event")

    def __init__(self, calls: CudaCalls) -> None:
        self._calls = calls
        self.event = calls.make_event()

    def is_done(self) -> bool:
        """See `Mark`."""
        return self._calls.is_done(self.event)

    def wait(self) -> None:
        """See `Mark`; lets go of the GIL if it must wait."""
        self._calls.synchronize(self.event)


class CudaStream:
    """`StepStream` of a CUDA device. Used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch has no types here
        self._device = device
        with torch.cuda.device(device):
            self.stream, self._copy_stream = _take_streams(device)
            self.calls = CudaCalls()
            self._marks: list[CudaMark] = []
            self._entry, self._step = self.make_mark(), self.make_mark()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """See `StepStream`. A caller's optimizer step, say, must not be read half-done."""
        caller = torch.cuda.current_stream(self._device).cuda_stream
        with torch.cuda.stream(self.stream):
            if caller != self.stream.cuda_stream:
                self.calls.record(self._entry.event, caller)
                self.calls.wait_event(self.stream.cuda_stream, self._entry.event)
            yield

    def host_buffer(self, num_ints: int) -> Tensor:
        """See `StepStream`."""
        return torch.zeros(num_ints, dtype=torch.int32, pin_memory=True)

    def make_mark(self) -> CudaMark:
        """See `StepStream`."""
        self._marks.append(CudaMark(self.calls))
        return self._marks[-1]

    def upload(self, target: int, source: int, nbytes: int, mark: Mark) -> None:
        """See `StepStream`."""
        stream = self.stream.cuda_stream
        self.calls.copy_to_device(target, source, nbytes, stream)
        self.calls.record(_event(mark), stream)

    def download(self, buffer: Tensor, parts: list[tuple[Tensor, int]], mark: Mark) -> None:
        """See `StepStream`: on the copy stream."""
        copy_stream = self._copy_stream.cuda_stream
        self.calls.record(self._step.event, self.stream.cuda_stream)
        self.calls.wait_event(copy_stream, self._step.event)
        target = buffer.data_ptr()
        for source, num_ints in parts:
            self.calls.copy_to_host(target, source.data_ptr(), _INT_NBYTES * num_ints, copy_stream)
            target += _INT_NBYTES * num_ints
        self.calls.record(_event(mark), copy_stream)

    def set(self, mark: Mark) -> None:
        """See `StepStream`."""
        self.calls.record(_event(mark), self.stream.cuda_stream)

    def close(self) -> None:
        """See `StepStream`. Idempotent."""
        self.stream.synchronize()
        self._copy_stream.synchronize()
        for mark in self._marks:
            self.calls.destroy_event(mark.event)
        if self._marks:
            _idle_streams(self._device).append((self.stream, self._copy_stream))
        self._marks.clear()

    def give_back_memory(self) -> None:
        """See `StepStream`: what torch keeps for later tensors goes back too."""
        torch.cuda.empty_cache()


class Uploads:
    """The way of ints to the device: page-locked memory, given out piece by piece in a circle.

    ::

        |..free..|== sent, perhaps not copied yet ==|..free..|
                 oldest                       newest ^ next piece
    """

    def __init__(self, stream: StepStream, num_ints: int) -> None:
        """``num_ints``: more than twice what one `send` sends, so that none waits for its own
        predecessor.
        """
        self._stream = stream
        self._memory = stream.host_buffer(num_ints)
        self._array: HostInts = self._memory.numpy()
        self._pieces: deque[tuple[int, Mark]] = deque()
        self._idle_marks: list[Mark] = []
        self._end = 0

    def piece(self, num_ints: int) -> HostInts:
        """[num_ints] int32 to be filled and given to `send`; waits while the device reads it."""
        start = self._end if self._end + num_ints <= len(self._array) else 0
        if start < self._end:  # what is ahead up to the end is older than what is at the beginning
            self._wait_for(self._end, len(self._array))
        self._wait_for(start, start + num_ints)
        self._end = start
        return self._array[start : start + num_ints]

    def send(self, target: Tensor, num_ints: int) -> None:
        """Copy the first ints of the latest `piece` to the beginning of ``target``, int32.

        ``target`` may be overwritten by the next `send` to it: that is ordered by the stream.
        """
        start, self._end = self._end, self._end + num_ints
        mark = self._idle_marks.pop() if self._idle_marks else self._stream.make_mark()
        self._pieces.append((start, mark))
        source = self._memory.data_ptr() + _INT_NBYTES * start
        self._stream.upload(target.data_ptr(), source, _INT_NBYTES * num_ints, mark)

    def _wait_for(self, start: int, end: int) -> None:
        """Forget the pieces that begin there, which are the oldest, once they were copied."""
        while self._pieces and start <= self._pieces[0][0] < end:
            _, mark = self._pieces.popleft()
            mark.wait()
            self._idle_marks.append(mark)


@cache
def _idle_streams(device: torch.device) -> list[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
    """Streams of engines that were closed: cuBLAS keeps a workspace (32 MiB on Hopper) for each
    stream it has seen, so that the next engine had better take one of them.
    """
    del device
    return []


def _take_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    try:
        return _idle_streams(device).pop()
    except IndexError:
        new_stream = torch.cuda.Stream
        return new_stream(device), new_stream(device)  # type: ignore[no-untyped-call]  # torch has no types here


def _event(mark: Mark) -> int:
    assert isinstance(mark, CudaMark), "marks belong to the stream that made them"
    return mark.event
