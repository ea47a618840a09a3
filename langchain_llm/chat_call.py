"""`ChatCall`: one chat call between LangChain's messages and the engine's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from langchain_llm.chat_results import chat_chunk, chat_result
from langchain_llm.streaming import PieceAssembler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.outputs import ChatGenerationChunk, ChatResult

    from langchain_llm.answer_start import AnswerStart
    from langchain_llm.options import CallOptions
    from nanoserve_core.request import Request, StepOutput
    from nanoserve_core.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """A conversation as a request, with what is needed to read its answer."""

    request: Request
    options: CallOptions
    start: AnswerStart
    tokenizer: Tokenizer
    first_call_index: int = 0
    """The ``index`` of the answer's first tool call in a stream."""

    def assembler(self) -> PieceAssembler:
        """A reader of this call's outputs."""
        return PieceAssembler(
            self.request,
            self.tokenizer,
            interval=self.options.stream_interval,
            start=self.start,
            parses_calls=self.options.tools.may_call,
        )

    def result(self, outputs: Sequence[StepOutput]) -> ChatResult:
        """The answer, of all outputs."""
        return chat_result(self.assembler().feed(outputs), model_name=self.options.model_name)

    def chunks(
        self, assembler: PieceAssembler, outputs: Sequence[StepOutput]
    ) -> list[ChatGenerationChunk]:
        """What `assembler` has to hand on after these outputs."""
        return [
            chat_chunk(
                piece,
                model_name=self.options.model_name,
                first_call_index=self.first_call_index,
            )
            for piece in assembler.feed(outputs)
        ]
