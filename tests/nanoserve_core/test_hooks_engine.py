"""Each hook in a running engine: when it is called, with what, and what its result does."""

from __future__ import annotations

import inspect
import re
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nanoserve_core import Engine, EngineConfig, FinishReason, Request, SamplingParams, hookspecs
from nanoserve_core.errors import InvalidRequest, PluginError
from nanoserve_core.hookspecs import hookimpl
from nanoserve_core.layers.attention import TorchAttention
from nanoserve_core.model_runner import ModelRunner
from nanoserve_core.models.qwen3 import Qwen3Model
from nanoserve_core.plugins import PluginManager
from nanoserve_core.sampler import Sampler, SamplerOutput
from tests.tiny_qwen3_models import VOCAB_SIZE, greedy_tokens, prompt_of, tiny_qwen3

if TYPE_CHECKING:
    import numpy as np

    from nanoserve_core.batch_state import BatchState
    from nanoserve_core.config import ModelSpec
    from nanoserve_core.engine_stats import EngineStats
    from nanoserve_core.hookspecs import StepStats
    from nanoserve_core.request import RequestMetrics, StepOutput

PROMPT = prompt_of(9)
MAX_TOKENS = 6
FAVOURITE = 99


def make_engine(*plugins: object, **options: Any) -> Engine:
    config = {"block_size": 4, "num_kvcache_blocks": 64, "max_num_seqs": 8, "max_model_len": 128}
    return Engine(tiny_qwen3(), EngineConfig(plugins=plugins, **{**config, **options}))


def request(
    request_id: str = "a", prompt: tuple[int, ...] = PROMPT, *, more: dict[str, Any] | None = None,
    **sampling: Any,
) -> Request:  # fmt: skip
    options = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **sampling}
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**options),
        **(more or {}),
    )


def run(engine: Engine, *requests: Request) -> dict[str, list[StepOutput]]:
    """Serve the requests to the end; all outputs by request id."""
    for each in requests:
        engine.add_request(each)
    outputs: dict[str, list[StepOutput]] = {each.request_id: [] for each in requests}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[StepOutput]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


EXPECTED = greedy_tokens("gqa", PROMPT, MAX_TOKENS, ignore_eos=True)


