"""`PluginManager`: what it takes, what it refuses, in which order it calls, what failures do."""

from __future__ import annotations

import logging
import sys
import types
from typing import TYPE_CHECKING

import pytest
import torch

from nanoserve_core.config import EngineConfig, ModelSpec
from nanoserve_core.errors import InvalidRequest, PluginError
from nanoserve_core.hookspecs import MAX_FAILURES, hookimpl
from nanoserve_core.plugins import PluginManager, attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from nanoserve_core.request import Request


def spec() -> ModelSpec:
    return ModelSpec(
        architecture="Qwen3ForCausalLM",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        attention_bias=False,
        dtype=torch.float32,
    )


class Steps:
    """Counts steps; may raise in each."""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[object] = []
        self.error = error

    @hookimpl
    def nanoserve_step_finished(self, stats: object) -> None:
        self.seen.append(stats)
        if self.error is not None:
            raise self.error


class Namespace:
    """Answers `nanoserve_cache_namespace`."""

    def __init__(self, answer: str | None, calls: list[str | None] | None = None) -> None:
        self.answer = answer
        self.calls = [] if calls is None else calls

    @hookimpl
    def nanoserve_cache_namespace(self, request: Request) -> str | None:
        assert request is not None
        self.calls.append(self.answer)
        return self.answer


def step(manager: PluginManager, stats: object = None) -> None:
    """What the engine does after a step."""
    if (hooks := manager.hooks.step_finished) is not None:
        manager.observe(hooks, stats=stats)


def namespace(manager: PluginManager) -> str | None:
    hooks = manager.hooks.cache_namespace
    result: str | None = manager.first(hooks or (), request="a request")
    return result


def test_table_is_empty_without_plugins() -> None:
    manager = PluginManager([], allowed=())

    assert manager.names == ()
    assert manager.hooks.step_finished is None


def test_hook_nobody_implements_stays_none_beside_those_somebody_does() -> None:
    manager = PluginManager([Steps()], allowed=())

    assert manager.hooks.step_finished is not None
    assert manager.hooks.tokens is None


def test_instances_modules_and_namespaces_are_plugins() -> None:
    seen: list[object] = []

    @hookimpl
    def nanoserve_step_finished(stats: object) -> None:
        seen.append(stats)

    module = types.ModuleType("my_plugin_module")
    module.nanoserve_step_finished = nanoserve_step_finished  # type: ignore[attr-defined]  # a test's module
    namespace = types.SimpleNamespace(nanoserve_step_finished=nanoserve_step_finished)
    instance = Steps()
    manager = PluginManager([module, namespace, instance], allowed=())

    step(manager, "now")

    assert manager.names == ("my_plugin_module", "SimpleNamespace", "Steps")
    assert (seen, instance.seen) == (["now", "now"], ["now"])


def test_two_plugins_of_one_class_get_different_names() -> None:
    manager = PluginManager([Steps(), Steps(), Steps()], allowed=())

    assert manager.names == ("Steps", "Steps-2", "Steps-3")


def test_class_is_refused_with_a_hint_to_pass_an_instance() -> None:
    with pytest.raises(PluginError, match=r"Steps is a class.*Pass Steps\(\) instead"):
        PluginManager([Steps], allowed=())


def test_plugin_without_any_hook_is_refused() -> None:
    with pytest.raises(PluginError, match=r"implements no hook.*nanoserve_step_finished"):
        PluginManager([object()], allowed=())


def test_same_object_is_refused_the_second_time() -> None:
    plugin = Steps()

    with pytest.raises(PluginError, match="is registered already"):
        PluginManager([plugin, plugin], allowed=())


class Misspelt:
    @hookimpl
    def nanoserve_step_finish(self, stats: object) -> None: ...


class Unmarked:
    def nanoserve_step_finished(self, stats: object) -> None: ...


class MisspeltAndUnmarked(Steps):
    def nanoserve_tokns(self, outputs: object) -> None: ...


class UnknownHook:
    @hookimpl
    def before_everything(self) -> None: ...


