"""`CallScope`: the calls that run inside one `batch`, so that the first failure can cancel the
others.

A worker thread that waits for the engine cannot be interrupted, but what it waits for can be
cancelled. The scope travels in the context that each worker gets a copy of.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Protocol

from nanoserve_core.errors import RequestFailed

if TYPE_CHECKING:
    from collections.abc import Iterator


class Closable(Protocol):
    """Something to wait for, that any thread can end."""

    def close(self) -> None:
        """End it; idempotent, never blocks."""


class CallScope:
    """Collects what runs inside it; `close` ends all of it and refuses what would start later.

    A scope can itself be registered in an outer one and is then closed with it. Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Closable] = set()
        self._is_closed = False

    def close(self) -> None:
        """Cancel everything inside; idempotent."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for call in running:
            call.close()

    def add(self, call: Closable) -> None:
        """Have `call` closed with the scope; closes it and raises `RequestFailed` when that is
        past.
        """
        with self._lock:
            if not self._is_closed:
                self._running.add(call)
                return
        call.close()
        raise RequestFailed(
            "this call was cancelled: another input of its batch failed, and return_exceptions is "
            "False. Pass return_exceptions=True to have all inputs answered."
        )

    def discard(self, call: Closable) -> None:
        """Forget a call that has ended."""
        with self._lock:
            self._running.discard(call)


_CURRENT: ContextVar[CallScope | None] = ContextVar("nanoserve_call_scope", default=None)


@contextmanager
def registered(call: Closable) -> Iterator[None]:
    """While the block runs, `call` belongs to the scope of the current context, if there is one."""
    scope = _CURRENT.get()
    if scope is None:
        yield
        return
    scope.add(call)
    try:
        yield
    finally:
        scope.discard(call)


def context_in(scope: CallScope) -> Context:
    """A copy of the current context in which calls belong to `scope`."""
    context = copy_context()
    context.run(_CURRENT.set, scope)
    return context
