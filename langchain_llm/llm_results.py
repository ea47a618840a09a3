"""Finished requests and pieces of streams as LangChain's generations of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from langchain_llm.results import ending_of, logprobs_content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_llm.results import Ending
    from langchain_llm.streaming import Piece
    from nanoserve_core.request import RequestOutput
    from nanoserve_core.text import Tokenizer


def llm_result(
    outputs: Sequence[RequestOutput],
    tokenizer: Tokenizer,
    *,
    model_name: str,
    num_logprobs: int | None,
) -> LLMResult:
    """All samples of all prompts, with the token counts of the whole in ``llm_output``."""
    generations: list[list[Generation]] = []
    for output in outputs:
        row: list[Generation] = []
        for index, sample in enumerate(output.outputs):
            info = _info(ending_of(output, index), model_name)
            if num_logprobs is not None and sample.logprobs is not None:
                content = logprobs_content(
                    tokenizer, sample.token_ids, sample.logprobs, num_logprobs
                )
                info["logprobs"] = {"content": content}
            row.append(Generation(text=sample.text, generation_info=info))
        generations.append(row)
    flat = [generation for row in generations for generation in row]
    return LLMResult(generations=[*generations], llm_output=_llm_output(flat, model_name))


def llm_chunk(piece: Piece, *, model_name: str) -> GenerationChunk:
    """A piece of a stream; only the last one has usage, reasons and names."""
    info: dict[str, Any] = {}
    if piece.logprobs:
        info["logprobs"] = {"content": piece.logprobs}
    if piece.ending is not None:
        info |= _info(piece.ending, model_name)
    return GenerationChunk(text=piece.text, generation_info=info or None)


def result_of_chunks(chunks: Sequence[GenerationChunk], *, model_name: str) -> LLMResult:
    """The chunks of one whole stream as a result."""
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    generation = Generation(text=whole.text, generation_info=whole.generation_info)
    return LLMResult(generations=[[generation]], llm_output=_llm_output([generation], model_name))


def _info(ending: Ending, model_name: str) -> dict[str, Any]:
    return {**ending.info(model_name), "usage_metadata": dict(ending.usage())}


def _llm_output(generations: Sequence[Generation], model_name: str) -> dict[str, Any]:
    usages = [(generation.generation_info or {})["usage_metadata"] for generation in generations]
    return {
        "model_name": model_name,
        "token_usage": {
            "prompt_tokens": sum(usage["input_tokens"] for usage in usages),
            "completion_tokens": sum(usage["output_tokens"] for usage in usages),
            "total_tokens": sum(usage["total_tokens"] for usage in usages),
        },
    }
