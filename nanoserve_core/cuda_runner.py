"""`CudaRunner`: steps that stay on the device, some of them launched before the oldest is read.

::

    what changed -> [ slots -> rows -> layers -> logits -> cut, tokens -> advance ] -> tokens to the
                      decode rows, then rows of prompts: captured, one for each size        host

A decode row's input is on the device, whether the host knows it or not, so launching waits for
nothing. In a step with a row that asks for the host's part in sampling (`HostWishes`) what is
captured ends with the logits, and `Sampler` and `BatchState` take over, as on a CPU; that row's
neighbours get the same tokens either way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanoserve_core.cuda_graphs import bucket_of, buckets_for
from nanoserve_core.cuda_outcomes import MAX_UNREAD_STEPS, Outcomes
from nanoserve_core.cuda_stream import Uploads
from nanoserve_core.device_rows import DeviceRows, max_num_delta_ints
from nanoserve_core.device_sampling import DeviceSampling
from nanoserve_core.errors import EngineClosed
from nanoserve_core.host_wishes import HostWishes
from nanoserve_core.kernels.slot_tables import SlotLayout
from nanoserve_core.layers.attention import ForwardBatch
from nanoserve_core.model_runner import ModelRunner, plain_torch
from nanoserve_core.models.decode_step import DecodeStep
from nanoserve_core.models.qwen3 import Qwen3Model
from nanoserve_core.prompt_inputs import PromptInputs, PromptShape, num_prompt_ints
from nanoserve_core.sampler import Sampler
from nanoserve_core.step_inputs import StepInputs
from nanoserve_core.step_parts import StepPart, Then, first_parts, usual_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from nanoserve_core.config import EngineConfig
    from nanoserve_core.cuda_graphs import Replays
    from nanoserve_core.cuda_stream import StepStream
    from nanoserve_core.kernels.step_ops import StepOps
    from nanoserve_core.layers.attention import AttentionBackend, IntArray
    from nanoserve_core.model_runner import InFlight
    from nanoserve_core.models.qwen3 import Qwen3Weights
    from nanoserve_core.models.source import ModelSource
    from nanoserve_core.plan import ScheduledSeq, StepPlan
    from nanoserve_core.plugins import PluginManager
    from nanoserve_core.request import PositionLogprobs
    from nanoserve_core.step_inputs import StepBatch

GRAPH_NBYTES = 512 << 20
"""What the graphs of all buckets, the libraries' workspaces and compiled kernels may take."""


_NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, kw_only=True)
class StepTools:
    """What carries out a step; on a CPU, for tests, something that does the same at once."""

    ops: StepOps
    backend: AttentionBackend
    stream: StepStream
    replays: Replays
    use_pdl: bool
    pack_size: int = 1
    """Decode rows whose shared blocks the backend reads once."""
    compiling_only: Callable[[], AbstractContextManager[None]] | None = None
    """Within it, ops compile their kernels and do not run; None where there is nothing to compile.
    """


