"""`NanoserveLLM`: LangChain's text-in, text-out class on the same engine."""

from __future__ import annotations

from contextlib import aclosing, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.runnables.config import get_config_list
from typing_extensions import Self, override

from langchain_llm import calls
from langchain_llm.llm_results import llm_chunk, llm_result, result_of_chunks
from langchain_llm.prompt import encode_chat, encode_text
from langchain_llm.run_metadata import run_metadata
from langchain_llm.served_model import ServedModel
from langchain_llm.streaming import PieceAssembler
from langchain_llm.streaming_handlers import wants_tokens
from nanoserve_core.errors import UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
        Callbacks,
    )
    from langchain_core.outputs import GenerationChunk, LLMResult
    from langchain_core.runnables import RunnableConfig

    from langchain_llm.options import CallOptions
    from nanoserve_core.request import Request, StepOutput

DEFAULT_MAX_TOKENS = 512
"""Length of a text for which none was asked: plain text has no end of turn."""


class NanoserveLLM(ServedModel, BaseLLM):
    """A text completion model that an engine in this process serves.

    ::

        llm = NanoserveLLM(engine=chat.engine, temperature=0)  # the same engine and batch
        llm.invoke("Once upon a time")

    The prompt goes to the model as it is written: no chat template, unless ``apply_chat_template``.
    The options are the fields of `ServedModel`.
    """

    n: int | None = None
    """Samples for each prompt; ``generate`` returns all, ``invoke`` and ``batch`` the first."""
    apply_chat_template: bool = False
    """True: each prompt is sent as one user message in the model's chat template."""

    # Many inputs.

    @override
    def batch(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Texts in order. Without limits, returned exceptions or token callbacks it is one call of
        the engine; else as `ServedModel.batch`.
        """
        configs = get_config_list(config, len(inputs))
        if inputs and not return_exceptions and self._is_one_call(configs):
            return BaseLLM.batch(self, list(inputs), configs, **kwargs)
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    @override
    async def abatch(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """`batch` for coroutines."""
        configs = get_config_list(config, len(inputs))
        if inputs and not return_exceptions and self._is_one_call(configs):
            return await BaseLLM.abatch(self, list(inputs), configs, **kwargs)
        return await super().abatch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def _is_one_call(self, configs: Sequence[RunnableConfig]) -> bool:
        listeners = [config.get("callbacks") for config in configs]
        return (
            configs[0].get("max_concurrency") is None
            and not self.streaming
            and not wants_tokens(self.callbacks, *listeners)
        )

    # Calls.

    @override
    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,  # Any: the base class's named arguments, and options of the call
    ) -> LLMResult:
        """As the base class; options of the call are part of the cache's key and of the trace."""
        model, rest = self._with_call_options(kwargs)
        stop = model.stop if stop is None else stop
        return super(NanoserveLLM, model).generate(prompts, stop, callbacks, **rest)

    @override
    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,  # Any: as `generate`
    ) -> LLMResult:
        """`generate` for coroutines."""
        model, rest = self._with_call_options(kwargs)
        stop = model.stop if stop is None else stop
        return await super(NanoserveLLM, model).agenerate(prompts, stop, callbacks, **rest)

    def _with_call_options(self, kwargs: dict[str, Any]) -> tuple[Self, dict[str, Any]]:
        """This model with the call's options as its fields, and the arguments that are no options.

        The base class makes the cache's key and the trace from the fields alone.
        """
        rest = {key: kwargs[key] for key in _GENERATE_ARGUMENTS if key in kwargs}
        given = {key: value for key, value in kwargs.items() if key not in rest}
        if not given:
            return self, rest
        self.call_options(**given)  # raises for wrong ones
        return self.model_copy(update=self._named(given)), rest

    @override
    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self.loaded_options(stop, **kwargs)
        if self._emits_tokens(prompts, run_manager):
            chunks = list(self._stream(prompts[0], stop, run_manager, **kwargs))
            return result_of_chunks(chunks, model_name=options.model_name)
        requests = self._requests(prompts, options, run_manager)
        return self._result(requests, calls.run(self.engine, requests, options.timeout), options)

    @override
    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        await (await self.engine.aload()).thread.turn()
        options = self.loaded_options(stop, **kwargs)
        if self._emits_tokens(prompts, run_manager):
            stream = self._astream(prompts[0], stop, run_manager, **kwargs)
            chunks = [chunk async for chunk in stream]
            return result_of_chunks(chunks, model_name=options.model_name)
        requests = self._requests(prompts, options, run_manager)
        outputs = await calls.arun(self.engine, requests, options.timeout)
        return self._result(requests, outputs, options)

    def _emits_tokens(
        self,
        prompts: Sequence[str],
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
    ) -> bool:
        # The base class gives the first prompt's run manager only: tokens of the others have
        # nowhere to go, so several prompts are streamed by `batch`, each in a call of its own.
        if run_manager is None or len(prompts) != 1 or (self.n or 1) > 1:
            return False
        return self.streaming or (self.streaming is None and wants_tokens(run_manager))

    @override
    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        options = _for_stream(self.loaded_options(stop, **kwargs))
        (request,) = self._requests([prompt], options, run_manager)
        pieces = self._pieces(request, options)
        stream = self.engine.thread.stream(request, timeout_seconds=options.timeout)
        with closing(calls.read(stream)) as steps:
            for outputs in steps:
                for piece in pieces.feed(outputs):
                    chunk = llm_chunk(piece, model_name=options.model_name)
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    @override
    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        engine = await self.engine.aload()
        await engine.thread.turn()
        options = _for_stream(self.loaded_options(stop, **kwargs))
        (request,) = self._requests([prompt], options, run_manager)
        pieces = self._pieces(request, options)
        stream = engine.thread.astream(request, timeout_seconds=options.timeout)
        async with aclosing(calls.aread(stream)) as steps:
            async for outputs in steps:
                for piece in pieces.feed(outputs):
                    chunk = llm_chunk(piece, model_name=options.model_name)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _requests(
        self,
        prompts: Sequence[str],
        options: CallOptions,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
    ) -> list[Request]:
        tokenizer, metadata = self.engine.tokenizer, run_metadata(run_manager)
        encoded = [self._prompt_ids(prompt, options) for prompt in prompts]
        return [
            calls.make_request(tokenizer, token_ids, self._limited(options, token_ids), metadata)
            for token_ids in encoded
        ]

    def _limited(self, options: CallOptions, prompt_token_ids: Sequence[int]) -> CallOptions:
        if options.has_max_tokens:
            return options
        room = self.engine.thread.engine.max_model_len - len(prompt_token_ids)
        limit = max(1, min(DEFAULT_MAX_TOKENS, room))  # no room at all is the engine's to refuse
        return replace(options, sampling=options.sampling.replace(max_tokens=limit))

    def _prompt_ids(self, prompt: str, options: CallOptions) -> list[int]:
        tokenizer = self.engine.tokenizer
        if not options.apply_chat_template:
            return encode_text(tokenizer, prompt, special=True)
        return encode_chat(tokenizer, [{"role": "user", "content": prompt}], options.template)

    def _pieces(self, request: Request, options: CallOptions) -> PieceAssembler:
        return PieceAssembler(request, self.engine.tokenizer, interval=options.stream_interval)

    def _result(
        self, requests: Sequence[Request], outputs: Sequence[StepOutput], options: CallOptions
    ) -> LLMResult:
        tokenizer = self.engine.tokenizer
        return llm_result(
            calls.collect(requests, tokenizer, outputs),
            tokenizer,
            model_name=options.model_name,
            num_logprobs=options.sampling.logprobs,
        )

    @override
    def get_token_ids(self, text: str) -> list[int]:
        """Ids of `text` as a prompt of this model: what a call with it is charged for."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._prompt_ids(text, self.call_options())


_GENERATE_ARGUMENTS = ("tags", "metadata", "run_name", "run_id")


def _for_stream(options: CallOptions) -> CallOptions:
    if options.sampling.n > 1:
        raise UnsupportedOption(
            f"n={options.sampling.n} is not served for streams: expected one sample, for chunks of "
            "several would run together. Use generate(), or n=1."
        )
    return options
