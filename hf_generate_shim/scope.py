"""`GenerateScope`: what the patched `generate` tells the patched `_sample` of the same call.

transformers offers no way to hand something through its preparation, and calls of other threads run
at the same time: a context variable belongs to one call in one thread.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@dataclass
class GenerateScope:
    """One running call of `generate`."""

    model: nn.Module
    has_user_cache: bool
    """The caller passed a cache object, and keeps it."""
    only_prepare: bool = False
    """Stop at the seam, see `preparation`."""
    seed: int | None = None
    """Of the rows' streams; None: drawn from torch's generator."""
    reached_sample: bool = False
    """`_sample` was called: the generation mode is one that the seam sees."""


_CURRENT: ContextVar[GenerateScope | None] = ContextVar("hf_generate_shim_scope", default=None)


def current_scope(model: nn.Module) -> GenerateScope | None:
    """The innermost running `generate` of this thread, if it is one of ``model``."""
    scope = _CURRENT.get()
    return scope if scope is not None and scope.model is model else None


@contextmanager
def entered(scope: GenerateScope) -> Iterator[GenerateScope]:
    """Make ``scope`` the current one for the block."""
    token = _CURRENT.set(scope)
    try:
        yield scope
    finally:
        _CURRENT.reset(token)
