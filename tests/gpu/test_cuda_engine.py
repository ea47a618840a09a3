"""The engine on the card: captured steps give the tokens of eager ones, of the CPU engine and of
every other schedule, and write nowhere but to their own blocks.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from nanoserve_core import Engine, EngineConfig, Request, SamplingParams
from nanoserve_core.cuda_graphs import BUCKETS
from nanoserve_core.cuda_runner import CudaRunner
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.plugins import PluginManager
from tests.nanoserve_core.hand_made_plans import Driven, Driver
from tests.parity.test_engine_parity import (
    Arrival,
    arrivals,
    assert_drained,
    assert_one_end_each,
    assert_tokens_of_solo_runs,
    engine_options,
    serve,
)
from tests.tiny_qwen3_models import SHAPES, greedy_tokens, prompt_of, tiny_qwen3

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from nanoserve_core.model_runner import StepResult
    from nanoserve_core.plan import ScheduledSeq

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MAX_ROWS = 40
ROOMY: dict[str, Any] = {
    "block_size": 16,
    "num_kvcache_blocks": 600,
    "max_model_len": 256,
    "max_num_seqs": MAX_ROWS,
    "max_num_batched_tokens": 512,
}
RATIO = 1.25
"""How much further from float32 than transformers' own bfloat16 logits may be."""


@cache
def on_card(shape: str) -> nn.Module:
    """A random float32 model on the card; weights that are trained stay as they are, others are
    fused.
    """
    model = copy.deepcopy(tiny_qwen3(shape)).to("cuda")
    return model.requires_grad_(shape == "tied")


def make_engine(shape: str = "gqa", **options: Any) -> Engine:
    return Engine(on_card(shape), EngineConfig(**{**ROOMY, **options}))


def runner_of(engine: Engine) -> CudaRunner:
    runner = engine._runner  # noqa: SLF001  # what these tests are about
    assert isinstance(runner, CudaRunner)
    return runner


def request_of(number: int, *, length: int = 9, **sampling: Any) -> Request:
    options = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return Request(
        request_id=str(number),
        prompt_token_ids=prompt_of(length, seed=number),
        sampling=SamplingParams(**options),
    )


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    """All requests at once; tokens of sample 0 by request id."""
    tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            if output.index == 0:
                tokens[output.request_id] += tuple(output.token_ids)
    return tokens


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.9, "repetition_penalty": 1.2, "min_tokens": 4, "logprobs": 2},
    ],
    ids=["greedy", "sampled", "filtered", "host"],
)
def test_float32_gives_the_tokens_of_the_cpu_engine(
    tiny_checkpoint: Path, sampling: dict[str, Any]
) -> None:
    options = {**ROOMY, "dtype": "float32"}
    requests = [
        request_of(i, length=5 + 11 * i, max_tokens=40, seed=i, ignore_eos=True, **sampling)
        for i in range(9)
    ]
    with Engine(tiny_checkpoint, EngineConfig(device="cpu", **options)) as engine:
        expected = run(engine, requests)

    with Engine(tiny_checkpoint, EngineConfig(device="cuda", **options)) as engine:
        tokens = run(engine, requests)

        assert engine.stats().backends["attention"] == "triton"
        assert tokens == expected
        assert run(engine, requests[:1])["0"] == expected["0"]  # alone: other products
        assert_drained(engine)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_greedy_tokens_are_those_of_transformers(shape: str) -> None:
    with make_engine(shape) as engine:
        tokens = run(engine, [request_of(i, length=3 + 5 * i) for i in range(8)])

        for i in range(8):
            assert tokens[str(i)] == greedy_tokens(shape, prompt_of(3 + 5 * i, seed=i), 8)


def test_captured_steps_give_the_tokens_of_eager_ones_at_every_bucket_edge() -> None:
    edges = sorted({n + d for n in BUCKETS for d in (-1, 0, 1) if 1 <= n + d <= MAX_ROWS})
    with make_engine() as captured, make_engine(enforce_eager=True) as eager:
        for num_rows in [*edges, *edges]:  # the second time everything is replayed
            requests = [
                request_of(i, seed=i, ignore_eos=True, temperature=0.8 * (i % 2))
                for i in range(num_rows)
            ]
            assert run(captured, requests) == run(eager, requests), f"{num_rows} rows"

        assert_drained(captured)


