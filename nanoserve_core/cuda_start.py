"""Puts together the runner of a model on a CUDA device: which attention, captured or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanoserve_core.compile_ahead import compiling_only
from nanoserve_core.cuda_graphs import PlainCalls, StepGraphs
from nanoserve_core.cuda_runner import CudaRunner, StepTools
from nanoserve_core.cuda_stream import CudaStream
from nanoserve_core.layers.flash_attention import FlashAttention
from nanoserve_core.model_runner import ModelRunner

if TYPE_CHECKING:
    from nanoserve_core.config import EngineConfig
    from nanoserve_core.cuda_graphs import Replays
    from nanoserve_core.layers.attention import AttentionBackend
    from nanoserve_core.models.source import ModelSource
    from nanoserve_core.plugins import PluginManager


def create_cuda_runner(
    source: ModelSource, config: EngineConfig, plugins: PluginManager
) -> ModelRunner:
    """The runner of a model on a CUDA device.

    One whose heads our kernels were not written for, or that is asked to (``attention_backend=
    "torch"``), runs in plain torch, a step at a time. Raises as `ModelRunner.create`.
    """
    from nanoserve_core.kernels import triton_ops
    from nanoserve_core.layers.triton_attention import TritonAttention

    is_served = TritonAttention.serves(source.spec)
    if config.attention_backend == "torch" or not is_served:
        runner = ModelRunner(source, config, plugins)
        if not is_served:
            runner.backend_names["attention_reason"] = "our kernels do not serve such heads"
        return runner
    with torch.cuda.device(source.device):
        stream, is_captured = CudaStream(source.device), not config.enforce_eager
        replays: Replays = PlainCalls()
        if is_captured:
            replays = StepGraphs(stream.stream, stream.calls)
        backend = _attention(source, config)
        tools = StepTools(
            ops=triton_ops,
            backend=backend,
            stream=stream,
            replays=replays,
            use_pdl=is_captured,
            pack_size=TritonAttention.pack_size(source.spec) if backend.name == "triton" else 1,
            compiling_only=compiling_only,
        )
        cuda_runner = CudaRunner(source, config, plugins, tools)
        cuda_runner.compile_for_first_tokens()
        torch.cuda.synchronize(source.device)  # what was filled on the caller's stream is there
        return cuda_runner


def _attention(source: ModelSource, config: EngineConfig) -> AttentionBackend:
    from nanoserve_core.layers.triton_attention import TritonAttention

    if config.attention_backend == FlashAttention.name:
        FlashAttention.check(source.spec)
        properties = torch.cuda.get_device_properties(source.device)
        return FlashAttention(source.spec, num_multiprocessors=properties.multi_processor_count)
    return TritonAttention(
        source.spec,
        device=source.device,
        max_num_rows=config.max_num_seqs,
        max_kv_len=min(config.max_model_len, source.spec.max_position_embeddings),
        use_pdl=not config.enforce_eager,
        batch_invariant=config.batch_invariant,
    )
