"""`CudaRunner`: steps that stay on the device, two of them launched before the oldest is read.

::

    deltas -> [ rows -> layers -> logits -> cut, tokens -> advance ]  captured, one per bucket
           -> rows of prompts: the same, eagerly                     -> tokens to the host

A decode row's input is on the device, whether the host knows it or not, so launching waits for
nothing. Steps with a row that asks for the host's part in sampling (`HostWishes`) go through
`Sampler` and `BatchState` instead, as on a CPU; that row's neighbours get the same tokens either
way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanoserve_core.cuda_graphs import PlainCalls, StepGraphs, bucket_of, buckets_for
from nanoserve_core.cuda_stream import CudaStream, Staging
from nanoserve_core.device_rows import RING_LENGTH, DeviceRows
from nanoserve_core.errors import EngineClosed, RequestFailed
from nanoserve_core.host_wishes import HostWishes
from nanoserve_core.kernels.sampling_scratch import FilterTiles, TileStatistics
from nanoserve_core.kernels.slot_tables import FAILED, PickedTokens, SlotLayout
from nanoserve_core.model_runner import ModelRunner, StepResult, plain_torch
from nanoserve_core.models.decode_step import DecodeStep
from nanoserve_core.models.qwen3 import Qwen3Model
from nanoserve_core.sampler import Sampler
from nanoserve_core.step_inputs import StepInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nanoserve_core.config import EngineConfig, ModelSpec
    from nanoserve_core.cuda_graphs import Replays
    from nanoserve_core.cuda_stream import HostInts, Mark, StepStream
    from nanoserve_core.kernels.slot_tables import StepRows
    from nanoserve_core.kernels.step_ops import StepOps
    from nanoserve_core.layers.attention import AttentionBackend, ForwardBatch, IntArray
    from nanoserve_core.model_runner import InFlight
    from nanoserve_core.models.qwen3 import Qwen3Weights
    from nanoserve_core.models.source import ModelSource
    from nanoserve_core.plan import ScheduledSeq, StepPlan
    from nanoserve_core.plugins import PluginManager
    from nanoserve_core.request import PositionLogprobs
    from nanoserve_core.sampler import SamplerOutput

MAX_UNREAD_STEPS = RING_LENGTH // 2 - 1
"""Steps whose tokens may be unread when another is launched: the ring holds two entries of each."""
GRAPH_NBYTES = 512 << 20
"""What the graphs of all buckets, the libraries' workspaces and compiled kernels may take."""


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