class Log:
    """Notes every call: (hook, its arguments)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.threads: set[str] = set()

    def note(self, hook: str, **arguments: Any) -> None:
        self.calls.append((hook, arguments))
        self.threads.add(threading.current_thread().name)

    def of(self, hook: str) -> list[dict[str, Any]]:
        return [arguments for name, arguments in self.calls if name == hook]


class Observer(Log):
    """Implements every observer."""

    @hookimpl
    def nanoserve_request_scheduled(
        self, request: Request, index: int, num_cached_tokens: int, queued_seconds: float
    ) -> None:
        self.note(
            "scheduled", id=request.request_id, index=index, cached=num_cached_tokens,
            seconds=queued_seconds,
        )  # fmt: skip

    @hookimpl
    def nanoserve_request_preempted(self, request: Request, index: int, num_tokens: int) -> None:
        self.note("preempted", id=request.request_id, index=index, num_tokens=num_tokens)

    @hookimpl
    def nanoserve_request_finished(
        self,
        request: Request,
        finish_reason: FinishReason,
        metrics: RequestMetrics,
        error: BaseException | None,
    ) -> None:
        self.note(
            "finished", id=request.request_id, reason=finish_reason, metrics=metrics, error=error
        )

    @hookimpl
    def nanoserve_tokens(self, outputs: list[StepOutput]) -> None:
        self.note("tokens", outputs=list(outputs))

    @hookimpl
    def nanoserve_step_finished(self, stats: StepStats) -> None:
        self.note("step", stats=stats)

    @hookimpl
    def nanoserve_weights_changed(self, old_epoch: int, new_epoch: int) -> None:
        self.note("weights", old=old_epoch, new=new_epoch)

    @hookimpl
    def nanoserve_shutdown(self, stats: EngineStats) -> None:
        self.note("shutdown", stats=stats)


def test_hook_configure() -> None:
    class Plugin(Log):
        @hookimpl
        def nanoserve_configure(self, config: EngineConfig, spec: ModelSpec) -> None:
            self.note("configure", config=config, spec=spec)

    plugin = Plugin()

    with make_engine(plugin) as engine:
        run(engine, request())

        (arguments,) = plugin.of("configure")
        assert arguments["config"] is engine.config
        assert arguments["spec"].vocab_size == VOCAB_SIZE


def test_configure_that_raises_keeps_the_engine_from_starting() -> None:
    class Plugin:
        @hookimpl
        def nanoserve_configure(self) -> None:
            raise OSError("disk full")

    with pytest.raises(PluginError, match="disk full"):
        make_engine(Plugin())


def test_hook_shutdown() -> None:
    observer = Observer()
    engine = make_engine(observer)
    run(engine, request())

    engine.close()
    engine.close()

    (arguments,) = observer.of("shutdown")
    assert arguments["stats"].generated_tokens == MAX_TOKENS


def test_hook_register_models() -> None:
    built = []

    class Builder:
        @hookimpl
        def nanoserve_register_models(self) -> dict[str, object]:
            def build(*args: Any, **kwargs: Any) -> Qwen3Model:
                built.append(args)
                return Qwen3Model(*args, **kwargs)

            return {"Qwen3ForCausalLM": build, "SomethingElse": build}

    with make_engine(Builder()) as engine:
        outputs = run(engine, request())

    assert len(built) == 1
    assert tokens_of(outputs["a"]) == EXPECTED


def test_hook_attention_backend() -> None:
    class Backend(TorchAttention):
        name = "mine"

    class Plugin:
        @hookimpl
        def nanoserve_attention_backend(
            self, config: EngineConfig, spec: ModelSpec, device: torch.device
        ) -> Backend:
            assert config.block_size == 4
            return Backend(spec, device=device)

    with make_engine(Plugin()) as engine:
        outputs = run(engine, request())

        assert engine.stats().backends["attention"] == "mine"
        assert tokens_of(outputs["a"]) == EXPECTED


class Favourite:
    """Batch processor: requests with metadata get one token only."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def assign(self, slot: int, request: Request) -> bool:
        self.log.note("assign", slot=slot, id=request.request_id)
        return bool(request.metadata)

    def release(self, slot: int) -> None:
        self.log.note("release", slot=slot)

    def apply(self, logits: torch.Tensor, slots: torch.Tensor, state: BatchState) -> torch.Tensor:
        lengths = [len(state.token_history(slot)) for slot in slots.tolist()]
        self.log.note("apply", shape=tuple(logits.shape), lengths=lengths)
        if FAVOURITE in state.token_history(int(slots[0]))[:1]:
            raise ZeroDivisionError("prompts must not begin with the favourite")
        logits[:, FAVOURITE] = 1e4
        return logits


class FavouritePlugin(Log):
    @hookimpl
    def nanoserve_logits_processors(self, device: torch.device) -> list[Favourite]:
        assert device.type == "cpu"
        return [Favourite(self)]


def test_hook_logits_processors() -> None:
    plugin = FavouritePlugin()
    with make_engine(plugin) as engine:
        outputs = run(engine, request("a"), request("b", more={"metadata": {"x": 1}}), request("c"))

    assert tokens_of(outputs["a"]) == tokens_of(outputs["c"]) == EXPECTED
    assert tokens_of(outputs["b"]) == (FAVOURITE,) * MAX_TOKENS
    assert [call["id"] for call in plugin.of("assign")] == ["a", "b", "c"]
    assert [call["shape"] for call in plugin.of("apply")] == [(1, VOCAB_SIZE)] * MAX_TOKENS
    assert [call["lengths"] for call in plugin.of("apply")] == [
        [len(PROMPT) + step] for step in range(MAX_TOKENS)
    ]


def test_batch_processor_that_raises_fails_the_requests_it_serves() -> None:
    bad_prompt = (FAVOURITE, *PROMPT)
    with make_engine(FavouritePlugin()) as engine:
        outputs = run(engine, request("a"), request("bad", bad_prompt, more={"metadata": {"x": 1}}))
        after = run(engine, request("c", more={"metadata": {"x": 1}}))

    assert tokens_of(outputs["a"]) == EXPECTED
    assert outputs["bad"][-1].finish_reason == FinishReason.ERROR
    assert isinstance(outputs["bad"][-1].error, ZeroDivisionError)
    assert tokens_of(after["c"]) == (FAVOURITE,) * MAX_TOKENS


