"""`Counters`: how the calls of an installed model were served."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hf_generate_shim.route import Path
    from nanoserve_adapters.unsupported import Unsupported


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Calls by path since `install` (a snapshot). A call that raised is counted where it ran."""

    fast: int = 0
    lockstep: int = 0
    fallback: int = 0
    """Served by transformers' own loop, or refused with ``strict=True``."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Of the fallbacks, by "option: why"."""
    lockstep_reasons: Mapping[str, int] = field(default_factory=dict)
    """Why rows of lockstep calls could not run freely, by "option: why"; a call may have several.
    """


class CallCounter:
    """Counts calls; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._lockstep_reasons: Counter[str] = Counter()

    def add(self, path: Path, lockstep_reasons: Iterable[Unsupported] = ()) -> None:
        """Count one call."""
        with self._lock:
            self._calls[path.value] += 1
            self._lockstep_reasons.update(found.reason for found in lockstep_reasons)

    def snapshot(self, reasons: Mapping[str, int]) -> Counters:
        """The numbers so far, with ``reasons`` for the fallbacks."""
        with self._lock:
            return Counters(
                **self._calls, reasons=reasons, lockstep_reasons=dict(self._lockstep_reasons)
            )
