"""`EngineReference`: what a model object holds of an engine. Cheap, lazy, counted, copyable.

LangChain copies its models freely: `configurable_fields` makes a new instance for every call,
agents deep-copy, joblib pickles. All copies use one engine, which is loaded on the first call.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_llm.shared_engine import BorrowedEngine, EngineRecipe, SharedEngine
from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.registry import EngineHandle
from nanoserve_core.errors import ConfigError, EngineClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers import PreTrainedTokenizerBase

    from langchain_llm.shared_engine import LoadedEngine, ModelSource, TokenizerSource
    from nanoserve_adapters.streams import LoopMailbox
    from nanoserve_core.engine_stats import EngineStats


class EngineReference:
    """A counted reference to an engine that may not be loaded yet. Every method: any thread.

    `share` gives another reference to the same engine; the engine is given back when the last one
    is closed or collected. Copies and deep copies are the same reference. Pickling keeps the recipe
    of an engine made from a path and raises `TypeError` for any other.
    """

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        # The collector may run it anywhere, so it only lets go; handle and thread end themselves.
        self._drop = weakref.finalize(self, shared.release)
        self._drop.atexit = False
        shared.retain()

    @classmethod
    def to_model(
        cls,
        model: ModelSource,
        *,
        tokenizer: TokenizerSource = None,
        options: Mapping[str, Any] | None = None,  # Any: each is checked by EngineConfig
        name: str | None = None,
    ) -> EngineReference:
        """A reference to the process's engine for `model`, loaded on first use by the registry.

        `name`: what a live model is called, in place of its own ``name_or_path``.
        """
        recipe = EngineRecipe(
            model=model,
            tokenizer_source=tokenizer,
            options=dict(options or {}),
            given_name=None if isinstance(model, str | Path) else name,
        )
        return cls(SharedEngine(recipe))

    @classmethod
    def to_running(
        cls,
        engine: EngineHandle | EngineThread,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str | None = None,
    ) -> EngineReference:
        """A reference to an engine that the caller runs and will close."""
        return cls(SharedEngine(BorrowedEngine(engine, tokenizer, name)))

    @property
    def name(self) -> str:
        """The path or hub id as it was given, or the name of the live model."""
        return self._shared.source.name

    @property
    def identity(self) -> str:
        """Names the weights in cache keys: equal for equal paths, unique for every live model."""
        return self._shared.identity

    @property
    def options(self) -> Mapping[str, Any]:  # Any: values of EngineConfig's fields
        """The engine options that were named."""
        return self._shared.source.options

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """The tokenizer that was named, or None for the model's own."""
        return self._shared.source.tokenizer_source

    @property
    def is_from_path(self) -> bool:
        """True when another process could load the same engine from its name and options."""
        return self._shared.source.is_from_path

    @property
    def is_loaded(self) -> bool:
        """True once the engine runs."""
        return self._shared.loaded is not None

    @property
    def is_closed(self) -> bool:
        """True when this reference was closed, even if others keep the engine running."""
        return not self._drop.alive

    def load(self) -> LoadedEngine:
        """The running engine, loaded now if need be; raises `EngineClosed` after `close`."""
        self._require_open()
        return self._shared.load()

    async def aload(self) -> LoadedEngine:
        """`load` that keeps the event loop free while weights are read."""
        self._require_open()
        loaded = self._shared.loaded
        return await asyncio.to_thread(self._shared.load) if loaded is None else loaded

    @property
    def thread(self) -> EngineThread:
        """The thread that runs the engine; loads it if need be."""
        return self.load().thread

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; loads the engine if need be."""
        return self.load().tokenizer

    @contextmanager
    def sync_call(self) -> Iterator[None]:
        """While the block runs, a thread waits for this engine: a full pool is spoken of, once."""
        with self._shared.pool_watch.call(self.load().config.max_num_seqs):
            yield

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a rendered conversation, long beginnings from memory; loads the engine."""
        self._require_open()
        return self._shared.encoder().encode(text)

    @property
    def has_grammars(self) -> bool:
        """True once a grammar was compiled for the tokenizer: the first one may take seconds."""
        return self._shared.has_grammars

    def note_grammar(self) -> None:
        """A grammar was compiled."""
        self._shared.has_grammars = True

    @property
    def max_model_len(self) -> int | None:
        """The longest context in tokens, as the engine, its options or the checkpoint's folder say;
        else None.
        """
        loaded = self._shared.loaded
        if loaded is not None:
            return loaded.thread.engine.max_model_len
        config = Path(self.name, "config.json")
        if "max_model_len" in self.options or not (self.is_from_path and config.is_file()):
            return self.options.get("max_model_len")
        length: int | None = json.loads(config.read_bytes()).get("max_position_embeddings")
        return length

    def mailbox(self) -> LoopMailbox:
        """Where finished calls of the running event loop are left: one wake-up for each step."""
        return self._shared.mailbox_of(asyncio.get_running_loop())

    def stats(self) -> EngineStats:
        """The engine's counters, read between two steps; loads the engine if need be."""
        stats: EngineStats = self.thread.stats()
        return stats

    def weights_changed(self) -> None:
        """Tell the engine that a live model's weights changed: no cached prefix is used again."""
        self.thread.call(lambda engine: engine.weights_changed())

    def share(self) -> EngineReference:
        """Another reference to the same engine, to be closed on its own; raises `EngineClosed`."""
        self._require_open()
        return EngineReference(self._shared)

    def close(self) -> None:
        """Give this reference back; idempotent. The last one stops the engine and waits for it."""
        loaded = self._shared.release() if self._drop.detach() is not None else None
        if loaded is not None:
            loaded.close()

    def _require_open(self) -> None:
        if self.is_closed:
            raise EngineClosed(
                f"the model {self.name!r} was closed: expected an open one. Make a new model "
                "object; where others use the same engine it is still loaded."
            )

    def __copy__(self) -> EngineReference:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineReference:  # Any: copy's own table
        return self

    def __reduce__(
        self,
    ) -> tuple[Callable[..., EngineReference], tuple[Any, ...]]:  # Any: arguments
        source = self._shared.source
        if not (isinstance(source, EngineRecipe) and source.is_from_path):
            raise TypeError(
                f"the engine of {self.name!r} cannot be pickled: its weights live in this process "
                "only. Make the model from a path or hub id, or use threads instead of processes."
            )
        return _from_recipe, (source.model, source.tokenizer_source, dict(source.options))

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "loaded" if self.is_loaded else "not loaded"
        return f"EngineReference({self.name!r}, {state})"


