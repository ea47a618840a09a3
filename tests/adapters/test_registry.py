"""One engine per model: who shares it, who is refused, when it ends."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from nanoserve_adapters import registry
from nanoserve_adapters.registry import EngineHandle, EngineRegistry
from nanoserve_adapters.testing import FakeEngine, tiny_tokenizer
from nanoserve_core.errors import ConfigError, EngineClosed
from tests.adapters.support import PATIENCE_SECONDS, hashed_tokens, new_request, tokens_in

if TYPE_CHECKING:
    from pathlib import Path

    from nanoserve_core.config import EngineConfig


class Module:
    """Stands in for a live module: has parameters, can be referred to weakly."""

    name_or_path = ""

    def parameters(self) -> list[object]:
        """None."""
        return []


class Loader:
    """Loads `FakeEngine`s and remembers them; may wait or fail."""

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []
        self.models: list[object] = []
        self.error: BaseException | None = None
        self.may_load = threading.Event()
        self.may_load.set()
        self.is_loading = threading.Event()

    def __call__(self, model: object, config: EngineConfig) -> FakeEngine:
        """What `EngineRegistry` calls to make an engine."""
        self.models.append(model if isinstance(model, str) else type(model))
        self.is_loading.set()
        assert self.may_load.wait(PATIENCE_SECONDS)
        if self.error is not None:
            raise self.error
        self.engines.append(FakeEngine(config=config))
        return self.engines[-1]


@pytest.fixture
def loader() -> Loader:
    """What the registry loads with."""
    return Loader()


@pytest.fixture
def engines(loader: Loader) -> EngineRegistry:
    """A registry of its own for each test."""
    return EngineRegistry(loader)


def test_same_model_gives_the_same_engine(engines: EngineRegistry, loader: Loader) -> None:
    with engines.acquire("org/model") as first, engines.acquire("org/model") as second:
        assert first.thread is second.thread
        assert first is not second

    assert loader.models == ["org/model"]


def test_different_models_have_different_engines(engines: EngineRegistry) -> None:
    with engines.acquire("org/a") as first, engines.acquire("org/b") as second:
        assert first.thread is not second.thread


def test_every_spelling_of_a_folder_is_the_same_model(
    engines: EngineRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)

    spellings = [str(folder), folder, "model", "link", "./link/../model/"]
    handles = [engines.acquire(spelling) for spelling in spellings]

    assert len({id(handle.thread) for handle in handles}) == 1
    assert {handle.model_name for handle in handles} == {os.path.realpath(folder)}
    for handle in handles:
        handle.close()


def test_live_module_is_shared_by_identity(engines: EngineRegistry, loader: Loader) -> None:
    module, twin = Module(), Module()

    with engines.acquire(module) as a, engines.acquire(module) as b, engines.acquire(twin) as c:
        assert a.thread is b.thread
        assert a.thread is not c.thread

    assert len(loader.engines) == 2


def test_concurrent_callers_load_once(engines: EngineRegistry, loader: Loader) -> None:
    loader.may_load.clear()
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(engines.acquire, "org/model") for _ in range(8)]
        loader.is_loading.wait()
        loader.may_load.set()
        handles = [call.result() for call in calls]

    assert len(loader.engines) == 1
    assert len({id(handle.thread) for handle in handles}) == 1
    for handle in handles:
        handle.close()
    assert loader.engines[0].num_closes == 1


def test_handle_shows_the_engines_facts(engines: EngineRegistry) -> None:
    with engines.acquire("org/model", max_num_seqs=7) as handle:
        tokens_in(handle.thread.stream(new_request(max_tokens=3)))

        assert handle.config.max_num_seqs == 7
        assert handle.spec.vocab_size == 1024
        assert handle.stats().steps == 3
        assert handle.model_name == "org/model"


def test_other_options_for_a_loaded_model_are_refused_showing_both(engines: EngineRegistry) -> None:
    with engines.acquire("org/model", max_num_seqs=8) as handle:
        with pytest.raises(ConfigError, match=r"max_num_seqs=8.*max_num_seqs=9") as refused:
            engines.acquire("org/model", max_num_seqs=9)

        assert "org/model" in str(refused.value)
        assert handle.thread.is_alive


def test_equal_or_unnamed_options_join_the_loaded_engine(engines: EngineRegistry) -> None:
    plugin = object()
    options: dict[str, Any] = {"max_num_seqs": 8, "plugins": [plugin]}

    with (
        engines.acquire("org/model", **options) as first,
        engines.acquire("org/model", **options) as second,
        engines.acquire("org/model") as third,
        engines.acquire("org/model", enforce_eager=False) as fourth,
    ):
        assert len({id(handle.thread) for handle in (first, second, third, fourth)}) == 1


def test_unknown_option_is_refused_before_anything_loads(
    engines: EngineRegistry, loader: Loader
) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        engines.acquire("org/model", max_num_seq=8)

    assert loader.models == []


@pytest.mark.parametrize("model", [3, None, object()])
def test_what_is_no_model_is_refused(engines: EngineRegistry, model: object) -> None:
    with pytest.raises(ConfigError, match="expected a folder"):
        engines.acquire(model)


def test_last_close_stops_the_engine(engines: EngineRegistry, loader: Loader) -> None:
    first, second = engines.acquire("org/model"), engines.acquire("org/model")

    first.close()
    first.close()

    assert second.thread.is_alive
    assert first.is_closed
    second.close()
    assert loader.engines[0].num_closes == 1


def test_closed_handle_refuses_while_others_go_on(engines: EngineRegistry) -> None:
    with engines.acquire("org/model") as open_handle:
        closed = engines.acquire("org/model")
        closed.close()

        for use in (lambda: closed.thread, closed.stats, lambda: closed.spec):
            with pytest.raises(EngineClosed, match="org/model"):
                use()
        assert open_handle.stats().steps == 0


def test_model_is_loaded_again_after_its_last_close(
    engines: EngineRegistry, loader: Loader
) -> None:
    engines.acquire("org/model", max_num_seqs=8).close()

    with engines.acquire("org/model", max_num_seqs=9) as handle:
        assert handle.config.max_num_seqs == 9

    assert len(loader.engines) == 2


def test_new_engine_waits_until_the_old_one_has_given_its_memory_back(
    loader: Loader, engines: EngineRegistry
) -> None:
    events: list[str] = []
    is_closing, may_close = threading.Event(), threading.Event()

    class SlowToClose(FakeEngine):
        def close(self) -> None:
            is_closing.set()
            assert may_close.wait(PATIENCE_SECONDS)
            events.append("closed")

    def load(model: object, config: EngineConfig) -> FakeEngine:
        events.append("loaded")
        return SlowToClose(config=config) if events == ["loaded"] else loader(model, config)

    engines = EngineRegistry(load)
    first = engines.acquire("org/model")
    with ThreadPoolExecutor(2) as pool:
        closing = pool.submit(first.close)
        is_closing.wait()
        acquiring = pool.submit(engines.acquire, "org/model")
        may_close.set()
        closing.result()
        acquiring.result().close()

    assert events == ["loaded", "closed", "loaded"]


def test_dropped_handles_count_no_more(engines: EngineRegistry, loader: Loader) -> None:
    dropped, kept = engines.acquire("org/model"), engines.acquire("org/model")
    ended = threading.Event()
    weakref.finalize(dropped, ended.set)

    del dropped
    assert ended.is_set()
    kept.close()

    assert loader.engines[0].num_closes == 1


def test_dropping_the_last_handle_stops_the_engine(engines: EngineRegistry) -> None:
    handle = engines.acquire("org/model")
    (engine_thread,) = [t for t in threading.enumerate() if t.name == "nanoserve-engine"]

    del handle

    engine_thread.join(PATIENCE_SECONDS)
    assert not engine_thread.is_alive()


def test_registry_does_not_keep_a_live_module(engines: EngineRegistry) -> None:
    module = Module()
    handle = engines.acquire(module)
    reference = weakref.ref(module)

    del module

    assert reference() is None
    handle.close()


def test_module_with_the_id_of_a_dead_one_is_another_model(
    engines: EngineRegistry, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "model_key", lambda _: ("module", 1234))
    dead, living = Module(), Module()
    old = engines.acquire(dead)
    del dead

    new = engines.acquire(living)

    assert old.thread is not new.thread
    old.close()
    assert new.thread.is_alive
    new.close()
    assert len(loader.engines) == 2


def test_failed_load_raises_for_every_waiting_caller_and_the_next_one_loads(
    engines: EngineRegistry, loader: Loader
) -> None:
    loader.error = OSError("no such checkpoint")
    loader.may_load.clear()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(engines.acquire, "org/model") for _ in range(2)]
        loader.is_loading.wait()
        loader.may_load.set()
        assert [str(call.exception()) for call in calls] == ["no such checkpoint"] * 2
    loader.error = None

    with engines.acquire("org/model") as handle:
        assert handle.thread.is_alive


def test_engine_that_died_is_replaced(engines: EngineRegistry, loader: Loader) -> None:
    def die(step: int) -> None:
        raise MemoryError(step)

    old = engines.acquire("org/model")
    loader.engines[0].before_step = die
    with pytest.raises(RuntimeError, match="MemoryError"):
        next(old.thread.stream(new_request()))

    with engines.acquire("org/model") as new:
        tokens = tokens_in(new.thread.stream(request := new_request()))
    old.close()

    assert tokens == hashed_tokens(request)
    assert [engine.num_closes for engine in loader.engines] == [1, 1]


def test_copies_are_the_same_handle(engines: EngineRegistry) -> None:
    with engines.acquire("org/model") as handle:
        assert copy.copy(handle) is handle
        assert copy.deepcopy({"engine": handle})["engine"] is handle


def test_unpickling_acquires_by_name_with_the_same_options(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_PROCESS_ENGINES", EngineRegistry(loader))
    with registry.acquire("org/model", max_num_seqs=8, tokenizer="org/tokenizer") as handle:
        data = pickle.dumps(handle)

        with pickle.loads(data) as same:
            assert isinstance(same, EngineHandle)
            assert same.thread is handle.thread

    with pickle.loads(data) as new:
        assert new.config.max_num_seqs == 8


def test_handle_of_a_live_module_cannot_be_pickled(engines: EngineRegistry) -> None:
    module = Module()
    with engines.acquire(module) as handle, pytest.raises(TypeError, match="live Module"):
        pickle.dumps(handle)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_loads_its_own_engine(engines: EngineRegistry, loader: Loader) -> None:
    handle = engines.acquire("org/model")
    pid = os.fork()
    if pid == 0:
        handle.close()  # the parent's: nothing happens to it
        with engines.acquire("org/model") as own:
            tokens_in(own.thread.stream(new_request()))
        os._exit(len(loader.engines))

    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 2
    assert handle.thread.is_alive
    handle.close()


def test_given_tokenizer_is_used_as_it_is(engines: EngineRegistry) -> None:
    tokenizer = object()

    with engines.acquire("org/model", tokenizer=tokenizer) as handle:
        assert handle.tokenizer is tokenizer


def test_own_tokenizer_is_loaded_when_first_asked_for_and_shared(
    engines: EngineRegistry, tmp_path: Path
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    with engines.acquire(tmp_path) as first, engines.acquire(tmp_path) as second:
        tokenizer = first.tokenizer

        assert tokenizer.decode(tokenizer("Hello").input_ids) == "Hello"
        assert second.tokenizer is tokenizer


def test_live_module_without_a_name_needs_a_tokenizer(engines: EngineRegistry) -> None:
    module = Module()
    with engines.acquire(module) as handle, pytest.raises(ConfigError, match="tokenizer="):
        _ = handle.tokenizer
