"""`ServedModel`: what `ChatNanoserve` and `NanoserveLLM` have in common.

The options as fields, the engine behind them, an identity for caches and traces, token counts, and
an end. It knows neither messages nor generations.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.language_models.base import (
    BaseLanguageModel,
    LangSmithParams,
    LanguageModelInput,
)
from langchain_core.runnables.config import get_config_list
from pydantic import Field, model_validator
from typing_extensions import Self, override

import nanoserve_core
from langchain_llm import calls, dispatch
from langchain_llm.engine_reference import EngineReference, resolve_engine
from langchain_llm.options import ALIASES, CallOptions, identity, merge, named, named_in_call
from langchain_llm.prompt import encode_text
from langchain_llm.results import PROVIDER
from nanoserve_core.request import Request
from nanoserve_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
    from langchain_core.runnables import RunnableConfig
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from nanoserve_core.engine_stats import EngineStats


class ServedModel(BaseLanguageModel):  # type: ignore[type-arg]  # the two subclasses differ in it
    """A language model that a nanoserve engine serves. Base of the two public classes.

    Every option may be given to the constructor, to ``bind`` and to a call; a call's value wins
    over a bound one, and that over the field. Unknown names raise `ConfigError`. None leaves an
    option to its default. The engine is loaded on first use; models that name the same checkpoint
    share it.
    """

    call_only_options: ClassVar[frozenset[str]] = frozenset()
    """Options of a call that are no fields."""

    model: str = Field(default="", frozen=True)
    """Folder or hub id; also ``model_name`` or ``model_id``. Not needed with ``engine``."""
    engine: Any = Field(default=None, exclude=True, repr=False, frozen=True)
    """An `EngineReference`; accepts another model's, an `EngineHandle` or an `EngineThread`. Any:
    it is never None after construction, whatever was given.
    """
    engine_options: dict[str, Any] = Field(default_factory=dict, frozen=True)
    """Fields of `EngineConfig` for the engine that `model` is loaded into."""
    tokenizer: Any = Field(default=None, exclude=True, repr=False, frozen=True)
    """A HuggingFace tokenizer or where it is; None: the model's own. Any: they share no public
    type.
    """
    served_model_names: list[str] = Field(default_factory=list)
    """Other names under which calls may ask for this model (``invoke(..., model=name)``)."""

    temperature: float | None = None
    """0 is greedy; None: what the checkpoint's generation_config recommends, else 1.0. The same
    holds for top_p, top_k, min_p, repetition_penalty and max_tokens, each for itself.
    """
    max_tokens: int | None = None
    """Most tokens to generate, also ``max_new_tokens``; -1: to the end of the context. None, and
    nothing recommended: as -1 for chat, where a turn ends by itself; for plain text 512, or what
    the context has room for.
    """
    min_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    """Strings that end the text and are not part of it. A call's list replaces this one."""
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    logprobs: bool | int | None = None
    """True: log-probabilities of the generated tokens; a number: also of so many likeliest ones."""
    top_logprobs: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    enable_thinking: bool | None = None
    """Given to the chat template; None leaves it to the template."""
    chat_template: str | None = None
    """Jinja source in place of the tokenizer's own template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template."""

    streaming: bool | None = None
    """True: ``invoke`` also streams, so that callbacks see tokens. False: streams come as one
    chunk.
    """
    stream_interval: int = Field(default=1, ge=1)
    """Least number of tokens in a chunk, but for the first and the last."""
    timeout: float | None = None
    """Seconds a call may wait and run before it is cancelled with `TimeoutError`."""
    priority: int = 0
    """Smaller runs earlier."""
    cache_salt: str | None = None
    """Calls share cached prefixes only with calls of the same salt."""

    max_retries: int | None = Field(default=None, exclude=True)
    """Accepted for code written for remote models, and unused: nothing here is retried."""
    api_key: Any = Field(default=None, exclude=True, repr=False)
    """Accepted and unused. Any: str or SecretStr."""
    base_url: str | None = Field(default=None, exclude=True)
    """Accepted and unused."""

    def __init__(self, **options: Any) -> None:  # Any: pydantic checks each
        """Make a model object; loads nothing. `ConfigError` or pydantic's ValidationError."""
        given = named(options, type(self).model_fields, where=type(self).__name__)
        given["engine"] = engine = resolve_engine(
            given.get("engine"),
            model=given.get("model"),
            tokenizer=given.get("tokenizer"),
            options=given.get("engine_options"),
        )
        given["model"] = engine.name
        given["engine_options"] = dict(engine.options)
        given["tokenizer"] = engine.tokenizer_source
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        super().__init__(**given)
        self.call_options()  # a wrong combination is found here, not at the first call

    @classmethod
    def from_hf(
        cls,
        hf_model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,  # Any: as the constructor
    ) -> Self:
        """A model object on a loaded HuggingFace model, whose weights are shared and not copied.

        ``model`` among the options is the name it is given in results and traces.
        """
        engine = EngineReference.to_model(
            hf_model,
            tokenizer=tokenizer,
            options=options.pop("engine_options", None),
            name=options.get("model"),
        )
        try:
            return cls(engine=engine, **options)
        finally:
            engine.close()  # the model object holds a reference of its own

    @model_validator(mode="after")
    def _set_nanoserve_version(self) -> Self:
        if hasattr(self, "_add_version"):  # not in langchain-core 1.4.0
            self._add_version(PROVIDER, nanoserve_core.__version__)
        return self

    # The engine.

    def stats(self) -> EngineStats:
        """The engine's counters; loads the engine if need be."""
        stats: EngineStats = self.engine.stats()
        return stats

    def warmup(self) -> None:
        """Load the engine, make it ready (`Engine.warmup`) and generate one token, so that the
        first call waits for nothing.
        """
        self.engine.thread.call(lambda engine: engine.warmup())
        request = Request(
            request_id=f"warmup-{uuid.uuid4().hex}",
            prompt_token_ids=(0,),
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            metadata={"source": "langchain"},
        )
        calls.run(self.engine, [request], None)

    def close(self) -> None:
        """Give the engine back: it stops when no other model uses it. Later calls raise
        `EngineClosed`.
        """
        self.engine.close()

    async def aclose(self) -> None:
        """`close` that keeps the event loop free while the engine stops."""
        await asyncio.to_thread(self.engine.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Many inputs.

    @override
    def batch(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,  # Any: options of the call
    ) -> list[Any]:  # Any: what the subclass's invoke returns
        """Results in order. ``max_concurrency`` bounds the inputs in flight, else the engine's size
        does.

        The first failure cancels the others, unless exceptions are to be returned.
        """
        if not inputs:
            return []
        configs = get_config_list(config, len(inputs))
        return dispatch.batch_in_window(
            lambda item: self.invoke(item[0], item[1], **kwargs),
            list(zip(inputs, configs, strict=True)),
            size=self._window(configs),
            return_exceptions=return_exceptions,
        )

    @override
    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,  # Any: options of the call
    ) -> Iterator[tuple[int, Any]]:  # Any: what the subclass's invoke returns
        """`batch` as an iterator of (position, result), in the order in which they end."""
        if not inputs:
            return
        configs = get_config_list(config, len(inputs))
        ended = dispatch.run_window(
            lambda item: self.invoke(item[0], item[1], **kwargs),
            list(zip(inputs, configs, strict=True)),
            size=self._window(configs),
        )
        with closing(ended):
            for position, future in ended:
                result = dispatch.result_of(future, return_exceptions=return_exceptions)
                yield position, result

    @override
    async def abatch(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,  # Any: options of the call
    ) -> list[Any]:  # Any: what the subclass's ainvoke returns
        """`batch` for coroutines; all inputs are in flight, or ``max_concurrency`` of them."""
        if not inputs:
            return []
        configs = get_config_list(config, len(inputs))
        return await dispatch.gather_in_window(
            lambda item: self.ainvoke(item[0], item[1], **kwargs),
            list(zip(inputs, configs, strict=True)),
            size=configs[0].get("max_concurrency"),
            return_exceptions=return_exceptions,
        )

    def _window(self, configs: Sequence[RunnableConfig]) -> int:
        return dispatch.window_size(configs, self.engine.load().config.max_num_seqs)

    # Options.

    def call_options(
        self,
        stop: list[str] | None = None,
        **given: Any,  # Any: each option is checked where it is used
    ) -> CallOptions:
        """The merged options of a call with these arguments; `ConfigError` for wrong ones.

        Loads nothing: what the checkpoint recommends is only among them when it is loaded.
        """
        loaded = self.engine.load() if self.engine.is_loaded else None
        recommended = loaded.recommended_sampling if loaded is not None else {}
        return merge(self.__dict__, self._named(given), stop, recommended)

    def loaded_options(
        self,
        stop: list[str] | None = None,
        **given: Any,  # Any: each option is checked where it is used
    ) -> CallOptions:
        """`call_options`, with the checkpoint's recommendations: loads the engine if need be."""
        self.engine.load()
        return self.call_options(stop, **given)

    def _named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        known = {*type(self).model_fields, *self.call_only_options}
        return named_in_call(given, known, where=type(self).__name__)

    # Identity.

    @property
    def model_name(self) -> str:
        """The same as `model`: the name other integrations use."""
        return self.model

    @property
    def _llm_type(self) -> str:
        return PROVIDER

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return self._identity(self.__dict__)

    def _identity(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        names = {"model": self.engine.identity, "model_name": fields["model"]}
        return names | identity(fields)

    @override
    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        ours = {ALIASES.get(key, key): value for key, value in kwargs.items()}
        stop = self.stop if stop is None else stop
        params = super()._get_ls_params(stop=stop or None, **ours)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = str(ours.get("model") or self.model)
        return params

    @classmethod
    @override
    def is_lc_serializable(cls) -> bool:
        """True: an object made from a path can be written down and loaded again."""
        return True

    @override
    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """The constructor's arguments; "not implemented" when they hold more than plain data."""
        is_plain = not self.engine_options.get("plugins") and (
            self.tokenizer is None or isinstance(self.tokenizer, str | Path)
        )
        if not (is_plain and self.engine.is_from_path):
            return self.to_json_not_implemented()
        return super().to_json()

    @property
    @override
    def lc_attributes(self) -> dict[str, Any]:
        """What `to_json` adds to the plain fields."""
        return {} if self.tokenizer is None else {"tokenizer": str(self.tokenizer)}

    # Counting.

    @override
    def get_token_ids(self, text: str) -> list[int]:
        """Ids of the text alone, by the model's own tokenizer; loads it if need be."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return encode_text(self.engine.tokenizer, text, special=False)
