"""Whether somebody listens for tokens: the handlers that LangChain attaches for streamed events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_core.callbacks import BaseCallbackManager, Callbacks
from langchain_core.callbacks.manager import BaseRunManager

# Private, but the only name there is; LangGraph and the partner packages import it too.
from langchain_core.tracers._streaming import _StreamingCallbackHandler

if TYPE_CHECKING:
    from collections.abc import Iterable


def wants_tokens(*callbacks: Callbacks | BaseRunManager) -> bool:
    """True when one of the handlers turns ``on_llm_new_token`` into streamed events."""
    return any(
        isinstance(handler, _StreamingCallbackHandler)
        for group in callbacks
        for handler in _handlers(group)
    )


def _handlers(callbacks: object) -> Iterable[object]:
    if isinstance(callbacks, BaseCallbackManager | BaseRunManager):
        return callbacks.handlers
    return callbacks if isinstance(callbacks, list) else ()
