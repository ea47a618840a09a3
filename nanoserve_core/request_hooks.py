"""`with_hooks`: a request as it was submitted, with what plugins make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoserve_core.errors import InvalidRequest, UnsupportedOption
from nanoserve_core.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanoserve_core.config import ModelSpec
    from nanoserve_core.plugins import PluginManager
    from nanoserve_core.request import Request, StopCheck


def with_hooks(
    request: Request,
    plugins: PluginManager,
    *,
    spec: ModelSpec,
    validate: Callable[[Request], None],
) -> Request:
    """The request with what plugins add to it; a hook that raises refuses the request.

    ``validate`` is asked again where a plugin has made the grammar. On the engine's thread.
    """
    hooks = plugins.hooks
    if request.grammar is not None:
        request = _with_grammar(request, plugins, spec)
        validate(request)
    if hooks.cache_namespace is not None:
        namespace = plugins.first(hooks.cache_namespace, request=request)
        if namespace is not None:
            request = replace(request, cache_salt=f"{request.cache_salt or ''}\0{namespace}")
    if hooks.request_processor is not None:
        added = plugins.collect(hooks.request_processor, request=request)
        processors = (*request.logits_processors, *added)
        request = replace(request, logits_processors=processors)
    if hooks.stop_checker is not None:
        checker = plugins.first(hooks.stop_checker, request=request)
        if checker is not None:
            asked = request.should_stop
            request = replace(request, should_stop=_either(asked, checker) if asked else checker)
    if hooks.request_added is not None:
        plugins.collect(hooks.request_added, request=request)
    return request


def _with_grammar(request: Request, plugins: PluginManager, spec: ModelSpec) -> Request:
    if plugins.hooks.sampler is not None:
        raise UnsupportedOption(
            f"request {request.request_id}: it has a grammar, which a plugin's sampler would not "
            "see: expected the engine's own sampler. Leave the plugin out."
        )
    if isinstance(request.grammar, Grammar):
        return request
    made = plugins.first(plugins.hooks.grammar or (), request=request, spec=spec)
    if not isinstance(made, Grammar):
        raise InvalidRequest(
            f"request {request.request_id}: grammar={request.grammar!r} is no Grammar, and hook "
            "nanoserve_grammar made none of it: expected one. Compile it with "
            "nanoserve_adapters.grammar.compile_grammar, or bring a plugin for it."
        )
    return replace(request, grammar=made)


def _either(first: StopCheck, second: StopCheck) -> StopCheck:
    """Stops when either check says so; both see every token, because they may keep state."""

    def check(index: int, token_ids: list[int]) -> bool:
        stops = first(index, token_ids)
        return second(index, token_ids) or stops

    return check
