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
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from nanoserve_core.errors import UnsupportedOption
from nanoserve_core.layers.linear import Linear, SplitLinear
from nanoserve_core.layers.norm_rope import RotaryFrequencies
from nanoserve_core.models.eligibility import HFModule, ineligible_reason
from nanoserve_core.models.qwen3 import LayerWeights, Qwen3Weights
from nanoserve_core.models.weights_epoch import WeightsChange, WeightsEpoch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from nanoserve_core.layers.linear import Projection

_Merge: TypeAlias = "Callable[..., Projection]"


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
