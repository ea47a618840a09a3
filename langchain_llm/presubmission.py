"""`Presubmission`: conversations that already run while LangChain's ``generate`` asks for them one
by one.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from langchain_core.messages import BaseMessage

    from langchain_llm.chat_call import ChatCall
    from nanoserve_adapters.streams import RequestStream


class Submitted(NamedTuple):
    """A call that runs, and the conversation it is for."""

    messages: Sequence[BaseMessage]
    call: ChatCall
    stream: RequestStream


class Presubmission:
    """Running conversations in the order in which they will be asked for. One thread."""

    def __init__(self) -> None:
        self._waiting: deque[Submitted] = deque()

    def add(self, submitted: Submitted) -> None:
        """Queue a running conversation."""
        self._waiting.append(submitted)

    def take(self, messages: Sequence[BaseMessage]) -> Submitted | None:
        """The next one, if it is for exactly these message objects."""
        if not self._waiting or not _are_same(self._waiting[0].messages, messages):
            return None
        return self._waiting.popleft()

    def close(self) -> None:
        """Cancel what nobody asked for."""
        while self._waiting:
            self._waiting.popleft().stream.close()


_CURRENT: ContextVar[Presubmission | None] = ContextVar("nanoserve_presubmission", default=None)


@contextmanager
def presubmitted(presubmission: Presubmission) -> Iterator[None]:
    """While the block runs, `take_submitted` takes from `presubmission`; then the rest is
    cancelled.
    """
    token = _CURRENT.set(presubmission)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        presubmission.close()


def take_submitted(messages: Sequence[BaseMessage]) -> Submitted | None:
    """The running request for these messages, if the current ``generate`` has submitted it."""
    presubmission = _CURRENT.get()
    return presubmission.take(messages) if presubmission is not None else None


def _are_same(ours: Sequence[BaseMessage], theirs: Sequence[BaseMessage]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
