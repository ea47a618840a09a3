"""The HuggingFace door: `model.generate` served by a nanoserve engine over the same weights.

    handle = hf_generate_shim.install(model)
    model.generate(**inputs, max_new_tokens=64)  # unchanged code, run by the engine
    handle.counters, handle.stats()
    hf_generate_shim.uninstall(model)  # or: with hf_generate_shim.installed(model): ...

Seeds and limits per row, priorities and log-probabilities are asked for by attributes of a
`GenerationConfig` (see `hf_generate_shim.call_options`).

A call that asks for what the engine does not do is served by transformers' own loop, with one
warning that names the option; `explain` says beforehand which way a call goes. Calls of several
threads join one running batch.
"""

from __future__ import annotations

from hf_generate_shim.counters import Counters
from hf_generate_shim.errors import GenerationCancelled, TokenIdOutOfRange
from hf_generate_shim.explanation import Explanation
from hf_generate_shim.handle import Handle
from hf_generate_shim.install import explain, install, installed, uninstall
from hf_generate_shim.route import Path
from hf_generate_shim.row_streamer import RowStreamer
from nanoserve_adapters.unsupported import NanoserveFallbackWarning

__all__ = [
    "Counters",
    "Explanation",
    "GenerationCancelled",
    "Handle",
    "NanoserveFallbackWarning",
    "Path",
    "RowStreamer",
    "TokenIdOutOfRange",
    "explain",
    "install",
    "installed",
    "uninstall",
]
