"""Every hook is documented, listed in the table of `hookspecs`, compiled, and tested by name."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from functools import cache

import pytest

from nanoserve_core import hookspecs
from nanoserve_core.plugins import HookTable
from tests.house.source_tree import ROOT, python_files, tree_of

PREFIX = "nanoserve_"
SPECS = {
    name: function
    for name, function in vars(hookspecs).items()
    if name.startswith(PREFIX) and inspect.isfunction(function)
}
TABLE_ROW = re.compile(r"^(nanoserve_\w+)  +(.+?)  +(setup|first|request|observer)  +(.+)$", re.M)
TABLE = {row[0]: row[2] for row in TABLE_ROW.findall(hookspecs.__doc__ or "")}

per_hook = pytest.mark.parametrize("hook", sorted(SPECS))


@cache
def names_of_tests() -> set[str]:
    """Names of all test functions under tests/."""
    trees = [tree_of(path) for path in python_files() if ROOT / "tests" in path.parents]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@per_hook
def test_docstring_says_when_on_which_thread_and_what_the_result_does(hook: str) -> None:
    docstring = inspect.getdoc(SPECS[hook]) or ""

    facts = re.findall(r"^(When|Thread|Result): \S", docstring, re.M)

    assert facts == ["When", "Thread", "Result"]


@per_hook
def test_arguments_and_result_are_typed(hook: str) -> None:
    signature = inspect.signature(SPECS[hook])

    annotations = [each.annotation for each in signature.parameters.values()]

    assert inspect.Signature.empty not in [*annotations, signature.return_annotation]


@per_hook
def test_table_lists_the_hook_with_its_kind(hook: str) -> None:
    options = vars(SPECS[hook])[f"{PREFIX}spec"]

    assert (TABLE[hook] == "first") == options["firstresult"]
    assert (TABLE[hook] == "observer") == (hook in hookspecs.OBSERVERS)


def test_table_lists_nothing_else() -> None:
    assert TABLE.keys() == SPECS.keys()


def test_compiled_table_has_a_field_for_each_hook() -> None:
    assert {PREFIX + field.name for field in fields(HookTable)} == SPECS.keys()


@per_hook
def test_hook_has_a_test_of_its_name(hook: str) -> None:
    assert f"test_hook_{hook.removeprefix(PREFIX)}" in names_of_tests()
