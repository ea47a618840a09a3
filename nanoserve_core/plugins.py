"""`PluginManager`: the plugins of one engine, checked at registration, compiled to plain calls.

pluggy keeps the plugins and their order. Its own call costs 2-6 microseconds, also for a hook that
nobody implements; the engine therefore reads a `HookTable`, which holds for each hook a tuple of
callables or None and is made anew when a plugin comes, goes or is switched off.

    if (hooks := plugins.hooks.step_finished) is not None:      # 0.03 us when nobody listens
        plugins.observe(hooks, stats=make_stats())

This file does not know what any hook means, except which of them are observers (`hookspecs`).
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.metadata import entry_points
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from nanoserve_core import hookspecs
from nanoserve_core.errors import NanoserveError, PluginError
from nanoserve_core.hookspecs import MAX_FAILURES, OBSERVERS, PROJECT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nanoserve_core.config import EngineConfig, ModelSpec

    Result = TypeVar("Result")

_PREFIX = f"{PROJECT}_"
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(spec).parameters)
    for name, spec in vars(hookspecs).items()
    if name.startswith(_PREFIX)
}
"""Hook -> names of its arguments."""

# Read once, while the engine is made: a plugin that comes later would wait for them in vain.
_ONLY_AT_START = frozenset(
    _PREFIX + name
    for name in ("register_models", "attention_backend", "logits_processors", "sampler")
)

_logger = logging.getLogger(__name__)


class Hook:
    """One plugin's implementation of one hook; call it with all arguments of the hook, by name."""

    __slots__ = ("_arguments", "_function", "hook_name", "plugin_name")

    def __init__(self, plugin_name: str, hook_name: str, function: Callable[..., Any]) -> None:
        self.plugin_name = plugin_name
        self.hook_name = hook_name
        self._function = function
        self._arguments = tuple(inspect.signature(function).parameters)

    def __call__(self, **kwargs: Any) -> Any:  # noqa: ANN401 - hooks differ
        """Pass on the arguments that the implementation names."""
        return self._function(**{name: kwargs[name] for name in self._arguments})

    def __repr__(self) -> str:
        return f"<Hook {self.hook_name} of plugin {self.plugin_name!r}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class HookTable:
    """Per hook (without the prefix) its implementations in calling order, or None."""

    configure: tuple[Hook, ...] | None = None
    register_models: tuple[Hook, ...] | None = None
    attention_backend: tuple[Hook, ...] | None = None
    logits_processors: tuple[Hook, ...] | None = None
    sampler: tuple[Hook, ...] | None = None
    cache_namespace: tuple[Hook, ...] | None = None
    request_added: tuple[Hook, ...] | None = None
    request_processor: tuple[Hook, ...] | None = None
    stop_checker: tuple[Hook, ...] | None = None
    grammar: tuple[Hook, ...] | None = None
    request_scheduled: tuple[Hook, ...] | None = None
    request_preempted: tuple[Hook, ...] | None = None
    request_finished: tuple[Hook, ...] | None = None
    tokens: tuple[Hook, ...] | None = None
    step_finished: tuple[Hook, ...] | None = None
    weights_changed: tuple[Hook, ...] | None = None
    shutdown: tuple[Hook, ...] | None = None


