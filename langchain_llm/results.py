"""What a finished request tells LangChain: usage, finish reason, times, log-probabilities.

It knows LangChain's dicts, but neither messages nor generations: both doors build theirs from
these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.messages.ai import UsageMetadata

    from nanoserve_core.request import (
        PositionLogprobs,
        RequestMetrics,
        RequestOutput,
    )
    from nanoserve_core.text import Tokenizer

PROVIDER = "nanoserve"
TOOL_CALLS = "tool_calls"
"""Finish reason of an answer that ended by itself and holds a tool call."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one sample ended and what it cost."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int = 0
    finish_reason: str
    stop_reason: int | str | None
    metrics: RequestMetrics | None

    def usage(self) -> UsageMetadata:
        """Token counts; ``cache_read``: prompt tokens that the prefix cache supplied;
        ``reasoning``: output tokens in the thinking block.
        """
        num_cached = self.metrics.num_cached_tokens if self.metrics is not None else 0
        return {
            "input_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "input_token_details": {"cache_read": num_cached},
            "output_token_details": {"reasoning": self.num_reasoning_tokens},
        }

    def info(self, model_name: str) -> dict[str, Any]:  # Any: strings and numbers
        """Entries of ``generation_info``, and so of ``response_metadata``. ``ttft_s``: seconds from
        submission to the first token; ``queue_s``: from submission to the first step;
        ``batch_peak``: most rows of a step it ran in; ``stop_reason``: the stop string or id that
        ended it, when one did.
        """
        info: dict[str, Any] = {
            "finish_reason": self.finish_reason,
            "model_name": model_name,
            "model_provider": PROVIDER,
        }
        if self.stop_reason is not None:
            info["stop_reason"] = self.stop_reason
        if self.metrics is not None:
            info |= _times(self.metrics)
        return info


def ending_of(output: RequestOutput, index: int) -> Ending:
    """The ending of sample `index`; prompt tokens count for the first sample only."""
    sample = output.outputs[index]
    return Ending(
        num_prompt_tokens=len(output.prompt_token_ids) if index == 0 else 0,
        num_output_tokens=len(sample.token_ids),
        finish_reason=str(sample.finish_reason),
        stop_reason=sample.stop_reason,
        metrics=output.metrics if index == 0 else None,
    )


def _times(metrics: RequestMetrics) -> dict[str, Any]:  # Any: numbers
    times: dict[str, Any] = {
        "cached_tokens": metrics.num_cached_tokens,
        "batch_peak": metrics.peak_batch,
    }
    if metrics.first_token_time is not None:
        times["ttft_s"] = metrics.first_token_time - metrics.arrival_time
    if metrics.first_scheduled_time is not None:
        times["queue_s"] = metrics.first_scheduled_time - metrics.arrival_time
    return times


def logprobs_content(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
    num_top: int,
) -> list[dict[str, Any]]:  # Any: OpenAI's layout of strings, numbers and lists
    """One entry for each generated token, in OpenAI's layout, with the ``num_top`` likeliest."""
    return [
        {
            **_entry(tokenizer, token_id, position),
            "top_logprobs": [
                _entry(tokenizer, other, position)
                for other in sorted(position, key=lambda token: position[token].rank)
                if position[other].rank <= num_top
            ],
        }
        for token_id, position in zip(token_ids, positions, strict=True)
    ]


def _entry(tokenizer: Tokenizer, token_id: int, position: PositionLogprobs) -> dict[str, Any]:
    text = tokenizer.decode([token_id])
    is_character = "\ufffd" not in text  # else the token is a part of one
    return {
        "token": text,
        "logprob": position[token_id].logprob,
        "bytes": list(text.encode()) if is_character else None,
    }
