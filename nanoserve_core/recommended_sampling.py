"""What a checkpoint's generation_config recommends for sampling, where a call says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""transformers' name -> ours."""


def recommended_sampling(source: object) -> dict[str, Any]:  # Any: numbers
    """Fields of `SamplingParams` for the checkpoint at `source` (folder or hub id) or for the live
    module `source`; without those that its generation_config leaves out.
    """
    config = _generation_config(source)
    found = {ours: getattr(config, theirs, None) for theirs, ours in _FIELDS.items()}
    return {name: value for name, value in found.items() if value is not None}


def _generation_config(
    source: object,
) -> Any:  # noqa: ANN401 - transformers is only imported when a checkpoint is read
    if not isinstance(source, str | Path):
        return getattr(source, "generation_config", None)
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(str(source))
    except OSError:  # the checkpoint has none
        return None