class PluginManager:
    """The plugins of one engine. Not thread-safe: one thread owns it, as it owns the engine.

    ``hooks`` is the compiled table. Read it anew each time: it is replaced when a plugin registers,
    unregisters or is switched off.
    """

    def __init__(
        self, plugins: Sequence[object] = (), allowed: tuple[str, ...] | None = None
    ) -> None:
        """Register the installed plugins that ``allowed`` names (None: all), then ``plugins``.

        Raises `PluginError` for a plugin that cannot be loaded, or is malformed, or is allowed but
        not installed.
        """
        self.hooks = HookTable()
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._configuration: tuple[EngineConfig, ModelSpec] | None = None
        self._failures: Counter[str] = Counter()
        for name, plugin in _installed_plugins(allowed):
            self.register(plugin, name)
        for plugin in plugins:
            self.register(plugin)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the registered plugins, in order of registration."""
        return tuple(name for name, _ in self._manager.list_name_plugin())

    @property
    def failures(self) -> Mapping[str, int]:
        """Plugin name -> how often its observers raised; at `MAX_FAILURES` they are off."""
        return MappingProxyType(dict(self._failures))

    def register(self, plugin: object, name: str | None = None) -> str:
        """Add a plugin (an instance or a module) between two steps; returns its name.

        Without ``name`` it is named after its module or class. One that comes after `configure` is
        configured here.
        Raises `PluginError` and changes nothing when the plugin is malformed, already registered,
        or implements a hook that has been read already.
        """
        if self._manager.is_registered(plugin):
            raise PluginError(f"plugin {plugin!r} is registered already. Register it once.")
        name = self._free_name(name or _name_of(plugin))
        implemented = _check_plugin(self._manager, plugin, name)
        late = sorted(implemented & _ONLY_AT_START)
        if late and self._configuration is not None:
            raise PluginError(
                f"plugin {name!r} implements {', '.join(late)}, which the engine has read already. "
                "Pass the plugin when the engine is made: plugins=[...]."
            )
        self._manager.register(plugin, name)
        self._compile()
        self._configure_latecomer(plugin, name)
        return name

    def unregister(self, plugin: object) -> None:
        """Remove a plugin between two steps; none of its hooks is called any more.

        Raises `PluginError` when it is not registered.
        """
        name = self._manager.get_name(plugin)
        if name is None:
            registered = ", ".join(self.names) or "none"
            raise PluginError(f"plugin {plugin!r} is not registered. Registered: {registered}.")
        self._manager.unregister(plugin)
        self._failures.pop(name, None)
        self._compile()

    def configure(self, config: EngineConfig, spec: ModelSpec) -> None:
        """Call ``nanoserve_configure`` of all plugins, and of each that registers later.

        Raises `PluginError` from the exception of the first plugin that fails.
        """
        self._configuration = (config, spec)
        self.collect(self.hooks.configure or (), config=config, spec=spec)

    def observe(self, hooks: Sequence[Hook], **kwargs: Any) -> None:
        """Call all ``hooks``; an exception is logged and counted, never raised."""
        for hook in hooks:
            try:
                hook(**kwargs)
            except Exception as error:  # noqa: BLE001  the border to a plugin: it may raise anything
                self._count_failure(hook, error)

    def first(self, hooks: Sequence[Hook], **kwargs: Any) -> Any:  # noqa: ANN401 - hooks differ
        """The first result that is not None, or None; later plugins are not asked.

        Raises `PluginError` from what a plugin raises; a `NanoserveError` passes as it is.
        """
        for hook in hooks:
            result = _call(hook, kwargs)
            if result is not None:
                return result
        return None

    def collect(self, hooks: Sequence[Hook], **kwargs: Any) -> list[Any]:
        """All results that are not None, in calling order. Raises as `first` does."""
        results = [_call(hook, kwargs) for hook in hooks]
        return [result for result in results if result is not None]

    def _compile(self) -> None:
        table = {
            field.name: self._implementations(_PREFIX + field.name) for field in fields(HookTable)
        }
        self.hooks = HookTable(**table)

    def _implementations(self, hook_name: str) -> tuple[Hook, ...] | None:
        # pluggy lists them in reverse calling order.
        found = reversed(getattr(self._manager.hook, hook_name).get_hookimpls())
        hooks = [Hook(each.plugin_name, hook_name, each.function) for each in found]
        if hook_name in OBSERVERS:
            hooks = [hook for hook in hooks if self._failures[hook.plugin_name] < MAX_FAILURES]
        return tuple(hooks) or None

    def _free_name(self, name: str) -> str:
        taken, free, number = set(self.names), name, 2
        while free in taken:
            free, number = f"{name}-{number}", number + 1
        return free

    def _configure_latecomer(self, plugin: object, name: str) -> None:
        if self._configuration is None:
            return
        config, spec = self._configuration
        own = [hook for hook in self.hooks.configure or () if hook.plugin_name == name]
        try:
            self.collect(own, config=config, spec=spec)
        except NanoserveError:
            self.unregister(plugin)
            raise

    def _count_failure(self, hook: Hook, error: Exception) -> None:
        self._failures[hook.plugin_name] += 1
        count = self._failures[hook.plugin_name]
        if count == 1:
            _logger.error(
                "plugin %r raised in %s; no request is affected. Further exceptions are counted, "
                "and after %d its observers are switched off.",
                hook.plugin_name,
                hook.hook_name,
                MAX_FAILURES,
                exc_info=error,
            )
        if count == MAX_FAILURES:
            _logger.error(
                "plugin %r raised %d times: its observers are switched off.",
                hook.plugin_name,
                count,
            )
            self._compile()


def attempt(function: Callable[..., Result], *args: Any) -> tuple[Result | None, Exception | None]:
    """Call code that is not ours for a request: its result, or what fails the request.

    Logits processors and the like run through here, so that one of them can harm only the requests
    that it serves.
    """
    try:
        return function(*args), None
    except Exception as error:  # noqa: BLE001  the border: foreign code may raise anything
        return None, error


def _call(hook: Hook, kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - hooks differ
    try:
        return hook(**kwargs)
    except NanoserveError:
        raise
    except Exception as error:
        raise PluginError(
            f"plugin {hook.plugin_name!r} raised in {hook.hook_name}: {error!r}"
        ) from error


def _installed_plugins(allowed: tuple[str, ...] | None) -> Iterator[tuple[str, object]]:
    """The plugins that installed packages offer, as (entry point's name, object)."""
    if allowed == ():
        return
    installed = {point.name: point for point in entry_points(group=PROJECT)}
    for name in sorted(installed) if allowed is None else allowed:
        if name not in installed:
            raise PluginError(
                f"allowed_plugins names {name!r}, which is not installed: expected one of "
                f"{', '.join(sorted(installed)) or '(none are installed)'}. Install or remove it."
            )
        try:
            plugin = installed[name].load()
        except Exception as error:
            raise PluginError(
                f"plugin {name!r} ({installed[name].value}) cannot be imported: {error!r}. Mend or "
                "uninstall it, or name in allowed_plugins only the plugins that may load."
            ) from error
        yield name, plugin


def _name_of(plugin: object) -> str:
    if inspect.ismodule(plugin):
        return plugin.__name__
    return type(plugin).__qualname__.rpartition("<locals>.")[2]


def _check_plugin(manager: pluggy.PluginManager, plugin: object, name: str) -> set[str]:
    """Names of the hooks that ``plugin`` implements; raises `PluginError` if it is malformed."""
    if inspect.isclass(plugin):
        raise PluginError(
            f"plugin {plugin.__name__} is a class: expected an instance or a module. "
            f"Pass {plugin.__name__}() instead."
        )
    implemented = set()
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            _check_unmarked(plugin, name, attribute)
        elif (hook := options.get("specname") or attribute) in _ARGUMENTS:
            if options.get("wrapper") or options.get("hookwrapper"):
                raise PluginError(
                    f"plugin {name!r}: {hook} is a wrapper: expected a plain function."
                )
            _check_function(plugin, name, attribute, hook)
            implemented.add(hook)
        elif not options.get("optionalhook"):
            raise PluginError(f"plugin {name!r}: {_unknown_hook(hook)}")
    if not implemented:
        raise PluginError(
            f"plugin {name!r} ({plugin!r}) implements no hook: expected at least one function "
            f"marked with @hookimpl. The hooks are {', '.join(_ARGUMENTS)}."
        )
    return implemented


def _check_unmarked(plugin: object, name: str, attribute: str) -> None:
    """Refuse a function that is named like a hook but would never be called."""
    if not attribute.startswith(_PREFIX):
        return
    static = inspect.getattr_static(plugin, attribute)
    if not isinstance(static, (FunctionType, staticmethod, classmethod)):
        return
    if attribute in _ARGUMENTS:
        raise PluginError(
            f"plugin {name!r}: {attribute} is not marked. Decorate it with @hookimpl."
        )
    raise PluginError(f"plugin {name!r}: {_unknown_hook(attribute)}")


def _unknown_hook(name: str) -> str:
    close = get_close_matches(name, _ARGUMENTS, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"The hooks are {', '.join(_ARGUMENTS)}."
    return f"{name} is not a hook. {hint}"


def _check_function(plugin: object, name: str, attribute: str, hook: str) -> None:
    """Refuse an implementation that could not be called with the hook's arguments."""
    where = f"plugin {name!r}: {attribute}"
    function, expected = getattr(plugin, attribute), _ARGUMENTS[hook]
    names = f"{', '.join(expected)}" if expected else "(none)"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise PluginError(f"{where} is a coroutine or generator: expected a plain function.")
    if _lacks_self(plugin, attribute, expected):
        raise PluginError(f"{where} lacks its first parameter: write ({attribute}(self, ...)).")
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in by_name:
            raise PluginError(f"{where} takes {parameter}: name the arguments it needs of {names}.")
        if parameter.name not in expected:
            close = get_close_matches(parameter.name, expected, n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            raise PluginError(
                f"{where} names the argument {parameter.name!r}, which {hook} does not have. {hint}"
                f"Its arguments are {names}."
            )


def _lacks_self(plugin: object, attribute: str, expected: tuple[str, ...]) -> bool:
    """Whether a method of the plugin's class names a hook's argument where ``self`` belongs."""
    if inspect.ismodule(plugin):
        return False
    static = inspect.getattr_static(type(plugin), attribute, None)
    if not isinstance(static, FunctionType):
        return False
    return next(iter(inspect.signature(static).parameters), "") in expected
