"""A grammar's mask on logits: reads the packed bits, writes -inf where one is not set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nanoserve_core.kernels.launch_errors import dtype_error, shape_error, stride_error

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 4096


@triton.jit
def apply_token_bitmask_kernel(
    scores_ptr,
    bitmask_ptr,
    rows_ptr,
    scores_row_stride,
    bitmask_row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """grid (masks, tiles): the scores themselves are never read."""
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + mask).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < vocab_size
    words = tl.load(bitmask_ptr + mask * bitmask_row_stride + columns // 32, mask=in_row, other=0)
    is_banned = ((words >> (columns % 32)) & 1) == 0
    minus_inf = tl.full((BLOCK,), float("-inf"), scores_ptr.dtype.element_ty)
    tl.store(scores_ptr + row * scores_row_stride + columns, minus_inf, mask=in_row & is_banned)


def apply_token_bitmask(scores: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """See `reference_sampling.apply_token_bitmask`.

    Raises ValueError or TypeError for arguments that do not fit; enqueues only.
    """
    op, (num_masks, vocab_size) = "apply_token_bitmask", (bitmask.shape[0], scores.shape[1])
    num_words = -(-vocab_size // 32)
    if bitmask.shape != (num_masks, num_words):
        raise shape_error(op, "bitmask", bitmask, (num_masks, num_words))
    if rows.shape != (num_masks,):
        raise shape_error(op, "rows", rows, (num_masks,))
    if bitmask.dtype != torch.int32:
        raise dtype_error(op, "bitmask", bitmask, torch.int32)
    for name, tensor in (("scores", scores), ("bitmask", bitmask)):
        if tensor.stride(-1) != 1:
            raise stride_error(op, name, tensor, "1 in the last dimension")
    if num_masks == 0:
        return
    apply_token_bitmask_kernel[(num_masks, triton.cdiv(vocab_size, BLOCK))](
        scores,
        bitmask,
        rows,
        scores.stride(0),
        bitmask.stride(0),
        vocab_size,
        BLOCK=BLOCK,
        num_warps=8,
    )
