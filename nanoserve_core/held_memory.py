"""Which of our objects hold how much memory of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_OURS = "nanoserve_core."


def held_nbytes(parts: Mapping[str, object], device_type: str) -> dict[str, int]:
    """Bytes of the tensors that each part holds on such a device, by the part's name.

    A part is a tensor, one of our objects, or a collection of parts. Memory that several hold
    counts for the first of them. What caches and graphs hold beside tensors is not seen.
    """
    seen_storages: set[int] = set()
    seen_objects: set[int] = set()
    found = {}
    for name, part in parts.items():
        nbytes = 0
        for tensor in _tensors(part, seen_objects):
            storage = tensor.untyped_storage()
            if tensor.device.type == device_type and storage.data_ptr() not in seen_storages:
                seen_storages.add(storage.data_ptr())
                nbytes += storage.nbytes()
        found[name] = nbytes
    return found


def _tensors(part: object, seen: set[int]) -> Iterator[Tensor]:
    waiting = [part]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            waiting += _members(item)


def _members(item: object) -> Iterable[object]:
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    if not type(item).__module__.startswith(_OURS):
        return ()
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*vars(item).values()] if not slots else [getattr(item, name, None) for name in slots]
