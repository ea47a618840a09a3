"""Token ids to vectors, and vectors to logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def embed(weight: Tensor, token_ids: Tensor, *, out: Tensor) -> None:
    """out[i] = weight[token_ids[i]]. weight: [vocab_size, hidden_size]; token_ids: [tokens] int64.

    Raises IndexError for an id outside the vocabulary on a CPU; requests are checked before they
    get here.
    """
    torch.index_select(weight, 0, token_ids, out=out)
