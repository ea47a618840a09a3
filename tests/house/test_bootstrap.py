"""The set-up script decides rightly, without making an environment."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

import pytest

from tests.house.source_tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@pytest.fixture
def bootstrap() -> ModuleType:
    """.ci/bootstrap.py as a module of its own."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / ".ci" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", [(3, 9), (3, 14)])
def test_other_pythons_are_refused_by_name(bootstrap: ModuleType, version: tuple[int, int]) -> None:
    with pytest.raises(
        bootstrap.SetupError, match=rf"this is Python 3\.{version[1]}; .*3\.10 to 3\.13"
    ):
        bootstrap.check_python(version)


def test_environment_of_another_python_is_refused(bootstrap: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("home = x\nversion = 3.9.1\n")

    with pytest.raises(bootstrap.SetupError, match=r"holds Python 3\.9\.1"):
        bootstrap.check_venv(tmp_path)


def test_up_to_date_environment_is_left_alone(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / bootstrap.STAMP).write_text(bootstrap.fingerprint_of_inputs())
    monkeypatch.setattr(bootstrap, "run", lambda command: pytest.fail(f"ran {command}"))

    bootstrap.set_up(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == [bootstrap.STAMP]


def test_extra_is_installed_once_under_the_constraints(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "run", commands.append)

    bootstrap.add_extra(tmp_path, "wild")
    bootstrap.add_extra(tmp_path, "wild")

    assert len(commands) == 1
    assert f"{ROOT}[wild]" in commands[0]
    assert str(bootstrap.CONSTRAINTS) in commands[0]


def test_oldest_versions_go_into_a_folder_of_their_own(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "run", commands.append)

    bootstrap.add_oldest(tmp_path)
    bootstrap.add_oldest(tmp_path)

    assert len(commands) == 1
    assert {"--no-deps", str(tmp_path / "oldest"), str(bootstrap.OLDEST)} <= set(commands[0])


def test_oldest_transformers_is_the_one_that_pyproject_names(bootstrap: ModuleType) -> None:
    pinned = dict(
        line.split("==") for line in bootstrap.OLDEST.read_text().splitlines() if "==" in line
    )
    supported = (ROOT / "pyproject.toml").read_text()

    oldest = ".".join(pinned["transformers"].split(".")[:2])
    assert f'"transformers>={oldest},<' in supported


def test_failed_install_leaves_no_stamp(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str]) -> None:
        raise bootstrap.SetupError(command[0])

    monkeypatch.setattr(bootstrap, "run", fail)

    with pytest.raises(bootstrap.SetupError):
        bootstrap.set_up(tmp_path / "venv")

    assert not (tmp_path / "venv" / bootstrap.STAMP).exists()


@pytest.mark.parametrize(
    ("index", "expected"), [(None, []), ("some-index", ["--index-url", "some-index"])]
)
def test_torch_alone_comes_from_the_index_that_is_named(
    bootstrap: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    index: str | None,
    expected: list[str],
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "run", calls.append)
    monkeypatch.setattr(bootstrap, "has_nvidia_driver", lambda: False)
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    if index is not None:
        monkeypatch.setenv("TORCH_INDEX_URL", index)

    bootstrap.install_torch(tmp_path / "bin" / "python", tmp_path / "constraints.txt")

    [command] = calls
    assert "torch" in command
    assert [part for part in command if part in ("--index-url", index)] == expected


def test_python_without_cuda_torch_lends_none(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    version = bootstrap.borrow_cuda_torch(tmp_path)

    assert version is None


def test_lent_torch_replaces_the_pinned_one(bootstrap: ModuleType) -> None:
    pins = bootstrap.constraints_text("2.11.0+cu130").splitlines()

    assert [pin for pin in pins if pin.startswith("torch==")] == ["torch==2.11.0+cu130"]
    assert any(pin.startswith("transformers==") for pin in pins)


def test_constraints_admit_what_the_project_asks_for(bootstrap: ModuleType) -> None:
    pins = bootstrap.CONSTRAINTS.read_text(encoding="utf-8")

    pinned = {line.split("==")[0] for line in pins.splitlines() if "==" in line and line[0] != "#"}

    assert {"torch", "transformers", "langchain-core", "pytest", "ruff", "mypy"} <= pinned
    assert sys.version_info[:2] <= bootstrap.NEWEST_PYTHON
