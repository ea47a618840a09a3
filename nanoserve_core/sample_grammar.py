"""`SampleGrammar`: one sample's matcher, with the budget and the end-of-sequence ids it goes with.

It stays with its sequence, through preemptions too. No torch at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nanoserve_core.errors import PluginError, RequestFailed
from nanoserve_core.plugins import attempt

if TYPE_CHECKING:
    from nanoserve_core.grammar import Bitmask, GrammarMatcher
    from nanoserve_core.request import Request


class SampleGrammar:
    """The engine's side of a `GrammarMatcher`: `accept` raises, the other methods keep `error`."""

    def __init__(
        self,
        matcher: GrammarMatcher,
        *,
        max_total_tokens: int,
        eos_token_ids: tuple[int, ...],
        ignore_eos: bool,
    ) -> None:
        """``max_total_tokens``: prompt plus the most tokens the sample may generate."""
        self._matcher = matcher
        self._max_total_tokens = max_total_tokens
        self._eos_token_ids = np.array(eos_token_ids, dtype=np.int64)
        self._ignore_eos = ignore_eos
        self._may_end = False
        self.error: Exception | None = None
        """Why the request must fail; set once."""

    @classmethod
    def of(
        cls, request: Request, *, max_total_tokens: int, eos_token_ids: tuple[int, ...]
    ) -> SampleGrammar | None:
        """With a fresh matcher; None for a request without grammar. Raises `PluginError`."""
        if request.grammar is None:
            return None
        matcher, error = attempt(request.grammar.matcher)
        if matcher is None:
            raise PluginError(
                f"request {request.request_id}: its grammar made no matcher: {error!r}"
            ) from error
        return cls(
            matcher,
            max_total_tokens=max_total_tokens,
            eos_token_ids=eos_token_ids,
            ignore_eos=request.sampling.ignore_eos,
        )

    def is_active(self, num_tokens: int) -> bool:
        """Whether the token after ``num_tokens`` known ones is constrained, or its row failed."""
        if self.error is not None:
            return True
        active, self.error = attempt(self._matcher.is_active, self._max_total_tokens - num_tokens)
        return bool(active) or self.error is not None

    def fill(self, row: Bitmask, num_tokens: int) -> None:
        """Set the allowed tokens' bits in a row of zeros; any one thread."""
        if self.error is not None:
            return
        remaining = self._max_total_tokens - num_tokens
        _, self.error = attempt(self._matcher.fill_bitmask, row, remaining)
        self._join_ends(row)
        if self.error is None and not row.any():
            self.error = RequestFailed(
                f"the grammar allows no token at position {num_tokens}: expected at least one, or "
                "a matcher that is finished. Look at the grammar."
            )

    def accept(self, token_id: int) -> bool:
        """Take in the sampled token; True when nothing may follow. Raises as the matcher does."""
        if self._may_end and token_id in self._eos_token_ids:
            return True  # with ignore_eos, where the grammar had nothing else to offer
        self._may_end = False
        self._matcher.accept(token_id)
        return self._matcher.is_finished()

    def _join_ends(self, row: Bitmask) -> None:
        """Where the output may end, every end-of-sequence id is as good.

        With ``ignore_eos`` none is, as long as the output can go on.
        """
        ids = self._eos_token_ids
        ids = ids[ids < 32 * len(row)]
        words, bits = ids >> 5, np.left_shift(1, ids & 31).astype(np.uint32).view(np.int32)
        if not (row[words] & bits).any():
            return
        self._may_end = True
        np.bitwise_or.at(row, words, bits)
        if self._ignore_eos:
            others = row.copy()
            np.bitwise_and.at(others, words, ~bits)
            if others.any():
                row[:] = others
