"""Uploads: pieces of page-locked memory in a circle."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoserve_core.cuda_stream import Uploads
from tests.nanoserve_core.host_device import HostMark, HostStream

SIZE = 32


class LazyStream(HostStream):
    """Copies when somebody waits for the mark, as late as a device may."""

    def __init__(self) -> None:
        self.log: list[tuple[tuple[int, int, int], HostMark]] = []
        self.num_marks = 0

    def make_mark(self) -> HostMark:
        """A mark whose wait carries out the copy."""
        self.num_marks += 1
        stream = self

        class Mark(HostMark):
            def wait(self) -> None:
                super().wait()
                stream.run_to(self)

        return Mark()

    def upload(self, target: int, source: int, nbytes: int, mark: HostMark) -> None:  # type: ignore[override]  # its own marks
        """Noted only."""
        mark.is_set = True
        self.log.append(((target, source, nbytes), mark))

    def run_to(self, mark: HostMark) -> None:
        """Carry out the copies up to that mark, in order."""
        while any(each is mark for _, each in self.log):
            ctypes.memmove(*self.log.pop(0)[0])


@given(sizes=st.lists(st.integers(1, SIZE // 2 - 1), min_size=1, max_size=60))
def test_no_piece_is_overwritten_before_it_was_copied(sizes: list[int]) -> None:
    stream = LazyStream()
    uploads = Uploads(stream, SIZE)
    targets = []

    for number, size in enumerate(sizes):
        piece = uploads.piece(size)
        piece[:] = number
        targets.append(torch.full((SIZE,), -1, dtype=torch.int32))
        uploads.send(targets[-1], size)

    while stream.log:
        stream.run_to(stream.log[0][1])
    for number, (size, target) in enumerate(zip(sizes, targets, strict=True)):
        assert target[:size].tolist() == [number] * size
        assert set(target[size:].tolist()) <= {-1}


@given(size=st.integers(1, SIZE // 2 - 1))
def test_marks_are_used_again(size: int) -> None:
    stream = LazyStream()
    uploads = Uploads(stream, SIZE)
    target = torch.zeros(SIZE, dtype=torch.int32)

    for _ in range(200):
        uploads.piece(size)[:] = 1
        uploads.send(target, size)

    assert stream.num_marks <= SIZE // size + 1


def test_what_was_filled_beyond_what_is_sent_is_not_sent() -> None:
    uploads = Uploads(HostStream(), SIZE)
    target = torch.zeros(SIZE, dtype=torch.int32)
    uploads.piece(8)[:] = np.arange(8)

    uploads.send(target, 3)

    assert target[:3].tolist() == [0, 1, 2]
    assert target[3:].abs().sum() == 0
