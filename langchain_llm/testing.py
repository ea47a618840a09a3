"""`scripted`: makes a real engine say what a test wants, by way of the sampling hook plugins have.

::

    script = scripted({"Paris": "It is in France."}, tokenizer)
    chat = ChatNanoserve(model=..., engine_options={"plugins": (script,)})
    chat.invoke("Where is Paris?")        # "It is in France.", whatever the weights say
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from nanoserve_core import hookimpl

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from nanoserve_core.request import LogitsProcessor, Request

Script: TypeAlias = str | Mapping[str, str] | Callable[[str], str | None]


def scripted(texts: Script, tokenizer: PreTrainedTokenizerBase) -> ScriptPlugin:
    """An engine plugin that forces answers, token by token, and the end of sequence after them.

    `texts`: one text for every prompt; or texts by a part of the prompt (the first part found in
    it counts, and prompts without any are sampled freely); or a function of the prompt's text,
    where None means freely.
    """
    return ScriptPlugin(texts, tokenizer)


class ScriptPlugin:
    """Made by `scripted`. ``texts`` may be replaced between calls."""

    def __init__(self, texts: Script, tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts = texts
        self._tokenizer = tokenizer

    @hookimpl
    def nanoserve_request_processor(self, request: Request) -> LogitsProcessor | None:
        """Give a scripted request its processor; engine thread."""
        text = self._answer(self._tokenizer.decode(list(request.prompt_token_ids)))
        if text is None:
            return None
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return _ForcedTokens([*token_ids, self._tokenizer.eos_token_id], request)

    def _answer(self, prompt: str) -> str | None:
        if isinstance(self.texts, str):
            return self.texts
        if isinstance(self.texts, Mapping):
            return next((text for part, text in self.texts.items() if part in prompt), None)
        return self.texts(prompt)


class _ForcedTokens:
    """Leaves one token possible at each position; the last one for ever after the script's end."""

    def __init__(self, token_ids: list[int], request: Request) -> None:
        self._token_ids = token_ids
        self._num_prompt_tokens = len(request.prompt_token_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = input_ids.shape[1] - self._num_prompt_tokens
        forced = self._token_ids[min(position, len(self._token_ids) - 1)]
        only: torch.Tensor = scores.new_full(scores.shape, float("-inf"))
        only[:, forced] = 0.0
        return only
