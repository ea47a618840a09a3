"""Reads the prompts that continuous batching takes: flat lists of token ids, without pads."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

from hf_generate_shim.errors import TokenIdOutOfRange
from nanoserve_core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hf_generate_shim.call import HFObject


def read_prompt(prompt: HFObject, vocab_size: int) -> tuple[int, ...]:
    """The ids of one prompt; a list, or an array or tensor of one dimension.

    Raises `InvalidRequest` for what is no prompt or an empty one, and `TokenIdOutOfRange`.
    """
    ids = _integers(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
    if not ids:
        raise InvalidRequest(
            "the prompt has 0 tokens: expected at least 1. Start it with a BOS token or text."
        )
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise TokenIdOutOfRange(
                f"token {place} of the prompt is {token_id}, which is not in the vocabulary: "
                f"expected 0 <= id < {vocab_size}. Was it made with another tokenizer?"
            )
    return ids


def _integers(prompt: Iterable[HFObject]) -> tuple[int, ...]:
    try:
        return tuple(map(index, prompt))
    except TypeError as error:
        raise InvalidRequest(
            f"the prompt is a {type(prompt).__name__} that holds something else than token ids "
            f"({error}): expected a list of integers. Pass the ids of one prompt, not a batch."
        ) from error
