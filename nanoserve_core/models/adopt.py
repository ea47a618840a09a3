"""Serving a live transformers module from its own weights: may we, how, and are they still where
they were.

No second copy is made. A frozen module's q/k/v and gate/up weights move into one tensor each, and
its parameters are re-pointed at slices of it: the same ``Parameter`` objects, values and names. A
module of which anything requires grad is left as it is, and the engine makes three products where
it would make one. Nothing else of the module changes, and closing the engine leaves it in working
order.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from nanoserve_core.config import ModelSpec
from nanoserve_core.errors import ConfigError, UnsupportedOption
from nanoserve_core.layers.linear import Linear, SplitLinear
from nanoserve_core.layers.norm_rope import RotaryFrequencies
from nanoserve_core.models.qwen3 import LayerWeights, Qwen3Weights
from nanoserve_core.models.weights import merged_eos_token_ids
from nanoserve_core.models.weights_epoch import WeightsChange, WeightsEpoch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from nanoserve_core.layers.linear import Projection

_HF_MODULE = "transformers.models.qwen3.modeling_qwen3"
_CAPTURE_HOOKS = "transformers.utils.output_capturing"
_GRADIENT_HOOK = ("transformers.modeling_utils", "make_inputs_require_grads")
_PLAIN_TYPES = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

HFModule: TypeAlias = Any  # Any: transformers' classes, which the core does not import
_Merge: TypeAlias = "Callable[..., Projection]"


def ineligible_reason(module: nn.Module) -> str | None:
    """Why the engine cannot take the place of ``module``'s forward, as a clause; None when it can.

    Changes nothing and runs nothing of the module. A few milliseconds for 28 layers.
    """
    return next(_reasons(module), None)


class Adoption:
    """A live module whose weights the engine uses. Holds the module weakly: it lives as long as its
    owner wants.
    """

    def __init__(self, module: nn.Module) -> None:
        """Adopt the module as it is. Raises `UnsupportedOption` with the reason when it is not
        eligible.
        """
        self._module = weakref.ref(module)
        self._dropout = _require_eligible(module)
        self.weights = adopted_weights(module)
        self._epoch = WeightsEpoch(module)

    @property
    def epoch(self) -> int:
        """How often the weights have changed since the adoption, as far as `refresh` has seen."""
        return self._epoch.number

    def refresh(self) -> bool:
        """Look at the module again; True when ``weights`` is a new object, because they or the code
        around them moved.

        Raises `UnsupportedOption` when the module has become one that cannot be served.
        """
        module = self._module()
        if module is None:
            return False
        if module.training and self._dropout:
            _require_eligible(module)
        if self._epoch.check() is not WeightsChange.STRUCTURE:
            return False
        self._dropout = _require_eligible(module)
        self.weights = adopted_weights(module)
        self._epoch.rebase(module)
        return True

    def close(self) -> None:
        """Stop watching. The module is left as it is, fused weights included: it works as before.
        Idempotent.
        """
        self._epoch.close()


def spec_of(module: HFModule) -> ModelSpec:
    """The shape facts of a live module; raises `ConfigError` for what cannot be computed."""
    generation_config = getattr(module, "generation_config", None)
    eos_token_ids = merged_eos_token_ids(
        getattr(generation_config, "eos_token_id", None), module.config.eos_token_id
    )
    dtype = next(module.parameters()).dtype
    return ModelSpec.from_hf_config(module.config, dtype=dtype, eos_token_ids=eos_token_ids)


def adopted_weights(module: HFModule) -> Qwen3Weights:
    """The weights of an eligible ``Qwen3ForCausalLM``, sharing its storage; fused when nothing
    requires grad.
    """
    base = module.model
    can_move = not any(each.requires_grad or each.is_inference() for each in module.parameters())
    merge = _fused if can_move else _side_by_side
    rotary = base.rotary_emb
    return Qwen3Weights(
        embedding=base.embed_tokens.weight.data,
        layers=tuple(_layer_weights(layer, merge) for layer in base.layers),
        norm=base.norm.weight.data,
        lm_head=_plain(module.lm_head),
        rotary=RotaryFrequencies(
            inv_freq=rotary.inv_freq.data, attention_scaling=rotary.attention_scaling
        ),
    )


def _layer_weights(layer: HFModule, merge: _Merge) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.data,
        qkv=merge(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=attention.q_norm.weight.data,
        k_norm=attention.k_norm.weight.data,
        o=_plain(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight.data,
        gate_up=merge(mlp.gate_proj, mlp.up_proj),
        down=_plain(mlp.down_proj),
    )


def _plain(linear: HFModule) -> Linear:
    return Linear(linear.weight.data, None if linear.bias is None else linear.bias.data)


def _side_by_side(*linears: HFModule) -> Projection:
    return SplitLinear(*(_plain(linear) for linear in linears))


def _fused(*linears: HFModule) -> Projection:
    weight = _joined([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears]
    return Linear(weight, None if biases[0] is None else _joined(biases))


def _joined(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor that holds all ``parameters``, which become slices of it (or are already, from an
    earlier adoption).
    """
    first = parameters[0].data
    num_rows = sum(len(parameter) for parameter in parameters)
    if _is_joined(parameters):
        return first.as_strided((num_rows, *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.data for parameter in parameters])
    sizes = [len(parameter) for parameter in parameters]
    for parameter, part in zip(parameters, whole.split_with_sizes(sizes), strict=True):
        parameter.data = part
    return whole


