"""What the README shows is true: its Python runs as written, its commands exist."""

from __future__ import annotations

import re

import pytest

from tests.house.source_tree import ROOT, run_python

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8") if README.exists() else ""
LIMIT_SECONDS = 100


def python_blocks() -> list[object]:
    """Every ```python block of the README, each under the line it starts at."""
    return [
        pytest.param(match[1], id=f"line-{TEXT.count(chr(10), 0, match.start()) + 1}")
        for match in re.finditer(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.parametrize("block", python_blocks())
def test_python_block_runs_as_written(block: str) -> None:
    result = run_python(block, limit_seconds=LIMIT_SECONDS)

    assert result.returncode == 0, f"{block}\n{result.stdout}\n{result.stderr}"


@pytest.mark.skipif(not TEXT, reason="there is no README yet")
def test_readme_shows_python_and_every_block_is_closed() -> None:
    fences = re.findall(r"^```", TEXT, re.MULTILINE)

    assert python_blocks()
    assert len(fences) % 2 == 0


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))

    shown = set(re.findall(r"(?:^    |`)make ([a-z-]+)", TEXT, re.MULTILINE))

    assert shown <= targets


def test_files_linked_from_the_readme_exist() -> None:
    links = re.findall(r"\]\((?!\w+:|#)([^)#]+)", TEXT)

    missing = [link for link in links if not (ROOT / link).exists()]

    assert not missing
