"""Names, exceptions and paths that have no place here."""

from __future__ import annotations

import ast
import re
import tokenize
from tokenize import COMMENT, generate_tokens
from typing import TYPE_CHECKING

import pytest

from tests.house.source_tree import (
    ROOT,
    name_of,
    package_files,
    per_file,
    python_files,
    repository_files,
    tree_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "misc", "common"}

# Where any exception may be caught, because it is reported to the caller whose request it was.
BORDERS = {
    "nanoserve_core/plugins.py": "a plugin's error is counted, or fails the requests it serves",
    "nanoserve_core/engine.py": "an error in a request's own `should_stop` fails that request",
    "hf_generate_shim/lockstep.py": "what a processor raises is raised in the call that brought it",
    "adapters/nanoserve_adapters/engine_worker.py": "the engine thread: callers get the error",
    "adapters/nanoserve_adapters/testing/fake_engine.py": "as the engine: it fails that request",
}

# A checker is silenced by the code of its rule and with a reason: noqa: CODE - why.
SILENCED = re.compile(r"#\s*(?:noqa|type:\s*ignore)\b")
SILENCED_WITH_REASON = re.compile(
    r"#\s*(?:noqa:\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*|type:\s*ignore\[[\w, -]+\])[\s#:-]+\w"
)

# Absolute paths of somebody's machine. Vocabularies are left out: such strings are words there.
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:work|root|home|Users)/\w")
VOCABULARIES = {"tokenizer.json", "vocab.json", "merges.txt"}


@per_file(python_files())
def test_file_name_says_what_is_inside(path: Path) -> None:
    assert path.stem not in NAMES_THAT_SAY_NOTHING


@per_file(package_files())
def test_any_exception_is_caught_only_at_the_borders(path: Path) -> None:
    wrong = [f"{name_of(path)}:{line}" for line in blind_handlers(tree_of(path))]

    assert not wrong or name_of(path) in BORDERS


@per_file(python_files())
def test_checkers_are_silenced_by_name_and_with_a_reason(path: Path) -> None:
    with tokenize.open(path) as source:
        comments = [token for token in generate_tokens(source.readline) if token.type == COMMENT]

    wrong = [
        f"{name_of(path)}:{comment.start[0]} {comment.string}"
        for comment in comments
        if SILENCED.search(comment.string) and not SILENCED_WITH_REASON.search(comment.string)
    ]

    assert not wrong


def test_borders_are_files_that_exist() -> None:
    missing = [file for file in BORDERS if not (ROOT / file).exists()]

    assert not missing


def test_adapters_folder_is_a_source_root_and_no_package() -> None:
    assert not (ROOT / "adapters" / "__init__.py").exists()


def test_packages_are_marked_as_typed() -> None:
    packages = {path.parent for path in package_files() if path.name == "__init__.py"}

    unmarked = [name_of(folder) for folder in packages if is_top(folder) and not has_marker(folder)]

    assert not unmarked


@per_file([path for path in repository_files() if path.name not in VOCABULARIES])
def test_file_names_no_path_of_a_machine(path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        pytest.skip("not a text file")

    found = MACHINE_PATH.findall(text)

    assert not found


@pytest.mark.parametrize(
    ("source", "num_blind"),
    [
        ("try: ...\nexcept: ...", 1),
        ("try: ...\nexcept (ValueError, Exception): ...", 1),
        ("try: ...\nexcept BaseException as error: log(error)", 1),
        ("with contextlib.suppress(Exception): ...", 1),
        ("try: ...\nexcept ValueError: ...", 0),
        ("try: ...\nexcept BaseException:\n    close()\n    raise", 0),
    ],
)
def test_blind_handlers_are_found(source: str, num_blind: int) -> None:
    found = list(blind_handlers(ast.parse(source)))

    assert len(found) == num_blind


def blind_handlers(tree: ast.AST) -> Iterator[int]:
    """Lines that catch any exception; a handler that cleans up and raises again does not count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = {"BaseException"} if node.type is None else names_in(node.type)
            raises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if caught & {"Exception", "BaseException"} and not raises:
                yield node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            suppressed = {name for argument in node.args for name in names_in(argument)}
            if suppressed & {"Exception", "BaseException"}:
                yield node.lineno


def names_in(node: ast.AST) -> set[str]:
    """Every plain name below `node`."""
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def is_top(folder: Path) -> bool:
    """Whether `folder` is a top-level package."""
    return not (folder.parent / "__init__.py").exists()


def has_marker(folder: Path) -> bool:
    """Whether type checkers are told to trust the annotations in `folder`."""
    return (folder / "py.typed").exists()