def _is_joined(parameters: list[nn.Parameter]) -> bool:
    storage = parameters[0].untyped_storage().data_ptr()
    end = parameters[0].data_ptr()
    for parameter in parameters:
        if parameter.untyped_storage().data_ptr() != storage or parameter.data_ptr() != end:
            return False
        end += parameter.nbytes
    return True


def _require_eligible(module: HFModule) -> bool:
    """Raise `UnsupportedOption` unless the module can be served; whether it has dropout (inactive
    now).
    """
    reason = ineligible_reason(module)
    if reason is not None:
        raise UnsupportedOption(
            f"this {type(module).__name__} cannot be served by nanoserve: {reason}. Expected a "
            "plain, whole Qwen3ForCausalLM on one device. Undo that, or let transformers run this "
            "model."
        )
    return bool(module.config.attention_dropout)


def _reasons(module: HFModule) -> Iterator[str]:
    """All reasons against serving the module, the most telling first; later ones rely on earlier
    ones.
    """
    if _stock_class(module, "Qwen3ForCausalLM") is None:
        yield f"it is a {type(module).__module__}.{type(module).__qualname__}, no Qwen3ForCausalLM"
        return
    if getattr(module, "is_quantized", False) or getattr(module, "hf_quantizer", None) is not None:
        yield "its weights are quantised"
    if getattr(module, "_hf_peft_config_loaded", False):
        yield "it has adapters loaded (merge or unload them)"
    for name, child in module.named_modules():
        yield from _reasons_of_child(name or "the model", child)
    yield from _reasons_of_tensors(module)
    yield from _reasons_of_config(module)


def _reasons_of_child(name: str, child: nn.Module) -> Iterator[str]:
    if "forward" in child.__dict__:
        yield f"forward of {name} is replaced on the instance"
    if hasattr(child, "parametrizations"):
        yield f"{name} has parametrizations"
    if type(child) not in _PLAIN_TYPES and _stock_class(child) is None:
        yield f"{name} is a {type(child).__module__}.{type(child).__qualname__}"
    hooks = [*child._forward_hooks.values(), *child._forward_pre_hooks.values()]  # noqa: SLF001  torch has no reader
    if not all(map(_changes_no_output, hooks)):
        yield f"{name} has forward hooks"


def _changes_no_output(hook: object) -> bool:
    """True for transformers' own hooks that keep outputs or mark them as needing gradients."""
    module, name = getattr(hook, "__module__", None), getattr(hook, "__name__", None)
    return module == _CAPTURE_HOOKS or (module, name) == _GRADIENT_HOOK


def _reasons_of_tensors(module: nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            yield f"{name} is a {type(parameter.data).__name__}, no plain parameter"
        elif parameter.is_meta:
            yield f"{name} is on the meta device (offloaded, or not loaded)"
        elif not parameter.is_contiguous():
            yield f"{name} is not contiguous"
    kinds = {(p.dtype, p.device) for p in module.parameters()}
    if len(kinds) != 1:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        yield f"its parameters are of several kinds ({listed})"
    elif (dtype := next(iter(kinds))[0]) not in _DTYPES:
        yield f"its parameters are {dtype}"


def _reasons_of_config(module: HFModule) -> Iterator[str]:
    try:
        spec = spec_of(module)
    except ConfigError as error:
        yield str(error).rstrip(".")
        return
    if len(module.model.layers) != spec.num_hidden_layers:
        yield f"it has {len(module.model.layers)} layers, its config says {spec.num_hidden_layers}"
    for weight in (module.model.embed_tokens.weight, module.lm_head.weight):
        if tuple(weight.shape) != (spec.vocab_size, spec.hidden_size):
            yield f"its vocabulary is {tuple(weight.shape)}, its config says {spec.vocab_size}"
    if module.training and module.config.attention_dropout:
        yield "it is in train mode with active dropout"


def _stock_class(module: HFModule, name: str | None = None) -> type | None:
    """The class of transformers' Qwen3 (of that name) whose forward ``module`` runs, or None if it
    runs another.
    """
    module_class: HFModule = type(module)
    for cls in module_class.__mro__:
        if cls.__module__ == _HF_MODULE or cls.__module__ == "transformers.activations":
            runs_it = module_class.forward is cls.forward
            return cls if runs_it and name in (None, cls.__name__) else None
    return None
