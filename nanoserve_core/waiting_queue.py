"""The sequences that wait, in the order (priority, arrival), and those not to be looked at yet.

::

    queued     may be admitted next
    parked     a running sequence is computing the block it needs next; by that block's hash
    followers  samples 1 .. n-1 of a request, until sample 0, their leader, has the prompt computed;
               members of a group, until their leader is admitted
    joining    those members then: they come before all others

A sequence that ended while it waited is dropped when its turn comes. This file knows no blocks and
no budget.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nanoserve_core.request import Sequence

_Entry: TypeAlias = "tuple[int, int, int, Sequence]"
_MIN_DEAD = 64


class WaitingQueue:
    """Waiting sequences; its length counts those that have not ended."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._parked: dict[bytes, list[Sequence]] = {}
        self._followers: dict[int, list[Sequence]] = {}
        self._joining: list[Sequence] = []
        self._num_waiting = 0
        self._num_dead = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        """A sequence starts to wait: a new one, or one preempted, at the place of its arrival."""
        self._num_waiting += 1
        self._queue(sequence)

    def push_followers(self, leader: Sequence, followers: list[Sequence]) -> None:
        """The other samples of the leader's request wait until `release_followers`."""
        if followers:
            self._num_waiting += len(followers)
            self._followers[leader.sequence_id] = followers

    def hold(self, num_members: int) -> None:
        """So many members of a group start to wait; `push_group` when all of it does."""
        self._num_waiting += num_members

    def push_group(self, members: list[Sequence]) -> None:
        """All unfinished members of a group wait: they take their turn together."""
        leader, *followers = members
        self._joining = [s for s in self._joining if s.request.group is not leader.request.group]
        self._followers[leader.sequence_id] = followers
        self._queue(leader)

    @property
    def is_joining(self) -> bool:
        """Whether a group is admitted in part: nobody else can be."""
        return bool(self._joining)

    def peek(self) -> Sequence | None:
        """The sequence whose turn it is."""
        if self._joining:
            return self._joining[0]
        heap = self._heap
        while heap and heap[0][-1].is_finished:
            heappop(heap)
            self._num_dead -= 1
        return heap[0][-1] if heap else None

    def pop(self) -> None:
        """The sequence of the last `peek` was admitted."""
        self._num_waiting -= 1
        if self._joining:
            self._joining.pop(0)
            return
        sequence = heappop(self._heap)[-1]
        if sequence.request.group is not None:
            self._joining = self._followers.pop(sequence.sequence_id)

    def park(self, prefix_hash: bytes) -> None:
        """Put the sequence of the last `peek` aside until the block with this hash is computed."""
        self._parked.setdefault(prefix_hash, []).append(heappop(self._heap)[-1])

    def wake(self, is_computing: Callable[[bytes], bool]) -> None:
        """Queue the parked sequences whose block is not being computed any more."""
        for prefix_hash in [key for key in self._parked if not is_computing(key)]:
            self._queue_all(self._parked.pop(prefix_hash))

    def release_followers(self, leader: Sequence) -> None:
        """Queue the followers of a leader that has its prompt computed, or has ended."""
        if self._followers:
            self._queue_all(self._followers.pop(leader.sequence_id, ()))

    @property
    def leader_ids(self) -> set[int]:
        """Sequences that others wait for as their followers."""
        return set(self._followers)

    def discard(self) -> None:
        """A waiting sequence, wherever it is, has just become finished."""
        self._num_waiting -= 1
        self._num_dead += 1
        self._joining = [sequence for sequence in self._joining if not sequence.is_finished]
        if self._num_dead > max(_MIN_DEAD, self._num_waiting):
            self._drop_dead()

    def _queue(self, sequence: Sequence) -> None:
        request = sequence.request
        entry = (request.priority, sequence.arrival, sequence.sequence_id, sequence)
        heappush(self._heap, entry)

    def _queue_all(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if sequence.is_finished:
                self._num_dead -= 1
            else:
                self._queue(sequence)

    def _drop_dead(self) -> None:
        """Ended sequences must not pile up behind a head that is blocked."""
        self._heap = [entry for entry in self._heap if not entry[-1].is_finished]
        heapify(self._heap)
        for waiting in (*self._parked.values(), *self._followers.values()):
            waiting[:] = [sequence for sequence in waiting if not sequence.is_finished]
        self._num_dead = 0
