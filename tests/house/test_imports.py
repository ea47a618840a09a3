"""Who may import what, where import-linter cannot say it: at import time, and inside a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.house.source_tree import (
    CORE,
    PACKAGES,
    imports_of,
    name_of,
    package_files,
    per_file,
    run_python,
    tree_of,
)

if TYPE_CHECKING:
    from pathlib import Path

# What a bare import of the package must not load. The two doors are opened by people who have
# loaded the framework already, so only the packages under them are held to it.
NOT_LOADED_BY = {
    "nanoserve_core": ["torch", "transformers"],
    "nanoserve_adapters": ["torch", "transformers", "langchain_core"],
    "hf_generate_shim": ["langchain_core"],
    "langchain_llm": ["langchain", "langgraph"],
}
RUN_WITHOUT_TORCH = ["scheduler", "block_manager", "plan", "request", "sampling_params"]
MAY_IMPORT_TRANSFORMERS = {"config.py", "models/weights.py", "llm.py"}


@pytest.mark.parametrize("package", PACKAGES)
def test_import_of_a_package_loads_no_framework_and_starts_no_thread(package: str) -> None:
    loaded, num_threads = state_after_import(package)

    assert not [name for name in NOT_LOADED_BY[package] if name in loaded]
    assert num_threads == 1


@pytest.mark.parametrize(
    "module", [name for name in RUN_WITHOUT_TORCH if (CORE / f"{name}.py").exists()]
)
def test_planning_modules_run_without_torch(module: str) -> None:
    loaded, _ = state_after_import(f"nanoserve_core.{module}")

    assert "torch" not in loaded


@per_file(package_files("nanoserve_core"))
def test_core_imports_transformers_only_inside_functions_of_its_three_borders(path: Path) -> None:
    may_import = path.relative_to(CORE).as_posix() in MAY_IMPORT_TRANSFORMERS

    wrong = [
        f"{name_of(path)}:{line}"
        for package, line, runs in imports_of(tree_of(path))
        if package == "transformers" and (runs or not may_import)
    ]

    assert not wrong


@per_file(package_files("nanoserve_core", "nanoserve_adapters", "hf_generate_shim"))
def test_only_the_langchain_door_imports_langchain(path: Path) -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {package}"
        for package, line, _ in imports_of(tree_of(path))
        if package.startswith(("langchain", "langgraph", "langsmith"))
    ]

    assert not wrong


def state_after_import(module: str) -> tuple[set[str], int]:
    """(modules loaded, threads running) in a fresh Python that imported only `module`."""
    code = (
        f"import {module}, json, sys, threading\n"
        "print(json.dumps([sorted(sys.modules), threading.active_count()]))"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    loaded, num_threads = json.loads(result.stdout)
    return set(loaded), num_threads
