"""`ReplayedCache`: the cache in a dict output, computed when somebody looks at it.

Most callers drop it, and the engine's K/V live in blocks that are shared and reused. So nothing is
copied: the first access runs the finished sequences through the model's own forward once.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from hf_generate_shim.call import CACHE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from hf_generate_shim.call import HFObject, SampleCall


class ReplayedCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """A `DynamicCache` of width + num_steps - 1 positions, filled at first use by the thread that
    uses it, with the weights of that moment. Good for continuing ``sequences``.

    A copy or pickle is filled first and holds no reference to the model.
    """

    def __init__(self, replay: Callable[[], HFObject]) -> None:
        super().__init__()
        self._replay: Callable[[], HFObject] | None = replay

    @classmethod
    def of(cls, call: SampleCall, sequences: torch.Tensor) -> ReplayedCache | None:
        """The cache of a finished call; None with ``use_cache=False``, as in transformers."""
        if not call.generation_config.use_cache:
            return None
        return cls(partial(_replay, call.model, sequences, call.attention_mask))

    @property
    def layers(self) -> HFObject:
        """Per layer keys and values [num_rows, num_kv_heads, positions, head_dim]."""
        replay = self.__dict__.get("_replay")
        if replay is not None:
            self._layers = replay().layers
            self._replay = None
        return self._layers

    @layers.setter
    def layers(self, layers: HFObject) -> None:
        self._layers = layers

    def __getstate__(self) -> dict[str, Any]:  # Any: the attributes of transformers' class
        assert self.layers is not None, "looking at the layers fills them"
        return dict(self.__dict__)


def _replay(
    model: torch.nn.Module, sequences: torch.Tensor, attention_mask: torch.Tensor | None
) -> HFObject:
    """Positions are counted as `generate` counts them: masked columns do not count, all new do."""
    ids = sequences[:, :-1]
    mask = torch.ones_like(ids)
    if attention_mask is not None:
        mask[:, : attention_mask.shape[1]] = (attention_mask != 0).to(ids)
    positions = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)
    cache = DynamicCache(config=model.config)
    parameters = inspect.signature(type(model).forward).parameters
    name = next(name for name in CACHE_NAMES if name in parameters)
    with torch.no_grad():
        model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{name: cache},
        )
    return cache
