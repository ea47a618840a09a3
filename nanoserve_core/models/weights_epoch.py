"""`WeightsEpoch`: has somebody changed the weights of a live module since the last look?

A version counter alone does not tell: fused optimizers and writes through ``param.data`` leave it
as it is. So several cheap signs are compared, each of which catches what others miss:

====================================  =============================================================
sign                                  catches
====================================  =============================================================
identity of modules and parameters    assign loads, replaced modules, adapters that wrap a layer
hooks, ``forward`` on an instance     code that a user put around a layer
data pointers                         ``.to``, ``vector_to_parameters``, re-pointed ``.data``
version counters                      SGD, AdamW, ``load_state_dict``, any in-place write
optimizer steps in this process       fused optimizers, and copies that follow a step
gradients                             a backward pass, whatever the optimizer does with it
sampled values                        fused optimizers of others, ``param.data`` writes
====================================  =============================================================

Values are sampled on a CPU, and elsewhere while some parameter requires grad. Reading samples of a
frozen module on a GPU would wait for the device at every request, to see what only a write through
``.data`` by hand does to it (PEFT merges an adapter in this way): ``Engine.weights_changed`` says
so. A write to a few elements that hits no sample goes unseen too. The module is watched from
outside: nothing of it is changed, and it is not kept alive.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

SAMPLES_PER_TENSOR = 64
"""Evenly spaced elements of each tensor that are compared; tensors of fewer are compared whole."""

_BIT_VIEWS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class WeightsChange(Enum):
    """What `WeightsEpoch.check` found."""

    NONE = "none"
    VALUES = "values"
    """The same tensors in the same places, with other values (or so it must be assumed)."""
    STRUCTURE = "structure"
    """Other tensors, other places, or other code around them: adopt the module anew."""


class WeightsEpoch:
    """Counts the changes of one module's weights. One thread uses it; optimizers run on any."""

    def __init__(self, module: nn.Module) -> None:
        self.number = 0
        """Changes seen so far."""
        self._steps = _StepCounter()
        self._handle = register_optimizer_step_post_hook(self._steps)
        self.rebase(module)

    def check(self) -> WeightsChange:
        """Compare with the last look and remember this one; a change raises `number` by one.

        A fifth of a millisecond for the 311 tensors of a 28-layer model, besides the samples. After
        STRUCTURE, `rebase` before the next check.
        """
        change = self._compare()
        if change is not WeightsChange.NONE:
            self.number += 1
        return change

    def rebase(self, module: nn.Module) -> None:
        """Take the module as it is now for unchanged."""
        modules = [each.__dict__ for each in module.modules()]
        self._modules = modules
        self._members = [
            (owner, name, member)
            for attributes in modules
            for owner in (attributes["_modules"], attributes["_parameters"], attributes["_buffers"])
            for name, member in owner.items()
        ]
        self._tensors = [each for _, _, each in self._members if isinstance(each, torch.Tensor)]
        # Whether it is one never changes; asking lets go of the GIL, which beside a busy thread
        # costs up to 5 ms each time.
        self._versioned = [each for each in self._tensors if not each.is_inference()]
        self._sample_views = _sample_views(self._tensors)
        self._code = self._read_code()
        self._pointers = self._read_pointers()
        self._signs = self._read_signs()
        self._samples = self._read_samples()

    def close(self) -> None:
        """Stop counting optimizer steps. Idempotent."""
        self._handle.remove()

    def _compare(self) -> WeightsChange:
        # Identity first: pointers are only worth comparing when the tensors are the same ones.
        is_same = all(owner.get(name) is member for owner, name, member in self._members)
        if not is_same or (self._code, self._pointers) != (
            self._read_code(),
            self._read_pointers(),
        ):
            return WeightsChange.STRUCTURE
        old = (self._signs, self._samples)
        self._signs, self._samples = self._read_signs(), self._read_samples()
        if self._signs != old[0] or not _are_unchanged(old[1], self._samples):
            return WeightsChange.VALUES
        return WeightsChange.NONE

    def _read_code(self) -> list[tuple[bool, int, int]]:
        return [
            ("forward" in each, len(each["_forward_hooks"]), len(each["_forward_pre_hooks"]))
            for each in self._modules
        ]

    def _read_pointers(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]

    def _read_signs(self) -> tuple[int, list[int], list[tuple[int, int]]]:
        """Optimizer steps, version counters (inference tensors have none), and what gradients there
        are.
        """
        versions = [each._version for each in self._versioned]  # noqa: SLF001  its only name
        gradients = [
            (id(gradient), gradient._version)  # noqa: SLF001  as above
            for tensor in self._tensors
            if tensor.requires_grad and (gradient := tensor.grad) is not None
        ]
        return self._steps.count, versions, gradients

    def _read_samples(self) -> list[Tensor] | None:
        """The sampled values, one tensor per dtype; None for frozen weights off the CPU."""
        if not any(each.requires_grad or each.device.type == "cpu" for each in self._tensors):
            return None
        return [torch.cat(views) for views in self._sample_views]


def _sample_views(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Per dtype, evenly spaced elements of each tensor, as integers, so that NaN equals itself."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        step = (
            max(tensor.numel() // SAMPLES_PER_TENSOR, 1) | 1
        )  # odd: an even one visits few columns
        bits = tensor.detach().view(_BIT_VIEWS[tensor.itemsize])
        by_dtype.setdefault(bits.dtype, []).append(bits.view(-1)[::step])
    return list(by_dtype.values())


def _are_unchanged(old: list[Tensor] | None, new: list[Tensor] | None) -> bool:
    if old is None or new is None:
        return old is new  # what was written while nobody looked is not known
    return all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


class _StepCounter:
    """Counts the steps of all optimizers of the process: also of those that hold other tensors,
    because copies of their result into a watched module (an average, a target network) often
    follow.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:  # Any: the optimizer and its step's arguments
        self.count += 1