class CudaRunner(ModelRunner):
    """`ModelRunner` of a CUDA device. Used by one thread at a time."""

    run_ahead = 2
    max_run_ahead = 32

    def __init__(
        self, source: ModelSource, config: EngineConfig, plugins: PluginManager, tools: StepTools
    ) -> None:
        """See `ModelRunner`; most use `ModelRunner.create`."""
        self._tools, self._stream = tools, tools.stream
        self._step_ops = tools.ops
        super().__init__(source, config, plugins, ops=tools.ops, backend=tools.backend)
        device, rows = self._device, config.max_num_seqs
        self._inputs = StepInputs(
            max_num_seqs=rows,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            device=torch.device("cpu"),
        )
        layout = self._layout(rows)
        self._sent = torch.zeros(
            num_prompt_ints(self._max_num_tokens, rows), dtype=torch.int32, device=device
        )
        self._uploads = Uploads(
            tools.stream, 3 * max_num_delta_ints(layout) + 6 * self._sent.shape[0]
        )
        self._rows = DeviceRows(
            layout,
            self.spec,
            max_model_len=self.max_model_len,
            ops=tools.ops,
            uploads=self._uploads,
            device=device,
            pack_size=tools.pack_size,
        )
        self._prompt_inputs = PromptInputs(
            max_num_tokens=self._max_num_tokens,
            max_num_rows=rows,
            uploads=self._uploads,
            device=device,
        )
        is_captured = (
            self._backend.graph_safe
            and isinstance(self._sampler, Sampler)
            and isinstance(self._model, Qwen3Model)
        )
        self._wishes = HostWishes(self._state, all_steps=not is_captured)
        self._sampling = DeviceSampling(rows, self.spec, tools.ops, self._rows, device)
        self._buckets = buckets_for(rows)
        self._outcomes = Outcomes(rows, tools.stream)
        self._unknown_tokens = torch.zeros(rows, dtype=torch.int64)
        self._decode_step = self._make_decode_step(source.weights)
        self.num_host_sampled_steps = 0
        """Steps that went through the host's sampler."""
        assert self.max_run_ahead < MAX_UNREAD_STEPS, "the ring would be overwritten"
        self.backend_names["steps"] = "captured" if is_captured else "eager"

    def launch(self, plan: StepPlan) -> InFlight:
        """See `ModelRunner.launch`: returns when the step is enqueued."""
        if self._is_closed:
            raise EngineClosed(
                "this CudaRunner is closed: expected an open one. Make a new engine."
            )
        with plain_torch(self._device.type), self._stream.entered():
            self._wishes.apply(plan)
            self._rows.apply(plan)
            self._inputs.apply(plan)
            self._note_scored(plan)
            self._copy_blocks(plan)
            self._outcomes.make_room()
            if not plan.seqs:
                return self._outcomes.take([])
            if self._wishes.all_steps or any(seq.num_prompt_logprobs for seq in plan.seqs):
                return self._launch_eager(plan)
            if self._wishes.are_in(plan):
                return self._launch_for_host_sampler(plan)
            return self._launch_captured(plan)

    def warmup(self, *, max_num_seqs: int, max_prompt_tokens: int) -> int:
        """See `ModelRunner.warmup`: steps of nothing but padding."""
        if self._wishes.all_steps:
            return 0
        parts = usual_parts(
            self._buckets,
            self._prompt_inputs.shapes(max_prompt_tokens),
            max_num_rows=max_num_seqs,
            can_share=self._tools.pack_size > 1,
        )
        self._compile(parts)
        with plain_torch(self._device.type), self._stream.entered():
            for part in parts:
                self._run_padding(part)
            mark = self._stream.make_mark()
            self._stream.set(mark)
            mark.wait()
        return len(parts)

    def compile_for_first_tokens(self) -> None:
        """Have ready what a first prompt and its next tokens need; runs nothing."""
        if not self._wishes.all_steps:
            self._compile(first_parts(self._prompt_inputs.shapes(self._max_num_tokens)))

    def memory_nbytes(self) -> dict[str, int]:
        """See `ModelRunner.memory_nbytes`."""
        found = super().memory_nbytes()
        return {**found, "graphs": self._tools.replays.nbytes} if found else found

    def close(self) -> None:
        """See `ModelRunner.close`."""
        if self._is_closed:
            return
        with self._stream.entered():
            self._tools.replays.clear()
        self._stream.close()
        super().close()
        del self._rows, self._sampling, self._decode_step, self._uploads, self._outcomes
        del self._tools, self._step_ops, self._wishes, self._prompt_inputs, self._sent
        self._stream.give_back_memory()

    def _launch_captured(self, plan: StepPlan) -> InFlight:
        """Everything on the device."""
        decode, prompts = _parts(plan)
        tokens: list[tuple[Tensor, int]] = []
        order = self._send_rows(decode)
        if decode:
            self._run_decode(decode, self._then(decode))
            tokens.append((self._sampling.next_tokens(), len(decode)))
        if prompts:
            self._run_prompts(prompts, self._then(prompts))
            num_sampled = sum(seq.samples for seq in prompts)
            tokens.append((self._sampling.next_tokens(), num_sampled))
        return self._outcomes.take(tokens, order)

    def _launch_for_host_sampler(self, plan: StepPlan) -> InFlight:
        """The logits on the device, and the host's sampler for all rows of the step."""
        decode, prompts = _parts(plan)
        parts: list[Tensor] = []
        order = self._send_rows(decode)
        if decode:
            self._run_decode(decode, Then.NOTHING)
            logits = self._sampling.logits[: len(decode)]
            if order is not None:
                (places,) = self._send([np.argsort(order)])
                logits = logits.index_select(0, places)
            elif prompts:
                logits = logits.clone()  # the prompts' logits come to the same memory
            parts.append(logits)
        if prompts:
            self._run_prompts(prompts, Then.NOTHING)
            parts.append(self._sampling.logits[: sum(seq.samples for seq in prompts)])
        logits = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self._sample_on_host(plan, logits, {})

    def _launch_eager(self, plan: StepPlan) -> InFlight:
        """As the model's own code says it, and the host's sampler: for other models, samplers and
        backends than ours, and for logprobs of prompts.
        """
        self._send_rows(())
        self._rows.receive()
        step, forward = self._upload(plan.seqs, num_decode_seqs=plan.num_decode_seqs)
        hidden_states = self._model.hidden_states(forward, self._kv_cache)
        prompt_logprobs = {
            row: self._prompt_logprobs(seq, hidden_states, int(forward.host_query_start[row]))
            for row, seq in enumerate(plan.seqs)
            if seq.num_prompt_logprobs
        }
        logits = hidden_states.new_empty(0, self.spec.vocab_size)
        if len(step.sampled_slots):
            logits = self._model.logits(hidden_states, forward.logits_indices)
        return self._sample_on_host(plan, logits, prompt_logprobs)

    def _sample_on_host(
        self,
        plan: StepPlan,
        logits: Tensor,
        prompt_logprobs: dict[int, list[PositionLogprobs]],
    ) -> InFlight:
        """logits: [sampled rows, vocab_size], in the plan's order."""
        self.num_host_sampled_steps += 1
        self._wishes.prepare(plan.seqs)
        self._state.grammars.start(plan.seqs)
        sampled = [seq for seq in plan.seqs if seq.samples]
        if not sampled:
            return self._outcomes.take_eager(None, prompt_logprobs)
        slots = np.array([seq.slot for seq in sampled])
        ends = np.array([seq.end for seq in sampled])
        output = self._sampler.sample(logits, slots, ends, self._state)
        self._state.advance(slots, output.token_ids)
        rows = self._rows.loose_rows(*self._send([slots]))
        self._rows.gather(rows)
        self._sampling.take(rows, output.token_ids)
        return self._outcomes.take_eager(output, prompt_logprobs)

    def _send_rows(self, decode: tuple[ScheduledSeq, ...]) -> IntArray | None:
        """Send what has changed; gives the order of the decode rows where it is not the plan's."""
        if decode:
            bucket = bucket_of(len(decode), self._buckets)
            slots = [seq.slot for seq in decode]
            self._rows.set_decode_rows(slots, bucket, self._inputs.tables_of)
        self._rows.send()
        return self._rows.order if decode else None

    def _then(self, seqs: tuple[ScheduledSeq, ...]) -> Then:
        return Then.FILTER if self._wishes.have_filters(seqs) else Then.SAMPLE

    def _run_decode(self, seqs: tuple[ScheduledSeq, ...], then: Then) -> None:
        bucket = bucket_of(len(seqs), self._buckets)
        self._replay(StepPart(bucket, self._rows.order is not None, then))

    def _decode(self, num_rows: int, is_packed: bool, then: Then) -> None:
        """What is captured of the decode rows."""
        pdl = self._tools.use_pdl
        self._rows.receive(pdl=pdl)
        rows = self._rows.decode_rows(num_rows, packed=is_packed)
        self._rows.gather(rows, pdl=pdl)
        logits = self._sampling.logits[:num_rows]
        self._decode_step.run(rows, self._kv_cache, logits)
        if then is not Then.NOTHING:
            self._sampling.run(logits, rows, has_filters=then is Then.FILTER, pdl=pdl)

    def _run_prompts(self, seqs: tuple[ScheduledSeq, ...], then: Then) -> None:
        """Chunks of prompts. The tokens of those that end their prompt are the first of the ring's
        entry, and so are their logits.
        """
        step = self._inputs.arrays(seqs)
        shape = self._prompt_inputs.shape_of(step.num_tokens, len(seqs))
        # Alone and whole: the last chunk of one prompt beside others may fill a step as well.
        is_long = len(seqs) == 1 and step.num_tokens == self._max_num_tokens == seqs[0].end
        self._prompt_inputs.send(step, shape)
        self._replay(StepPart(shape, is_long, then))

    def _prompts(self, shape: PromptShape, is_long: bool, then: Then) -> None:
        """What is captured of prompts. ``is_long``: the step is the first of a long prompt."""
        self._rows.receive()
        inputs = self._prompt_inputs.tensors(shape)
        whole = np.array([shape.num_tokens], dtype=np.int32) if is_long else _NOTHING
        batch = ForwardBatch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_start=inputs.query_start,
            kv_lens=inputs.kv_lens,
            block_tables=self._rows.tables.block_tables.index_select(0, inputs.row_slots),
            logits_indices=inputs.logits_indices,
            num_decode_seqs=0,
            host_query_start=_NOTHING,
            host_kv_lens=whole,
            host_block_tables=_NOTHING,
        )
        hidden_states = self._model.hidden_states(batch, self._kv_cache)
        logits = self._sampling.logits[: shape.num_rows]
        assert isinstance(self._model, Qwen3Model), "others are not captured"
        self._model.logits(hidden_states, inputs.logits_indices, out=logits)
        if then is not Then.NOTHING:
            rows = self._rows.loose_rows(inputs.sampled_slots)
            self._rows.gather(rows)
            self._sampling.run(logits, rows, has_filters=then is Then.FILTER)

    def _replay(self, part: StepPart) -> None:
        self._tools.replays.run(part, self._function(part))

    def _function(self, part: StepPart) -> Callable[[], None]:
        size, is_special, then = part
        if isinstance(size, PromptShape):
            return partial(self._prompts, size, is_special, then)
        return partial(self._decode, size, is_special, then)

    def _compile(self, parts: list[StepPart]) -> None:
        if self._tools.compiling_only is None:
            return
        model, decode_step = self._model, self._decode_step
        assert isinstance(model, Qwen3Model), "others are not captured"
        with (
            plain_torch(self._device.type),
            self._stream.entered(),
            self._tools.compiling_only(),
        ):
            try:
                # Each launch costs milliseconds here, and all layers need the same kernels.
                self._model, self._decode_step = model.of_one_layer(), decode_step.of_one_layer()
                for part in parts:
                    if isinstance(part.size, PromptShape):  # torch's own ops do run
                        self._prompt_inputs.send_padding(part.size)
                    self._function(part)()
            finally:
                self._model, self._decode_step = model, decode_step

    def _run_padding(self, part: StepPart) -> None:
        """Writes no K/V and no slot. It takes its place among the steps, like any other."""
        self._outcomes.make_room()
        if isinstance(part.size, PromptShape):
            self._rows.send()
            self._prompt_inputs.send_padding(part.size)
        else:
            self._rows.set_decode_rows([], part.size, self._inputs.tables_of)
            self._rows.send()
        self._replay(part)
        self._sampling.next_tokens()
        self._outcomes.take([]).wait()

    def _upload(
        self, seqs: tuple[ScheduledSeq, ...], *, num_decode_seqs: int
    ) -> tuple[StepBatch, ForwardBatch]:
        """The rows of an eager step, on the host and, in one copy, on the device."""
        step = self._inputs.batch(_plan_of(seqs, num_decode_seqs), self._unknown_tokens)
        host = step.forward
        slots = np.array([seq.slot for seq in seqs])
        parts = [
            host.token_ids.numpy(),
            host.positions.numpy(),
            host.slot_mapping.numpy(),
            host.host_query_start,
            host.host_kv_lens,
            slots,
            host.logits_indices.numpy(),
        ]
        token_ids, positions, slot_mapping, query_start, kv_lens, row_slots, indices = self._send(
            parts
        )
        unknown = [row for row, seq in enumerate(seqs) if not seq.token_ids]
        if unknown:  # rows of one token each, whose last token only the device knows
            rows = torch.tensor(unknown, device=self._device)
            where = query_start.index_select(0, rows).long()
            newest = self._rows.last_tokens(row_slots.index_select(0, rows))
            token_ids.index_copy_(0, where, newest)
        forward = replace(
            host,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=query_start,
            kv_lens=kv_lens,
            block_tables=self._rows.tables.block_tables.index_select(0, row_slots),
            logits_indices=indices,
        )
        return step, forward

    def _copy_blocks(self, plan: StepPlan) -> None:
        """See `ModelRunner`; without waiting, as a copy from ordinary memory would."""
        if plan.block_copies:
            sources, destinations = self._send(list(np.array(plan.block_copies).T))
            self._ops.copy_blocks(self._kv_cache.tensor, sources=sources, destinations=destinations)

    def _send(
        self,
        parts: Sequence[np.ndarray[Any, Any]],  # Any: ints of any width
    ) -> tuple[Tensor, ...]:
        """The arrays on the device, int32 and side by side, each from a multiple of 16 bytes on."""
        ends = list(accumulate(-(-len(part) // 4) * 4 for part in parts))
        piece = self._uploads.piece(ends[-1])
        for part, start in zip(parts, (0, *ends), strict=False):
            piece[start : start + len(part)] = part
        self._uploads.send(self._sent, ends[-1])
        return tuple(
            self._sent[start : start + len(part)]
            for part, start in zip(parts, (0, *ends), strict=False)
        )

    def _holders(self) -> dict[str, object]:
        """See `ModelRunner._holders`."""
        return {
            **super()._holders(),
            "slots": self._rows,
            "sampling": self._sampling,
            "decode_step": self._decode_step,
            "inputs": [self._prompt_inputs, self._sent],
        }

    def _make_decode_step(self, weights: Qwen3Weights) -> DecodeStep:
        return DecodeStep(
            self.spec,
            weights,
            backend=self._backend,
            ops=self._step_ops,
            max_num_rows=self._buckets[-1],
            num_positions=self.max_model_len,
            use_pdl=self._tools.use_pdl,
        )

    def _use(self, weights: Qwen3Weights) -> None:
        """See `ModelRunner`; what was captured points to where the weights were."""
        with self._stream.entered():
            self._tools.replays.clear()
            super()._use(weights)
            self._sampling.logits = self._sampling.logits.to(self.spec.dtype)
            self._decode_step = self._make_decode_step(weights)

    def _layout(self, max_num_seqs: int) -> SlotLayout:
        return SlotLayout(
            num_slots=max_num_seqs,
            max_num_blocks=-(-self.max_model_len // self.block_size),
            block_size=self.block_size,
        )

    def _step_nbytes(self, config: EngineConfig) -> int:
        """See `ModelRunner`: with the rows, the arenas and the graphs."""
        rows = config.max_num_seqs
        return (
            super()._step_nbytes(config)
            + DeviceRows.nbytes(self._layout(rows))
            + DecodeStep.nbytes(self.spec, rows)
            + rows * self.spec.vocab_size * self.spec.dtype.itemsize
            + GRAPH_NBYTES
        )


def _parts(plan: StepPlan) -> tuple[tuple[ScheduledSeq, ...], tuple[ScheduledSeq, ...]]:
    """Decode rows, and rows of prompts."""
    return plan.seqs[: plan.num_decode_seqs], plan.seqs[plan.num_decode_seqs :]


def _plan_of(seqs: tuple[ScheduledSeq, ...], num_decode_seqs: int) -> StepPlan:
    from nanoserve_core.plan import StepPlan

    return StepPlan(step_id=-1, seqs=seqs, num_decode_seqs=num_decode_seqs)