def test_hook_sampler() -> None:
    class Second(Sampler):
        """Takes the second best token."""

        def sample(
            self,
            logits: torch.Tensor,
            slots: np.ndarray,
            positions: np.ndarray,
            state: BatchState,
        ) -> SamplerOutput:
            assert len(slots) == len(positions) == len(logits)
            assert (positions == state.num_tokens[slots]).all()
            return SamplerOutput(token_ids=logits.topk(2).indices[:, 1])

    class Plugin:
        @hookimpl
        def nanoserve_sampler(self, config: EngineConfig, device: torch.device) -> Second:
            assert (config.max_num_seqs, device.type) == (8, "cpu")
            return Second()

    with make_engine(Plugin()) as engine:
        outputs = run(engine, request(max_tokens=1))

    with torch.no_grad():
        logits = tiny_qwen3()(torch.tensor([PROMPT])).logits[0, -1]
    assert tokens_of(outputs["a"]) == (int(logits.topk(2).indices[1]),)


def test_hook_cache_namespace() -> None:
    class Tenants:
        @hookimpl
        def nanoserve_cache_namespace(self, request: Request) -> str | None:
            return request.metadata.get("tenant")

    observer = Observer()
    with make_engine(Tenants(), observer) as engine:
        for number, tenant in enumerate(["x", "y", "x", None]):
            more = {"metadata": {"tenant": tenant}} if tenant else None
            run(engine, request(f"{number}", more=more))

    assert [call["cached"] for call in observer.of("scheduled")] == [0, 0, 8, 0]


def test_hook_request_added() -> None:
    class Plugin(Log):
        @hookimpl
        def nanoserve_request_added(self, request: Request) -> None:
            self.note("added", id=request.request_id)
            if request.request_id == "refused":
                raise LookupError("unknown tenant")
            if request.request_id == "invalid":
                raise InvalidRequest("not today")

    plugin = Plugin()
    with make_engine(plugin) as engine:
        with pytest.raises(PluginError, match="unknown tenant") as caught:
            engine.add_request(request("refused"))
        with pytest.raises(InvalidRequest, match="not today"):
            engine.add_request(request("invalid"))
        outputs = run(engine, request("a", n=2))

        assert engine.stats().free_blocks == engine.stats().num_blocks
    assert isinstance(caught.value.__cause__, LookupError)
    assert [call["id"] for call in plugin.of("added")] == ["refused", "invalid", "a"]
    assert tokens_of([each for each in outputs["a"] if each.index == 0]) == EXPECTED


