"""`RowProgress`: a bar that counts the rows of a call as they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from types import TracebackType

    from hf_generate_shim.results import Results


class RowProgress:
    """A context manager around one call of ``num_rows``; without ``is_shown`` it does nothing."""

    def __init__(self, num_rows: int, *, is_shown: bool) -> None:
        self._bar = tqdm(total=num_rows, desc="generate", unit="row") if is_shown else None

    def update(self, results: Results) -> None:
        """Show how many rows have ended by now."""
        if self._bar is not None:
            self._bar.update(results.num_finished_rows - self._bar.n)

    def __enter__(self) -> RowProgress:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
