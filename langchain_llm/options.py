"""The one place where an option's sources meet: call > bind > field > the checkpoint's
recommendation > default.

Every option of a call is also a field of the model, under the same name. LangChain has merged
``bind`` into the call's arguments when they arrive here. In a call None means "not given".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from langchain_llm.prompt import TemplateOptions
from langchain_llm.response_schema import response_schema
from langchain_llm.tool_options import ToolOptions, tool_options
from nanoserve_core.errors import ConfigError, UnsupportedOption
from nanoserve_core.sampling_params import SamplingParams

# Any, throughout: an option's value is checked by the class it ends up in (SamplingParams,
# Request).
Options = Mapping[str, Any]

ALIASES = {
    "model_name": "model",
    "model_id": "model",
    "max_new_tokens": "max_tokens",
}
"""Names other integrations use -> ours; accepted by constructors and calls."""

TO_THE_END = -1
"""``max_tokens`` for an answer as long as the context allows, as other integrations have it."""

# Fields that become the SamplingParams field of the same name.
_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "ignore_eos",
    "skip_special_tokens",
)
_TEMPLATE = ("enable_thinking", "chat_template", "chat_template_kwargs", "apply_chat_template")
_DELIVERY = ("model", "stream_interval", "timeout", "priority", "cache_salt")
TOOL_OPTIONS = frozenset({"tools", "tool_choice", "response_format"})
"""Options of a chat call that are no fields: `bind_tools` and ``with_structured_output`` set them.
"""
_ANSWER = (*sorted(TOOL_OPTIONS), "parallel_tool_calls", "thinking_budget", "close_json")
_IDENTITY = (*_SAMPLING, "max_tokens", "logprobs", "top_logprobs", *_TEMPLATE, *_ANSWER)
CALL_OPTIONS = (*_IDENTITY, *_DELIVERY)
"""Fields that a call, or ``bind``, may set."""

# Read by LangChain itself before the arguments come to us.
_SWITCHES = frozenset({"stream"})


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Everything one call asks for, after merging."""

    sampling: SamplingParams
    has_max_tokens: bool
    """Whether a length was asked for, be it "to the end of the context"."""
    template: TemplateOptions
    apply_chat_template: bool
    model_name: str
    stream_interval: int
    timeout: float | None
    priority: int
    cache_salt: str | None
    tools: ToolOptions
    response_schema: Mapping[str, Any] | None
    """The JSON schema the answer is to follow."""
    thinking_budget: int | None
    close_json: bool


def named(options: Options, known: Iterable[str], *, where: str) -> dict[str, Any]:
    """`options` under our names.

    `ConfigError` for a name that is not among `known` (it names the nearest), or given twice under
    two names.
    """
    known = frozenset(known)
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = ALIASES.get(key, key)
        if name not in known:
            raise ConfigError(f"{key}={value!r} is not an option of {where}. {_hint(key, known)}")
        if found.setdefault(name, value) != value:
            raise ConfigError(
                f"{name} was given twice with different values, {found[name]!r} and {value!r}: "
                f"{key} is another name for it. Give one of them."
            )
    return found


def named_in_call(options: Options, fields: Iterable[str], *, where: str) -> dict[str, Any]:
    """`named` for the arguments of a call to a model that has these `fields`, without those not
    given.
    """
    known = set(CALL_OPTIONS) & set(fields)
    for key in sorted((TOOL_OPTIONS - known) & options.keys()):
        if options[key]:
            raise UnsupportedOption(
                f"{key}={options[key]!r} is not served by {where}, whose calls return text. Use "
                "ChatNanoserve for tools and structured output."
            )
    skipped = _SWITCHES | (TOOL_OPTIONS - known)
    rest = {k: value for k, value in options.items() if value is not None and k not in skipped}
    return named(rest, known, where=where)


def merge(
    fields: Options, given: Options, stop: list[str] | None, recommended: Options
) -> CallOptions:
    """The options of one call. `fields`: the model's; `given`: from `named_in_call`; `stop`:
    LangChain's own argument, which replaces the field's list (an empty list switches it off);
    `recommended`: the checkpoint's, for what nobody has set.
    """
    chosen = {name: value for name, value in fields.items() if value is not None}
    merged = {**recommended, **chosen, **given}
    if stop is not None:
        merged["stop"] = stop
    return CallOptions(
        sampling=_sampling(merged),
        has_max_tokens=merged.get("max_tokens") is not None,
        template=TemplateOptions(
            chat_template=merged.get("chat_template"),
            enable_thinking=merged.get("enable_thinking"),
            variables=merged.get("chat_template_kwargs") or {},
        ),
        apply_chat_template=bool(merged.get("apply_chat_template")),
        model_name=_served_name(fields, given),
        stream_interval=merged["stream_interval"],
        timeout=merged.get("timeout"),
        priority=merged["priority"],
        cache_salt=merged.get("cache_salt"),
        tools=tool_options(
            merged.get("tools"),
            merged.get("tool_choice"),
            is_parallel=merged.get("parallel_tool_calls"),
        ),
        response_schema=response_schema(merged.get("response_format")),
        thinking_budget=merged.get("thinking_budget"),
        close_json=merged.get("close_json") is not False,
    )


def identity(fields: Options) -> dict[str, Any]:
    """The options among `fields` that decide on the answer: what a cache must tell apart."""
    return {name: value for name in _IDENTITY if (value := fields.get(name)) is not None}


def _sampling(merged: Options) -> SamplingParams:
    chosen = {name: value for name in _SAMPLING if (value := merged.get(name)) is not None}
    limit = merged.get("max_tokens")
    limit = None if limit == TO_THE_END else limit  # SamplingParams' own default is 16 tokens
    return SamplingParams(**chosen, max_tokens=limit, logprobs=_num_logprobs(merged))


def _num_logprobs(merged: Options) -> int | None:
    """``logprobs`` as a switch with ``top_logprobs`` (OpenAI's form), or as a number (vLLM's)."""
    wanted, top = merged.get("logprobs"), merged.get("top_logprobs")
    if wanted is False:
        return None
    if wanted is None or wanted is True:
        return top if top is not None or wanted is None else 0
    return int(wanted)


def _served_name(fields: Options, given: Options) -> str:
    own, wanted = fields["model"], given.get("model")
    served = [own, *fields.get("served_model_names", ())]
    if wanted is None:
        return str(own)
    if wanted not in served:
        raise ConfigError(
            f"model={wanted!r} is not served by this object: expected one of "
            f"{', '.join(map(repr, served))}. Make another model object for it, or add the name to "
            "served_model_names."
        )
    return str(wanted)


def _hint(key: str, known: Iterable[str]) -> str:
    close = get_close_matches(key, [*known, *ALIASES], n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known options: {', '.join(sorted(known))}."
