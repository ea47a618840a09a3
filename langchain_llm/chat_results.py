"""Finished requests and pieces of streams as LangChain's chat messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_llm.results import ending_of, logprobs_content

if TYPE_CHECKING:
    from langchain_llm.streaming import Piece
    from nanoserve_core.request import RequestOutput
    from nanoserve_core.text import Tokenizer


def chat_result(
    output: RequestOutput, tokenizer: Tokenizer, *, model_name: str, num_logprobs: int | None
) -> ChatResult:
    """The answer of one finished request."""
    sample, ending = output.outputs[0], ending_of(output, 0)
    info = ending.info(model_name)
    if num_logprobs is not None and sample.logprobs is not None:
        info["logprobs"] = {
            "content": logprobs_content(tokenizer, sample.token_ids, sample.logprobs, num_logprobs)
        }
    message = AIMessage(content=sample.text, usage_metadata=ending.usage())
    return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])


def chat_chunk(piece: Piece, *, model_name: str) -> ChatGenerationChunk:
    """A piece of a stream. Only the last one has usage, reasons and names: LangChain adds chunks
    up.
    """
    info: dict[str, Any] = {}
    if piece.logprobs:
        info["logprobs"] = {"content": piece.logprobs}
    if piece.ending is None:
        message = AIMessageChunk(content=piece.text)
    else:
        info |= piece.ending.info(model_name)
        message = AIMessageChunk(
            content=piece.text, usage_metadata=piece.ending.usage(), chunk_position="last"
        )
    return ChatGenerationChunk(message=message, generation_info=info or None)
