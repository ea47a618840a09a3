"""`Prompts`: the rows of a padded batch without their pads.

The engine runs each row alone and pad-free; pads come back only in the returned tensor. Masked
tokens are dropped wherever they stand: on the left (padding), in the middle (holes), on the right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Host copies of ``input_ids`` and its mask, both [num_rows, width]."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    """True: a real token."""

    @classmethod
    def read(cls, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Prompts:
        """Copy both to the host, which waits for the device.

        ``attention_mask`` has the shape of ``input_ids`` and any dtype; None masks nothing.
        """
        ids = input_ids.detach().cpu().numpy().astype(np.int64, copy=False)
        if attention_mask is None:
            return cls(ids=ids, mask=np.ones(ids.shape, dtype=np.bool_))
        return cls(ids=ids, mask=(attention_mask != 0).detach().cpu().numpy())

    @property
    def num_rows(self) -> int:
        """Rows, each ``num_return_sequences`` times."""
        return int(self.ids.shape[0])

    @property
    def width(self) -> int:
        """Columns, pads included."""
        return int(self.ids.shape[1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[num_rows]: real tokens of each row."""
        lengths: NDArray[np.int64] = self.mask.sum(axis=1, dtype=np.int64)
        return lengths

    @property
    def has_holes(self) -> bool:
        """True when a row has a masked token after its first real one."""
        return not self.is_masked_before(self.mask.argmax(axis=1))

    def is_masked_before(self, columns: NDArray[np.int64]) -> bool:
        """Whether each row masks just the tokens left of its column in ``columns`` [num_rows]."""
        expected = np.arange(self.width)[None, :] >= columns[:, None]
        return bool((self.mask == expected).all())

    def rows(self) -> list[tuple[int, ...]]:
        """The real tokens of each row."""
        return [tuple(ids[mask].tolist()) for ids, mask in zip(self.ids, self.mask, strict=True)]

    def default_position_ids(self) -> NDArray[np.int64]:
        """[num_rows, width]: the positions that transformers gives when the caller gives none."""
        positions = np.cumsum(self.mask, axis=1, dtype=np.int64) - 1
        return np.where(self.mask, positions, 0)
