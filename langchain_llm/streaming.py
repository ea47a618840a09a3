"""`PieceAssembler`: step outputs to pieces of an answer, as few as the consumer's pace allows.

Everything that waits becomes one piece of each kind: LangChain's own cost is per chunk. A piece
never ends inside a character or inside what may become a stop string, and the pieces join to
exactly the answer of ``invoke``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_llm.answer_parser import AnswerParser, CallBlock, Prose, Reasoning, joined
from langchain_llm.answer_start import AnswerStart
from langchain_llm.calls import merge_by_sample
from langchain_llm.reasoning_tokens import num_reasoning_tokens
from langchain_llm.results import TOOL_CALLS, Ending, logprobs_content
from langchain_llm.tool_call_block import parsed_call
from nanoserve_core.request import FinishReason
from nanoserve_core.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.messages import InvalidToolCall, ToolCall

    from langchain_llm.answer_parser import Part
    from nanoserve_core.request import PositionLogprobs, Request, StepOutput
    from nanoserve_core.text import Tokenizer

    Call: TypeAlias = ToolCall | InvalidToolCall


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Something of one kind to hand on: text, reasoning or a tool call. The last piece of a stream,
    and only it, has an ``ending``; it may have nothing else, and never a call.
    """

    text: str = ""
    reasoning: str = ""
    call: Call | None = None
    call_number: int = 0
    """Which of the answer's calls, from 0."""
    logprobs: list[dict[str, Any]] | None = None  # Any: OpenAI's layout
    ending: Ending | None = None


class PieceAssembler:
    """Turns the outputs of one request (one sample) into pieces. One consumer's thread or task.

    ``interval``: least number of tokens in a piece, but for the first and the last. ``start`` and
    ``parses_calls``: as for `AnswerParser`; by default all is text.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        interval: int = 1,
        start: AnswerStart = AnswerStart.ANSWER,
        parses_calls: bool = False,
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._interval = interval
        self._start = start
        self._text_stream = TextStream(tokenizer, request.sampling)
        self._parser = AnswerParser(start, parses_calls=parses_calls)
        self._token_ids: list[int] = []
        self._reasoning = ""
        self._num_calls = 0
        self._has_valid_call = False
        self._is_first = True
        self._parts: list[Part] = []
        self._waiting: list[tuple[int, PositionLogprobs | None]] = []

    def feed(self, outputs: Sequence[StepOutput]) -> list[Piece]:
        """Take what has arrived; the next pieces, none while there is nothing to hand on."""
        (output,) = merge_by_sample(outputs)
        self._token_ids.extend(output.token_ids)
        positions = output.logprobs or (None,) * len(output.token_ids)
        self._waiting.extend(zip(output.token_ids, positions, strict=True))
        self._parts += self._parser.push(self._text_stream.feed(output))
        if output.finish_reason is not None:
            self._parts += self._parser.finish()
            return self._last_pieces(output)
        is_due = self._is_first or len(self._waiting) >= self._interval
        return self._pieces(was_cut=False) if self._parts and is_due else []

    def _pieces(self, *, was_cut: bool) -> list[Piece]:
        parts, self._parts = joined(self._parts), []
        self._is_first = False
        pieces = [self._piece(part, was_cut=was_cut) for part in parts]
        logprobs, self._waiting = self._logprobs(), []
        if logprobs is not None:
            first, *others = pieces or [Piece()]
            pieces = [replace(first, logprobs=logprobs), *others]
        return pieces

    def _last_pieces(self, output: StepOutput) -> list[Piece]:
        was_cut = output.finish_reason is FinishReason.LENGTH
        pieces = self._pieces(was_cut=was_cut)
        ending = self._ending(output)
        if pieces and pieces[-1].call is None and not pieces[-1].reasoning:
            return [*pieces[:-1], replace(pieces[-1], ending=ending)]
        return [*pieces, Piece(ending=ending)]

    def _piece(self, part: Part, *, was_cut: bool) -> Piece:
        if isinstance(part, CallBlock):
            call = parsed_call(part, was_cut=was_cut)
            self._has_valid_call = self._has_valid_call or call["type"] == "tool_call"
            self._num_calls += 1
            return Piece(call=call, call_number=self._num_calls - 1)
        if isinstance(part, Reasoning):
            self._reasoning += part.text
            return Piece(reasoning=part.text)
        assert isinstance(part, Prose), "there are three kinds of parts"
        return Piece(text=part.text)

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
        is_call = self._has_valid_call and output.finish_reason is FinishReason.STOP
        return Ending(
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_output_tokens=len(self._token_ids),
            num_reasoning_tokens=self._num_reasoning_tokens(output),
            finish_reason=TOOL_CALLS if is_call else str(output.finish_reason),
            stop_reason=stopped if stopped is not None else output.stop_reason,
            metrics=output.metrics,
        )

    def _num_reasoning_tokens(self, output: StepOutput) -> int:
        if not self._reasoning:
            return 0
        token_ids = self._token_ids[:-1] if output.ends_with_stop_token else self._token_ids
        return num_reasoning_tokens(self._tokenizer, token_ids, self._start, self._reasoning)
