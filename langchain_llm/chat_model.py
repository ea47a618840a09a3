"""`ChatNanoserve`: a LangChain chat model whose every call joins the engine's one running batch."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from pydantic import Field
from typing_extensions import override

from langchain_llm import calls
from langchain_llm.answer_grammar import (
    answer_grammar,
    check_schemas,
    has_grammar_backend,
    wants_grammar,
)
from langchain_llm.answer_start import answer_start
from langchain_llm.chat_call import ChatCall
from langchain_llm.messages import to_template_messages
from langchain_llm.options import TO_THE_END, TOOL_OPTIONS
from langchain_llm.presubmission import Presubmission, Submitted, presubmitted, take_submitted
from langchain_llm.prompt import encode_chat, render_chat
from langchain_llm.run_metadata import run_metadata
from langchain_llm.served_model import ServedModel
from langchain_llm.structured_output import structured_output
from langchain_llm.tool_options import tool_options
from nanoserve_core.errors import NanoserveError

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

    from langchain_llm.answer_start import AnswerStart
    from langchain_llm.options import CallOptions
    from nanoserve_core.grammar import Grammar

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


# In version 1 of the output a call is one of the content's blocks, which LangChain numbers from 0:
# a call with the number of another block would be merged into it.
_V1_CALL_INDEX = 1_000


class ChatNanoserve(ServedModel, BaseChatModel):
    """A chat model that an engine in this process serves.

    ::

        chat = ChatNanoserve(model="path-or-hub-id", temperature=0.6, max_tokens=512)
        chat.invoke("Hello")

    Every way in (``invoke``, ``ainvoke``, ``stream``, ``astream``, ``batch``, ``abatch``,
    ``generate``) from any thread or event loop joins one running batch. Sync code inside async code
    (a `RunnableLambda` of a sync function) is limited by the event loop's own small thread pool:
    use the async methods there. The options are the fields of `ServedModel`, and these.
    """

    call_only_options: ClassVar[frozenset[str]] = TOOL_OPTIONS

    thinking_budget: int | None = Field(default=None, ge=0)
    """Most tokens of the thinking block, which is then closed; None: no limit of its own."""
    parallel_tool_calls: bool | None = None
    """False: at most one tool call in an answer."""
    close_json: bool = True
    """Whether a JSON document or call is brought to its end before ``max_tokens`` cuts it."""

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
        with presubmitted(self._presubmission(messages, self.loaded_options(stop, **given))):
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
        submitted = take_submitted(messages)
        if submitted is not None:
            outputs = [output for step in calls.read(submitted.stream) for output in step]
            return submitted.call.result(outputs)
        call = self._call(messages, self.loaded_options(stop, **kwargs), run_manager)
        return call.result(calls.run(self.engine, [call.request], call.options.timeout))

    @override
    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        await (await self.engine.aload()).thread.turn()
        call = await self._acall(messages, self.loaded_options(stop, **kwargs), run_manager)
        return call.result(await calls.arun(self.engine, [call.request], call.options.timeout))

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
        submitted = take_submitted(messages)
        if submitted is None:
            submitted = self._submitted(messages, self.loaded_options(stop, **kwargs), run_manager)
        call, assembler = submitted.call, submitted.call.assembler()
        with closing(calls.read(submitted.stream)) as steps:
            for outputs in steps:
                for chunk in call.chunks(assembler, outputs):
                    if run_manager is not None:  # else the base class tells the callbacks
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
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
        await engine.thread.turn()
        call = await self._acall(messages, self.loaded_options(stop, **kwargs), run_manager)
        assembler = call.assembler()
        stream = engine.thread.astream(call.request, timeout_seconds=call.options.timeout)
        async with aclosing(calls.aread(stream)) as steps:
            async for outputs in steps:
                for chunk in call.chunks(assembler, outputs):
                    if run_manager is not None:  # else the base class tells the callbacks
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _submitted(
        self,
        messages: Sequence[BaseMessage],
        options: CallOptions,
        run_manager: CallbackManagerForLLMRun | None,
    ) -> Submitted:
        call = self._call(messages, options, run_manager)
        stream = self.engine.thread.stream(call.request, timeout_seconds=options.timeout)
        return Submitted(messages, call, stream)

    def _call(
        self,
        messages: Sequence[BaseMessage],
        options: CallOptions,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
    ) -> ChatCall:
        tokenizer = self.engine.tokenizer
        prompt = render_chat(
            tokenizer, to_template_messages(messages), options.template, options.tools.shown
        )
        start = answer_start(prompt)
        request = calls.make_request(
            tokenizer,
            self.engine.encode_prompt(prompt),
            options,
            run_metadata(run_manager),
            self._grammar(options, start),
        )
        return ChatCall(
            request=request,
            options=options,
            start=start,
            tokenizer=tokenizer,
            first_call_index=_V1_CALL_INDEX if self.output_version == "v1" else 0,
        )

    async def _acall(
        self,
        messages: Sequence[BaseMessage],
        options: CallOptions,
        run_manager: AsyncCallbackManagerForLLMRun | None,
    ) -> ChatCall:
        """`_call`; where it may take long, the event loop goes on meanwhile."""
        if wants_grammar(options) and not self.engine.has_grammars:
            return await asyncio.to_thread(self._call, messages, options, run_manager)
        return self._call(messages, options, run_manager)

    def _grammar(self, options: CallOptions, start: AnswerStart) -> Grammar | None:
        end_ids = frozenset(self.engine.thread.engine.eos_token_ids)
        grammar = answer_grammar(self.engine.tokenizer, options, start, end_ids)
        if grammar is not None:
            self.engine.note_grammar()
        return grammar

    @override
    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,  # Any: OpenAI's dict
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: dict[str, Any] | type | None = None,  # Any: OpenAI's dict
        **kwargs: Any,  # Any: further options of the calls
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with `tools` to call; `tool_options` says what ``tool_choice`` may be.

        Calls that must be made (``any``, a name) follow their tool's schema by a grammar, which the
        extra ``structured`` brings; with it those that the model makes of itself do too. ``strict``
        False leaves arguments free: any JSON object. ``response_format`` with tools: the answer is
        calls, or the document. Raises `UnsupportedSchema` for a schema that cannot be honoured.
        """
        found = tool_options(tools, tool_choice, is_parallel=parallel_tool_calls, strict=strict)
        bound: dict[str, Any] = {
            "tools": list(found.schemas) or None,
            "tool_choice": found.named or (tool_choice if tools else None),
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
            **kwargs,
        }
        given = {name: value for name, value in bound.items() if value is not None}
        options = {name: value for name, value in given.items() if name not in _NOT_OPTIONS}
        check_schemas(self.call_options(**options))
        return self.bind(**given)

    @override
    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,  # Any: ``tools`` that may be called as well, and options of the calls
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """This model with answers that are documents of `schema`: instances of a pydantic class (of
        either version), dicts for anything else.

        Needs the extra ``structured``. Every method follows the schema by a grammar, ``json_mode``
        too; ``strict`` False follows JSON only and leaves the schema to the parser. An answer that
        its limit has cut raises `OutputParserException`, or is the ``parsing_error`` of
        ``include_raw``. Raises `UnsupportedSchema` for a schema that cannot be honoured.
        """
        return structured_output(
            self, schema, method=method, include_raw=include_raw, strict=strict, **kwargs
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
        shown = tool_options(tools).shown
        conversation = to_template_messages(messages)
        template = self.call_options().template
        return len(encode_chat(self.engine.tokenizer, conversation, template, shown))

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
            tool_calling=True,
            tool_choice=has_grammar_backend(),
            tool_call_streaming=True,
            structured_output=has_grammar_backend(),
            reasoning_output=self.enable_thinking is not False,
        )
        if (length := self.engine.max_model_len) is not None:
            profile["max_input_tokens"] = length
        limit = self.max_tokens if self.max_tokens not in (None, TO_THE_END) else length
        if limit is not None:
            profile["max_output_tokens"] = limit
        return profile
