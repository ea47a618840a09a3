"""`EngineStats`: what an engine has done since it started, and how it stands now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; counters count since the engine started."""

    running: int
    waiting: int
    peak_batch: int
    """Most sequences in one step."""
    free_blocks: int
    num_blocks: int
    prompt_tokens_computed: int
    """Prompt tokens that went through the model, without those computed again after a preemption.
    """
    prompt_tokens_cached: int
    """Prompt tokens that the prefix index supplied at first admission."""
    tokens_recomputed: int
    """Tokens that went through the model once more after a preemption."""
    generated_tokens: int
    preemptions: int
    steps: int
    backends: Mapping[str, str]
    """Which implementation serves what, and why: attention, ops, sampler."""
    weights_epoch: int
    finished_requests: Mapping[str, int]
    """Finished requests by reason."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes on the engine's device by what they are for: weights (shared ones too), kv_cache,
    activations, graphs and so on. Without the libraries' workspaces and the code of kernels.
    """

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of prompt tokens that needed no computing; recomputing is not counted."""
        total = self.prompt_tokens_cached + self.prompt_tokens_computed
        return self.prompt_tokens_cached / total if total else 0.0