class MisspeltArgument:
    @hookimpl
    def nanoserve_request_added(self, reqest: object) -> None: ...


class DefaultForUnknownArgument:
    @hookimpl
    def nanoserve_request_added(self, request: object, retries: int = 3) -> None: ...


class AnyArguments:
    @hookimpl
    def nanoserve_request_added(self, **kwargs: object) -> None: ...


class NoSelf:
    @hookimpl
    def nanoserve_request_added(request) -> None: ...


class Coroutine:
    @hookimpl
    async def nanoserve_tokens(self, outputs: object) -> None: ...


class Wrapper:
    @hookimpl(wrapper=True)
    def nanoserve_tokens(self) -> Generator[None, None, None]:
        yield


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Misspelt(), "nanoserve_step_finish is not a hook. Did you mean nanoserve_step_finished"),
        (Unmarked(), r"'Unmarked': nanoserve_step_finished is not marked. Decorate .*@hookimpl"),
        (MisspeltAndUnmarked(), "nanoserve_tokns is not a hook. Did you mean nanoserve_tokens"),
        (UnknownHook(), "before_everything is not a hook. The hooks are nanoserve_configure, "),
        (MisspeltArgument(), r"argument 'reqest'.*Did you mean 'request'\? Its arguments are req"),
        (DefaultForUnknownArgument(), "argument 'retries', which nanoserve_request_added does no"),
        (AnyArguments(), r"takes \*\*kwargs.*name the arguments it needs of request"),
        (NoSelf(), "lacks its first parameter"),
        (Coroutine(), "nanoserve_tokens is a coroutine"),
        (Wrapper(), "nanoserve_tokens is a wrapper"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_malformed_plugin_is_refused_and_nothing_changes(plugin: object, message: str) -> None:
    manager = PluginManager([Steps()], allowed=())
    hooks = manager.hooks

    with pytest.raises(PluginError, match=message):
        manager.register(plugin)

    assert manager.names == ("Steps",)
    assert manager.hooks is hooks


def test_properties_of_a_plugin_are_not_run() -> None:
    class WithProperty(Steps):
        @property
        def nanoserve_version(self) -> str:
            raise AssertionError("a property was read")

    manager = PluginManager([WithProperty()], allowed=())

    assert manager.names == ("WithProperty",)


def test_implementation_may_have_another_name_and_fewer_arguments() -> None:
    class Renamed:
        def __init__(self) -> None:
            self.calls = 0

        @hookimpl(specname="nanoserve_step_finished")
        def count(self) -> None:
            self.calls += 1

    plugin = Renamed()

    step(PluginManager([plugin], allowed=()))

    assert plugin.calls == 1


def test_static_and_class_methods_are_called() -> None:
    calls: list[str] = []

    class Both:
        @staticmethod
        @hookimpl
        def nanoserve_step_finished(stats: str) -> None:
            calls.append(stats)

        @classmethod
        @hookimpl
        def nanoserve_tokens(cls, outputs: str) -> None:
            calls.append(outputs)

    manager = PluginManager([Both()], allowed=())

    step(manager, "stats")
    manager.observe(manager.hooks.tokens or (), outputs="outputs")

    assert calls == ["stats", "outputs"]


def test_plugin_registers_and_leaves_between_steps() -> None:
    manager, plugin = PluginManager([], allowed=()), Steps()

    step(manager, 1)
    manager.register(plugin)
    step(manager, 2)
    manager.unregister(plugin)
    step(manager, 3)

    assert plugin.seen == [2]
    assert manager.hooks.step_finished is None


def test_unknown_plugin_cannot_leave() -> None:
    with pytest.raises(PluginError, match=r"is not registered. Registered: Steps\."):
        PluginManager([Steps()], allowed=()).unregister(Steps())


def test_first_result_counts_and_the_last_registered_is_asked_first() -> None:
    calls: list[str | None] = []
    plugins = [Namespace("a", calls), Namespace("b", calls), Namespace(None, calls)]

    answer = namespace(PluginManager(plugins, allowed=()))

    assert answer == "b"
    assert calls == [None, "b"]


def test_no_answer_is_none() -> None:
    assert namespace(PluginManager([Namespace(None)], allowed=())) is None


def test_tryfirst_and_trylast_change_the_order() -> None:
    calls: list[str] = []

    def plugin(name: str, **options: bool) -> object:
        @hookimpl(**options)
        def nanoserve_step_finished() -> None:
            calls.append(name)

        return types.SimpleNamespace(nanoserve_step_finished=nanoserve_step_finished)

    plugins = [plugin("first", tryfirst=True), plugin("middle"), plugin("last", trylast=True)]

    step(PluginManager(plugins, allowed=()))

    assert calls == ["first", "middle", "last"]


def test_results_that_are_not_none_are_collected_in_calling_order() -> None:
    manager = PluginManager([Namespace("a"), Namespace(None), Namespace("c")], allowed=())

    answers = manager.collect(manager.hooks.cache_namespace or (), request="a request")

    assert answers == ["c", "a"]


def test_observer_that_raises_is_logged_once_counted_and_switched_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, sound = Steps(error=ZeroDivisionError("broken")), Steps()
    manager = PluginManager([broken, sound], allowed=())

    with caplog.at_level(logging.ERROR):
        for number in range(MAX_FAILURES + 2):
            step(manager, number)

    assert len(broken.seen) == MAX_FAILURES
    assert len(sound.seen) == MAX_FAILURES + 2
    assert manager.failures == {"Steps": MAX_FAILURES}
    first, last = caplog.records
    assert "raised in nanoserve_step_finished" in first.message
    assert first.exc_info is not None
    assert "switched off" in last.message


def test_plugin_whose_observers_are_off_still_decides() -> None:
    class Mixed(Steps, Namespace):
        def __init__(self) -> None:
            Steps.__init__(self, ZeroDivisionError())
            Namespace.__init__(self, "mine")

    manager = PluginManager([Mixed()], allowed=())

    for _ in range(MAX_FAILURES):
        step(manager)

    assert manager.hooks.step_finished is None
    assert namespace(manager) == "mine"


def test_plugin_that_registers_again_starts_anew() -> None:
    plugin = Steps(error=ZeroDivisionError())
    manager = PluginManager([plugin], allowed=())
    for _ in range(MAX_FAILURES):
        step(manager)
    manager.unregister(plugin)

    manager.register(plugin)

    assert manager.failures == {}
    assert manager.hooks.step_finished is not None


class Refuses:
    """Raises when a request is submitted."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    @hookimpl
    def nanoserve_request_added(self) -> None:
        raise self.error


def test_decision_that_raises_is_a_plugin_error_with_its_cause() -> None:
    cause = LookupError("no such tenant")
    manager = PluginManager([Refuses(cause)], allowed=())

    with pytest.raises(PluginError, match=r"'Refuses' raised in nanoserve_request_added") as caught:
        manager.collect(manager.hooks.request_added or (), request=None)

    assert caught.value.__cause__ is cause
    assert manager.failures == {}


def test_own_exceptions_of_nanoserve_pass_as_they_are() -> None:
    cause = InvalidRequest("not today")
    manager = PluginManager([Refuses(cause)], allowed=())

    with pytest.raises(InvalidRequest) as caught:
        manager.collect(manager.hooks.request_added or (), request=None)

    assert caught.value is cause


@pytest.mark.parametrize("method", ["observe", "first", "collect"])
def test_keyboard_interrupt_is_nobodys_failure(method: str) -> None:
    class Interrupted:
        @hookimpl
        def nanoserve_step_finished(self) -> None:
            raise KeyboardInterrupt

    manager = PluginManager([Interrupted()], allowed=())

    with pytest.raises(KeyboardInterrupt):
        getattr(manager, method)(manager.hooks.step_finished, stats=None)


def test_attempt_gives_the_result_or_the_exception() -> None:
    error = ValueError("no")

    def fails() -> None:
        raise error

    assert attempt(divmod, 7, 2) == ((3, 1), None)
    assert attempt(fails) == (None, error)


class Configured:
    """Notes its configuration; may raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.config: EngineConfig | None = None
        self.error = error

    @hookimpl
    def nanoserve_configure(self, config: EngineConfig) -> None:
        self.config = config
        if self.error is not None:
            raise self.error


def test_configuration_reaches_plugins_that_register_before_and_after() -> None:
    early, late, config = Configured(), Configured(), EngineConfig()
    manager = PluginManager([early], allowed=())

    manager.configure(config, spec())
    manager.register(late)

    assert early.config is config
    assert late.config is config


def test_plugin_that_fails_to_configure_stops_the_start() -> None:
    manager = PluginManager([Configured(OSError("disk full"))], allowed=())

    with pytest.raises(PluginError, match="disk full"):
        manager.configure(EngineConfig(), spec())


def test_late_plugin_that_fails_to_configure_is_not_registered() -> None:
    manager = PluginManager([], allowed=())
    manager.configure(EngineConfig(), spec())

    with pytest.raises(PluginError, match="disk full"):
        manager.register(Configured(OSError("disk full")))

    assert manager.names == ()


def test_plugin_with_a_hook_of_the_start_comes_too_late_afterwards() -> None:
    class Sampling:
        @hookimpl
        def nanoserve_sampler(self) -> None: ...

    manager = PluginManager([], allowed=())
    manager.configure(EngineConfig(), spec())

    with pytest.raises(PluginError, match="nanoserve_sampler, which the engine has read already"):
        manager.register(Sampling())


MODULE = """
from nanoserve_core.hookspecs import hookimpl

class Quiet:
    @hookimpl
    def nanoserve_step_finished(self, stats):
        stats.append("quiet")

instance = Quiet()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a distribution with these entry points importable for the test."""

    def make(**points: str) -> None:
        (tmp_path / "quiet_plugin.py").write_text(MODULE)
        info = tmp_path / "quiet_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quiet-plugin\nVersion: 1.0\n")
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[nanoserve]", *lines]) + "\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "quiet_plugin", raising=False)

    return make


