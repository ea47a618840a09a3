"""How one request is sampled: frozen, validated when made, in vLLM's field names. No torch at run
time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from nanoserve_core.errors import ConfigError
from nanoserve_core.options import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request. Unknown or contradictory values raise `ConfigError` (a
    ValueError) by name.

    Order of effects on the logits: repetition, presence and frequency penalties, ``logit_bias``,
    bad words and ``min_tokens``, the request's own processors, temperature, top-k, top-p, min-p
    (HuggingFace's order).
    """

    n: int = 1
    temperature: float = 1.0
    """0 is argmax."""
    top_k: int = 0
    """0 (or -1, as vLLM writes it) keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar et
    al., 2019).
    """
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """None: drawn by the engine at admission. Sample i of a request uses an own stream derived from
    (seed, i).
    """
    max_tokens: int | None = 16
    """None: until the model's or the pool's limit. 0: an empty result with reason ``length``."""
    min_tokens: int = 0
    """End-of-sequence and stop ids cannot be sampled before so many tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings; matched on text, by the door that has the tokenizer."""
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    """Words never generated; a door with a tokenizer turns them into ``bad_words_ids``."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """Number of most likely tokens to report besides the chosen one; None: none at all."""
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Raw: log-softmax of the model's logits. Processed: after all effects listed above; cut tokens
    have -inf.
    """
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_combinations()

    @classmethod
    def from_options(
        cls, **options: Any
    ) -> SamplingParams:  # Any: each option is checked by the constructor
        """Like the constructor, but an unknown name raises `ConfigError` with the nearest one."""
        refuse_unknown(options, (f.name for f in fields(cls)), kind="a sampling")
        return cls(**options)

    def replace(self, **changes: Any) -> SamplingParams:  # Any: as the constructor
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)

    @property
    def is_greedy(self) -> bool:
        """True when the token is the argmax: no random number is drawn."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """True when sampling reads the tokens seen so far (penalties, multi-token bad words)."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or any(len(word) > 1 for word in self.bad_words_ids)
        )

    def _normalise(self) -> None:
        set_field = object.__setattr__
        set_field(self, "stop", _strings(self.stop, "stop"))
        set_field(self, "bad_words", _strings(self.bad_words, "bad_words"))
        set_field(
            self,
            "stop_token_ids",
            tuple(_token_id(t, "stop_token_ids") for t in self.stop_token_ids),
        )
        words = tuple(
            tuple(_token_id(t, "bad_words_ids") for t in word) for word in self.bad_words_ids
        )
        set_field(self, "bad_words_ids", words)
        bias = {_token_id(t, "logit_bias"): float(value) for t, value in self.logit_bias.items()}
        set_field(self, "logit_bias", bias)
        if self.top_k == -1:
            set_field(self, "top_k", 0)

    def _check_ranges(self) -> None:
        _at_least("n", self.n, 1)
        _at_least("top_k", self.top_k, 0, "0 keeps all tokens")
        _at_least("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 0, "None means until the limit of the model")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 0, "None reports no logprobs")
        _between("temperature", self.temperature, 0.0, math.inf, "0 is greedy")
        _between("top_p", self.top_p, 0.0, 1.0, "1 keeps all tokens", low_open=True)
        _between("min_p", self.min_p, 0.0, 1.0, "0 keeps all tokens")
        _between(
            "repetition_penalty",
            self.repetition_penalty,
            0.0,
            math.inf,
            "1 changes nothing",
            low_open=True,
        )
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0, "0 changes nothing")
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "0 changes nothing")
        if self.seed is not None and not 0 <= _integer("seed", self.seed) < 2**64:
            raise ConfigError(
                f"seed={self.seed} is out of range: expected 0 <= seed < 2**64. Pass None for a "
                "random one."
            )
        if self.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise ConfigError(
                f"logprobs_mode={self.logprobs_mode!r} is unknown: expected 'raw_logprobs' or "
                "'processed_logprobs'."
            )

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}: expected "
                "min_tokens <= max_tokens. "
                "Raise max_tokens or lower min_tokens."
            )
        if "" in self.stop:
            raise ConfigError(
                "stop contains an empty string, which would end every request at once. Remove it."
            )
        if self.stop and not self.detokenize:
            raise ConfigError(
                f"stop={self.stop!r} needs text, but detokenize=False. Use stop_token_ids instead."
            )
        if () in self.bad_words_ids:
            raise ConfigError(
                "bad_words_ids contains an empty word: expected at least one token id in each. "
                "Remove it."
            )
        if any(math.isnan(value) for value in self.logit_bias.values()):
            raise ConfigError(
                f"logit_bias={dict(self.logit_bias)!r} contains NaN: expected numbers."
            )


def _strings(value: str | Iterable[str] | None, name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    result = tuple(value)
    for item in result:
        if not isinstance(item, str):
            raise ConfigError(
                f"{name} contains {item!r}: expected strings. Token ids go into {name}_token_ids "
                "or _ids."
            )
    return result


def _token_id(value: object, name: str) -> int:
    number = _integer(name, value)
    if number < 0:
        raise ConfigError(f"{name} contains {value!r}: expected token ids >= 0.")
    return number


def _integer(name: str, value: object) -> int:
    """The integer a caller gave; numpy's integers and the like are welcome, booleans are not."""
    if type(value) is int:  # the usual case: the check below costs 15 us on Python 3.11
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}: expected an integer.")
    return index(value)


def _at_least(name: str, value: object, low: int, hint: str = "") -> None:
    if _integer(name, value) < low:
        raise ConfigError(
            f"{name}={value!r} is out of range: expected {name} >= {low}{_in_brackets(hint)}."
        )


def _between(
    name: str, value: object, low: float, high: float, hint: str, *, low_open: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ConfigError(
            f"{name}={value!r} is not a number: expected a float{_in_brackets(hint)}."
        )
    if value < low or value > high or (low_open and value == low) or math.isinf(value):
        sign = "<" if low_open else "<="
        raise ConfigError(
            f"{name}={value!r} is out of range: expected {low} {sign} {name} <= "
            f"{high}{_in_brackets(hint)}."
        )


def _in_brackets(hint: str) -> str:
    return f" ({hint})" if hint else ""
