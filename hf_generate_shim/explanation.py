"""`Explanation`: what would happen to a call of `generate`, in words."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_generate_shim.route import Path

if TYPE_CHECKING:
    from nanoserve_adapters.unsupported import Unsupported


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The path of a call and every reason that was found why it is not a faster one. Prints as
    text.
    """

    path: Path
    reasons: tuple[Unsupported, ...] = ()

    def __str__(self) -> str:
        if self.path is Path.FAST:
            return "fast: the engine runs this call"
        listed = " ".join(
            f"{r.option}={reprlib.repr(r.value)}: it {r.because}. {r.way_out}" for r in self.reasons
        )
        if self.path is Path.LOCKSTEP:
            listed = f"the engine runs all rows of this call step by step: {listed}"
        return f"{self.path}: {listed}"
