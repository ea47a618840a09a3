"""Every file says what it is, and every public function, class and method says what it gives."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.house.source_tree import (
    ROOT,
    Definition,
    name_of,
    package_files,
    per_file,
    python_files,
    tree_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# Overrides that may go without, because the framework's base class documents them: why there is
# nothing to add. Keys are "file: Class.method".
DOCUMENTED_BY_THE_FRAMEWORK: dict[str, str] = {}

EXAMPLES = [path for path in python_files() if ROOT / "examples" in path.parents]


@per_file(python_files())
def test_file_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(tree_of(path))

    assert docstring


@per_file([*package_files(), *EXAMPLES])
def test_public_names_have_docstrings(path: Path) -> None:
    bare = [
        f"{name_of(path)}:{node.lineno} {name}"
        for name, node in public_definitions(tree_of(path))
        if not ast.get_docstring(node)
        and f"{name_of(path)}: {name}" not in DOCUMENTED_BY_THE_FRAMEWORK
    ]

    assert not bare


def test_exceptions_name_methods_that_exist_and_still_have_no_docstring() -> None:
    for entry in DOCUMENTED_BY_THE_FRAMEWORK:
        file, _, name = entry.partition(": ")

        definitions = dict(public_definitions(tree_of(ROOT / file)))

        assert name in definitions
        assert not ast.get_docstring(definitions[name])


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Public functions and classes at the top level, and the public methods of public classes."""
    for node in definitions_in(tree.body):
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            for member in definitions_in(node.body):
                yield f"{node.name}.{member.name}", member


def definitions_in(body: Sequence[ast.stmt | ast.ExceptHandler]) -> Iterator[Definition]:
    """Public definitions of one body, also under `if` and `try`, but no repetitions."""
    for node in body:
        if isinstance(node, Definition):
            if not node.name.startswith("_") and not is_repetition(node):
                yield node
        else:
            blocks = (ast.stmt, ast.ExceptHandler)
            children = [child for child in ast.iter_child_nodes(node) if isinstance(child, blocks)]
            yield from definitions_in(children)


def is_repetition(node: Definition) -> bool:
    """Whether the definition only repeats a documented name: `@overload`, `@x.setter`."""
    decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
    return bool(decorators & {"overload", "setter", "deleter"})
