"""`ModelRunner`: weights, K/V cache and batch state of one model on one device; carries out step
plans.

It does not schedule and knows no text. What it has found out about the model and the machine
(`spec`, `num_blocks`, ``max_model_len``) is for others to read and never written into the config.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from nanoserve_core.batch_state import BatchState
from nanoserve_core.errors import ConfigError, EngineClosed, UnsupportedOption
from nanoserve_core.held_memory import held_nbytes
from nanoserve_core.kernels import for_device
from nanoserve_core.kv_cache import CudaMemory, KVCache, num_cpu_blocks, num_device_blocks
from nanoserve_core.layers.attention import TorchAttention
from nanoserve_core.models.qwen3 import scratch_nbytes
from nanoserve_core.models.source import open_source
from nanoserve_core.sampler import Sampler, token_logprobs
from nanoserve_core.step_inputs import StepInputs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor, nn

    from nanoserve_core.batch_state import BatchLogitsProcessor
    from nanoserve_core.config import EngineConfig, ModelSpec
    from nanoserve_core.kernels import KernelOps
    from nanoserve_core.layers.attention import AttentionBackend
    from nanoserve_core.models.qwen3 import Qwen3Weights
    from nanoserve_core.models.source import CausalModel, ModelSource
    from nanoserve_core.plan import ScheduledSeq, StepPlan
    from nanoserve_core.plugins import PluginManager
    from nanoserve_core.request import PositionLogprobs, Request
    from nanoserve_core.sampler import SamplerOutput, SamplerProtocol

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose logits exist at a time: [256, 151936] in float32 is 156 MB."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step gave, on the host. *Sampled row* counts the rows with ``samples=True``, in row
    order.
    """

    token_ids: np.ndarray[Any, np.dtype[np.int64]]  # Any: the shape
    """[num_samples] int64, one per sampled row; that of a row in ``errors`` means nothing."""
    logprobs: tuple[PositionLogprobs | None, ...] = ()
    """One per sampled row; None where the request asks for none."""
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    """Row of ``plan.seqs`` -> one entry for each of its first ``num_prompt_logprobs`` positions,
    about the token that *follows* the position.
    """
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Sampled row -> [vocab_size] float32, where the request asks."""
    scores: dict[int, Tensor] = field(default_factory=dict)
    """Sampled row -> [vocab_size] float32, where the request asks."""
    errors: dict[int, BaseException] = field(default_factory=dict)
    """Sampled row -> why its request must fail; the other rows are good."""


class InFlight(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """The result, once the step is done; the same object at each call."""
        ...

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...


class ModelRunner:
    """Runs the steps of one model. Made by `create`; used by one thread at a time, the one that
    owns the engine.
    """

    run_ahead = 0
    """Steps that may be launched before the oldest is read; a CPU has none, its step is done when
    launch returns.
    """
    max_run_ahead = 0
    """The same where the host comes late."""

    def __init__(
        self,
        source: ModelSource,
        config: EngineConfig,
        plugins: PluginManager,
        *,
        ops: KernelOps | None = None,
        backend: AttentionBackend | None = None,
    ) -> None:
        """Size the K/V pool and make all that a step writes to. Raises `ConfigError` and
        `PluginError`.

        ``ops``: None takes those that run everywhere. ``backend``: attention where no plugin brings
        one; None takes `TorchAttention`.
        """
        spec, device = source.spec, source.device
        self.spec = spec
        self.max_model_len = min(config.max_model_len, spec.max_position_embeddings)
        self._source = source
        self._device = device
        self._max_num_tokens = config.max_num_batched_tokens
        self._ops = ops or for_device(device)
        backend = backend or TorchAttention(spec, device=device)
        self._backend = _attention_backend(config, spec, backend, device, plugins)
        self.block_size = _block_size(config, self._backend)
        self.num_blocks = self._num_blocks(config)
        self.backend_names = {
            "attention": self._backend.name,
            "attention_reason": _reason(config, is_brought=self._backend is not backend),
            "device": str(device),
        }
        self._model = self._build(source.weights)
        self._kv_cache = KVCache(
            spec, num_blocks=self.num_blocks, block_size=self.block_size, device=device
        )
        self._inputs = StepInputs(
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            device=device,
        )
        self._sampler = _sampler(config, device, plugins)
        self._state = BatchState(
            config.max_num_seqs,
            spec.vocab_size,
            self.max_model_len,
            device,
            eos_token_ids=spec.eos_token_ids,
            processors=_logits_processors(config, spec, device, plugins),
        )
        self._scored: dict[int, Request] = {}
        self._is_closed = False

    @classmethod
    def create(
        cls, model: str | Path | nn.Module, config: EngineConfig, plugins: PluginManager
    ) -> ModelRunner:
        """Load a checkpoint (folder or hub id) or adopt a live module, and make the runner of it.

        Raises `ConfigError` (also for a checkpoint that is incomplete or not a Qwen3),
        `PluginError`, and `UnsupportedOption` for a module that cannot be served from its own
        weights.
        """
        if config.tensor_parallel_size > 1:
            raise ConfigError(
                f"tensor_parallel_size={config.tensor_parallel_size} is not served yet: expected "
                "1. Run one engine per device instead."
            )
        builders = {}
        for mapping in plugins.collect(plugins.hooks.register_models or ()):
            builders.update(mapping)
        with plain_torch("cpu"):
            source = open_source(model, config, builders)
            try:
                if source.device.type == "cuda":
                    from nanoserve_core.cuda_start import create_cuda_runner

                    return create_cuda_runner(source, config, plugins)
                return cls(source, config, plugins)
            except BaseException:
                if source.adoption is not None:
                    source.adoption.close()
                raise

    def launch(self, plan: StepPlan) -> InFlight:
        """Carry out one step; never waits for an accelerator (on a CPU the step is done on return).

        Plans come in the order in which they were made. An exception is a failure of the engine,
        not of a request.
        """
        if self._is_closed:
            raise EngineClosed(
                "this ModelRunner is closed: expected an open one. Make a new engine."
            )
        with plain_torch(self._device.type):
            self._state.apply(plan)
            self._inputs.apply(plan)
            self._note_scored(plan)
            self._copy_blocks(plan)
            return self._run(plan) if plan.seqs else _Launched(None, {})

    def weights_epoch(self) -> int:
        """A number that changes when the weights may have changed; weights that moved are adopted
        anew.

        Cheap enough for once per request, not per step. Always 0 for weights loaded from files.
        Raises `UnsupportedOption` when the adopted module has become one that cannot be served (an
        adapter was put in, it was quantised, moved to another device, its dropout became active).
        """
        adoption = None if self._is_closed else self._source.adoption
        if adoption is None:
            return 0
        with plain_torch(self._device.type):
            if adoption.refresh():
                self._use(adoption.weights)
        return adoption.epoch

    def warmup(self, *, max_num_seqs: int, max_prompt_tokens: int) -> int:
        """Have ready what steps need: see `Engine.warmup`. Gives the number of sizes made ready."""
        del max_num_seqs, max_prompt_tokens
        return 0

    def memory_nbytes(self) -> dict[str, int]:
        """Bytes on the device by what they are for; nothing once closed. Shared weights count."""
        return {} if self._is_closed else held_nbytes(self._holders(), self._device.type)

    def close(self) -> None:
        """Give the memory back. An adopted module keeps its weights and works as before.
        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._source.adoption is not None:
            self._source.adoption.close()
        self._state.grammars.close()
        del self._model, self._kv_cache, self._state, self._backend, self._source, self._weights

    def _run(self, plan: StepPlan) -> InFlight:
        step = self._inputs.batch(plan, self._state.last_token)
        self._state.grammars.start(plan.seqs)
        hidden_states = self._model.hidden_states(step.forward, self._kv_cache)
        prompt_logprobs = {
            row: self._prompt_logprobs(seq, hidden_states, int(step.forward.host_query_start[row]))
            for row, seq in enumerate(plan.seqs)
            if seq.num_prompt_logprobs
        }
        if len(step.sampled_slots) == 0:
            return _Launched(None, prompt_logprobs)
        logits = self._model.logits(hidden_states, step.forward.logits_indices)
        slots = step.sampled_slots
        output = self._sampler.sample(logits, slots, step.sampled_positions, self._state)
        self._state.advance(slots, output.token_ids)
        return _Launched(output, prompt_logprobs)

    def _copy_blocks(self, plan: StepPlan) -> None:
        if plan.block_copies:
            pairs = list(zip(*plan.block_copies, strict=True))
            sources, destinations = torch.tensor(pairs, device=self._device).unbind(0)
            self._ops.copy_blocks(self._kv_cache.tensor, sources=sources, destinations=destinations)

    def _note_scored(self, plan: StepPlan) -> None:
        """Keep the requests that want prompt logprobs: a chunk's last target is not among its own
        tokens.
        """
        for slot in plan.released:
            self._scored.pop(slot, None)
        for assignment in plan.assigned:
            if assignment.request.sampling.prompt_logprobs is not None:
                self._scored[assignment.slot] = assignment.request

    def _prompt_logprobs(
        self, seq: ScheduledSeq, hidden_states: Tensor, first_token: int
    ) -> list[PositionLogprobs]:
        """One entry per position, about the prompt token after it. first_token: the row's first in
        the step.
        """
        request = self._scored[seq.slot]
        num_top = request.sampling.prompt_logprobs or 0
        following = torch.tensor(
            request.prompt_token_ids[seq.start + 1 : seq.start + 1 + seq.num_prompt_logprobs],
            device=self._device,
        )
        rows = torch.arange(len(following), device=self._device) + first_token
        entries: list[PositionLogprobs] = []
        for some_rows, some_ids in zip(
            torch.split(rows, PROMPT_LOGPROB_ROWS),
            torch.split(following, PROMPT_LOGPROB_ROWS),
            strict=True,
        ):
            logits = self._model.logits(hidden_states, some_rows)
            entries += token_logprobs(logits, some_ids, num_top)
        return entries

    def _holders(self) -> dict[str, object]:
        """Who holds memory, by its name; the first of several who hold the same counts."""
        return {
            "weights": self._weights,
            "kv_cache": self._kv_cache,
            "attention": self._backend,
            "batch_state": self._state,
            "activations": self._model,
        }

    def _build(self, weights: Qwen3Weights) -> CausalModel:
        self._weights = weights
        return self._source.builder(
            self.spec,
            weights,
            backend=self._backend,
            ops=self._ops,
            max_num_tokens=self._max_num_tokens,
            num_positions=self.max_model_len,
        )

    def _use(self, weights: Qwen3Weights) -> None:
        """Go on with weights that are elsewhere or of another dtype; K/V of running sequences is
        kept, converted.
        """
        device, dtype = weights.embedding.device, weights.embedding.dtype
        if device != self._device:
            raise UnsupportedOption(
                f"the adopted module moved from {self._device} to {device} while its engine was "
                "open: expected it to stay. Move it back, or close the engine and make a new one."
            )
        if dtype != self.spec.dtype:
            self.spec = replace(self.spec, dtype=dtype)
            if isinstance(self._backend, TorchAttention):
                self._backend = TorchAttention(self.spec, device=device)
            self._convert_kv_cache()
        self._model = self._build(weights)

    def _convert_kv_cache(self) -> None:
        old = self._kv_cache.tensor
        self._kv_cache = KVCache(
            self.spec, num_blocks=self.num_blocks, block_size=self.block_size, device=self._device
        )
        live = torch.from_numpy(self._inputs.live_block_ids()).to(self._device)
        self._kv_cache.tensor[:, :, live] = old[:, :, live].to(self.spec.dtype)

    def _num_blocks(self, config: EngineConfig) -> int:
        """The size of the pool; asked when the weights are there and before anything else is."""
        if self._device.type == "cpu":
            return num_cpu_blocks(
                config, self.spec, block_size=self.block_size, max_model_len=self.max_model_len
            )
        return num_device_blocks(
            config,
            self.spec,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            step_nbytes=self._step_nbytes(config),
            memory=CudaMemory(self._device),
        )

    def _step_nbytes(self, config: EngineConfig) -> int:
        """What is allocated on a device after the pool, and the largest step's scratch."""
        rows, vocab_size = config.max_num_seqs, self.spec.vocab_size
        return (
            scratch_nbytes(self.spec, self._max_num_tokens)
            + rows * vocab_size * self.spec.dtype.itemsize
            + Sampler.peak_nbytes(rows, vocab_size)
            + BatchState.nbytes(rows, vocab_size, self.max_model_len)
        )


