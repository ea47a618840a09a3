"""`ModelSource`: where a model comes from (a checkpoint's files or a live module), read and ready
to be built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from nanoserve_core.config import ModelSpec
from nanoserve_core.errors import ConfigError
from nanoserve_core.models.adopt import Adoption
from nanoserve_core.models.eligibility import spec_of
from nanoserve_core.models.qwen3 import Qwen3Model
from nanoserve_core.models.weights import (
    checkpoint_dtype,
    checkpoint_eos_token_ids,
    checkpoint_folder,
    load_weights,
    read_hf_config,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from nanoserve_core.config import EngineConfig
    from nanoserve_core.kernels import KernelOps
    from nanoserve_core.kv_cache import KVCache
    from nanoserve_core.layers.attention import AttentionBackend, ForwardBatch
    from nanoserve_core.models.qwen3 import Qwen3Weights


class CausalModel(Protocol):
    """A model as the runner uses it."""

    def hidden_states(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Run a step: [tokens, hidden_size], valid until the next step; K and V of all tokens go to
        the cache.
        """
        ...

    def logits(self, hidden_states: Tensor, indices: Tensor) -> Tensor:
        """The head, for some rows: indices [R] int64 -> [R, vocab_size]."""
        ...


class ModelBuilder(Protocol):
    """Makes a model of weights in Qwen3's layout; what ``nanoserve_register_models`` maps an
    architecture to.
    """

    def __call__(
        self,
        spec: ModelSpec,
        weights: Qwen3Weights,
        *,
        backend: AttentionBackend,
        ops: KernelOps,
        max_num_tokens: int,
        num_positions: int,
    ) -> CausalModel:
        """See `Qwen3Model`, which is the builder of ``Qwen3ForCausalLM``."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What is known before the model is built. ``adoption`` is None for weights that are ours
    alone.
    """

    spec: ModelSpec
    weights: Qwen3Weights
    device: torch.device
    builder: ModelBuilder
    adoption: Adoption | None


def open_source(
    model: str | Path | nn.Module, config: EngineConfig, builders: Mapping[str, ModelBuilder]
) -> ModelSource:
    """Load a checkpoint (folder or hub id) or adopt a live module.

    ``builders``: further architectures. Raises `ConfigError`; for a module that cannot be served,
    `UnsupportedOption`.
    """
    known = {"Qwen3ForCausalLM": Qwen3Model, **builders}
    if isinstance(model, nn.Module):
        return _adopted(model, config, known)
    return _loaded(model, config, known)


def _adopted(
    module: nn.Module, config: EngineConfig, builders: Mapping[str, ModelBuilder]
) -> ModelSource:
    adoption = Adoption(module)
    try:
        spec = spec_of(module)
        device = adoption.weights.embedding.device
        _require_same("dtype", config.dtype, str(spec.dtype).removeprefix("torch."))
        _require_same("device", config.device, str(device))
        builder = _builder(spec, builders)
    except ConfigError:
        adoption.close()
        raise
    return ModelSource(
        spec=spec, weights=adoption.weights, device=device, builder=builder, adoption=adoption
    )


def _loaded(
    model: str | Path, config: EngineConfig, builders: Mapping[str, ModelBuilder]
) -> ModelSource:
    device = _device(config.device)
    folder = checkpoint_folder(model)
    hf_config = read_hf_config(folder)
    spec = ModelSpec.from_hf_config(
        hf_config,
        dtype=_dtype(config.dtype, checkpoint_dtype(folder, hf_config), device),
        eos_token_ids=checkpoint_eos_token_ids(folder, hf_config),
    )
    builder = _builder(spec, builders)
    weights = load_weights(folder, spec, device=device)
    return ModelSource(spec=spec, weights=weights, device=device, builder=builder, adoption=None)


def _builder(spec: ModelSpec, builders: Mapping[str, ModelBuilder]) -> ModelBuilder:
    if spec.architecture not in builders:
        raise ConfigError(
            f"architecture {spec.architecture!r} is not served: expected one of "
            f"{', '.join(builders)}. Use such a checkpoint, or a plugin that registers it."
        )
    return builders[spec.architecture]


def _device(name: str) -> torch.device:
    if name == "auto":
        return (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device={name!r} cannot be used: {reason}. Expected 'auto', 'cpu' or a CUDA device of "
            "this machine."
        ) from error
    return device


def _dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to compute in. Auto is float32 on a CPU: few of them multiply bfloat16 as fast."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.float32 if device.type == "cpu" else stored


def _require_same(name: str, wanted: str, actual: str) -> None:
    is_same = wanted in ("auto", actual) or actual.startswith(f"{wanted}:")
    if not is_same:
        raise ConfigError(
            f"{name}={wanted!r} does not fit the adopted module, whose {name} is {actual!r}: its "
            f"weights are shared, not copied. Leave {name} at 'auto', or convert the module first."
        )
