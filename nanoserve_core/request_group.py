"""`RequestGroup`: requests whose next tokens are chosen together, step by step.

The scheduler admits all of a group or none, never samples one without the others, and preempts them
together; the sampler hands their logits to the group's own `GroupSampler`. No torch at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nanoserve_core.request import Request


class GroupSampler(Protocol):
    """Chooses the tokens of a group; keeps whatever state it needs."""

    def __call__(self, logits: Tensor, members: Sequence[int]) -> Tensor:
        """One token for each member that has not ended: [len(members)] int64.

        ``logits``: [len(members), vocab] float32 on the model's device, its own to keep and edit.
        ``members``: places in ``request_ids``, rising. Called once a step on the engine's thread,
        in order: the tokens of the step before are committed. What it raises fails the group.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestGroup:
    """What the requests of a group share; compared by identity.

    A member ends by ``max_tokens``, its own stop ids or its ``should_stop``; the others go on. When
    one is aborted or fails, so does all of the group.
    """

    request_ids: tuple[str, ...]
    num_total_tokens: tuple[int, ...]
    """Prompt plus ``max_tokens`` of each member."""
    sampler: GroupSampler

    @classmethod
    def join(cls, requests: Sequence[Request], sampler: GroupSampler) -> list[Request]:
        """The requests as members of one new group, to be submitted one after the other.

        None of it runs before all of it was submitted: who submits a part only must abort it.
        """
        totals = (len(r.prompt_token_ids) + (r.sampling.max_tokens or 0) for r in requests)
        group = cls(
            request_ids=tuple(request.request_id for request in requests),
            num_total_tokens=tuple(totals),
            sampler=sampler,
        )
        return [replace(request, group=group) for request in requests]
