"""`ChatNanoserve`: a LangChain chat model whose every call joins the engine's one running batch."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from typing_extensions import override

from langchain_llm import calls
from langchain_llm.chat_results import chat_chunk, chat_result
from langchain_llm.messages import to_template_messages
from langchain_llm.presubmission import Presubmission, Submitted, presubmitted, take_submitted
from langchain_llm.prompt import encode_chat
from langchain_llm.run_metadata import run_metadata
from langchain_llm.served_model import ServedModel
from langchain_llm.streaming import PieceAssembler
from nanoserve_core.errors import NanoserveError, UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
        Callbacks,
    )
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.runnables import Runnable
    from langchain_core.tools import BaseTool
    from pydantic import BaseModel

    from langchain_llm.options import CallOptions
    from nanoserve_core.request import Request, RequestOutput

# Named arguments of BaseChatModel.generate and what its callers add: not options of the call.
_NOT_OPTIONS = frozenset(
    {
        "tags",
        "metadata",
        "run_name",
        "run_id",
        "ls_structured_output_format",
        "structured_output_format",
    }
)


class ChatNanoserve(ServedModel, BaseChatModel):
    """A chat model that an engine in this process serves.

    ::

        chat = ChatNanoserve(model="path-or-hub-id", temperature=0.6, max_tokens=512)
        chat.invoke("Hello")

    Every way in (``invoke``, ``ainvoke``, ``stream``, ``astream``, ``batch``, ``abatch``,
    ``generate``) from any thread or event loop joins one running batch. Sync code inside async code
    (a `RunnableLambda` of a sync function) is limited by the event loop's own small thread pool:
    use the async methods there. The options are the fields of `ServedModel`.
    """

    @override
    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,  # Any: the base class's named arguments, and options of the call
    ) -> LLMResult:
        """As the base class, but all conversations run together and not one after another."""
        given = {key: value for key, value in kwargs.items() if key not in _NOT_OPTIONS}
        waits_before_calls = self._has_cache() or self.rate_limiter is not None
        if len(messages) < 2 or waits_before_calls:
            return super().generate(messages, stop, callbacks, **kwargs)
        with presubmitted(self._presubmission(messages, self.call_options(stop, **given))):
            return super().generate(messages, stop, callbacks, **kwargs)

    def _has_cache(self) -> bool:
        return self.cache is not False and not (self.cache is None and get_llm_cache() is None)

    def _presubmission(
        self, messages: Sequence[Sequence[BaseMessage]], options: CallOptions
    ) -> Presubmission:
        presubmission = Presubmission()
        try:
            for conversation in messages:
                presubmission.add(self._submitted(conversation, options, None))
        except NanoserveError:
            pass  # the loop in the base class comes to this conversation, and raises it there
        except BaseException:
            presubmission.close()
            raise
        return presubmission

    @override
    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        options = self.call_options(stop, **kwargs)
        submitted = take_submitted(messages)
        if submitted is None:
            request = self._request(messages, options, run_manager)
            (output,) = calls.run(self.engine, [request], options.timeout)
        else:
            outputs = [output for step in calls.read(submitted.stream) for output in step]
            (output,) = calls.collect([submitted.request], self.engine.tokenizer, outputs)
        return self._result(output, options)

    @override
    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        await self.engine.aload()
        options = self.call_options(stop, **kwargs)
        request = self._request(messages, options, run_manager)
        (output,) = await calls.arun(self.engine, [request], options.timeout)
        return self._result(output, options)

    @override
    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        try:
            return await super()._agenerate_with_cache(messages, stop, run_manager, **kwargs)
        except asyncio.CancelledError as error:
            # The base class tells callbacks neither end nor error when its caller is cancelled.
            if run_manager is not None:
                await run_manager.on_llm_error(error, response=LLMResult(generations=[]))
            raise

    @override
    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        options = self.call_options(stop, **kwargs)
        submitted = take_submitted(messages) or self._submitted(messages, options, run_manager)
        pieces = self._pieces(submitted.request, options)
        with closing(calls.read(submitted.stream)) as steps:
            for outputs in steps:
                if (piece := pieces.feed(outputs)) is None:
                    continue
                chunk = chat_chunk(piece, model_name=options.model_name)
                if run_manager is not None:  # else the base class tells the callbacks
                    run_manager.on_llm_new_token(piece.text, chunk=chunk)
                yield chunk

    @override
    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        engine = await self.engine.aload()
        options = self.call_options(stop, **kwargs)
        request = self._request(messages, options, run_manager)
        pieces = self._pieces(request, options)
        stream = engine.thread.astream(request, timeout_seconds=options.timeout)
        async with aclosing(calls.aread(stream)) as steps:
            async for outputs in steps:
                if (piece := pieces.feed(outputs)) is None:
                    continue
                chunk = chat_chunk(piece, model_name=options.model_name)
                if run_manager is not None:  # else the base class tells the callbacks
                    await run_manager.on_llm_new_token(piece.text, chunk=chunk)
                yield chunk

    def _submitted(
        self,
        messages: Sequence[BaseMessage],
        options: CallOptions,
        run_manager: CallbackManagerForLLMRun | None,
    ) -> Submitted:
        request = self._request(messages, options, run_manager)
        stream = self.engine.thread.stream(request, timeout_seconds=options.timeout)
        return Submitted(messages, request, stream)

    def _request(
        self,
        messages: Sequence[BaseMessage],
        options: CallOptions,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
    ) -> Request:
        tokenizer = self.engine.tokenizer
        prompt = encode_chat(tokenizer, to_template_messages(messages), options.template)
        return calls.make_request(tokenizer, prompt, options, run_metadata(run_manager))

    def _pieces(self, request: Request, options: CallOptions) -> PieceAssembler:
        return PieceAssembler(request, self.engine.tokenizer, interval=options.stream_interval)

    def _result(self, output: RequestOutput, options: CallOptions) -> ChatResult:
        return chat_result(
            output,
            self.engine.tokenizer,
            model_name=options.model_name,
            num_logprobs=options.sampling.logprobs,
        )

    @override
    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Not served yet: raises `UnsupportedOption`, for a model that never sees the tools would
        answer as if there were none. No tools at all are fine.
        """
        if not tools:
            return self.bind(**kwargs)
        raise UnsupportedOption(
            f"bind_tools({len(tools)} tools) is not served by nanoserve yet: answers are text. "
            "Describe the tools in the prompt and parse the answer, or use another chat model here."
        )

    @override
    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Not served yet: raises `UnsupportedOption`."""
        raise UnsupportedOption(
            f"with_structured_output({schema!r}) is not served by nanoserve yet: answers are text. "
            "Ask for the format in the prompt and add an output parser behind the model."
        )

    @override
    def get_num_tokens_from_messages(
        self,
        messages: list[BaseMessage],
        tools: Sequence[Any] | None = None,  # Any: whatever convert_to_openai_tool accepts
    ) -> int:
        """Length of the prompt that these messages make, generation prompt and `tools` included."""
        if not messages:
            return 0
        schemas = [convert_to_openai_tool(tool) for tool in tools or ()]
        conversation = to_template_messages(messages)
        template = self.call_options().template
        return len(encode_chat(self.engine.tokenizer, conversation, template, schemas))

    @override
    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of LangChain's cache: the fields as they are now, and what the call says."""
        fields: Mapping[str, Any] = {**self.__dict__, **self._named(kwargs)}
        if stop is not None:
            fields = {**fields, "stop": stop}
        return json.dumps(
            [type(self).__name__, self._identity(fields)], sort_keys=True, default=str
        )

    @override
    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(
            name=self.model,
            open_weights=True,
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            pdf_inputs=False,
            text_outputs=True,
            tool_calling=False,
            structured_output=False,
            reasoning_output=False,
        )
        if (length := self.engine_options.get("max_model_len")) is not None:
            profile["max_input_tokens"] = length
        return profile