def resolve_engine(
    engine: object,
    *,
    model: object,
    tokenizer: TokenizerSource = None,
    options: Mapping[str, Any] | None = None,  # Any: each is checked by EngineConfig
) -> EngineReference:
    """The reference for a new model object, from its arguments ``engine``, ``model`` and so on.

    An engine is used as it is when it serves `model` (or none is named) with these `options` (or
    none are given). Else `model` is loaded: so `configurable_fields` can switch models, though it
    passes the old engine on. Raises `ConfigError` when the arguments name nothing, or contradict.
    """
    if engine is None:
        return EngineReference.to_model(_checked(model), tokenizer=tokenizer, options=options)
    reference = _as_reference(engine, tokenizer, str(model) if model else None)
    is_same_model = not model or str(model) == reference.name
    if is_same_model and tokenizer is not None and tokenizer != reference.tokenizer_source:
        raise _contradiction("tokenizer", tokenizer, reference.tokenizer_source, reference.name)
    if is_same_model and (not options or options == reference.options):
        return reference
    if is_same_model and not reference.is_from_path:
        raise _contradiction("engine_options", options, reference.options, reference.name)
    return EngineReference.to_model(
        _checked(model or reference.name), tokenizer=tokenizer, options=options or reference.options
    )


def _contradiction(option: str, value: object, made_with: object, name: str) -> ConfigError:
    return ConfigError(
        f"{option}={value!r} cannot be changed for the engine of {name!r}, which was made with "
        f"{made_with!r}. Give it where the engine is made."
    )


def _checked(model: object) -> str | Path:
    if isinstance(model, str | Path) and str(model):
        return model
    raise ConfigError(
        f"model={model!r} is a {type(model).__name__}: expected a folder or a hub id. Pass "
        "model=..., or engine=... of another model; for a loaded HuggingFace model use "
        "from_hf(model, tokenizer)."
    )


def _as_reference(engine: object, tokenizer: TokenizerSource, name: str | None) -> EngineReference:
    if isinstance(engine, EngineReference):
        return engine.share()
    if not isinstance(engine, EngineHandle | EngineThread):
        raise ConfigError(
            f"engine={engine!r} is a {type(engine).__name__}: expected the engine of another model "
            "(chat.engine), an EngineHandle or an EngineThread. Pass model=... to have one loaded."
        )
    if isinstance(tokenizer, str | Path):
        raise ConfigError(
            f"tokenizer={tokenizer!r} is a path: expected a tokenizer object with a running "
            "engine. Load it with AutoTokenizer.from_pretrained and pass that."
        )
    return EngineReference.to_running(engine, tokenizer=tokenizer, name=name)


def _from_recipe(
    model: ModelSource,
    tokenizer: TokenizerSource,
    options: dict[str, Any],  # Any: values of EngineConfig's fields
) -> EngineReference:
    return EngineReference.to_model(model, tokenizer=tokenizer, options=options)
