"""The generation modes that never reach `_sample`, seen from the arguments of `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoserve_adapters.unsupported import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from hf_generate_shim.call import HFObject

# Name of an argument or config field: when it switches the mode, and why that is not served.
_SWITCHES: Mapping[str, tuple[Callable[[HFObject], bool], str]] = {
    "custom_generate": (lambda value: value is not None, "does not run a custom decoding loop"),
    "num_beams": (lambda value: (value or 1) > 1, "samples one continuation per row"),
    "assistant_model": (lambda value: value is not None, "takes no draft model"),
    "prompt_lookup_num_tokens": (lambda value: value is not None, "drafts no tokens"),
    "assistant_early_exit": (lambda value: value is not None, "drafts no tokens"),
    "use_mtp": (bool, "drafts no tokens"),
    "dola_layers": (lambda value: value is not None, "contrasts no layers"),
    "penalty_alpha": (lambda value: (value or 0) > 0, "does not search contrastively"),
    "constraints": (lambda value: value is not None, "samples one continuation per row"),
    "force_words_ids": (lambda value: value is not None, "samples one continuation per row"),
}


def other_mode(model: nn.Module, arguments: Mapping[str, HFObject]) -> Unsupported | None:
    """The option by which this call leaves the modes that `_sample` runs; None when none does.

    ``arguments`` are those of `generate` by name. As in transformers they win, also as None, over
    the given generation config, and that over the model's.
    """
    configs = (arguments.get("generation_config"), getattr(model, "generation_config", None))
    for name, (switches, because) in _SWITCHES.items():
        given = [getattr(config, name, None) for config in configs]
        value = next((value for value in given if value is not None), None)
        value = arguments.get(name, value)
        if switches(value):
            return _unsupported(name, value, because)
    return None


def _unsupported(name: str, value: HFObject, because: str) -> Unsupported:
    shown = value if isinstance(value, (int, float, str)) else f"({type(value).__name__})"
    way_out = "Pass num_beams=1." if name == "num_beams" else f"Leave {name} out."
    return Unsupported(option=name, value=shown, because=because, way_out=way_out)
