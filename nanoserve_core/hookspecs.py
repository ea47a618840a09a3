"""The hooks of nanoserve. This docstring is the guide to writing a plugin.

A plugin is an object (or a module) with one function for each hook it wants; it names only the
arguments it needs::

    from nanoserve_core import LLM, SamplingParams, hookimpl

    class SlowSteps:                                # watches; can harm no request
        def __init__(self) -> None:
            self.worst_seconds = 0.0

        @hookimpl
        def nanoserve_step_finished(self, stats):
            self.worst_seconds = max(self.worst_seconds, stats.duration_seconds)

    class NoSecrets:                                # decides; raising refuses this request
        @hookimpl
        def nanoserve_request_added(self, request):
            if "secret" in request.metadata.get("tags", ()):
                raise ValueError("requests with the tag 'secret' are not served here")

    watcher = SlowSteps()
    with LLM("path-or-hub-id", plugins=[watcher, NoSecrets()]) as llm:
        llm.generate(["Hello"], SamplingParams(max_tokens=8))
    print(watcher.worst_seconds)

An installed package offers a plugin (an instance or a module, never a class) as an entry point of
group ``nanoserve``; ``EngineConfig.allowed_plugins`` says which may load. A misspelt hook, an
argument a hook does not have, a class instead of an instance or a plugin without any hook is
refused with `PluginError` when it is registered.

=============================  ================  ========  ========================================
hook (``nanoserve_`` + ...)    when              kind      what the return, or raising, does
=============================  ================  ========  ========================================
nanoserve_configure            once, at start    setup     an exception stops the start
nanoserve_register_models      once, at start    setup     name -> builder; all are merged
nanoserve_attention_backend    once, at start    first     a backend instead of ours
nanoserve_logits_processors    once, at start    setup     batch processors; all are used
nanoserve_sampler              once, at start    first     a sampler instead of ours
nanoserve_cache_namespace      each submit       first     prefixes are shared only within the name
nanoserve_request_added        each submit       request   an exception refuses this request
nanoserve_request_processor    each submit       request   a callable on its logits; all are used
nanoserve_stop_checker         each submit       first     a check that may end a sample
nanoserve_grammar              each submit       first     a Grammar made of request.grammar
nanoserve_request_scheduled    sample admitted   observer  nothing
nanoserve_request_preempted    sample preempted  observer  nothing
nanoserve_request_finished     once a request    observer  nothing
nanoserve_tokens               each step         observer  nothing
nanoserve_step_finished        each step         observer  nothing
nanoserve_weights_changed      weights changed   observer  nothing
nanoserve_shutdown             once, at close    observer  nothing
=============================  ================  ========  ========================================

Kinds. *setup*: an exception is raised to whoever starts the engine. *first*: the first result that
is not None counts, the other plugins are not asked. *request*: an exception belongs to this request
and its caller. *observer*: an exception is logged once, counted, and after `MAX_FAILURES` the
plugin's observers are switched off; no request is harmed.

Order: the plugin registered last is asked first (``plugins=[...]`` come after installed ones);
``@hookimpl(tryfirst=True)`` and ``trylast=True`` change that. Threads: the *engine's thread* is the
one that calls ``Engine.step`` (``EngineThread``'s, or the caller's with `LLM`); a hook there must
not block. Hooks see a whole step or a whole request, never a single logit or token, and a hook
nobody implements costs one attribute test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from nanoserve_core.batch_state import BatchLogitsProcessor
    from nanoserve_core.config import EngineConfig, ModelSpec
    from nanoserve_core.engine_stats import EngineStats
    from nanoserve_core.grammar import Grammar
    from nanoserve_core.layers.attention import AttentionBackend
    from nanoserve_core.models.source import ModelBuilder
    from nanoserve_core.request import (
        FinishReason,
        LogitsProcessor,
        Request,
        RequestMetrics,
        StepOutput,
        StopCheck,
    )
    from nanoserve_core.sampler import SamplerProtocol

PROJECT = "nanoserve"
"""Name of the markers' project and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as the implementation of the hook of the same name."""

