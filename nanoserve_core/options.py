"""Options given by name: an unknown one is refused with the nearest known name, never ignored."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from nanoserve_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def refuse_unknown(options: Mapping[str, object], known: Iterable[str], *, kind: str) -> None:
    """Raise `ConfigError` for the first option that is not ``known``; ``kind`` says of what."""
    names = list(known)
    for name, value in options.items():
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known options: {', '.join(names)}."
            raise ConfigError(f"{name}={value!r} is not {kind} option. {hint}")
