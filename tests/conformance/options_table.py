"""Reads the tables of `hf_generate_shim/OPTIONS.md`: option -> the ways it may send a call."""

from __future__ import annotations

import re
from pathlib import Path

import hf_generate_shim

FILE = Path(hf_generate_shim.__file__).with_name("OPTIONS.md")
WAYS = {"fast", "lockstep", "fallback", "prepared"}
_ROW = re.compile(r"^\| `(?P<option>\w+)` \| (?P<ways>[a-z, ]+) \|", re.MULTILINE)


def ways_by_option() -> dict[str, set[str]]:
    """Every row of every table; AssertionError for an option that is listed twice."""
    rows = [
        (row["option"], set(row["ways"].split(", "))) for row in _ROW.finditer(FILE.read_text())
    ]
    table = dict(rows)
    assert len(table) == len(rows), "an option is listed twice"
    return table


TABLE = ways_by_option()


def may_fall_back(reason: str) -> bool:
    """Whether the option that a counted reason names is one that the table lets fall back."""
    return "fallback" in TABLE.get(reason.partition(":")[0], set())
