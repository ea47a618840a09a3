"""`PieceAssembler`: step outputs to pieces of text, as few as the consumer's pace allows.

Everything that waits becomes one piece: LangChain's own cost is per chunk. A piece never ends
inside a character or inside what may become a stop string, and the pieces join to exactly the text
of ``invoke``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_llm.calls import merge_by_sample
from langchain_llm.results import Ending, logprobs_content
from nanoserve_core.text import TextStream

if TYPE_CHECKING:
    from nanoserve_core.request import PositionLogprobs, Request, StepOutput
    from nanoserve_core.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text to hand on; the last piece of a stream, and only it, has an ``ending``."""

    text: str
    logprobs: list[dict[str, Any]] | None = None  # Any: OpenAI's layout
    ending: Ending | None = None


class PieceAssembler:
    """Turns the outputs of one request (one sample) into pieces. One consumer's thread or task.

    ``interval``: least number of tokens in a piece, but for the first and the last.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, *, interval: int) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._interval = interval
        self._text_stream = TextStream(tokenizer, request.sampling)
        self._num_tokens = 0
        self._is_first = True
        self._text = ""
        self._waiting: list[tuple[int, PositionLogprobs | None]] = []

    def feed(self, outputs: list[StepOutput]) -> Piece | None:
        """Take what has arrived; the next piece, or None while there is nothing to hand on."""
        (output,) = merge_by_sample(outputs)
        self._num_tokens += len(output.token_ids)
        positions = output.logprobs or (None,) * len(output.token_ids)
        self._waiting.extend(zip(output.token_ids, positions, strict=True))
        self._text += self._text_stream.feed(output)
        if output.finish_reason is not None:
            return self._piece(self._ending(output))
        is_due = self._is_first or len(self._waiting) >= self._interval
        return self._piece(None) if self._text and is_due else None

    def _piece(self, ending: Ending | None) -> Piece:
        piece = Piece(text=self._text, logprobs=self._logprobs(), ending=ending)
        self._text, self._waiting, self._is_first = "", [], False
        return piece

    def _logprobs(self) -> list[dict[str, Any]] | None:  # Any: OpenAI's layout
        num_top = self._request.sampling.logprobs
        if num_top is None:
            return None
        known = [(token_id, position) for token_id, position in self._waiting if position]
        token_ids = [token_id for token_id, _ in known]
        return logprobs_content(self._tokenizer, token_ids, [p for _, p in known], num_top)

    def _ending(self, output: StepOutput) -> Ending:
        assert output.finish_reason is not None, "an ending needs a reason"
        stopped = self._text_stream.stopped
        return Ending(
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_output_tokens=self._num_tokens,
            finish_reason=output.finish_reason,
            stop_reason=stopped if stopped is not None else output.stop_reason,
            metrics=output.metrics,
        )