def test_hook_request_processor() -> None:
    def favour(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        return scores.index_fill(1, torch.tensor([FAVOURITE]), 1e4)

    def ban(_input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([FAVOURITE]), -torch.inf)

    class Plugin:
        @hookimpl
        def nanoserve_request_processor(self, request: Request) -> object:
            return {"favour": favour, "ban": ban}.get(request.request_id)

    with make_engine(Plugin()) as engine:
        outputs = run(
            engine,
            request("favour"),
            request("ban", more={"logits_processors": (favour,)}),
            request("a"),
        )

    assert tokens_of(outputs["favour"]) == (FAVOURITE,) * MAX_TOKENS
    assert tokens_of(outputs["ban"]) == EXPECTED  # the plugin's runs after the request's own
    assert tokens_of(outputs["a"]) == EXPECTED


def test_request_processor_that_raises_at_submit_refuses_the_request() -> None:
    class Plugin:
        @hookimpl
        def nanoserve_request_processor(self) -> None:
            raise OSError("no grammar file")

    with make_engine(Plugin()) as engine:
        with pytest.raises(PluginError, match="no grammar file"):
            engine.add_request(request())

        assert not engine.has_unfinished_requests()


def test_hook_stop_checker() -> None:
    class Plugin(Log):
        @hookimpl
        def nanoserve_stop_checker(self, request: Request) -> object:
            if request.request_id == "free":
                return None

            def check(index: int, token_ids: list[int]) -> bool:
                self.note("check", index=index, tokens=list(token_ids))
                return len(token_ids) == 3

            return check

    plugin = Plugin()
    with make_engine(plugin) as engine:
        outputs = run(engine, request("stopped"), request("free"))

    assert tokens_of(outputs["stopped"]) == EXPECTED[:3]
    assert outputs["stopped"][-1].finish_reason == FinishReason.STOP
    assert tokens_of(outputs["free"]) == EXPECTED
    assert [call["tokens"] for call in plugin.of("check")] == [
        list(EXPECTED[:n]) for n in (1, 2, 3)
    ]


def test_hook_request_scheduled() -> None:
    observer = Observer()
    with make_engine(observer) as engine:
        run(engine, request("first", n=2))
        run(engine, request("second"))

    calls = observer.of("scheduled")
    assert [(call["id"], call["index"]) for call in calls] == [
        ("first", 0),
        ("first", 1),
        ("second", 0),
    ]
    assert calls[0]["cached"] == 0
    assert calls[2]["cached"] == 8
    assert all(call["seconds"] >= 0 for call in calls)


def preempting_run(observer: Observer) -> Engine:
    """An engine that has preempted: four requests that together outgrow the pool."""
    engine = make_engine(observer, num_kvcache_blocks=10, watermark=0.0)
    run(
        engine,
        *(request(f"r{n}", prompt_of(6, seed=n), max_tokens=24) for n in range(4)),
    )
    return engine


def test_hook_request_preempted() -> None:
    observer = Observer()

    with preempting_run(observer) as engine:
        calls = observer.of("preempted")

        assert len(calls) == engine.stats().preemptions > 0
        assert all(6 < call["num_tokens"] <= 30 for call in calls)
        # A sample that comes back is not scheduled for the first time.
        assert [call["id"] for call in observer.of("scheduled")] == ["r0", "r1", "r2", "r3"]


def test_hook_request_finished() -> None:
    def broken(_input_ids: torch.Tensor, _scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("broken")

    observer = Observer()
    with make_engine(observer) as engine:
        run(
            engine,
            request("length", n=2),
            request("stop", stop_token_ids=(EXPECTED[2],)),
            request("error", more={"logits_processors": (broken,)}),
        )
        engine.add_request(request("abort"))
        engine.abort("abort")
        engine.step()

    calls = {call["id"]: call for call in observer.of("finished")}
    assert len(observer.of("finished")) == 4
    assert {name: str(call["reason"]) for name, call in calls.items()} == {
        name: name for name in ("length", "stop", "error", "abort")
    }
    assert isinstance(calls["error"]["error"], ZeroDivisionError)
    assert calls["length"]["error"] is None
    metrics = calls["length"]["metrics"]
    assert (
        metrics.arrival_time
        <= metrics.first_scheduled_time
        <= metrics.first_token_time
        <= metrics.finished_time
    )


def test_hook_tokens() -> None:
    observer = Observer()
    with make_engine(observer) as engine:
        outputs = run(engine, request("a"), request("b", prompt_of(5)))

    seen = [output for call in observer.of("tokens") for output in call["outputs"]]
    for name in ("a", "b"):
        assert [each for each in seen if each.request_id == name] == outputs[name]


def test_hook_step_finished() -> None:
    observer = Observer()
    with make_engine(observer, max_num_batched_tokens=6) as engine:
        run(engine, request("a"), request("b", prompt_of(4)))

        all_stats = [call["stats"] for call in observer.of("step")]
        assert len(all_stats) == engine.stats().steps
    assert [stats.step_id for stats in all_stats] == sorted(stats.step_id for stats in all_stats)
    first = all_stats[0]
    assert (first.num_prefill_tokens, first.num_decode_tokens) == (6, 0)
    assert [(row.request_id, row.start, row.num_tokens, row.samples) for row in first.rows] == [
        ("a", 0, 6, False)
    ]
    last = all_stats[-1]
    assert last.num_running == last.num_waiting == 0
    assert last.num_free_blocks == last.num_blocks == 64
    rows = [row for stats in all_stats for row in stats.rows if row.request_id == "a"]
    assert sum(row.num_tokens for row in rows) == len(PROMPT) + MAX_TOKENS - 1
    assert sum(row.samples for row in rows) == MAX_TOKENS
    assert [row.is_prefill for row in rows] == [True] * 2 + [False] * (MAX_TOKENS - 1)
    assert all(stats.duration_seconds >= 0 for stats in all_stats)


def test_step_stats_count_preemptions_and_cached_tokens() -> None:
    observer = Observer()
    with preempting_run(observer) as engine:
        run(engine, request("once"))
        run(engine, request("again"))

        all_stats = [call["stats"] for call in observer.of("step")]
        assert sum(stats.num_preemptions for stats in all_stats) == engine.stats().preemptions
        cached = sum(stats.num_cached_tokens for stats in all_stats)
        assert cached >= engine.stats().prompt_tokens_cached > 0


def test_hook_weights_changed() -> None:
    observer = Observer()
    with make_engine(observer) as engine:
        run(engine, request("a"))

        engine.weights_changed()
        run(engine, request("b"))

    assert [(call["old"], call["new"]) for call in observer.of("weights")] == [(0, 1)]
    assert [call["cached"] for call in observer.of("scheduled")] == [0, 0]


def test_observers_that_raise_harm_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def note(self, hook: str, **arguments: Any) -> None:
            super().note(hook, **arguments)
            raise ZeroDivisionError(hook)

    broken, sound = Broken(), Observer()
    with make_engine(broken, sound) as engine:
        outputs = run(engine, request("a"), request("b"))

        assert engine.plugins.failures == {"Broken": 3}
    assert tokens_of(outputs["a"]) == tokens_of(outputs["b"]) == EXPECTED
    assert len(broken.calls) == 3
    assert len(sound.of("finished")) == 2
    assert caplog.text.count("raised 3 times: its observers are switched off") == 1


def test_observer_registers_and_leaves_while_requests_run() -> None:
    observer = Observer()
    with make_engine() as engine:
        engine.add_request(request("a"))
        engine.step()
        engine.plugins.register(observer)
        engine.step()
        engine.step()
        engine.plugins.unregister(observer)
        run(engine)

    assert len(observer.of("step")) == 2
    assert observer.of("finished") == []


def test_hooks_run_on_the_thread_that_steps_the_engine() -> None:
    observer = Observer()

    def work() -> None:
        with make_engine(observer) as engine:
            run(engine, request())

    thread = threading.Thread(target=work, name="the engine's thread")
    thread.start()
    thread.join()

    assert observer.threads == {"the engine's thread"}


def test_guide_to_plugins_runs_as_written() -> None:
    """The code in the docstring of `hookspecs`, with a tiny model in place of the path."""
    from nanoserve_adapters.testing import tiny_model, tiny_tokenizer

    guide = inspect.getdoc(hookspecs) or ""
    code = textwrap.dedent(re.search(r"::\n\n((?: {4}.*\n|\n)+)", guide)[1])  # type: ignore[index]  # it is there
    names: dict[str, Any] = {"model": tiny_model(), "tokenizer": tiny_tokenizer()}

    exec(code.replace('"path-or-hub-id"', "model, tokenizer=tokenizer"), names)

    assert names["watcher"].worst_seconds > 0


AHEAD = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 2.0, "frequency_penalty": 1.0},
    {"temperature": 1.0, "seed": 11, "top_p": 0.9},
    {"temperature": 1.0, "seed": 12, "top_k": 8, "logprobs": 2},
    {"bad_words_ids": ((EXPECTED[0], EXPECTED[1]), (EXPECTED[3],)), "min_tokens": 4},
]


