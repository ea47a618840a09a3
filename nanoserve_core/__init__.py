"""nanoserve's engine: token ids in, token ids out; knows no framework.

The public names load on first use (PEP 562), so that importing the package loads neither torch nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoserve_core.config import EngineConfig, ModelSpec
    from nanoserve_core.engine import Engine
    from nanoserve_core.engine_stats import EngineStats
    from nanoserve_core.errors import (
        ConfigError,
        EngineClosed,
        EngineDead,
        InvalidRequest,
        NanoserveError,
        PluginError,
        RequestFailed,
        RequestTooLong,
        UnsupportedOption,
    )
    from nanoserve_core.hookspecs import StepStats, hookimpl
    from nanoserve_core.llm import LLM
    from nanoserve_core.request import (
        CompletionOutput,
        FinishReason,
        Request,
        RequestOutput,
        StepOutput,
    )
    from nanoserve_core.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineStats",
    "FinishReason",
    "InvalidRequest",
    "ModelSpec",
    "NanoserveError",
    "PluginError",
    "Request",
    "RequestFailed",
    "RequestOutput",
    "RequestTooLong",
    "SamplingParams",
    "StepOutput",
    "StepStats",
    "UnsupportedOption",
    "hookimpl",
]

_MODULES = {
    "config": ("EngineConfig", "ModelSpec"),
    "engine": ("Engine",),
    "engine_stats": ("EngineStats",),
    "errors": (
        "ConfigError",
        "EngineClosed",
        "EngineDead",
        "InvalidRequest",
        "NanoserveError",
        "PluginError",
        "RequestFailed",
        "RequestTooLong",
        "UnsupportedOption",
    ),
    "hookspecs": ("StepStats", "hookimpl"),
    "llm": ("LLM",),
    "request": ("CompletionOutput", "FinishReason", "Request", "RequestOutput", "StepOutput"),
    "sampling_params": ("SamplingParams",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
