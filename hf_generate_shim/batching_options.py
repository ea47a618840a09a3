"""`BatchingOptions`: what of transformers' `ContinuousBatchingConfig` means something here.

Two of its fields change results and are honoured. The others size and tune transformers' own paged
cache and batches, for which the engine has options of its own (see `install`): they are left alone,
and a line in the log says so once.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING

from transformers.generation import ContinuousBatchingConfig

from nanoserve_core.errors import ConfigError

if TYPE_CHECKING:
    from hf_generate_shim.call import HFObject

_LOG = logging.getLogger(__name__)

CONFIG_ARGUMENT = "continuous_batching_config"
"""Under this name it is an argument, and a deprecated field of a `GenerationConfig`."""


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """The fields that change results."""

    seed: int | None = None
    """Of sampled requests; None: drawn from torch's generator."""
    return_logprobs: bool = False
    """Give each token's log-probability, of the processed scores, in `GenerationOutput.logprobs`.
    """


class BatchingOptionsReader:
    """Reads configs for one installed model, and names what it left alone once. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._named: set[str] = set()

    def read(self, config: HFObject) -> BatchingOptions:
        """The options of a `ContinuousBatchingConfig`; the defaults for None.

        Raises `ConfigError` for another object. ``config`` is not changed.
        """
        if config is None:
            return BatchingOptions()
        if not isinstance(config, ContinuousBatchingConfig):
            raise ConfigError(
                f"{CONFIG_ARGUMENT} is a {type(config).__name__}: expected a "
                "ContinuousBatchingConfig. Make one with "
                "transformers.generation.ContinuousBatchingConfig(...)."
            )
        self._name(config)
        return BatchingOptions(
            seed=None if config.seed is None else config.seed % 2**64,
            return_logprobs=config.return_logprobs,
        )

    def _name(self, config: HFObject) -> None:
        honoured = {field.name for field in fields(BatchingOptions)}
        left = {name for name in _changed_fields(config) if name not in honoured}
        with self._lock:
            new = sorted(left - self._named)
            self._named |= left
        if new:
            _LOG.info(
                "%s: %s set up transformers' own cache and batches, and change nothing here; "
                "install() takes the engine's options",
                CONFIG_ARGUMENT,
                ", ".join(f"{name}={getattr(config, name)!r}" for name in new),
            )


def _changed_fields(config: HFObject) -> list[str]:
    return [
        field.name
        for field in fields(config)
        if field.default is not MISSING and getattr(config, field.name) != field.default
    ]
