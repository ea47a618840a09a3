"""Every script in examples/ runs as it is, on the shipped tiny checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LIMIT_SECONDS = 100  # below the limit on a test, so that what the example printed is shown

# Arguments an example needs besides --model to be quick on a CPU.
MORE_ARGUMENTS: dict[str, list[str]] = {
    "chat_service.py": ["--users", "12", "--arrival-seconds", "0.2", "--reading-seconds", "0.1"],
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_on_the_tiny_checkpoint(example: Path, tiny_checkpoint: Path) -> None:
    arguments = ["--model", str(tiny_checkpoint), *MORE_ARGUMENTS.get(example.name, [])]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'adapters'}"}

    result = subprocess.run(
        [sys.executable, str(example), *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )

    assert result.returncode == 0, f"{example.name} failed:\n{result.stdout}\n{result.stderr}"
    assert result.stdout.strip(), f"{example.name} printed nothing"


def test_table_names_only_examples_that_exist() -> None:
    names = {example.name for example in EXAMPLES}

    unknown = sorted(set(MORE_ARGUMENTS) - names)

    assert not unknown
