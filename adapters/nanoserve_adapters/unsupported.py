"""One policy for options of a framework that an engine does not honour: fall back, or refuse.

A door says what it found (`Unsupported`), the policy decides: with ``strict`` the call is refused;
else it counts, warns once per reason, and the door lets the framework's own code serve the call.
It knows no framework.
"""

from __future__ import annotations

import reprlib
import threading
import warnings
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from nanoserve_core.errors import UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Mapping


class NanoserveFallbackWarning(UserWarning):
    """A call is served by the framework's own code because nanoserve does not honour an option."""


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """An option that is not honoured: which, its value, why, and what the user can do about it."""

    option: str
    value: object
    because: str
    """Completes "it ...": ``samples one continuation per row``."""
    way_out: str
    """A sentence: ``Pass num_beams=1.``"""

    @property
    def reason(self) -> str:
        """The key under which it is counted and warned once; does not depend on the value."""
        return f"{self.option}: {self.because}"


class UnsupportedPolicy:
    """Refuse (``strict``) or fall back, in the name of a ``door`` ("hf_generate_shim", ...).

    Any thread may call.
    """

    def __init__(self, *, strict: bool, door: str) -> None:
        self.strict = strict
        self.door = door
        self._lock = threading.Lock()
        self._counters: dict[str, int] = {}

    @property
    def counters(self) -> Mapping[str, int]:
        """How often each reason was met, refused or not (a snapshot)."""
        with self._lock:
            return MappingProxyType(dict(self._counters))

    def report(self, found: Unsupported, *, stacklevel: int = 2) -> None:
        """Count `found`; then raise `UnsupportedOption`, or warn (`NanoserveFallbackWarning`, once
        per reason) and return: the caller is to fall back. ``stacklevel`` is `warnings.warn`'s: 2
        names the caller of this method.
        """
        with self._lock:
            count = self._counters[found.reason] = self._counters.get(found.reason, 0) + 1
        if self.strict:
            raise UnsupportedOption(self.message(found))
        if count == 1:
            warnings.warn(self.message(found), NanoserveFallbackWarning, stacklevel=stacklevel)

    def message(self, found: Unsupported) -> str:
        """The sentence of the warning or the refusal: option, value, reason, way out."""
        value = reprlib.repr(found.value)
        start = f"{found.option}={value} is not served by {self.door}"
        if self.strict:
            return f"{start} (strict=True): it {found.because}. {found.way_out}"
        return (
            f"{start}: it {found.because}. This call is served without nanoserve, which is slower. "
            f"{found.way_out}"
        )
