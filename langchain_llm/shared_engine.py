"""`SharedEngine`: the state behind all references to an engine: how to get it, it, the count."""

from __future__ import annotations

import threading
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from langchain_llm.pool_watch import PoolWatch
from langchain_llm.prompt_encoder import PromptEncoder
from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.registry import acquire
from nanoserve_adapters.streams import LoopMailbox
from nanoserve_core.errors import ConfigError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from nanoserve_adapters.registry import EngineHandle
    from nanoserve_core.config import EngineConfig

    ModelSource: TypeAlias = nn.Module | str | Path
    TokenizerSource: TypeAlias = PreTrainedTokenizerBase | str | Path | None


class LoadedEngine(Protocol):
    """What a loaded engine gives: `EngineHandle`, or `BorrowedEngine`."""

    @property
    def thread(self) -> EngineThread:
        """The engine's thread."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""

    @property
    def config(self) -> EngineConfig:
        """The options the engine runs with."""

    @property
    def recommended_sampling(self) -> Mapping[str, Any]:  # Any: numbers
        """Fields of `SamplingParams` that the checkpoint recommends."""

    def close(self) -> None:
        """Give the engine back."""


class EngineSource(Protocol):
    """Where a `SharedEngine` gets its engine from."""

    @property
    def name(self) -> str:
        """What the model is called."""

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """The tokenizer that was named, or None."""

    @property
    def options(self) -> Mapping[str, Any]:  # Any: values of EngineConfig's fields
        """The engine options that were named."""

    @property
    def is_from_path(self) -> bool:
        """True when another process could load the same engine."""

    def load(self) -> LoadedEngine:
        """The engine, running."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineRecipe:
    """An engine to be loaded through the registry."""

    model: ModelSource
    tokenizer_source: TokenizerSource
    options: Mapping[str, Any]  # Any: values of EngineConfig's fields
    given_name: str | None = None
    """What a live model is to be called."""

    @property
    def name(self) -> str:
        """The path or hub id as it was given; for a live model the name given to it, its
        ``name_or_path`` or its class.
        """
        if self.given_name is not None:
            return self.given_name
        if isinstance(self.model, str | Path):
            return str(self.model)
        return str(getattr(self.model, "name_or_path", "") or type(self.model).__name__)

    @property
    def is_from_path(self) -> bool:
        """False for a live model."""
        return isinstance(self.model, str | Path)

    def load(self) -> EngineHandle:
        """A handle of the process's one engine for the model, its tokenizer loaded too."""
        handle = acquire(self.model, tokenizer=self.tokenizer_source, **self.options)
        try:
            # Here, where nobody's event loop is held up by them.
            _ = handle.tokenizer, handle.recommended_sampling
        except BaseException:
            handle.close()
            raise
        return handle


class BorrowedEngine:
    """A running engine of the caller's; closing it stays the caller's business."""

    is_from_path = False

    def __init__(
        self,
        engine: EngineHandle | EngineThread,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str | None,
    ) -> None:
        self._handle = None if isinstance(engine, EngineThread) else engine
        self._thread = engine if isinstance(engine, EngineThread) else None
        self.tokenizer_source = tokenizer
        self.options: dict[str, Any] = {}  # Any: see EngineSource
        self.name = name or (self._handle.model_name if self._handle is not None else "nanoserve")

    @property
    def thread(self) -> EngineThread:
        """The engine's thread."""
        if self._thread is not None:
            return self._thread
        assert self._handle is not None, "a borrowed engine is a handle or a thread"
        return self._handle.thread

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The one given with it, else the handle's; `ConfigError` when there is neither."""
        if self.tokenizer_source is not None:
            return self.tokenizer_source
        if self._handle is None:
            raise ConfigError(
                "engine is an EngineThread, which has no tokenizer: expected one for text. Pass "
                "tokenizer=... as well."
            )
        return self._handle.tokenizer

    @property
    def config(self) -> EngineConfig:
        """The options the engine runs with."""
        config: EngineConfig = self.thread.engine.config
        return config

    @property
    def recommended_sampling(self) -> Mapping[str, Any]:  # Any: numbers
        """The handle's; a bare thread does not know where its model came from, and has none."""
        return {} if self._handle is None else self._handle.recommended_sampling

    def load(self) -> BorrowedEngine:
        """Itself: it runs already."""
        return self

    def close(self) -> None:
        """Nothing: the caller closes it."""


class SharedEngine:
    """One engine for several references, loaded once. Any thread."""

    def __init__(self, source: EngineSource) -> None:
        self.source = source
        self.loaded: LoadedEngine | None = None
        self.has_grammars = False
        """Whether a grammar was compiled for it: the first one takes long."""
        # A number of the process would be equal in the next process and hit its cached answers.
        self.identity = source.name if source.is_from_path else f"{source.name}#{uuid.uuid4().hex}"
        self.pool_watch = PoolWatch()
        self._encoder: PromptEncoder | None = None  # a race makes two, of which one stays
        self._loading = threading.Lock()
        self._counting = threading.RLock()  # a collection may run `release` inside `retain`
        self._num_references = 0
        self._mailboxes: weakref.WeakValueDictionary[int, LoopMailbox] = (
            weakref.WeakValueDictionary()
        )

    def load(self) -> LoadedEngine:
        """The engine, loaded by the first caller; the others wait for it."""
        if self.loaded is not None:
            return self.loaded
        with self._loading:
            if self.loaded is None:
                self.loaded = self.source.load()
            return self.loaded

    def encoder(self) -> PromptEncoder:
        """The encoder of all prompts for this engine; loads the engine if need be."""
        if self._encoder is None:
            self._encoder = PromptEncoder(self.load().tokenizer)
        return self._encoder

    def retain(self) -> None:
        """One reference more."""
        with self._counting:
            self._num_references += 1

    def release(self) -> LoadedEngine | None:
        """One reference less; the engine when that was the last: to be closed, or just dropped."""
        with self._counting:
            self._num_references -= 1
            if self._num_references:
                return None
            loaded, self.loaded, self._encoder = self.loaded, None, None
            return loaded

    def mailbox_of(self, loop: asyncio.AbstractEventLoop) -> LoopMailbox:
        """The mailbox that all calls of `loop` share; only for the loop's own thread."""
        # A mailbox keeps its loop alive, so an id in the table is never a dead loop's.
        mailbox = self._mailboxes.get(id(loop))
        if mailbox is None:
            mailbox = self._mailboxes[id(loop)] = LoopMailbox(loop)
        return mailbox
