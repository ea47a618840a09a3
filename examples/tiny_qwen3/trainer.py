"""The optimizer step: loss where something is to be said, documents kept apart, layers compiled.

Knows batches and the model, not where the text comes from or how long a run lasts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from examples.tiny_qwen3.batches import Batch

PEAK_LEARNING_RATE = 2e-3
WARMUP_SHARE = 0.03  # of the whole run
FLOOR_SHARE = 0.01  # of the peak learning rate, at the end
WEIGHT_DECAY = 0.1
PROSE_DROPOUT = 0.15  # the novels are read many times over; the dialogues are new every step
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """A batch on the device: what is read, what is to be said, and how much each counts.

    token_ids: [num_rows, length] int64; mask: [num_rows, 1, length, length] bool, None for plain
    causal; positions: [num_counted] int64, indices into the flattened rows; targets: [num_counted]
    int64; weights: [num_counted] float32. `has_dropout`: this text is read many times.
    """

    token_ids: Tensor
    mask: Tensor | None
    positions: Tensor
    targets: Tensor
    weights: Tensor
    has_dropout: bool


class Trainer:
    """One training run: the model, its optimizer and the way the learning rate goes."""

    def __init__(self, model: Qwen3ForCausalLM, *, device: str) -> None:
        """Moves the model to the device; compiles its layers where a GPU makes that worthwhile."""
        self.model = model.to(device)
        self._device = device
        add_dropout(model, PROSE_DROPOUT)
        if device == "cuda":
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        matrices = [weight for weight in model.parameters() if weight.ndim == 2]
        vectors = [weight for weight in model.parameters() if weight.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device == "cuda")

    def step(self, batches: list[Batch], progress: float) -> list[Tensor]:
        """One optimizer step; `progress` is the share of the run that is over.

        Gives each batch's mean loss, on the device, so that nobody waits for it.
        """
        losses = self._backward(batches)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return losses

    def warm_up(self, batches: list[Batch]) -> None:
        """Compile for every shape of batch, changing no weight."""
        self._backward(batches)
        self._optimizer.zero_grad()

    @torch.no_grad()
    def held_out_losses(self, batches: list[Batch]) -> list[float]:
        """Each batch's mean loss, without dropout."""
        self.model.eval()
        on_device = [to_device(batch, self._device) for batch in batches]
        with torch.compiler.set_stance("force_eager"):  # these shapes are not worth compiling for
            return [(self._loss_sum(batch) / batch.weights.sum()).item() for batch in on_device]

    def _backward(self, batches: list[Batch]) -> list[Tensor]:
        on_device = [to_device(batch, self._device) for batch in batches]
        total_weight = sum(batch.weights.sum() for batch in on_device)
        losses = []
        for batch in on_device:
            self.model.train(batch.has_dropout)
            loss_sum = self._loss_sum(batch)
            torch.autograd.backward(loss_sum / total_weight)
            losses.append(loss_sum.detach() / batch.weights.sum())
        return losses

    def _loss_sum(self, batch: DeviceBatch) -> Tensor:
        """The weighted loss; logits are made only where something is to be said."""
        with torch.autocast(self._device, dtype=torch.bfloat16):
            hidden = self.model.model(
                input_ids=batch.token_ids,
                attention_mask={"full_attention": batch.mask},
                use_cache=False,
            ).last_hidden_state
            counted = hidden.flatten(0, 1).index_select(0, batch.positions)
            logits = self.model.lm_head(counted).float()
        losses = functional.cross_entropy(logits, batch.targets, reduction="none")
        return (losses * batch.weights).sum()


def to_device(batch: Batch, device: str) -> DeviceBatch:
    """Copy a batch to the device without waiting for it, and build its mask there."""
    counted = torch.from_numpy(batch.weights[:, 1:].reshape(-1))
    positions = counted.nonzero().squeeze(1)
    said = torch.from_numpy(batch.token_ids[:, 1:].reshape(-1))[positions]
    mask = None
    if batch.documents is not None:
        mask = document_mask(_copied(torch.from_numpy(batch.documents[:, :-1].copy()), device))
    return DeviceBatch(
        token_ids=_copied(torch.from_numpy(batch.token_ids[:, :-1].copy()), device).long(),
        mask=mask,
        positions=_copied(positions, device),
        targets=_copied(said, device).long(),
        weights=_copied(counted[positions], device).float(),
        has_dropout=batch.documents is None,
    )


def _copied(tensor: Tensor, device: str) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor


def document_mask(documents: Tensor) -> Tensor:
    """Who may look at whom: earlier tokens of the same document.

    documents: [num_rows, length] uint8. Gives [num_rows, 1, length, length] bool.
    """
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def add_dropout(model: Qwen3ForCausalLM, probability: float) -> None:
    """Dropout on everything that enters the residual stream, while the model is in train mode."""

    def drop(module: torch.nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return functional.dropout(output, probability, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def learning_rate(progress: float) -> float:
    """Linear warm-up, then half a cosine down to the floor."""
    if progress < WARMUP_SHARE:
        return PEAK_LEARNING_RATE * max(progress, 1e-3) / WARMUP_SHARE
    angle = math.pi * min(1.0, (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE))
    return PEAK_LEARNING_RATE * (FLOOR_SHARE + (1 - FLOOR_SHARE) * 0.5 * (1 + math.cos(angle)))