OBSERVERS = frozenset(
    {
        "nanoserve_request_scheduled",
        "nanoserve_request_preempted",
        "nanoserve_request_finished",
        "nanoserve_tokens",
        "nanoserve_step_finished",
        "nanoserve_weights_changed",
        "nanoserve_shutdown",
    }
)
"""Hooks whose exceptions are counted and never reach a request."""

MAX_FAILURES = 3
"""Exceptions after which a plugin's observers are switched off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One sequence's part of a step: positions ``[start, start + num_tokens)`` were computed."""

    request_id: str
    index: int
    """Which of the request's samples."""
    start: int
    num_tokens: int
    is_prefill: bool
    samples: bool
    """True when the row yielded a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Facts of one committed step; counts of sequences and blocks are those after the commit."""

    step_id: int
    start_time: float
    """When the step was launched, in seconds on `time.monotonic`'s clock."""
    duration_seconds: float
    """From launch to commit; with run-ahead this includes the wait for earlier steps."""
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_cached_tokens: int
    """Tokens that the prefix index supplied to sequences admitted in this step."""
    num_preemptions: int
    rows: tuple[StepRow, ...]


@hookspec(historic=True)
def nanoserve_configure(config: EngineConfig, spec: ModelSpec) -> None:
    """Set up: look at the engine's options and at the model's shape.

    When: once per engine, when the model is loaded and before the first request; a plugin that
    registers later gets it then.
    Thread: the one that makes the engine.
    Result: none. An exception keeps the engine from starting, or the plugin from registering.
    """


@hookspec
def nanoserve_shutdown(stats: EngineStats) -> None:
    """Tear down: flush and close what `nanoserve_configure` opened.

    When: once, in ``Engine.close``, after the last request has ended.
    Thread: the one that closes the engine.
    Result: none; exceptions are counted.
    """


