"""`BatchState`: one row per slot of what sampling reads and advances, on the model's device.

A sequence keeps its slot while it runs, so a step sends only what changed: who left, who came. What
the device computes itself (last token, position, history, counts) is advanced on the device and
never asked back; the host keeps its own count of tokens, which it knows without their values.

    launch(plan):   state.apply(plan)                         released, then assigned
                    logits = model(...)                       rows that yield a token
                    output = sampler.sample(logits, slots, positions, state)
                    state.advance(slots, output.token_ids)    last_token[slots] are the new tokens

It knows no model, no block and no policy.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from nanoserve_core.grammar_masks import GrammarMasks
from nanoserve_core.plugins import attempt
from nanoserve_core.slot_rules import Feature, SlotRules, effective_top_k, features_of, rules_of
from nanoserve_core.slot_table import SlotTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from nanoserve_core.plan import SlotAssignment, StepPlan
    from nanoserve_core.request import Request

    HostInts = NDArray[np.int64]
    HostNumbers = NDArray[np.int64] | NDArray[np.float64]

_logger = logging.getLogger(__name__)


class BatchLogitsProcessor(Protocol):
    """Edits logits of many requests at once; what hook ``nanoserve_logits_processors`` returns.

    All methods run on the engine's thread. Per-slot data of its own can live in tensors indexed by
    slot: between `assign` and `release` a slot has one tenant.
    """

    def assign(self, slot: int, request: Request) -> bool | None:
        """A sequence of ``request`` takes the slot; False: its logits need not pass `apply`.

        Called again, with any slot, when the sequence resumes after a preemption.
        """
        ...

    def release(self, slot: int) -> None:
        """The sequence leaves a slot that was assigned."""
        ...

    def apply(self, logits: Tensor, slots: Tensor, state: BatchState) -> Tensor:
        """Edit, in place or not, the rows of one step that it serves.

        ``logits``: [rows, vocab] float32, after penalties; ``slots``: [rows] int64 on the device.
        Returns [rows, vocab]. ``state.token_history(slot)`` gives a row's tokens.
        """
        ...


class BatchState:
    """The slots of one engine. Written by the model runner alone, on the engine's thread."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        max_model_len: int,
        device: torch.device | str,
        *,
        eos_token_ids: Iterable[int] = (),
        processors: Sequence[BatchLogitsProcessor] = (),
    ) -> None:
        """All slots free. ``eos_token_ids``: what ``min_tokens`` holds back besides stop ids."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.processors = tuple(processors)
        self._eos_token_ids = tuple(eos_token_ids)
        # One tensor each for ints and floats: a step's deltas travel in two copies.
        self._ints = torch.zeros(4, max_num_seqs, dtype=torch.int64, device=self.device)
        self._floats = torch.zeros(6, max_num_seqs, dtype=torch.float64, device=self.device)
        self.last_token, self.position, self.seed, self.top_k = self._ints
        """[max_num_seqs] int64 each; `position` is that of `last_token`, `seed` has a uint64's
        bits.
        """
        self.temperature, self.top_p, self.min_p = self._floats[:3]
        """[max_num_seqs] float64 each."""
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = self._floats[3:]
        # On the host, per slot.
        self.features = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.host_top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.host_seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.served = np.zeros((len(self.processors), max_num_seqs), dtype=np.bool_)
        """[processors, max_num_seqs]: whose `apply` a slot's logits pass."""
        self.failures: dict[int, Exception] = {}
        """Slot -> why a plugin could not take its request."""
        self.grammars = GrammarMasks(vocab_size, self.device)
        self._rules: list[SlotRules | None] = [None] * max_num_seqs
        self._history = SlotTable(max_num_seqs, max_model_len, torch.int64, self.device)
        self._counts = SlotTable(max_num_seqs, vocab_size, torch.int32, self.device)

    @staticmethod
    def nbytes(max_num_seqs: int, vocab_size: int, max_model_len: int) -> int:
        """Bytes on the device when every slot keeps history and counts: the most there can be."""
        return max_num_seqs * (10 * 8 + 8 * max_model_len + 4 * vocab_size)

    def apply(self, plan: StepPlan) -> None:
        """Carry out the plan's ``released``, then its ``assigned``; before the step's forward."""
        for slot in plan.released:
            self._release(slot)
        for assignment in plan.assigned:
            self._release(assignment.slot)
            self._assign(assignment)
        if plan.assigned:
            self._upload(plan.assigned)

    def advance(self, slots: HostInts, token_ids: Tensor) -> None:
        """Append one sampled token per slot, on the device; after sampling.

        ``slots``: [rows] int64 on the host, without repetition; ``token_ids``: [rows] int64 on the
        device. No value is read back.
        """
        slots = np.asarray(slots, dtype=np.int64)
        positions = self.num_tokens[slots]
        on_device = self.to_device(slots)
        self.last_token.index_copy_(0, on_device, token_ids)
        self.position.index_copy_(0, on_device, self.to_device(positions))
        self.num_tokens[slots] = positions + 1
        remembering = np.flatnonzero(self._history.rows[slots] >= 0)
        if len(remembering):
            chosen = token_ids[self.to_device(remembering)]
            self._remember(slots[remembering], positions[remembering], chosen)

    def token_history(self, slot: int) -> Tensor:
        """The slot's tokens so far, prompt and output: [num_tokens] int64, a copy.

        Kept for slots whose request has penalties, bad words of several tokens or processors, or is
        served by a plugin's batch processor; `KeyError` for others.
        """
        row = self._history.rows[slot]
        if row < 0:
            raise KeyError(f"slot {slot} keeps no history: no processor serves it")
        return self._history.data[row, : self.num_tokens[slot]].clone()

    def padded_history(self, slots: HostInts) -> Tensor:
        """Histories of ``slots`` as one tensor [rows, longest] int64.

        A shorter one is padded with its own first token.
        """
        lengths = self.num_tokens[slots]
        rows = self.to_device(self._history.rows[slots])
        history = self._history.data[:, : lengths.max()].index_select(0, rows)
        if (lengths == lengths[0]).all():
            return history
        columns = torch.arange(history.shape[1], device=self.device)
        return torch.where(columns < self.to_device(lengths)[:, None], history, history[:, :1])

    def output_counts(self, slots: HostInts, tokens: Tensor) -> Tensor:
        """How often each of ``tokens`` [rows, n] is in its slot's output; 0 if not counted."""
        rows = self.to_device(self._counts.rows[slots])[:, None]
        return self._counts.data[rows.clamp(min=0), tokens] * (rows >= 0)

    def rules(self, slot: int) -> SlotRules:
        """The rare wishes of the slot's tenant."""
        rules = self._rules[slot]
        assert rules is not None, f"slot {slot} has no tenant"
        return rules

    def to_device(self, host: HostNumbers) -> Tensor:
        """Host numbers as a tensor on the state's device: no copy on a CPU, and no waiting for a
        device.
        """
        tensor = torch.from_numpy(host)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _release(self, slot: int) -> None:
        if self._rules[slot] is None:
            return
        for processor, served in zip(self.processors, self.served, strict=True):
            if served[slot]:
                served[slot] = False
                _, error = attempt(processor.release, slot)
                if error is not None:  # its request is gone: there is nobody to fail
                    _logger.error("%r raised in release(%d)", processor, slot, exc_info=error)
        self._rules[slot] = None
        self.features[slot] = 0
        self.failures.pop(slot, None)
        self.grammars.release(slot)
        self._history.remove(slot)
        self._counts.remove(slot)

    def _assign(self, assignment: SlotAssignment) -> None:
        slot, request = assignment.slot, assignment.request
        self._rules[slot] = rules_of(request, self._eos_token_ids, self.device)
        self.features[slot] = features_of(request, self.vocab_size)
        self.num_tokens[slot] = len(assignment.token_ids)
        self.num_prompt_tokens[slot] = assignment.num_prompt_tokens
        self.min_tokens[slot] = request.sampling.min_tokens
        self.host_top_k[slot] = effective_top_k(request.sampling, self.vocab_size)
        self.host_seed[slot] = assignment.seed
        if assignment.grammar is not None:
            self.features[slot] |= Feature.GRAMMAR
            self.grammars.assign(slot, assignment.grammar)
        self._offer(slot, request)
        if self.features[slot] & Feature.HISTORY:
            tokens = torch.tensor(assignment.token_ids, device=self.device)
            self._history.add(slot)[: len(tokens)] = tokens
        if self.features[slot] & Feature.COUNTS:
            output = torch.tensor(assignment.token_ids[assignment.num_prompt_tokens :])
            counts = output.to(torch.int64).bincount(minlength=self.vocab_size)
            self._counts.add(slot).copy_(counts)

    def _offer(self, slot: int, request: Request) -> None:
        """Ask the plugins' processors whether they serve the slot."""
        for processor, served in zip(self.processors, self.served, strict=True):
            answer, error = attempt(processor.assign, slot, request)
            if error is not None:
                self.features[slot] |= Feature.FAILED
                self.failures[slot] = error
            elif answer is None or answer:
                served[slot] = True
                self.features[slot] |= Feature.BATCH_PROCESSORS | Feature.HISTORY

    def _upload(self, assigned: tuple[SlotAssignment, ...]) -> None:
        slots = torch.tensor([each.slot for each in assigned], device=self.device)
        ints = torch.tensor([_ints_of(each, self.vocab_size) for each in assigned])
        floats = torch.tensor([_floats_of(each) for each in assigned], dtype=torch.float64)
        self._ints.index_copy_(1, slots, ints.T.to(self.device))
        self._floats.index_copy_(1, slots, floats.T.to(self.device))

    def _remember(self, slots: HostInts, positions: HostInts, token_ids: Tensor) -> None:
        rows = self.to_device(self._history.rows[slots])
        self._history.data[rows, self.to_device(positions)] = token_ids
        counted = np.flatnonzero(self._counts.rows[slots] >= 0)
        if len(counted):
            rows = self.to_device(self._counts.rows[slots[counted]])
            self._counts.data[rows, token_ids[self.to_device(counted)]] += 1


def _ints_of(assignment: SlotAssignment, vocab_size: int) -> tuple[int, int, int, int]:
    seed = assignment.seed
    return (
        assignment.token_ids[-1],
        len(assignment.token_ids) - 1,
        seed - 2**64 if seed >= 2**63 else seed,
        effective_top_k(assignment.request.sampling, vocab_size),
    )


def _floats_of(assignment: SlotAssignment) -> tuple[float, ...]:
    sampling = assignment.request.sampling
    return (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