def test_installed_plugin_is_found_by_its_entry_point(install: Callable[..., None]) -> None:
    install(quiet="quiet_plugin:instance")
    manager, stats = PluginManager([]), []  # type: tuple[PluginManager, list[str]]

    step(manager, stats)

    assert manager.names == ("quiet",)
    assert stats == ["quiet"]


def test_allow_list_names_what_may_load(install: Callable[..., None]) -> None:
    install(quiet="quiet_plugin:instance", other="quiet_plugin:Quiet()")

    assert PluginManager([], allowed=("quiet",)).names == ("quiet",)
    assert PluginManager([], allowed=()).names == ()


def test_plugins_of_the_caller_are_asked_before_installed_ones(
    install: Callable[..., None],
) -> None:
    install(quiet="quiet_plugin:instance")
    seen: list[str] = []

    class Mine:
        @hookimpl
        def nanoserve_step_finished(self, stats: list[str]) -> None:
            stats.append("mine")

    step(PluginManager([Mine()]), seen)

    assert seen == ["mine", "quiet"]


def test_allowed_plugin_that_is_not_installed_is_an_error(install: Callable[..., None]) -> None:
    install(quiet="quiet_plugin:instance")

    with pytest.raises(PluginError, match=r"names 'quite', which is not installed.*one of quiet"):
        PluginManager([], allowed=("quite",))


def test_installed_plugin_that_cannot_be_imported_is_named(install: Callable[..., None]) -> None:
    install(broken="no_such_module:plugin")

    with pytest.raises(PluginError, match=r"'broken' \(no_such_module:plugin\) cannot be imported"):
        PluginManager([])


def test_installed_class_is_refused(install: Callable[..., None]) -> None:
    install(quiet="quiet_plugin:Quiet")

    with pytest.raises(PluginError, match="is a class"):
        PluginManager([])
