"""The seam: methods of `Qwen3ForCausalLM`, patched while a model is installed.

transformers looks the decoding loop up on the class (``type(self)._sample``), so the class is where
it can be replaced; which instances are served is kept in a weak table outside of them. Copies,
pickles and subclasses of a model are therefore untouched, and no attribute of a model changes.

`_sample` is the loop, `generate` what stands around it, and `_get_stopping_criteria` where
transformers would spend a second on each new stop string. The entry points for continuous batching
stand beside `generate`.

This is the one place of the project that patches somebody else's class. It does so on request, and
puts back what it found when the last model is uninstalled.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import Qwen3ForCausalLM

from hf_generate_shim.call import HFObject, SampleCall
from hf_generate_shim.stop_strings import light_criteria

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from hf_generate_shim.handle import Handle


BATCH_ENTRY_POINTS = (
    "init_continuous_batching",
    "continuous_batching_context_manager",
    "generate_batch",
    "destroy_cached_continuous_batching_manager",
)
"""transformers' methods for continuous batching, served by functions of the same names."""


@dataclass(frozen=True, kw_only=True)
class _Patch:
    name: str
    found: HFObject
    """What the class itself held under the name; None when it inherited the method."""
    original: Callable[..., HFObject]
    ours: Callable[..., HFObject]


class Seam:
    """The patches on one class, and the handle of each model that they serve. Any thread."""

    def __init__(self, owner: type) -> None:
        self.owner = owner
        self._lock = threading.RLock()  # a collected model is detached by whichever thread it hits
        self._served: weakref.WeakKeyDictionary[nn.Module, Handle] = weakref.WeakKeyDictionary()
        self._patches: dict[str, _Patch] = {}
        self._install: Callable[[nn.Module], object] | None = None

    def handle_of(self, model: nn.Module) -> Handle | None:
        """The handle of an installed model."""
        return self._served.get(model)

    def attach(self, model: nn.Module, handle: Handle) -> Handle:
        """Let ``handle`` serve ``model``, unless another one does: returns the one that does.

        The first model patches the class.
        """
        with self._lock:
            present = self._served.get(model)
            if present is not None:
                return present
            if not self._patches:
                self._patch("generate", _patched_generate)
                self._patch("_sample", _patched_sample)
                self._patch("_get_stopping_criteria", _patched_criteria)
                for name in BATCH_ENTRY_POINTS:
                    self._patch(name, functools.partial(_patched_entry_point, name))
            self._served[model] = handle
            weakref.finalize(model, self._restore_if_unused).atexit = False
            return handle

    def detach(self, model: nn.Module) -> None:
        """Serve ``model`` no longer; the last one restores the class. Idempotent."""
        with self._lock:
            self._served.pop(model, None)
            self._restore_if_unused()

    @contextmanager
    def serving_all(self, install: Callable[[nn.Module], object]) -> Iterator[None]:
        """Within the block each model is served from its first `generate` on: it is given to
        ``install``, which is to attach it. One block at a time, in a process that is all tests.
        """
        with self._lock:
            self._install = install
            self._patch_once()
        try:
            yield
        finally:
            with self._lock:
                self._install = None
                self._restore_if_unused()

    def handle_for_call(self, model: nn.Module) -> Handle | None:
        """The handle for a call of `generate` that begins; None for a model not installed."""
        handle = self._served.get(model)
        if handle is None and self._install is not None:
            self._install(model)
            handle = self._served.get(model)
        return handle

    def original(self, name: str) -> Callable[..., HFObject]:
        """transformers' own method, for calls that must not come back here."""
        return self._patches[name].original

    def _patch_once(self) -> None:
        if not self._patches:
            self._patch("generate", _patched_generate)
            self._patch("_sample", _patched_sample)

    def _patch(self, name: str, make: Callable[..., Callable[..., HFObject]]) -> None:
        original = getattr(self.owner, name)
        ours = make(self, original)
        found = vars(self.owner).get(name)
        self._patches[name] = _Patch(name=name, found=found, original=original, ours=ours)
        setattr(self.owner, name, ours)

    def _restore_if_unused(self) -> None:
        with self._lock:
            is_used = any(reference() is not None for reference in self._served.keyrefs())
            if is_used or self._install is not None:
                return
            for patch in self._patches.values():
                if vars(self.owner).get(patch.name) is not patch.ours:
                    continue  # somebody patched over us: ours passes through, theirs stays
                if patch.found is None:
                    delattr(self.owner, patch.name)
                else:
                    setattr(self.owner, patch.name, patch.found)
            self._patches.clear()


def _patched_generate(seam: Seam, original: Callable[..., HFObject]) -> Callable[..., HFObject]:
    names = tuple(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)  # transformers and others read its signature
    def generate(self: nn.Module, *args: HFObject, **kwargs: HFObject) -> HFObject:
        handle = seam.handle_for_call(self)
        if handle is None:
            return original(self, *args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        return handle.generate(self, functools.partial(original, self, *args, **kwargs), arguments)

    return generate


def _patched_sample(seam: Seam, original: Callable[..., HFObject]) -> Callable[..., HFObject]:
    @functools.wraps(original)
    def _sample(self: nn.Module, input_ids: HFObject, **kwargs: HFObject) -> HFObject:
        run_original = functools.partial(original, self, input_ids, **kwargs)
        handle = seam.handle_of(self)
        if handle is None:
            return run_original()
        names = ("logits_processor", "stopping_criteria", "generation_config")
        named = {name: kwargs.pop(name) for name in names}
        synced_gpus = bool(kwargs.pop("synced_gpus", False))
        streamer = kwargs.pop("streamer", None)
        call = SampleCall(
            model=self,
            input_ids=input_ids,
            **named,
            synced_gpus=synced_gpus,
            streamer=streamer,
            model_kwargs=kwargs,
        )
        return handle.sample(call, run_original)

    return _sample


def _patched_criteria(seam: Seam, original: Callable[..., HFObject]) -> Callable[..., HFObject]:
    @functools.wraps(original)
    def _get_stopping_criteria(
        self: nn.Module,
        generation_config: HFObject,
        stopping_criteria: HFObject,
        tokenizer: HFObject = None,
        **kwargs: HFObject,
    ) -> HFObject:
        build = functools.partial(original, self, **kwargs)
        if seam.handle_of(self) is None:
            return build(generation_config, stopping_criteria, tokenizer=tokenizer)
        return light_criteria(build, generation_config, stopping_criteria, tokenizer)

    return _get_stopping_criteria


def _patched_entry_point(
    name: str, seam: Seam, original: Callable[..., HFObject]
) -> Callable[..., HFObject]:
    @functools.wraps(original)
    def entry_point(self: nn.Module, *args: HFObject, **kwargs: HFObject) -> HFObject:
        handle = seam.handle_of(self)
        if handle is None:
            return original(self, *args, **kwargs)
        return getattr(handle.continuous_batching, name)(self, *args, **kwargs)

    return entry_point


QWEN3 = Seam(Qwen3ForCausalLM)
"""The seam of this process: patching a class is process-wide, so its record is too."""
