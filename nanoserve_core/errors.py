"""Every exception nanoserve raises on purpose.

    NanoserveError
    ├── ConfigError(ValueError)         an engine option is wrong or cannot be met
    ├── UnsupportedOption(ValueError)   an option of a framework that this door does not serve
    ├── InvalidRequest(ValueError)      one request is malformed
    │   └── RequestTooLong              ... or can never fit the context or the KV pool
    ├── RequestFailed(RuntimeError)     one admitted request failed; ``__cause__`` says why
    ├── PluginError(RuntimeError)       a plugin is malformed or raised
    ├── EngineClosed(RuntimeError)      the engine was closed before or during the call
    └── EngineDead(RuntimeError)        the engine thread died; ``__cause__`` says why

Each class is also the builtin a user would catch. A message has three parts: what was wrong and its
value, what was expected, what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanoserve_core.request import RequestOutput


class NanoserveError(Exception):
    """Root of all nanoserve exceptions."""


class ConfigError(NanoserveError, ValueError):
    """An engine option has a value that is wrong, contradictory or impossible on this machine."""


class UnsupportedOption(NanoserveError, ValueError):
    """A framework option that nanoserve does not honour: names option, value and way out."""


class InvalidRequest(NanoserveError, ValueError):
    """A request was refused when it was submitted; other requests are not affected."""


class RequestTooLong(InvalidRequest):
    """The prompt, or prompt plus ``max_tokens``, can never fit ``max_model_len`` or the KV pool."""


class RequestFailed(NanoserveError, RuntimeError):
    """An admitted request ended with ``finish_reason="error"``; the cause is chained.

    ``outputs``: from `LLM.generate`, the results of all requests of the call, the failed ones
    included; nothing is lost.
    """

    def __init__(self, message: str, outputs: Sequence[RequestOutput] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class PluginError(NanoserveError, RuntimeError):
    """A plugin was refused at registration, or raised while serving a request."""


class EngineClosed(NanoserveError, RuntimeError):
    """The engine was closed: before the call, or while the call waited."""


class EngineDead(NanoserveError, RuntimeError):
    """The engine stopped because of an internal failure; the cause is chained."""
