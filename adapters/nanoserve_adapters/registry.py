"""One engine per model in a process, shared by counted handles.

Chains, models or threads that name the same checkpoint, or hold the same live module, get the same
engine: one copy of the weights, one running batch, one prefix cache. The table of engines is a
process-wide object, the one of this package: sharing within the process is its purpose.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_core.config import EngineConfig, recommended_sampling
from nanoserve_core.errors import ConfigError, EngineClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from nanoserve_adapters.sink import EngineLike
    from nanoserve_core.config import ModelSpec
    from nanoserve_core.engine_stats import EngineStats

    TokenizerSource: TypeAlias = PreTrainedTokenizerBase | str | Path | None

Key: TypeAlias = tuple[str, object]
"""("path", resolved folder), ("hub", id) or ("module", id of the live module)."""


def acquire(
    model: str | Path | nn.Module,
    *,
    tokenizer: TokenizerSource = None,
    **engine_options: Any,  # Any: each option is checked by EngineConfig
) -> EngineHandle:
    """A handle on the process's one engine for `model`; loads it on first use.

    `model`: a folder (resolved), a hub id, or a live module (by identity, held weakly). Options are
    `EngineConfig`'s, ``plugins`` among them. Those that are named must equal the loaded engine's,
    else `ConfigError` shows both; those not named are taken as they are. Any thread; concurrent
    callers load once, and all get the exception when loading fails.

    The engine lives while somebody holds an open handle: keep it.
    """
    return _PROCESS_ENGINES.acquire(model, tokenizer=tokenizer, **engine_options)


class EngineHandle:
    """A counted reference to a shared engine: the last `close` stops it. Context manager.

    ``copy`` and ``deepcopy`` give the same handle. Unpickling acquires anew by path or hub id; the
    handle of a live module cannot be pickled (TypeError).
    """

    def __init__(
        self,
        registry: EngineRegistry,
        entry: RegistryEntry,
        tokenizer: TokenizerSource,
        options: Mapping[str, Any],  # Any: see acquire
    ) -> None:
        self._registry = registry
        self._entry: RegistryEntry | None = entry
        self._model_name = entry.model_name
        self._tokenizer = tokenizer
        self._options = dict(options)

    @property
    def thread(self) -> EngineThread:
        """The engine's thread; raises `EngineClosed` when this handle was closed."""
        return self._require_entry().thread.result()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that was given, else the model's own, loaded on first use; any thread.

        Raises `ConfigError` for a live module that does not say where its tokenizer is.
        """
        source = self._tokenizer
        if source is None or isinstance(source, (str, Path)):
            source = self._tokenizer = self._require_entry().load_tokenizer(source)
        return source

    @property
    def spec(self) -> ModelSpec:
        """Shape facts of the model."""
        return self.thread.engine.spec

    @property
    def config(self) -> EngineConfig:
        """The options the engine runs with."""
        return self.thread.engine.config

    @property
    def model_name(self) -> str:
        """Hub id, resolved folder, or the live module's ``name_or_path``, else its class name."""
        return self._model_name

    @property
    def recommended_sampling(self) -> Mapping[str, Any]:  # Any: numbers
        """Fields of `SamplingParams` that the model's generation_config recommends; read at the
        first use, any thread.
        """
        return self._require_entry().recommended_sampling

    @property
    def is_closed(self) -> bool:
        """True when this handle was closed; others may still hold the engine."""
        return self._entry is None

    def stats(self) -> EngineStats:
        """The engine's counters, read between two steps."""
        return self.thread.stats()

    def close(self) -> None:
        """Give the reference back; the last one stops the engine and waits for it. Idempotent."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._registry.release(self, entry)

    def __enter__(self) -> EngineHandle:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __copy__(self) -> EngineHandle:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> EngineHandle:
        return self

    def __reduce__(self) -> tuple[Callable[[], EngineHandle], tuple[()]]:
        _, name = self._require_entry().key
        if not isinstance(name, str):
            raise TypeError(
                f"the engine handle of a live {self._model_name} cannot be pickled: its weights "
                f"live in process {os.getpid()}. Pickle a handle acquired by path or hub id."
            )
        again = functools.partial(acquire, name, tokenizer=self._tokenizer, **self._options)
        return again, ()

    def _require_entry(self) -> RegistryEntry:
        entry = self._entry
        if entry is None:
            raise EngineClosed(
                f"this handle on the engine of {self._model_name} was closed: expected an open one."
                " Acquire a new handle; the engine is loaded again when nobody else holds it."
            )
        return entry


class EngineRegistry:
    """The engines of a process by model. Entries are held weakly: the open handles keep them."""

    def __init__(self, load: Callable[[str | Path | nn.Module, EngineConfig], EngineLike]) -> None:
        self._load_engine = load
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._entries: weakref.WeakValueDictionary[Key, RegistryEntry] = (
            weakref.WeakValueDictionary()
        )

    def acquire(
        self,
        model: str | Path | nn.Module,
        *,
        tokenizer: TokenizerSource = None,
        **engine_options: Any,  # Any: see acquire
    ) -> EngineHandle:
        """See the module's `acquire`."""
        config = EngineConfig.from_options(**engine_options)
        if self._pid != os.getpid():
            self._reset()  # a fork: the threads, and whoever held the lock, stayed in the parent
        handle, entry, is_new = self._claim(model, tokenizer, engine_options)
        try:
            if is_new:
                self._load(entry, model, config)
            entry.require_options({name: getattr(config, name) for name in engine_options})
        except BaseException:
            handle.close()
            raise
        return handle

    def _claim(
        self,
        model: str | Path | nn.Module,
        tokenizer: TokenizerSource,
        options: Mapping[str, Any],  # Any: see acquire
    ) -> tuple[EngineHandle, RegistryEntry, bool]:
        """A handle on the model's entry, and whether the entry is new: then the caller loads."""
        key = model_key(model)
        while True:
            with self._lock:
                entry = self._entries.get(key)
                is_new = entry is None or not entry.can_serve(model)
                if entry is None or is_new:
                    entry = self._entries[key] = RegistryEntry(key, model)
                if not entry.is_closing:
                    handle = EngineHandle(self, entry, tokenizer, options)
                    entry.handles.add(handle)
                    return handle, entry, is_new
            entry.closed.wait()  # its memory is needed for the engine that will replace it

    def _load(
        self, entry: RegistryEntry, model: str | Path | nn.Module, config: EngineConfig
    ) -> None:
        try:
            engine = self._load_engine(model, config)
            entry.thread.set_result(EngineThread(engine))
        except Exception as error:
            entry.thread.set_exception(error)
            raise
        except BaseException:
            entry.thread.set_exception(
                EngineClosed(f"loading {entry.model_name} was interrupted. Acquire it again.")
            )
            raise

    def release(self, handle: EngineHandle, entry: RegistryEntry) -> None:
        """Take a handle back; closes the engine after the last one. For `EngineHandle.close`."""
        if entry.pid != os.getpid():
            return  # a fork: the engine and its handles are the parent's
        with self._lock:
            if handle not in entry.handles:
                return
            entry.handles.discard(handle)
            if entry.handles:
                return
            entry.is_closing = True
        try:
            entry.close()
        finally:
            with self._lock:
                if self._entries.get(entry.key) is entry:
                    del self._entries[entry.key]
            entry.closed.set()


