"""Prompt token ids: a chat template applied exactly once, or plain text.

It knows tokenizers and template dicts; it knows no LangChain message and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanoserve_core.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedTokenizerBase


# The prompt is always rendered to text and tokenised here, once.
_OURS = frozenset({"conversation", "messages", "tools", "chat_template", "tokenize", "return_dict"})


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """What a call says about the chat template. `ConfigError` for variables that are not its to
    set.
    """

    chat_template: str | None = None
    """Jinja source used in place of the tokenizer's own template."""
    enable_thinking: bool | None = None
    """Passed to the template when not None."""
    variables: Mapping[str, Any] = field(default_factory=dict)  # Any: the template's own business
    """Further variables of the template (``chat_template_kwargs``)."""

    def __post_init__(self) -> None:
        wrong = sorted(_OURS & set(self.variables))
        if wrong:
            raise ConfigError(
                f"chat_template_kwargs holds {', '.join(wrong)}, which nanoserve sets itself: "
                "expected variables of the template. Remove it; a template has its own option, "
                "chat_template."
            )

    def as_arguments(self) -> dict[str, Any]:  # Any: the template's own business
        """Keyword arguments for ``apply_chat_template``."""
        arguments: dict[str, Any] = {"add_generation_prompt": True, **self.variables}
        if self.chat_template is not None:
            arguments["chat_template"] = self.chat_template
        if self.enable_thinking is not None:
            arguments["enable_thinking"] = self.enable_thinking
        return arguments


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    options: TemplateOptions,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The conversation as the model reads it, with the generation prompt at its end.

    Raises `ConfigError` when there is no template or it does not print the `tools` (in OpenAI's
    form), `InvalidRequest` when it refuses the messages.
    """
    from jinja2 import TemplateError  # a template cannot have been compiled without it

    if not messages:
        raise InvalidRequest("there are no messages: expected at least one. Send a HumanMessage.")
    if options.chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"the tokenizer ({type(tokenizer).__name__}) has no chat template: expected one for "
            "chat. Pass chat_template=..., or use NanoserveLLM for plain text."
        )
    try:
        rendered = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            **options.as_arguments(),
        )
    except TemplateError as error:
        raise InvalidRequest(
            f"the chat template refuses these messages: {error}. Change the history, or pass "
            "another chat_template."
        ) from error
    _require_tools_in(str(rendered), tools or ())
    return str(rendered)


def _require_tools_in(rendered: str, tools: Sequence[Mapping[str, Any]]) -> None:
    names = [str(tool["function"]["name"]) for tool in tools]
    if names and not any(name in rendered for name in names):
        raise ConfigError(
            f"the chat template prints no tools, so the model would not see {', '.join(names)}: "
            "expected one that does. Pass a chat_template that prints `tools`, or bind none."
        )


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    options: TemplateOptions,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Ids of the rendered conversation. The template writes the special tokens: none are added."""
    return encode_text(tokenizer, render_chat(tokenizer, messages, options, tools), special=False)


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    special: bool,
) -> list[int]:
    """Ids of `text`; ``special`` adds what the tokenizer puts around plain text (a BOS, if it has
    one).
    """
    return list(tokenizer.encode(text, add_special_tokens=special))
