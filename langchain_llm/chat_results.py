"""Pieces of an answer as LangChain's chat messages: all of them as one, or each as a chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_llm.tool_call_block import call_chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_llm.streaming import Piece

REASONING_KEY = "reasoning_content"
"""Where LangChain looks for reasoning among ``additional_kwargs``."""


def chat_result(pieces: Sequence[Piece], *, model_name: str) -> ChatResult:
    """The whole answer, of all its pieces."""
    ending = pieces[-1].ending
    assert ending is not None, "an answer's last piece has its ending"
    info = ending.info(model_name)
    if any(piece.logprobs is not None for piece in pieces):
        content = [entry for piece in pieces for entry in piece.logprobs or ()]
        info["logprobs"] = {"content": content}
    found = [piece.call for piece in pieces if piece.call is not None]
    message = AIMessage(
        content="".join(piece.text for piece in pieces),
        additional_kwargs=_reasoning("".join(piece.reasoning for piece in pieces)),
        tool_calls=[call for call in found if call["type"] == "tool_call"],
        invalid_tool_calls=[call for call in found if call["type"] == "invalid_tool_call"],
        usage_metadata=ending.usage(),
    )
    return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])


def chat_chunk(piece: Piece, *, model_name: str, first_call_index: int) -> ChatGenerationChunk:
    """A piece of a stream. Only the last one has usage, reasons and names: LangChain adds chunks
    up.
    """
    info: dict[str, Any] = {}
    if piece.logprobs:
        info["logprobs"] = {"content": piece.logprobs}
    fields: dict[str, Any] = {}
    if piece.call is not None:
        index = first_call_index + piece.call_number
        fields["tool_call_chunks"] = [call_chunk(piece.call, index)]
    if piece.ending is not None:
        info |= piece.ending.info(model_name)
        fields |= {"usage_metadata": piece.ending.usage(), "chunk_position": "last"}
    message = AIMessageChunk(
        content=piece.text, additional_kwargs=_reasoning(piece.reasoning), **fields
    )
    return ChatGenerationChunk(message=message, generation_info=info or None)


def _reasoning(text: str) -> dict[str, Any]:
    return {REASONING_KEY: text} if text else {}
