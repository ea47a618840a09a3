"""What a request tells plugins about the LangChain run it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_core.callbacks.manager import BaseRunManager


def run_metadata(run_manager: BaseRunManager | None) -> dict[str, Any]:  # Any: users' own metadata
    """``source`` always; ``run_id``, ``parent_run_id``, ``tags`` and ``metadata`` where they are
    known.

    LangChain tells them to ``invoke`` and ``ainvoke``, and to the streams of the LLM class.
    """
    if run_manager is None:
        return {"source": "langchain"}
    return {
        "source": "langchain",
        "run_id": str(run_manager.run_id),
        "parent_run_id": str(run_manager.parent_run_id) if run_manager.parent_run_id else None,
        "tags": tuple(run_manager.tags),
        "metadata": dict(run_manager.metadata),
    }