@pytest.mark.parametrize("run_ahead", [1, 2])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_sampling_is_the_same_when_results_come_late(run_ahead: int, num_blocks: int) -> None:
    from nanoserve_adapters.testing import DelayedRunner

    options = {"num_kvcache_blocks": num_blocks, "watermark": 0.0}
    requests = [
        request(f"r{n}", prompt_of(5, seed=n), max_tokens=16, **sampling)
        for n, sampling in enumerate(AHEAD)
    ]
    alone = {}
    for each in requests:
        with make_engine(**options) as engine:
            alone |= run(engine, each)
    config = EngineConfig(block_size=4, max_num_seqs=8, max_model_len=128, **options)
    plugins = PluginManager([], allowed=())
    runner = DelayedRunner(ModelRunner.create(tiny_qwen3(), config, plugins), run_ahead)

    with Engine.from_runner(runner, config, plugins) as engine:  # type: ignore[arg-type]  # a double
        late = run(engine, *requests)

        assert num_blocks == 64 or engine.stats().preemptions > 0
    for name, outputs in alone.items():
        assert tokens_of(late[name]) == tokens_of(outputs)
        assert logprobs_of(late[name]) == pytest.approx(logprobs_of(outputs), abs=1e-4)


def logprobs_of(outputs: list[StepOutput]) -> list[float]:
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    return [logprob.logprob for entry in entries for logprob in entry.values()]
