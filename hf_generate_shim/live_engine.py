"""`LiveEngine`: the engine over a live model's weights, started by the first call that needs it."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen3ForCausalLM

from hf_generate_shim.task import longest_request
from nanoserve_adapters.registry import acquire
from nanoserve_adapters.unsupported import Unsupported
from nanoserve_core.config import EngineConfig
from nanoserve_core.engine_stats import EngineStats
from nanoserve_core.errors import ConfigError, EngineClosed, RequestTooLong, UnsupportedOption
from nanoserve_core.models.eligibility import Eligibility

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from hf_generate_shim.call import HFObject
    from hf_generate_shim.task import Task
    from nanoserve_adapters.engine_thread import EngineThread
    from nanoserve_adapters.registry import EngineHandle

# What transformers' loop calls on the model, and the engine does not.
_LOOP_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")

_INSIDE_A_STEP = Unsupported(
    option="generate",
    value="(by a processor or criterion)",
    because="cannot run a call for which a step of its own waits",
    way_out="Call generate before or after.",
)

_NOT_STARTED = EngineStats(
    running=0,
    waiting=0,
    peak_batch=0,
    free_blocks=0,
    num_blocks=0,
    prompt_tokens_computed=0,
    prompt_tokens_cached=0,
    tokens_recomputed=0,
    generated_tokens=0,
    preemptions=0,
    steps=0,
    backends={},
    weights_epoch=0,
    finished_requests={},
)


class LiveEngine:
    """One model's share in the process's engine for it. Any thread; holds the model weakly.

    ``options`` are `EngineConfig`'s. Without a ``max_model_len`` the model's own limit is asked
    for, unless the engine already runs with another one.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: HFObject,
        options: Mapping[str, Any],  # Any: checked by EngineConfig
    ) -> None:
        self._model = weakref.ref(model)
        self._eligibility = Eligibility(model)
        self._tokenizer = tokenizer
        self._options = dict(options)
        self._lock = threading.Lock()
        self._handle: EngineHandle | None = None
        self._device: torch.device | None = None
        self._is_closed = False

    @property
    def max_model_len(self) -> int:
        """Longest row in tokens; before the engine runs, what it will be asked for."""
        handle = self._handle
        if handle is not None:
            return int(handle.thread.engine.max_model_len)
        limit = int(self._require_model().config.max_position_embeddings)
        return min(limit, int(self._options.get("max_model_len", limit)))

    def reasons(self) -> list[Unsupported]:
        """What about the model as it is now keeps its calls from the engine.

        Less than a millisecond for 28 layers: a module can be changed between any two calls.
        """
        model = self._require_model()
        reason = self._eligibility.reason()
        reasons = [] if reason is None else [_not_plain(model, reason)]
        if self._handle is not None and self._handle.thread.is_current:
            reasons.append(_INSIDE_A_STEP)
        return [*reasons, *_loop_reasons(model)]

    def group_reasons(self, task: Task) -> list[Unsupported]:
        """Why the rows of a lockstep call cannot run in one step."""
        handle, num_rows = self._handle, len(task.rows)
        options = EngineConfig.from_options(**self._options)
        config = options if handle is None else handle.thread.engine.config
        limit = min(config.max_num_seqs, config.max_num_batched_tokens)
        if not task.is_lockstep or num_rows <= limit:
            return []
        return [
            Unsupported(
                option="input_ids",
                value=f"({num_rows} rows)",
                because=f"runs at most {limit} rows in one step, and this call needs all in one",
                way_out="Split the batch, or install with a larger max_num_seqs.",
            )
        ]

    def start_reasons(self, task: Task) -> list[Unsupported]:
        """Start the engine if need be; why it cannot run ``task`` on this model."""
        try:
            thread = self.start()
        except UnsupportedOption as error:
            return [_not_plain(self._require_model(), str(error))]
        try:
            thread.engine.validate(longest_request(task))
        except RequestTooLong:
            held = "all rows of that length at once" if task.is_lockstep else "a row of that length"
            return [
                Unsupported(
                    option="max_length",
                    value=max(map(len, task.rows)) + (task.sampling.max_tokens or 0),
                    because=f"cannot hold {held}",
                    way_out="Lower max_new_tokens, or give the engine more kv_cache_memory_bytes.",
                )
            ]
        return []

    def start(self) -> EngineThread:
        """The engine's thread; starts both at the first call, concurrent callers wait.

        An engine that died, or whose model has moved to another device, is replaced. Raises
        `UnsupportedOption` for a model that cannot be served, `ConfigError` for options that cannot
        be met, `EngineClosed` after `close` and in a forked process.
        """
        with self._lock:
            if self._is_closed:
                raise EngineClosed(
                    "this model was uninstalled while the call was being prepared: expected an "
                    "installed one. Install it again."
                )
            model = self._require_model()
            device = next(model.parameters()).device
            if self._handle is not None and not self._can_go_on(self._handle, device):
                self._handle.close()
                self._handle = None
            if self._handle is None:
                self._handle, self._device = self._acquire(model), device
            return self._handle.thread

    def stats(self) -> EngineStats:
        """The engine's counters; all zero while it has not been started."""
        handle = self._handle
        return _NOT_STARTED if handle is None else handle.stats()

    def close(self) -> None:
        """Give the engine back. Idempotent."""
        with self._lock:
            handle, self._handle, self._is_closed = self._handle, None, True
        if handle is not None:
            handle.close()

    def _can_go_on(self, handle: EngineHandle, device: torch.device) -> bool:
        handle.thread.require_own_process()
        return handle.thread.is_alive and device == self._device

    def _acquire(self, model: nn.Module) -> EngineHandle:
        if "max_model_len" in self._options:
            return acquire(model, tokenizer=self._tokenizer, **self._options)
        options = {"max_model_len": self.max_model_len, **self._options}
        try:
            return acquire(model, tokenizer=self._tokenizer, **options)
        except ConfigError:  # it runs already, for another door, with a limit of its own
            return acquire(model, tokenizer=self._tokenizer, **self._options)

    def _require_model(self) -> HFObject:
        model = self._model()
        assert model is not None, "a call is made on a model, so it is alive"
        return model


def _loop_reasons(model: nn.Module) -> list[Unsupported]:
    """Methods of transformers' loop that were replaced on the instance or in a subclass."""
    return [
        _not_plain(model, f"{name} was replaced")
        for name in _LOOP_METHODS
        if name in vars(model) or getattr(type(model), name) is not getattr(Qwen3ForCausalLM, name)
    ]


def _not_plain(model: nn.Module, reason: str) -> Unsupported:
    return Unsupported(
        option="model",
        value=type(model).__name__,
        because=f"serves a plain, whole Qwen3ForCausalLM on one device, and here {reason}",
        way_out="Undo that to use the engine.",
    )


def wait_for_device(model: nn.Module) -> None:
    """Wait for the caller's stream: the engine has one of its own, and an optimizer step may still
    run on this one.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