class _Launched:
    """A step of which only the copy to the host is left."""

    def __init__(
        self, output: SamplerOutput | None, prompt_logprobs: dict[int, list[PositionLogprobs]]
    ) -> None:
        self._output = output
        self._prompt_logprobs = prompt_logprobs
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        """See `InFlight`."""
        if self._result is None:
            self._result = self._read()
        return self._result

    def is_done(self) -> bool:
        """See `InFlight`."""
        return True

    def _read(self) -> StepResult:
        output = self._output
        if output is None:
            empty = np.zeros(0, dtype=np.int64)
            return StepResult(token_ids=empty, prompt_logprobs=self._prompt_logprobs)
        with plain_torch(output.token_ids.device.type):
            return StepResult(
                token_ids=output.token_ids.cpu().numpy(),
                logprobs=output.read_logprobs(),
                prompt_logprobs=self._prompt_logprobs,
                logits=output.logits,
                scores=output.scores,
                errors=dict(output.read_errors()),
            )


@contextmanager
def plain_torch(device_type: str) -> Iterator[None]:
    """No gradients, no inference mode, no autocast, whatever the calling thread has set: these
    belong to the thread, and tensors made under inference mode could not be used outside it.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled(device_type):  # asking costs less than entering: 10 us a step
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(torch.no_grad())
        yield


def _attention_backend(
    config: EngineConfig,
    spec: ModelSpec,
    own: AttentionBackend,
    device: torch.device,
    plugins: PluginManager,
) -> AttentionBackend:
    hooks = plugins.hooks.attention_backend or ()
    brought: AttentionBackend | None = plugins.first(hooks, config=config, spec=spec, device=device)
    backend = brought or own
    wanted = config.attention_backend
    if wanted not in (None, backend.name):
        raise ConfigError(
            f"attention_backend={wanted!r} is not available: expected {backend.name!r}. Leave it "
            "at None, or pass a plugin with nanoserve_attention_backend that brings it."
        )
    if config.batch_invariant and not backend.batch_invariant:
        raise ConfigError(
            f"batch_invariant=True is not served by attention backend {backend.name!r}: expected "
            "one whose rows do not depend on each other. Leave attention_backend at None."
        )
    return backend


def _reason(config: EngineConfig, *, is_brought: bool) -> str:
    """Why attention is computed by whom it is."""
    if config.attention_backend is not None:
        return "asked for by attention_backend"
    return "brought by a plugin" if is_brought else "the default of this device"


def _block_size(config: EngineConfig, backend: AttentionBackend) -> int:
    block_size = config.block_size or backend.default_block_size
    if not backend.supports_block_size(block_size):
        raise ConfigError(
            f"block_size={block_size} is not served by attention backend {backend.name!r}: "
            f"expected one like {backend.default_block_size}, its default. Leave it at None."
        )
    return block_size


def _sampler(config: EngineConfig, device: torch.device, plugins: PluginManager) -> SamplerProtocol:
    sampler: SamplerProtocol | None = plugins.first(
        plugins.hooks.sampler or (), config=config, device=device
    )
    return sampler or Sampler()


def _logits_processors(
    config: EngineConfig, spec: ModelSpec, device: torch.device, plugins: PluginManager
) -> list[BatchLogitsProcessor]:
    hooks = plugins.hooks.logits_processors or ()
    lists = plugins.collect(hooks, config=config, spec=spec, device=device)
    return [processor for processors in lists for processor in processors]
