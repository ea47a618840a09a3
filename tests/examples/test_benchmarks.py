"""The benchmarks run on a tiny model; what they measure is not asserted."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from nanoserve_adapters.testing import tiny_model

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


def test_continuous_batching_is_measured_beside_the_bare_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "continuous_batching.py", "--tiny", "--device", "cpu")

    printed = capsys.readouterr().out
    for route in ("bare engine, even", "generate_batch, even", "manager, mixed"):
        assert route in printed
    assert "fast=16" in printed


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


def test_the_hosts_part_of_a_step_is_profiled_and_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "profile.svg"
    options = ["--tiny", "--device", "cpu", "--rows", "1", "3", "--out", str(picture)]

    run(monkeypatch, "step_profile.py", *options)

    printed = capsys.readouterr().out
    for name in ("schedule", "launch", "commit", "deliver"):
        assert name in printed
    assert picture.read_text(encoding="utf-8").count("3 rows") == 1


def test_kernels_of_a_step_are_sorted_by_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    profile = runpy.run_path(str(BENCHMARKS / "step_profile.py"))
    layer = ["nvjet", "qk_norm_rope_write_kernel", "decode_attention_kernel", "skinny", "splitK"]
    layer += ["add_rms_norm_kernel", "nvjet", "silu_mul_kernel", "gemm", "add_rms_norm_kernel"]
    head = ["apply_deltas_kernel", "gather_rows_kernel", "decode_plan_kernel", "embed_rms_norm"]
    tail = ["nvjet", "tile_statistics_kernel", "pick_token_kernel", "advance_state", "Memcpy DtoH"]
    alone = ["gemv", "qk_norm_rope_write_kernel", "decode_attention_kernel", *["gemv"] * 3]
    steps = [[*head, *layer, *layer, *tail], [*head, *alone, *alone, "gemv", *tail[1:]]]
    kernels = [("left out", 9.0), *((name, 1.0) for step in steps for name in step)]

    found = [dict(profile["sum_parts"](step)) for step in profile["steps_of"](kernels)]

    products = {"qkv": 2.0, "o": 2.0, "gate_up": 2.0, "down": 2.0, "lm_head": 1.0}
    rest = {"attention": 2.0, "state": 5.0, "sampler": 2.0}
    assert found[0] == {**products, **rest, "o": 4.0, "norms, rope, silu": 9.0}
    assert found[1] == {**products, **rest, "norms, rope, silu": 3.0}


def test_the_floors_of_the_parts_are_the_floor_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    roofline = runpy.run_path(str(BENCHMARKS / "roofline.py"))
    shape, contexts = roofline["SHAPES"]["8B"], [100, 860, 2000]

    parts = roofline["decode_parts"](shape, contexts)

    assert sum(parts.values()) == pytest.approx(roofline["decode_seconds"](shape, contexts))
    assert parts["lm_head"] == pytest.approx(2 * (4096 * 151936 + 3 * (4096 + 151936)) / 4.3e12)


def test_overhead_of_calls_and_chunks_is_measured_in_every_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "langchain_overhead.py", "--parts", "calls", "--repeats", "1")

    printed = capsys.readouterr().out
    for row in ("ainvoke, a call", "chain.invoke, a call", "chain.astream, a chunk", "llm.stream"):
        assert row in printed


def test_overhead_of_a_call_is_printed_for_each_model_and_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "hf_overhead.py", "--layers", "1", "--rows", "1", "2", "--repeats", "2")

    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["layers", "rows", "prepare"]
    assert [line.split()[:2] for line in lines] == [["1", "1"], ["1", "2"]]
    assert all(len(line.split()) == 8 for line in lines)


def test_a_long_prompt_between_streams_is_timed_for_each_chunk_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tiny", "--device", "cpu", "--prompt-len", "200", "--streams", "2"]

    run(monkeypatch, "long_prompt_gpu.py", *options, "--visits", "4", "--chunks", "0", "32")

    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["batched", "chunk"]
    assert [line.split()[:2] for line in lines] == [["16384", "0"], ["16384", "32"]]


def test_the_rows_of_the_card_are_measured_and_set_beside_their_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench, workloads = (
        runpy.run_path(str(BENCHMARKS / f"{name}.py")) for name in ("bench_gpu", "workloads")
    )
    model = tiny_model(max_position_embeddings=512)
    loads = {"b16": workloads["uniform"](3, 8, 5)}

    rows = list(bench["measure_model"](model, "0.6B", loads, repeats=2, clock=bench["Clock"](60.0)))

    assert [(row.workload, row.num_repeats) for row in rows] == [("first token", 9), ("b16", 2)]
    assert rows[1].rate == pytest.approx(15 / rows[1].seconds)
    table = bench["card_table"](rows)
    assert table.row_count == 2
    assert list(table.columns[7].cells) == ["-", "20,000"]
