"""`ContinuousBatching`: transformers' entry points for continuous batching on an installed model.

The functions have transformers' names and arguments, and results of the same form. They are plain
`generate` in what they give, and one running batch in how.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hf_generate_shim.batch_arguments import BatchArguments
from hf_generate_shim.batching_options import CONFIG_ARGUMENT, BatchingOptionsReader
from hf_generate_shim.manager import BatchingManager
from hf_generate_shim.pause import EnginePause
from hf_generate_shim.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from hf_generate_shim.call import HFObject
    from hf_generate_shim.handle import Handle


class ContinuousBatching:
    """The entry points of one handle. Any thread."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._options = BatchingOptionsReader()
        self._turns = Turns()
        self.pause = EnginePause(self._turns)
        self._kept: BatchingManager | None = None
        self._managers: weakref.WeakSet[BatchingManager] = weakref.WeakSet()

    @property
    def options(self) -> BatchingOptionsReader:
        """Reads a `ContinuousBatchingConfig`."""
        return self._options

    def keep(self, manager: BatchingManager) -> None:
        """Give ``manager`` to the next `init_continuous_batching`."""
        self._kept = manager

    def cancel(self) -> None:
        """Cancel every open request."""
        for manager in list(self._managers):
            manager.cancel_all()

    def close(self) -> None:
        """Let go of everything, since the model is uninstalled."""
        self._kept = None
        self.pause.end()
        self._turns.close()

    def init_continuous_batching(
        self,
        model: nn.Module,
        generation_config: HFObject = None,
        continuous_batching_config: HFObject = None,
        workload_hints: HFObject = None,
    ) -> BatchingManager:
        """A manager, not yet started; the one that was kept, if it is idle and its config equal.

        The configs are read now and left as they are. ``workload_hints`` size transformers' own
        cache. Raises what `generate` raises for the config, and `ConfigError`.
        """
        del workload_hints
        return self._manager(model, generation_config, continuous_batching_config, {})

    @contextmanager
    def continuous_batching_context_manager(
        self,
        model: nn.Module,
        generation_config: HFObject = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: HFObject = None,
        persistent_manager: bool = False,
        warmup: bool = True,
        workload_hints: HFObject = None,
    ) -> Iterator[BatchingManager]:
        """A manager that is started, and stopped after the block.

        Its requests are finished, those of a block that raises cancelled.
        """
        manager = self.init_continuous_batching(
            model, generation_config, continuous_batching_config, workload_hints
        )
        with _session(manager, block, timeout, keep=persistent_manager, warmup=warmup):
            yield manager

    def generate_batch(
        self,
        model: nn.Module,
        inputs: Sequence[Sequence[int]],
        generation_config: HFObject = None,
        continuous_batching_config: HFObject = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: HFObject,
    ) -> dict[str, HFObject]:
        """One `GenerationOutput` per prompt and returned sequence, by ``req_<number>``, in order.

        ``kwargs`` are any other arguments of `generate`. A prompt that is none or that fails has
        ``error`` in its output. Raises what `generate` raises for the arguments, `EngineDead` and
        `EngineClosed`.
        """
        if len(inputs) == 0:
            return {}
        manager = self._manager(model, generation_config, continuous_batching_config, kwargs)
        with _session(manager, True, None, keep=persistent_manager, warmup=warmup):
            return manager.generate(
                inputs, record_timestamps=record_timestamps, progress_bar=progress_bar
            )

    def destroy_cached_continuous_batching_manager(self, model: nn.Module) -> None:
        """Stop and forget the manager that was kept."""
        del model
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.destroy()

    def _manager(
        self,
        model: HFObject,
        generation_config: HFObject,
        continuous_batching_config: HFObject,
        common: dict[str, HFObject],
    ) -> BatchingManager:
        if continuous_batching_config is None:
            config = model.generation_config if generation_config is None else generation_config
            continuous_batching_config = getattr(config, CONFIG_ARGUMENT, None)
        options = self._options.read(continuous_batching_config)
        arguments = BatchArguments(generation_config, common)
        if self._kept is not None and self._kept.has(arguments, options):
            return self._kept
        arguments.planner(self._handle, model, {})  # refuses what no request can have
        manager = BatchingManager(
            self._handle, model, arguments, options, turns=self._turns, pause=self.pause
        )
        self._managers.add(manager)
        return manager


@contextmanager
def _session(
    manager: BatchingManager, block: bool, timeout: float | None, *, keep: bool, warmup: bool
) -> Iterator[None]:
    if warmup and not manager.warmed_up:
        manager.warmup()
    manager.start()
    try:
        yield
    except BaseException:
        manager.stop(block=block, timeout=timeout, hard_stop=True)
        raise
    manager.stop(block=block, timeout=timeout, keep_for_next_session=keep)