@hookspec
def nanoserve_register_models() -> Mapping[str, ModelBuilder] | None:
    """Teach the engine further architectures: name in a checkpoint's config -> model builder.

    When: once per engine, before the checkpoint is read.
    Thread: the one that makes the engine.
    Result: the mappings of all plugins are merged; None adds nothing. An exception keeps the engine
    from starting.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def nanoserve_attention_backend(
    config: EngineConfig, spec: ModelSpec, device: torch.device
) -> AttentionBackend | None:
    """Replace attention by another backend (see ``layers.attention.AttentionBackend``).

    When: once per engine, before the K/V pool is sized.
    Thread: the one that makes the engine.
    Result: the first backend that is not None is used. An exception keeps the engine from starting.
    """
    raise NotImplementedError


@hookspec
def nanoserve_logits_processors(
    config: EngineConfig, spec: ModelSpec, device: torch.device
) -> Sequence[BatchLogitsProcessor] | None:
    """Add processors that edit the logits of many requests at once.

    Each meets ``nanoserve_core.batch_state.BatchLogitsProcessor``.

    When: once per engine, before the first request. Of the processors: ``assign`` and ``release``
    as sequences take and leave slots; ``apply`` once per step in which a slot they serve yields a
    token, after penalties and before the requests' own processors.
    Thread: the one that makes the engine; of the processors: the engine's.
    Result: all processors of all plugins are used. An exception keeps the engine from starting; one
    out of ``assign`` or ``apply`` fails the requests it was called for, no others.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def nanoserve_sampler(config: EngineConfig, device: torch.device) -> SamplerProtocol | None:
    """Replace the sampler by another one (see ``sampler.SamplerProtocol``).

    When: once per engine, before the first request. Of the sampler: once per step.
    Thread: the one that makes the engine; of the sampler: the engine's.
    Result: the first sampler that is not None is used. An exception keeps the engine from starting;
    one out of ``sample`` is a failure of the engine.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def nanoserve_cache_namespace(request: Request) -> str | None:
    """Name a request's cache namespace, such as a tenant: prefixes are shared only within it.

    When: once per request, when it is submitted.
    Thread: the engine's.
    Result: the first name that is not None becomes part of the request's ``cache_salt``. An
    exception refuses this request.
    """
    raise NotImplementedError


@hookspec
def nanoserve_request_added(request: Request) -> None:
    """See, or refuse, a valid request before it is queued.

    When: once per request, when it is submitted.
    Thread: the engine's.
    Result: none. An exception refuses this request: a NanoserveError is raised as it is, any other
    as the cause of a `PluginError`.
    """


@hookspec
def nanoserve_request_processor(request: Request) -> LogitsProcessor | None:
    """Give a request a logits processor: ``(input_ids [1, n], scores [1, V]) -> scores``.

    When: once per request, when it is submitted. Of the processor: once per token of the request.
    Thread: the engine's.
    Result: those of all plugins that are not None run after the request's own. An exception refuses
    this request, and one out of the processor fails it.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def nanoserve_stop_checker(request: Request) -> StopCheck | None:
    """Give a request a rule for stopping, ``(sample index, output token ids) -> stop?``.

    When: once per request, when it is submitted. Of the rule: once per new token, with a list it
    must not keep or change.
    Thread: the engine's.
    Result: the first rule that is not None is used besides the request's own. An exception refuses
    this request, and one out of the rule fails it.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def nanoserve_grammar(request: Request, spec: ModelSpec) -> Grammar | None:
    """Turn ``request.grammar``, which is no `Grammar` yet (a JSON schema, a string), into one.

    When: once per request with such a grammar, when it is submitted. Of the grammar: ``matcher``
    once per sample; of the matcher: see `grammar.GrammarMatcher`.
    Thread: the engine's.
    Result: the first grammar that is not None is used; without any, the request is refused. An
    exception refuses this request, and one out of the matcher fails it.
    """
    raise NotImplementedError


@hookspec
def nanoserve_request_scheduled(
    request: Request, index: int, num_cached_tokens: int, queued_seconds: float
) -> None:
    """See a sample start: how long it waited, and how many prompt tokens were cached.

    When: once per sample, at its first admission (not again after a preemption).
    Thread: the engine's.
    Result: none; exceptions are counted.
    """


@hookspec
def nanoserve_request_preempted(request: Request, index: int, num_tokens: int) -> None:
    """See a sample give up its K/V; it keeps its ``num_tokens`` tokens and computes them again.

    When: each time a sample is preempted.
    Thread: the engine's.
    Result: none; exceptions are counted.
    """


@hookspec
def nanoserve_request_finished(
    request: Request,
    finish_reason: FinishReason,
    metrics: RequestMetrics,
    error: BaseException | None,
) -> None:
    """See a request end; ``error`` is the cause when the reason is ``error``, else None.

    When: exactly once per admitted request, after its last sample ended (stop, length, abort or
    error).
    Thread: the engine's.
    Result: none; exceptions are counted.
    """


@hookspec
def nanoserve_tokens(outputs: Sequence[StepOutput]) -> None:
    """See all news of a step, for all requests at once: tokens, logprobs, ends.

    When: once per step that has news, before they are delivered; they must not be changed.
    Thread: the engine's.
    Result: none; exceptions are counted.
    """


@hookspec
def nanoserve_step_finished(stats: StepStats) -> None:
    """See a step's counts and times. The stats are only built when a plugin has this hook.

    When: once per committed step.
    Thread: the engine's.
    Result: none; exceptions are counted.
    """


@hookspec
def nanoserve_weights_changed(old_epoch: int, new_epoch: int) -> None:
    """See that the model's weights have changed; the prefix cache has been dropped already.

    When: once per change, noticed by the engine or told by ``weights_changed()``, before the next
    step.
    Thread: the engine's.
    Result: none; exceptions are counted.
    """