class CudaRunner(ModelRunner):
    """`ModelRunner` of a CUDA device. Used by one thread at a time."""

    run_ahead = 2

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
        self._rows = DeviceRows(
            self._layout(rows),
            self.spec,
            max_model_len=self.max_model_len,
            ops=tools.ops,
            stream=tools.stream,
            device=device,
            pack_size=tools.pack_size,
        )
        is_captured = (
            self._backend.graph_safe
            and isinstance(self._sampler, Sampler)
            and isinstance(self._model, Qwen3Model)
        )
        self._wishes = HostWishes(self._state, all_steps=not is_captured)
        self._sampling = _DeviceSampling(rows, self.spec, tools.ops, self._rows, device)
        self._buckets = buckets_for(rows)
        self._staging = Staging(tools.stream, 3 * self._max_num_tokens + 6 * rows + 64, device)
        self._outcomes = _Outcomes(rows, tools.stream)
        self._unknown_tokens = torch.zeros(rows, dtype=torch.int64)
        self._decode_step = self._make_decode_step(source.weights)
        self.num_eager_steps = 0
        """Steps that went through the host's sampler."""
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
            if self._wishes.are_in(plan):
                return self._launch_eager(plan)
            return self._launch_captured(plan)

    def close(self) -> None:
        """See `ModelRunner.close`."""
        if self._is_closed:
            return
        with self._stream.entered():
            self._tools.replays.clear()
        self._stream.close()
        super().close()
        del self._rows, self._sampling, self._decode_step, self._staging, self._outcomes
        del self._tools, self._step_ops, self._wishes

    def _launch_captured(self, plan: StepPlan) -> InFlight:
        num_decode = plan.num_decode_seqs
        decode, prompts = plan.seqs[:num_decode], plan.seqs[num_decode:]
        tokens: list[tuple[Tensor, int]] = []
        order = None
        if decode:
            bucket = bucket_of(num_decode, self._buckets)
            slots = [seq.slot for seq in decode]
            self._rows.set_decode_rows(slots, bucket, self._inputs.tables_of)
            order = self._rows.order
            is_packed = order is not None
            self._rows.send()
            self._rows.gather()
            has_filters = self._wishes.have_filters(decode)
            function = partial(self._decode, bucket, has_filters, is_packed)
            self._tools.replays.run((bucket, has_filters, is_packed), function)
            tokens.append((self._sampling.next_tokens(), num_decode))
        if prompts:
            self._rows.send()
            tokens += self._prefill(prompts)
        return self._outcomes.take(tokens, order)

    def _decode(self, num_rows: int, has_filters: bool, is_packed: bool) -> None:
        """What is captured."""
        rows = self._rows.decode_rows(num_rows, packed=is_packed)
        logits = self._sampling.logits[:num_rows]
        self._decode_step.run(rows, self._kv_cache, logits)
        pdl = self._tools.use_pdl
        self._sampling.run(logits, rows, has_filters=has_filters, pdl=pdl)

    def _prefill(self, seqs: tuple[ScheduledSeq, ...]) -> list[tuple[Tensor, int]]:
        """Chunks of prompts; where the tokens of those are that end their prompt, and how many."""
        forward, slots = self._upload(seqs, num_decode_seqs=0)
        hidden_states = self._model.hidden_states(forward, self._kv_cache)
        if slots.shape[0] == 0:
            return []
        rows = self._rows.loose_rows(slots)
        logits = self._model.logits(hidden_states, forward.logits_indices)
        self._sampling.run(logits, rows, has_filters=self._wishes.have_filters(seqs))
        return [(self._sampling.next_tokens(), slots.shape[0])]

    def _launch_eager(self, plan: StepPlan) -> InFlight:
        """The host's sampler, for all rows of the step."""
        self.num_eager_steps += 1
        self._rows.send()
        self._wishes.prepare(plan.seqs)
        forward, slots = self._upload(plan.seqs, num_decode_seqs=plan.num_decode_seqs)
        hidden_states = self._model.hidden_states(forward, self._kv_cache)
        prompt_logprobs = {
            row: self._prompt_logprobs(seq, hidden_states, int(forward.host_query_start[row]))
            for row, seq in enumerate(plan.seqs)
            if seq.num_prompt_logprobs
        }
        if slots.shape[0] == 0:
            return self._outcomes.take_eager(None, prompt_logprobs)
        logits = self._model.logits(hidden_states, forward.logits_indices)
        sampled = [seq for seq in plan.seqs if seq.samples]
        host_slots = np.array([seq.slot for seq in sampled])
        ends = np.array([seq.end for seq in sampled])
        output = self._sampler.sample(logits, host_slots, ends, self._state)
        self._state.advance(host_slots, output.token_ids)
        self._sampling.take(self._rows.loose_rows(slots), output.token_ids)
        self._rows.note_advanced()
        return self._outcomes.take_eager(output, prompt_logprobs)

    def _upload(
        self, seqs: tuple[ScheduledSeq, ...], *, num_decode_seqs: int
    ) -> tuple[ForwardBatch, Tensor]:
        """The rows as the model sees them, in one copy; and the slots of those that sample."""
        some = _plan_of(seqs, num_decode_seqs)
        step = self._inputs.batch(some, self._unknown_tokens)
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
            step.sampled_slots,
        ]
        token_ids, positions, slot_mapping, query_start, kv_lens, row_slots, indices, sampled = (
            self._send(parts)
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
        return forward, sampled

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
        buffer, starts, end = self._staging.buffer(), [], 0
        for part in parts:
            starts.append(end)
            buffer[end : end + len(part)] = part
            end += -(-len(part) // 4) * 4
        sent = self._staging.send(end)
        return tuple(sent[at : at + len(part)] for at, part in zip(starts, parts, strict=True))

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


class _DeviceSampling:
    """Logits to tokens to slots, on the device; and where in the ring they are."""

    def __init__(
        self,
        max_num_rows: int,
        spec: ModelSpec,
        ops: StepOps,
        rows: DeviceRows,
        device: torch.device,
    ) -> None:
        self._ops = ops
        self._rows = rows
        vocab_size = spec.vocab_size
        self.logits = torch.zeros(max_num_rows, vocab_size, dtype=spec.dtype, device=device)
        self._cut = torch.zeros(max_num_rows, dtype=torch.float32, device=device)
        self._stats = TileStatistics.allocate(max_num_rows, vocab_size, device)
        self._tiles = FilterTiles.allocate(max_num_rows, vocab_size, device)
        self._picked = PickedTokens.allocate(max_num_rows, device)
        self._ring_entries = rows.ring.token_ids.unbind(0)
        self._num_advances = 0

    def run(self, logits: Tensor, rows: StepRows, *, has_filters: bool, pdl: bool = False) -> None:
        """Sample a token per row and advance. Enqueues only; capturable."""
        ops, num_rows, cut = self._ops, rows.num_rows, None
        if has_filters:
            cut = self._cut[:num_rows]
            ops.filter_tiles(logits, rows, tiles=self._tiles, pdl=pdl)
            ops.filter_cut(logits, rows, tiles=self._tiles, cut=cut, pdl=pdl)
        picked = self._picked.first(num_rows)
        ops.tile_statistics(logits, rows, cut=cut, stats=self._stats, pdl=pdl)
        ops.pick_token(logits, rows, cut=cut, stats=self._stats, picked=picked, pdl=pdl)
        ops.advance_state(self._rows.tables, rows, picked=picked, ring=self._rows.ring, pdl=pdl)

    def take(self, rows: StepRows, token_ids: Tensor) -> None:
        """Advance by tokens that the host's sampler drew."""
        picked = self._picked.first(rows.num_rows)
        picked.token_ids.copy_(token_ids)
        self._ops.advance_state(self._rows.tables, rows, picked=picked, ring=self._rows.ring)
        self.next_tokens()

    def next_tokens(self) -> Tensor:
        """[slots] int32: where the newest `run` or `take` left its tokens; once after each."""
        at = self._num_advances % RING_LENGTH
        self._num_advances += 1
        return self._ring_entries[at]


class _Outcomes:
    """Steps that are launched and not read, and the host memory their tokens come to."""

    def __init__(self, max_num_rows: int, stream: StepStream) -> None:
        self._stream = stream
        buffers = [stream.host_buffer(max_num_rows) for _ in range(MAX_UNREAD_STEPS + 1)]
        self._buffers = [(buffer, buffer.numpy(), stream.make_mark()) for buffer in buffers]
        self._next = 0
        self._unread: deque[_Launched | _LaunchedEager] = deque()

    def make_room(self) -> None:
        """Read the oldest steps when more were launched than the ring and the buffers hold."""
        while self._unread and (
            self._unread[0].is_read or len(self._unread) > MAX_UNREAD_STEPS - 1
        ):
            self._unread.popleft().wait()

    def take(self, tokens: list[tuple[Tensor, int]], order: IntArray | None = None) -> _Launched:
        """A step of the device: its tokens are the first of each tensor, one after the other.

        ``order``: the places in the plan of the first of them, where they are in another order.
        """
        buffer, array, mark = self._turn()
        if tokens:
            self._stream.download(buffer, tokens, mark)
        step = _Launched(array[: sum(num_tokens for _, num_tokens in tokens)], mark, order)
        self._unread.append(step)
        return step

    def take_eager(
        self, output: SamplerOutput | None, prompt_logprobs: dict[int, list[PositionLogprobs]]
    ) -> _LaunchedEager:
        """A step of the host's sampler."""
        _, _, mark = self._turn()
        self._stream.set(mark)
        step = _LaunchedEager(output, prompt_logprobs, mark, self._stream)
        self._unread.append(step)
        return step

    def _turn(self) -> tuple[Tensor, HostInts, Mark]:
        self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next]


class _Launched:
    """A step whose tokens are on their way; see `InFlight`."""

    def __init__(self, tokens: HostInts, mark: Mark, order: IntArray | None) -> None:
        self._tokens = tokens
        self._order = order
        self._mark = mark
        self._result: StepResult | None = None

    @property
    def is_read(self) -> bool:
        """Whether its buffer may be used again."""
        return self._result is not None

    def is_done(self) -> bool:
        """See `InFlight`."""
        return self._result is not None or self._mark.is_done()

    def wait(self) -> StepResult:
        """See `InFlight`."""
        if self._result is None:
            self._mark.wait()
            token_ids = self._tokens.astype(np.int64)
            if self._order is not None:
                token_ids[self._order] = self._tokens[: len(self._order)]
            self._result = StepResult(
                token_ids=token_ids,
                logprobs=(None,) * len(token_ids),
                errors={
                    int(row): _no_token(token_ids[row]) for row in np.flatnonzero(token_ids < 0)
                },
            )
        return self._result


class _LaunchedEager:
    """A step of the host's sampler; see `InFlight`."""

    def __init__(
        self,
        output: SamplerOutput | None,
        prompt_logprobs: dict[int, list[PositionLogprobs]],
        mark: Mark,
        stream: StepStream,
    ) -> None:
        self._output = output
        self._prompt_logprobs = prompt_logprobs
        self._mark = mark
        self._stream = stream
        self._result: StepResult | None = None

    @property
    def is_read(self) -> bool:
        """Whether `wait` has been called."""
        return self._result is not None

    def is_done(self) -> bool:
        """See `InFlight`."""
        return self._result is not None or self._mark.is_done()

    def wait(self) -> StepResult:
        """See `InFlight`."""
        if self._result is None:
            self._mark.wait()
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        output = self._output
        if output is None:
            empty = np.zeros(0, dtype=np.int64)
            return StepResult(token_ids=empty, prompt_logprobs=self._prompt_logprobs)
        with plain_torch(output.token_ids.device.type), self._stream.entered():
            return StepResult(
                token_ids=output.token_ids.cpu().numpy(),
                logprobs=output.read_logprobs(),
                prompt_logprobs=self._prompt_logprobs,
                logits=output.logits,
                scores=output.scores,
                errors=dict(output.read_errors()),
            )


def create_cuda_runner(
    source: ModelSource, config: EngineConfig, plugins: PluginManager
) -> ModelRunner:
    """The runner of a model on a CUDA device.

    One whose heads our kernels were not written for, or that is asked to (``attention_backend=
    "torch"``), runs in plain torch, a step at a time. Raises as `ModelRunner.create`.
    """
    from nanoserve_core.kernels import triton_ops
    from nanoserve_core.layers.triton_attention import TritonAttention

    if config.attention_backend == "torch" or not TritonAttention.serves(source.spec):
        return ModelRunner(source, config, plugins)
    with torch.cuda.device(source.device):
        stream = CudaStream(source.device)
        replays: Replays = PlainCalls()
        if not config.enforce_eager:
            replays = StepGraphs(stream.stream, stream.calls)
        use_pdl = not config.enforce_eager
        backend = TritonAttention(
            source.spec,
            device=source.device,
            max_num_rows=config.max_num_seqs,
            max_kv_len=min(config.max_model_len, source.spec.max_position_embeddings),
            use_pdl=use_pdl,
        )
        tools = StepTools(
            ops=triton_ops,
            backend=backend,
            stream=stream,
            replays=replays,
            use_pdl=use_pdl,
            pack_size=TritonAttention.pack_size(source.spec),
        )
        runner = CudaRunner(source, config, plugins, tools)
        torch.cuda.synchronize(source.device)  # what was filled on the caller's stream is there
        return runner


def _plan_of(seqs: tuple[ScheduledSeq, ...], num_decode_seqs: int) -> StepPlan:
    from nanoserve_core.plan import StepPlan

    return StepPlan(step_id=-1, seqs=seqs, num_decode_seqs=num_decode_seqs)


def _no_token(token: int) -> RequestFailed:
    if token == FAILED:
        return RequestFailed(
            "no token can be drawn: the logits contain NaN or +inf. Expected finite ones. Look at "
            "the weights, or run in float32."
        )
    return RequestFailed(
        "the device took the sequence for ended or lacked a block for it: expected the scheduler "
        "and the device to agree. Please report this."
    )
