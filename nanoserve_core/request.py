"""The vocabulary of a request: what was asked (`Request`), how far it is (`Sequence`), what came
out (`StepOutput`).

Token ids only; text belongs to the door that made the request. No torch at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

    from nanoserve_core.request_group import RequestGroup
    from nanoserve_core.sample_grammar import SampleGrammar
    from nanoserve_core.sampling_params import SamplingParams

LogitsProcessor: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
"""HuggingFace's form: ``(input_ids [1, num_tokens] int64, scores [1, vocab_size] float32) ->
scores``; runs on the engine's thread, for the rows of its own request only, after penalties and
before temperature.
"""

StopCheck: TypeAlias = Callable[[int, "list[int]"], bool]
"""``(sample index, output token ids so far) -> stop?``; called on the engine's thread after each
new token, must not keep or change the list. True ends that sample with reason ``stop``; the newest
token is kept.
"""


class FinishReason(str, Enum):
    """Why a sample ended. A member equals its string: ``reason == "stop"``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


class SequenceStatus(Enum):
    """WAITING -> RUNNING -> FINISHED, and from RUNNING back to WAITING by preemption."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked. Frozen: nobody writes to it after it was made; validated by
    ``Engine.add_request``.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Smaller runs earlier; equal priorities run in order of arrival."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    should_stop: StopCheck | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    grammar: Any = None  # Any: a `Grammar`, or what a plugin makes one of
    """What the output must match: a `Grammar`, or what hook ``nanoserve_grammar`` turns into one.
    """
    output_logits: bool = False
    """Deliver each new token's raw logits row, float32 [vocab_size], in `StepOutput.logits`."""
    output_scores: bool = False
    """Deliver the row after penalties, processors, temperature and filters in `StepOutput.scores`.
    """
    group: RequestGroup | None = None
    """Others whose tokens are chosen in the same steps; see `RequestGroup.join`."""
    metadata: Mapping[str, Any] = field(
        default_factory=dict
    )  # Any: whatever the door's plugins agree on
    """For plugins: source, tags, run id. The engine does not read it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", tuple(self.prompt_token_ids))


@dataclass(slots=True, eq=False)
class Sequence:
    """Progress of one sample of a request. The scheduler is its only writer, and the block manager
    of the two block lists.

    ``num_tokens`` known tokens; K/V exists for ``num_computed_tokens`` of them; ``num_in_flight``
    further positions belong to launched steps that are not committed; ``num_pending`` tokens will
    be sampled by those steps and are not known yet.
    """

    sequence_id: int
    request: Request
    index: int
    seed: int
    arrival: int
    """Position in the order of arrival: ties of priority are broken by it, also after a preemption.
    """
    max_total_tokens: int
    """Prompt plus the most tokens it may generate; the sequence ends with reason ``length`` there.
    """
    token_ids: list[int]
    num_prompt_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    generation: int = -1
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_pending: int = 0
    num_cached_tokens: int = 0
    """Tokens of the latest admission that the prefix index supplied."""
    num_preemptions: int = 0
    num_sent_blocks: int = 0
    """How many of ``block_ids`` the runner has been told of."""
    is_preempting: bool = False
    """Chosen as a victim; its launched steps are still coming in, then it returns to waiting."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hash of each full block of known tokens, extended as tokens become known; never
    recomputed.
    """
    grammar: SampleGrammar | None = None
    """Set when the sample is made; while one of its tokens is pending it is not scheduled."""
    cache_epoch: int = -1
    """Weights epoch of its K/V and hashes; in a newer one they are not looked up nor registered."""

    @property
    def num_tokens(self) -> int:
        """Tokens the host knows: prompt and committed output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Generated tokens (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def prompt_token_ids(self) -> list[int]:
        """Prompt tokens (a copy)."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def is_finished(self) -> bool:
        """True once the sample has a finish reason."""
        return self.status is SequenceStatus.FINISHED


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position. ``rank`` is 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs: TypeAlias = "dict[int, Logprob]"
"""Token id -> `Logprob` for one position: the chosen token and the requested number of most likely
ones.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times in seconds on `time.monotonic`'s clock, and counts, of one request."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    peak_batch: int = 0
    """Most rows in one step since it was first scheduled; 0 when it never was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """News of one sample from one or several committed steps, or its end. Each sample has exactly
    one with a ``finish_reason``, each request exactly one with ``request_finished``.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    """New tokens; the end-of-sequence token is among them when it was sampled."""
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """One entry per new token when `SamplingParams.logprobs` asks for them."""
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    """One entry per prompt token (None for the first), once per request, with the first output of
    sample 0.
    """
    logits: tuple[torch.Tensor, ...] = ()
    scores: tuple[torch.Tensor, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token's id when one ended the sample; None for the model's own end-of-sequence ids.
    """
    ends_with_stop_token: bool = False
    """True when the last of ``token_ids`` is the end-of-sequence or stop id that ended the sample:
    not part of the text.
    """
    error: BaseException | None = None
    request_finished: bool = False
    metrics: RequestMetrics | None = None
    """Given with ``request_finished``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One finished sample as a door returns it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One finished request as ``LLM.generate`` returns it: all ``n`` samples, with shortcuts to the
    first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Generated ids of the first sample."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sample ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[PositionLogprobs] | None:
        """Logprobs of the first sample, one entry per generated token."""
        return self.outputs[0].logprobs