def test_filters_come_and_go_without_changing_the_neighbours() -> None:
    plain = [request_of(i, max_tokens=30, ignore_eos=True) for i in range(5)]
    filtered = [request_of(i + 9, temperature=0.7, top_k=9, max_tokens=6, seed=i) for i in range(5)]
    with make_engine() as engine:
        alone = run(engine, plain)

        together = run(engine, [*filtered, *plain])

        assert {request: together[request] for request in alone} == alone


def tokens_with_aborts(
    engine: Engine, requests: Sequence[Request], abort_steps: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """The first request alone until its prompt is in the cache, then the others with it."""
    tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
    waiting, step = list(requests), 0
    while waiting or engine.has_unfinished_requests():
        for request in waiting[: 1 if step == 0 else 9]:
            engine.add_request(request)
            waiting.remove(request)
        for request_id, abort_step in abort_steps.items():
            if abort_step == step:
                engine.abort(request_id)
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += tuple(output.token_ids)
        step += 1
    return tokens


@pytest.mark.parametrize("num_requests", [5, 16, 40])
def test_a_prefix_that_is_read_once_gives_the_tokens_of_one_read_by_every_row(
    tiny_checkpoint: Path, num_requests: int
) -> None:
    # In float32: packed rows make fewer items, so the planner may cut the K/V in other places.
    dtype = "float32"
    prefix = prompt_of(300, seed=900)
    requests = []
    for i in range(num_requests):
        request = request_of(
            i, length=1 + 7 * i % 50, max_tokens=20 + i, seed=i, temperature=0.8 * (i % 2)
        )
        own = request.prompt_token_ids
        requests.append(request if i % 7 == 3 else replace(request, prompt_token_ids=prefix + own))
    aborts = {str(i): 9 + 2 * i for i in range(1, num_requests, 6)}
    options = {**ROOMY, "max_model_len": 512, "num_kvcache_blocks": 2000}
    config = EngineConfig(device="cuda", dtype=dtype, **{**options, "max_num_batched_tokens": 4096})
    results = []
    for is_packed in (False, True):
        with Engine(tiny_checkpoint, config) as engine:
            rows = runner_of(engine)._rows  # noqa: SLF001  # as above
            assert rows._pack_size > 1  # noqa: SLF001  # as above
            if not is_packed:
                rows._pack_size = 1  # noqa: SLF001  # there is no option for it

            results.append(tokens_with_aborts(engine, requests, aborts))

            assert (rows._sent_groups != ([], [])) == is_packed  # noqa: SLF001  # as above
            assert_drained(engine)
    for i in range(num_requests):
        plain, packed = (tokens[str(i)] for tokens in results)
        if str(i) in aborts:  # at the same step, but a step brings as much as is done by then
            plain, packed = (tokens[: min(len(plain), len(packed))] for tokens in (plain, packed))
        assert packed == plain


@settings(max_examples=40)
@given(
    schedule=st.lists(arrivals(), min_size=1, max_size=7),
    options=engine_options(),
    block_size=st.sampled_from([4, 16]),
    enforce_eager=st.sampled_from([False, False, True]),
)
def test_every_schedule_gives_each_request_its_solo_tokens(
    schedule: list[Arrival], options: dict[str, Any], block_size: int, enforce_eager: bool
) -> None:
    smallest = -(-options["max_model_len"] // block_size)
    extra = options["num_kvcache_blocks"] * options["block_size"] // block_size
    options = {
        **options,
        "block_size": block_size,
        "num_kvcache_blocks": max(smallest, extra),
        "enforce_eager": enforce_eager,
    }
    with Engine(on_card("gqa"), EngineConfig(**options)) as engine:
        outputs = serve(engine, schedule, {"temperature": 0.0})

        assert_one_end_each(outputs, schedule)
        assert_tokens_of_solo_runs(outputs, schedule, "gqa")
        assert_drained(engine)


def test_nothing_is_written_outside_the_positions_of_live_rows() -> None:
    lengths = [3, 17, 40, 5, 64]
    with make_engine() as engine:
        cache_tensor = runner_of(engine)._kv_cache.tensor  # noqa: SLF001  # as above
        cache_tensor.fill_(torch.nan)
        torch.cuda.synchronize()

        run(engine, [request_of(i, length=n, ignore_eos=True) for i, n in enumerate(lengths)])

        torch.cuda.synchronize()
        is_written = ~cache_tensor.isnan().all(-1).all(-1)  # [2, layers, blocks, block_size]
        counts = is_written.flatten(2).sum(-1).unique().tolist()
        assert counts == [sum(n + 8 - 1 for n in lengths)]


def test_weights_that_moved_are_followed_by_the_captured_steps() -> None:
    model = copy.deepcopy(tiny_qwen3("gqa")).to("cuda")
    with Engine(model, EngineConfig(**ROOMY)) as engine:
        before = run(engine, [request_of(0, ignore_eos=True)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            model.lm_head.weight.data = model.lm_head.weight.data.roll(1, 0)
        engine.weights_changed()

        after = run(engine, [request_of(0, ignore_eos=True)])

        assert before["0"] == greedy_tokens("gqa", prompt_of(9, seed=0), 8, ignore_eos=True)
        assert after["0"][0] == (before["0"][0] + 1) % model.config.vocab_size


def test_a_step_of_the_callers_stream_is_waited_for() -> None:
    model = copy.deepcopy(tiny_qwen3("gqa")).to("cuda")
    with Engine(model, EngineConfig(**ROOMY)) as engine:
        before = run(engine, [request_of(0, ignore_eos=True)])
        head = model.lm_head.weight
        with torch.no_grad():
            rolled = head.roll(1, 0)
            torch.cuda._sleep(50_000_000)  # noqa: SLF001  # torch has no public way to be slow
            head.copy_(rolled)
        engine.weights_changed()

        after = run(engine, [request_of(0, ignore_eos=True)])

        assert after["0"][0] == (before["0"][0] + 1) % model.config.vocab_size


class CapturedDriver(Driver):
    """Drives captured steps, and takes each step's logits from where the graph leaves them."""

    def __init__(self, runner: CudaRunner) -> None:
        super().__init__(runner)
        self._cuda_runner = runner

    def add_plain(self, prompt: Sequence[int]) -> Driven:
        """A sequence that asks for nothing a graph cannot do."""
        sampling = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        sequence = self.add(prompt, sampling=sampling)
        sequence.request = replace(sequence.request, output_logits=False)
        return sequence

    def _take(
        self, work: Mapping[Driven, int], rows: Sequence[ScheduledSeq], result: StepResult
    ) -> None:
        torch.cuda.synchronize()
        logits: Tensor = self._cuda_runner._sampling.logits  # noqa: SLF001  # as above
        result = replace(
            result, logits={row: logits[row].float().clone() for row in range(len(rows))}
        )
        super()._take(work, rows, result)


@pytest.mark.parametrize("num_rows", [1, 3, 20, 70])
def test_bfloat16_logits_of_captured_steps_are_as_good_as_those_of_transformers(
    tiny_checkpoint: Path, num_rows: int
) -> None:
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=dtype).to("cuda").eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    config = EngineConfig(
        device="cuda", dtype="bfloat16", num_kvcache_blocks=400, max_model_len=256, max_num_seqs=70
    )
    runner = ModelRunner.create(tiny_checkpoint, config, PluginManager())
    assert isinstance(runner, CudaRunner)
    driver = CapturedDriver(runner)
    sequences = [driver.add_plain(prompt_of(40, seed=seed)) for seed in range(num_rows)]
    for sequence in sequences:
        driver.prefill(sequence)

    driver.decode(sequences, 24)

    ours, theirs, truth = [], [], []
    for sequence in sequences[:8]:
        ids = torch.tensor([sequence.tokens[:-1]], device="cuda")
        with torch.no_grad():
            truth.append(exact(ids).logits[0, 40:].float())
            theirs.append(rounded(ids).logits[0, 40:].float())
        ours.append(torch.stack(sequence.logits[1:]))
    reference = torch.stack(truth)
    error, allowed = (
        (torch.stack(each) - reference).norm() / reference.norm() for each in (ours, theirs)
    )
    runner.close()
    assert error <= RATIO * allowed
