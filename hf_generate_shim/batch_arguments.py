"""`BatchArguments`: the arguments of `generate` for the requests of one manager."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from hf_generate_shim.batching_options import CONFIG_ARGUMENT
from hf_generate_shim.call import CACHE_NAMES
from hf_generate_shim.planner import Planner
from nanoserve_core.errors import UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from hf_generate_shim.call import HFObject
    from hf_generate_shim.handle import Handle

_MAX_PLANNERS = 64

_PROMPTS = "The prompts are lists of ids, without pads."
_REFUSED: Mapping[str, str] = {
    "streamer": "Pass streaming=True to add_request of init_continuous_batching's manager.",
    **dict.fromkeys(("inputs", "input_ids", "inputs_embeds"), _PROMPTS),
    **dict.fromkeys(("attention_mask", "position_ids"), _PROMPTS),
    **dict.fromkeys(CACHE_NAMES, "Requests share cached prefixes by themselves."),
    "custom_generate": "Call generate for it.",
}
_NOT_GIVEN_IF_NONE = ("max_new_tokens", "eos_token_id", CONFIG_ARGUMENT)
"""Named by transformers' own methods, whose default for them is None."""

_TENSORS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class BatchArguments:
    """Merges what was given for all requests with what is given for one, and keeps the planners.

    ``common``: arguments of `generate` by name. A config that is given is copied: what becomes of
    the caller's later changes nothing. None stands for the model's own, as it is at each request.
    """

    def __init__(self, generation_config: HFObject, common: Mapping[str, HFObject]) -> None:
        self.generation_config = copy.deepcopy(generation_config)
        self._common = dict(common)
        self._lock = threading.Lock()
        self._planners: OrderedDict[str, Planner] = OrderedDict()
        self._teachers: dict[str, Planner] = {}

    def planner(self, handle: Handle, model: nn.Module, given: Mapping[str, HFObject]) -> Planner:
        """The planner for requests with the arguments ``given``, which win over the common ones.

        Raises `UnsupportedOption` for arguments that a request cannot have.
        """
        arguments = self._merged(given)
        key = _key(arguments)
        if key is None:
            return self._new_planner(handle, model, arguments)
        with self._lock:
            planner = self._planners.get(key)
        if planner is None:
            planner = self._new_planner(handle, model, arguments)
            self._teach(planner, arguments)
        with self._lock:
            self._planners[key] = planner
            self._planners.move_to_end(key)
            while len(self._planners) > _MAX_PLANNERS:
                self._planners.popitem(last=False)
        return planner

    def _teach(self, planner: Planner, arguments: Mapping[str, HFObject]) -> None:
        """Let a new planner learn from an earlier one that has another ``max_new_tokens``."""
        limit = planner.resolved("max_new_tokens")
        if limit is None:
            return
        others = {name: arg for name, arg in arguments.items() if name != "max_new_tokens"}
        with self._lock:
            teacher = self._teachers.setdefault(str(_key(others)), planner)
        if teacher is not planner:
            planner.learn_from(teacher, limit)

    def are_equal(self, other: BatchArguments) -> bool:
        """Whether requests get the same from both; False when they hold objects."""
        key = _key(self._common)
        is_same_config = bool(self.generation_config == other.generation_config)
        return key is not None and key == _key(other._common) and is_same_config

    def _merged(self, given: Mapping[str, HFObject]) -> dict[str, HFObject]:
        arguments = {**self._common, **given}
        for name in _NOT_GIVEN_IF_NONE:
            if arguments.get(name, 0) is None:
                del arguments[name]
        if arguments.get("cache_implementation") == "paged":
            del arguments["cache_implementation"]
        for name, way_out in _REFUSED.items():
            if arguments.get(name) is not None:
                raise UnsupportedOption(
                    f"{name} was given to continuous batching, which takes prompts and arguments "
                    f"of generate without it. {way_out}"
                )
        return arguments

    def _new_planner(
        self, handle: Handle, model: nn.Module, arguments: dict[str, HFObject]
    ) -> Planner:
        planner = Planner(handle, model, self._folded(arguments))
        if planner.resolved("return_dict_in_generate"):
            _require_no_tensors(planner)
            arguments = {**arguments, "return_dict_in_generate": False}
            return Planner(handle, model, self._folded(arguments))
        return planner

    def _folded(self, arguments: dict[str, HFObject]) -> dict[str, HFObject]:
        """The arguments as part of the config, for transformers warns of both side by side."""
        if self.generation_config is None:
            return arguments
        config = copy.deepcopy(self.generation_config)
        setattr(config, CONFIG_ARGUMENT, None)  # read long ago
        # None as an argument switches off what the model's config has; in a config it does not.
        folded = {name: value for name, value in arguments.items() if value is not None}
        others = {name: None for name, value in arguments.items() if value is None}
        return {**others, **config.update(**folded), "generation_config": config}


def _require_no_tensors(planner: Planner) -> None:
    for name in _TENSORS:
        if planner.resolved(name):
            raise UnsupportedOption(
                f"{name}=True was given to continuous batching: expected it to be off. Call "
                "generate for it: a GenerationOutput has no place for such tensors."
            )


def _key(arguments: Mapping[str, HFObject]) -> str | None:
    """Equal for equal arguments; None when they hold objects, which may change."""
    if all(_is_plain(value) for value in arguments.values()):
        return repr(sorted(arguments.items()))
    return None


def _is_plain(value: HFObject) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
