"""`CallOptions`: what a call asks of nanoserve beyond transformers' contract.

`generate` refuses arguments that it does not know, but a `GenerationConfig` carries attributes of
any name::

    config = GenerationConfig(max_new_tokens=64, do_sample=True, nanoserve_seed=[7, 8])
    model.generate(**inputs, generation_config=config)

nanoserve_seed            an int: the call's, in place of a number from torch's generator. A list:
                          each row's own; a row then depends on its prompt and its seed alone
nanoserve_max_new_tokens  a list: each row's own limit, up to that of the call
nanoserve_priority        an int; calls with smaller ones are admitted first, default 0
nanoserve_logprobs        True: a dict output has a field ``logprobs``, float32 [num_rows,
                          num_steps]: the log-probability of each chosen token under the model's
                          own distribution, 0 where a row has ended. "processed_logprobs": under
                          the one that it was drawn from

Lists have one entry per prompt or, with ``num_return_sequences``, one per row of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias

from nanoserve_core.errors import ConfigError
from nanoserve_core.options import refuse_unknown
from nanoserve_core.philox import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hf_generate_shim.call import HFObject

LogprobsMode: TypeAlias = Literal["raw_logprobs", "processed_logprobs"]

PREFIX = "nanoserve_"

_LOGPROBS: Mapping[bool | str, LogprobsMode | None] = {
    False: None,
    True: "raw_logprobs",
    "raw_logprobs": "raw_logprobs",
    "processed_logprobs": "processed_logprobs",
}


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """The options of one call, checked. Rows are those of the output."""

    seed: int | None = None
    row_seeds: tuple[int, ...] | None = None
    row_max_tokens: tuple[int, ...] | None = None
    priority: int = 0
    logprobs: LogprobsMode | None = None

    @property
    def has_seeds(self) -> bool:
        """Whether the caller says what the rows draw from."""
        return self.seed is not None or self.row_seeds is not None

    @classmethod
    def read(
        cls, generation_config: HFObject, *, num_rows: int, pad_token_id: int | None
    ) -> CallOptions:
        """The options in the merged config of a call. Raises `ConfigError` for an unknown name, a
        wrong value, a list of another length, logprobs without a dict to put them in, or limits of
        rows without a pad id to fill them.
        """
        given = given_options(generation_config)
        refuse_unknown(given, (PREFIX + name for name in _READERS), kind="a nanoserve")
        rows = _Rows(num_rows, int(generation_config.num_return_sequences or 1))
        fields: dict[str, Any] = {}  # Any: each reader knows the fields that it fills
        for name, value in given.items():
            if value is not None:
                fields |= _READERS[name.removeprefix(PREFIX)](name, value, rows)
        options = cls(**fields)
        if options.logprobs is not None and not generation_config.return_dict_in_generate:
            raise ConfigError(
                "nanoserve_logprobs are a field of a dict output, and this call returns a tensor: "
                "expected return_dict_in_generate=True. Pass it, or leave nanoserve_logprobs out."
            )
        if options.row_max_tokens is not None and pad_token_id is None:
            raise ConfigError(
                "nanoserve_max_new_tokens ends rows at different steps, and the call has no pad id "
                "to fill them: expected one. Pass pad_token_id."
            )
        return options


def given_options(generation_config: HFObject) -> dict[str, object]:
    """The attributes of a `GenerationConfig`, or of None, that are meant for nanoserve."""
    attributes = vars(generation_config) if generation_config is not None else {}
    return {name: value for name, value in attributes.items() if name.startswith(PREFIX)}


@dataclass(frozen=True)
class _Rows:
    num_rows: int
    num_per_prompt: int

    def spread(self, name: str, value: HFObject, low: int) -> list[tuple[int, int]]:
        """Per row its entry of a list, and how many rows before it have that entry."""
        entries = value.tolist() if hasattr(value, "tolist") else value
        lengths = (self.num_rows // self.num_per_prompt, self.num_rows)
        if not isinstance(entries, (list, tuple)) or len(entries) not in lengths:
            raise ConfigError(
                f"{name}={value!r} does not fit the call: expected a list of {lengths[0]} (one "
                f"entry per prompt) or {lengths[1]} (one per row). Pass such a list."
            )
        repeats = self.num_rows // len(entries)
        return [(_integer(name, entry, low), i) for entry in entries for i in range(repeats)]


def _read_seed(name: str, value: HFObject, rows: _Rows) -> dict[str, Any]:
    if isinstance(value, int):
        return {"seed": _integer(name, value, 0)}
    # Of several sequences for one seed the first is the one that the seed gives alone.
    seeds = rows.spread(name, value, 0)
    return {"row_seeds": tuple(derive_seed(seed, i) if i else seed for seed, i in seeds)}


def _read_max_new_tokens(name: str, value: HFObject, rows: _Rows) -> dict[str, Any]:
    return {"row_max_tokens": tuple(limit for limit, _ in rows.spread(name, value, 1))}


def _read_priority(name: str, value: HFObject, rows: _Rows) -> dict[str, Any]:
    del rows
    return {"priority": _integer(name, value, None)}


def _read_logprobs(name: str, value: HFObject, rows: _Rows) -> dict[str, Any]:
    del rows
    if isinstance(value, (bool, str)) and value in _LOGPROBS:
        return {"logprobs": _LOGPROBS[value]}
    raise ConfigError(
        f"{name}={value!r} is unknown: expected True, 'raw_logprobs' or 'processed_logprobs'. Pass "
        "one of them."
    )


def _integer(name: str, value: HFObject, low: int | None) -> int:
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        number = index(value)
        if low is None or low <= number < 2**64:
            return number
    expected = "an integer" if low is None else f"an integer of at least {low} and below 2**64"
    raise ConfigError(f"{name}={value!r} does not fit: expected {expected}. Pass one.")


_READERS: Mapping[str, Callable[[str, HFObject, _Rows], dict[str, Any]]] = {
    "seed": _read_seed,
    "max_new_tokens": _read_max_new_tokens,
    "priority": _read_priority,
    "logprobs": _read_logprobs,
}