class RegistryEntry:
    """One model's engine: its thread (to come, while it loads) and the open handles on it."""

    def __init__(self, key: Key, model: str | Path | nn.Module) -> None:
        self.key = key
        self.pid = os.getpid()
        self.thread: Future[EngineThread] = Future()
        # Weak, so that a handle nobody holds counts no more: with the last one the entry goes, and
        # its EngineThread closes itself.
        self.handles: weakref.WeakSet[EngineHandle] = weakref.WeakSet()
        self.is_closing = False
        self.closed = threading.Event()
        self._module = None if isinstance(key[1], str) else weakref.ref(model)
        self._source = key[1] if isinstance(key[1], str) else getattr(model, "name_or_path", "")
        self.model_name: str = self._source or type(model).__name__
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        self._tokenizer_lock = threading.Lock()

    def can_serve(self, model: str | Path | nn.Module) -> bool:
        """False when the engine failed to load or has ended, or the module's id was reused."""
        if self._module is not None and self._module() is not model:
            return False
        if self.is_closing or not self.thread.done():
            return True
        return self.thread.exception() is None and self.thread.result().is_alive

    def require_options(self, options: Mapping[str, object]) -> None:
        """Raise `ConfigError` for options that the engine does not run with; waits for a load."""
        config = self.thread.result().engine.config
        named = {k: v for k, v in options.items() if getattr(config, k) != v}
        if named:
            loaded = {name: getattr(config, name) for name in named}
            raise ConfigError(
                f"the engine of {self.model_name} runs with {_listed(loaded)}, but this call asks "
                f"for {_listed(named)}: expected equal options, for a process has one engine per "
                "model. Name none of them to take the engine as it is, or close its handles first."
            )

    def load_tokenizer(self, source: str | Path | None) -> PreTrainedTokenizerBase:
        """The tokenizer at `source` (None: the model's own), loaded once; any thread."""
        name = self._source if source is None else str(source)
        if not name:
            raise ConfigError(
                f"the live {self.model_name} does not say where its tokenizer is (name_or_path is "
                "empty): expected a tokenizer. Pass tokenizer= when you acquire the engine."
            )
        with self._tokenizer_lock:
            if name not in self._tokenizers:
                self._tokenizers[name] = _load_tokenizer(name)
            return self._tokenizers[name]

    @functools.cached_property
    def recommended_sampling(self) -> Mapping[str, Any]:  # Any: numbers
        """See `EngineHandle`; of a live module as long as it lives."""
        live = self._module() if self._module is not None else None
        return recommended_sampling(self.key[1] if self._module is None else live)

    def close(self) -> None:
        """Close the engine if it was ever loaded."""
        if self.thread.done() and self.thread.exception() is None:
            self.thread.result().close()


def model_key(model: str | Path | nn.Module) -> Key:
    """What makes two calls mean the same model; raises `ConfigError` for what names none."""
    if isinstance(model, (str, Path)):
        path = Path(model).expanduser()
        is_folder = path.exists() or isinstance(model, Path)
        return ("path", os.path.realpath(path)) if is_folder else ("hub", model)
    if not callable(getattr(model, "parameters", None)):
        raise ConfigError(
            f"model={model!r} is a {type(model).__name__}: expected a folder, a hub id or a loaded "
            "Qwen3ForCausalLM."
        )
    return ("module", id(model))


def load_engine(model: str | Path | nn.Module, config: EngineConfig) -> EngineLike:
    """Make the engine of `model`; loads torch and the weights."""
    from nanoserve_core.engine import Engine

    return Engine(model, config)


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def _listed(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


_PROCESS_ENGINES = EngineRegistry(load_engine)
