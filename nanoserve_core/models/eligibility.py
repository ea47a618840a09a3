"""May the engine take the place of a live transformers module's forward, and what are its shapes.

It serves a plain, whole ``Qwen3ForCausalLM`` on one device, whose code and tensors nobody has
wrapped, replaced, quantised or moved away. It reads the module and changes nothing.
"""

from __future__ import annotations

import inspect
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from nanoserve_core.config import ModelSpec
from nanoserve_core.errors import ConfigError
from nanoserve_core.models.weights import merged_eos_token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

_HF_MODULE = "transformers.models.qwen3.modeling_qwen3"
_CAPTURE_HOOKS = "transformers.utils.output_capturing"
_GRADIENT_HOOK = ("transformers.modeling_utils", "make_inputs_require_grads")
_FUSED_HEAD = ("trl.trainer.utils", "_fused_forward")
_PLAIN_TYPES = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

HFModule: TypeAlias = Any  # Any: transformers' classes, which the core does not import


def ineligible_reason(module: nn.Module) -> str | None:
    """Why the engine cannot take the place of ``module``'s forward, as a clause; None when it can.

    Changes nothing and runs nothing of the module. A few milliseconds for 28 layers; for a look
    before every call there is `Eligibility`.
    """
    return next(_reasons(module), None)


class Eligibility:
    """`ineligible_reason` of one module, asked again and again: reasons are only looked for anew
    when the module is not what it was, which costs a fifth to see. Any thread; holds it weakly.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._last: tuple[list[object], str | None] | None = None

    def reason(self) -> str | None:
        """See `ineligible_reason`."""
        module = self._module()
        assert module is not None, "whoever asks holds the module"
        state = _state_of(module)
        last = self._last
        if last is None or last[0] != state:
            last = self._last = (state, ineligible_reason(module))
        return last[1]


def _state_of(module: HFModule) -> list[object]:
    """All that reasons depend on, objects by their ids, so that nothing is kept alive; tensors by
    where their data is, which is another place after every change of device or dtype.
    """
    state: list[object] = [
        module.training,
        {name: _copied(value) for name, value in vars(module.config).items()},
        getattr(module, "is_quantized", False),
        getattr(module, "hf_quantizer", None) is None,
        getattr(module, "_hf_peft_config_loaded", False),
    ]
    pending: list[nn.Module] = [module]
    while pending:
        each = pending.pop()
        attributes = each.__dict__
        children, parameters = attributes["_modules"], attributes["_parameters"]
        hooks, pre_hooks = attributes["_forward_hooks"], attributes["_forward_pre_hooks"]
        forward = attributes.get("forward")
        state += (id(each), type(each), id(forward), len(children), *parameters)
        if hooks or pre_hooks:
            state += (*map(id, hooks.values()), *map(id, pre_hooks.values()))
        for parameter in parameters.values():
            if parameter is not None:
                state += (parameter.data_ptr(), type(parameter), parameter.is_contiguous())
        pending += [child for child in children.values() if child is not None]
    return state


def _copied(value: object) -> object:
    return value.copy() if isinstance(value, dict | list) else value


def spec_of(module: HFModule) -> ModelSpec:
    """The shape facts of a live module; raises `ConfigError` for what cannot be computed."""
    generation_config = getattr(module, "generation_config", None)
    eos_token_ids = merged_eos_token_ids(
        getattr(generation_config, "eos_token_id", None), module.config.eos_token_id
    )
    dtype = next(module.parameters()).dtype
    return ModelSpec.from_hf_config(module.config, dtype=dtype, eos_token_ids=eos_token_ids)


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
    if _is_replaced(child):
        yield f"forward of {name} is replaced on the instance"
    if hasattr(child, "parametrizations"):
        yield f"{name} has parametrizations"
    if type(child) not in _PLAIN_TYPES and _stock_class(child) is None:
        yield f"{name} is a {type(child).__module__}.{type(child).__qualname__}"
    hooks = [*child._forward_hooks.values(), *child._forward_pre_hooks.values()]  # noqa: SLF001  torch has no reader
    if not all(map(_changes_no_output, hooks)):
        yield f"{name} has forward hooks"


def _is_replaced(child: nn.Module) -> bool:
    """Whether the instance has a forward that may compute something else than its class's."""
    own = child.__dict__.get("forward")
    return own is not None and not _is_own(own, child)


def _is_own(forward: object, child: nn.Module) -> bool:
    """True for a bound copy of the class's method, decorated, compiled or not, and for TRL's head
    around one: asked for logits, as generation does, it calls the forward that it found.
    """
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    if not isinstance(forward, MethodType) or forward.__self__ is not child:
        return False
    function: HFModule = forward.__func__
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is not None and (names.get("__name__"), code.co_name) == _FUSED_HEAD:
        return _is_own(inspect.getclosurevars(function).nonlocals.get("original_forward"), child)
    known: HFModule = type(child).forward
    while known is not None and known is not function:
        known = getattr(known, "__wrapped__", None)
    return known is not None


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
