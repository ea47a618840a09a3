"""Exceptions of this door, besides those of `nanoserve_core.errors`."""

from __future__ import annotations

from nanoserve_core.errors import InvalidRequest, NanoserveError


class TokenIdOutOfRange(InvalidRequest, IndexError):
    """A prompt holds an id outside the vocabulary.

    An `IndexError`, as in transformers on a CPU, and a `ValueError`. On a GPU transformers' own
    lookup would end in a device-side assertion, after which the process is lost.
    """


class GenerationCancelled(NanoserveError):
    """Raised in a running `generate` whose `RowStreamer` was cancelled by its reader."""
