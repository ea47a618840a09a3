"""The source tree as the house tests see it: which files there are, and how to read one."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import tokenize
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "nanoserve_core": ROOT / "nanoserve_core",
    "nanoserve_adapters": ROOT / "adapters" / "nanoserve_adapters",
    "hf_generate_shim": ROOT / "hf_generate_shim",
    "langchain_llm": ROOT / "langchain_llm",
}
CORE = PACKAGES["nanoserve_core"]

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def name_of(path: Path) -> str:
    """`path` as it is written in messages and tables: relative to the root, with slashes."""
    return path.relative_to(ROOT).as_posix()


def package_files(*packages: str) -> list[Path]:
    """Every Python file of these packages (of all four if none is named), sorted."""
    roots = [PACKAGES[package] for package in packages or PACKAGES]
    return sorted(path for root in roots for path in root.rglob("*.py"))


def python_files() -> list[Path]:
    """Every Python file of the repository."""
    return [path for path in repository_files() if path.suffix == ".py"]


@lru_cache(maxsize=1)
def repository_files() -> list[Path]:
    """Every file that is tracked or would be; outside a clone, every file of the places we own."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        return sorted(
            path for name in listing.stdout.split("\0") if (path := ROOT / name).is_file()
        )
    owned = [*PACKAGES.values(), ROOT / "tests", ROOT / "examples", ROOT / ".ci"]
    inside = [path for folder in owned for path in folder.rglob("*") if path.is_file()]
    return sorted(path for path in [*inside, *ROOT.glob("*.*")] if "__pycache__" not in path.parts)


def per_file(files: list[Path]) -> pytest.MarkDecorator:
    """Parametrise a test over `files`, each under its name."""
    return pytest.mark.parametrize("path", files, ids=name_of)


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of one file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def num_code_lines(source: str) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | Definition) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def imports_of(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Every absolute import: (top-level package, line, whether importing the file runs it).

    What stands inside a function or under `if TYPE_CHECKING` does not run then.
    """

    def walk(node: ast.AST, *, runs: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node.lineno, runs
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno, runs
        runs = runs and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            runs = False
        for child in ast.iter_child_nodes(node):
            yield from walk(child, runs=runs)

    return walk(tree, runs=True)


def run_python(code: str, *, limit_seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh Python at the root, with the four packages on its path."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )
