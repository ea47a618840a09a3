"""Calls in a forked child of the test's process, and what each of them raises."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def in_forked_child(*calls: Callable[[], object]) -> list[tuple[str, str]]:
    """(type, text) of the exception that each call raises in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with os.fdopen(writer, "w") as pipe:
            for call in calls:
                error = outcome(call)
                print(type(error).__name__.replace("NoneType", "None"), error, sep="\t", file=pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lines = pipe.read().splitlines()
    os.waitpid(pid, 0)
    return [(kind, text) for kind, text in (line.split("\t") for line in lines)]


def outcome(call: Callable[[], object]) -> Exception | None:
    """What a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    return None
