"""The benchmarks of the LangChain door run on a tiny model; what they measure is not asserted."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    """Run a benchmark as its command would, in this process: torch is loaded already."""
    script = BENCHMARKS / name
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        for module in set(sys.modules) - before:
            path = getattr(sys.modules[module], "__file__", None) or ""
            if path.startswith(str(BENCHMARKS)):
                del sys.modules[module]


def test_chains_on_a_device_are_measured_on_every_route(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--tiny", "--chains", "4", "--busy", "0", "--output-len", "6"]

    run(monkeypatch, "langchain_gpu.py", *options)

    printed = capsys.readouterr().out
    for route in ("bare engine", "gather(ainvoke)", "gather(astream)", "batch", "one by one"):
        assert f"   4    0 {route}" in printed
    assert "largest batch 4" in printed


@pytest.mark.parametrize("route", ["start", "attach"])
def test_a_start_is_timed_from_its_beginning_to_the_first_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, route: str
) -> None:
    options = ["--child", route, "--tiny", "--device", "cpu", "--checkpoint", str(tmp_path)]
    run(monkeypatch, "start_gpu.py", *options, "--child", "save")

    run(monkeypatch, "start_gpu.py", *options)

    seconds = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert seconds["first token"] > seconds["token"] > 0
    assert seconds["again"] > 0
