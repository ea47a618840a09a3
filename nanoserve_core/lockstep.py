"""`Lockstep`: the groups of the scheduler, and which members stand before their next token.

::

    waits for members -> waits -> joins -> computes all but its last token -> ready <-> in a step
                           ^------------------ preempted together ------------------------|

The members that have not ended are sampled in one step or in none. This file plans nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanoserve_core.block_manager import BlockManager
    from nanoserve_core.request import Sequence
    from nanoserve_core.request_group import RequestGroup


class Lockstep:
    """Unfinished groups; written by the scheduler only."""

    def __init__(self) -> None:
        self._members: dict[RequestGroup, list[Sequence]] = {}
        self.ready: dict[int, Sequence] = {}
        """Running members by id whose K/V is computed or in flight, but for that of the last token.
        """

    def add(self, sequence: Sequence) -> list[Sequence]:
        """A member was submitted; the list of all that were, which grows with each."""
        group = sequence.request.group
        assert group is not None, "only members of groups come here"
        members = self._members.setdefault(group, [])
        members.append(sequence)
        return members

    def together(self, sequence: Sequence) -> list[Sequence]:
        """The unfinished sequences that wait and run with this one, in order; else itself alone."""
        group = sequence.request.group
        members = [sequence] if group is None else self._members[group]
        return [member for member in members if not member.is_finished]

    def forget(self, group: RequestGroup | None) -> None:
        """Every member of a group has ended."""
        if group is not None:
            del self._members[group]

    def complete_groups(self) -> Iterator[list[Sequence]]:
        """The unfinished members of each group of which all can run: none has a token pending."""
        if not self.ready:
            return
        for members in self._members.values():
            live = [member for member in members if not member.is_finished]
            if all(m.sequence_id in self.ready and not m.num_pending for m in live):
                yield live


def num_blocks_together(members: Iterable[Sequence], manager: BlockManager) -> int:
    """Blocks that waiting members take at most; of equal prompts the whole blocks count once."""
    num_blocks, prompts = 0, set[tuple[int, ...]]()
    for member in members:
        prompt = member.request.prompt_token_ids
        num_blocks += manager.num_blocks_for(member.num_tokens)
        if prompt in prompts and manager.enable_prefix_caching:
            num_blocks -= (len(prompt) - 1) // manager.block_size
        prompts.add(prompt)
    return num_blocks
