"""The runner: what it makes of its options, plugins and thread, and what a step hands back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nanoserve_core.config import EngineConfig
from nanoserve_core.errors import ConfigError, EngineClosed, UnsupportedOption
from nanoserve_core.hookspecs import hookimpl
from nanoserve_core.layers.attention import TorchAttention
from nanoserve_core.model_runner import PROMPT_LOGPROB_ROWS, ModelRunner
from nanoserve_core.models.qwen3 import Qwen3Model
from nanoserve_core.plan import StepPlan
from nanoserve_core.plugins import PluginManager
from nanoserve_core.sampler import Sampler
from nanoserve_core.sampling_params import SamplingParams
from tests.nanoserve_core.hand_made_plans import GREEDY, Driver
from tests.nanoserve_core.random_qwen3 import (
    frozen,
    random_model,
    random_tokens,
    reference_logits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor, nn

    from nanoserve_core.batch_state import BatchState
    from nanoserve_core.config import ModelSpec
    from nanoserve_core.layers.attention import AttentionBackend, AttentionPlan
    from nanoserve_core.request import Request
    from nanoserve_core.sampler import SamplerOutput

MODEL = frozen(random_model())


def test_facts_of_model_and_machine_are_there_to_read() -> None:
    with_options = EngineConfig(max_num_seqs=2, max_model_len=4096, num_kvcache_blocks=9)

    runner = ModelRunner.create(MODEL, with_options, no_plugins())

    assert runner.max_model_len == 512  # the model's own limit is smaller than what was asked for
    assert runner.num_blocks == 9
    assert runner.block_size == 16
    assert runner.run_ahead == 0
    assert runner.spec.vocab_size == 199
    assert runner.backend_names["attention"] == "torch"
    runner.close()


def test_pool_is_computed_when_no_size_is_given() -> None:
    config = EngineConfig(max_num_seqs=2, max_model_len=100, block_size=8)

    runner = ModelRunner.create(MODEL, config, no_plugins())

    assert runner.num_blocks == 2 * 13
    runner.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"attention_backend": "flash"}, r"attention_backend='flash'.*'torch'"),
        ({"kv_cache_memory_bytes": 1000}, "K/V pool would have 0 blocks"),
    ],
)
def test_option_that_cannot_be_met_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelRunner.create(MODEL, EngineConfig(**options), no_plugins())


def test_folder_and_its_name_are_loaded(tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path)

    for path in (tmp_path, str(tmp_path)):
        runner = ModelRunner.create(path, small_config(), no_plugins())
        assert runner.weights_epoch() == 0
        runner.close()


def test_rows_that_do_not_sample_give_no_token(driver: Driver) -> None:
    sequence = driver.add(random_tokens(9))

    first = driver.step({sequence: 5})
    second = driver.step({sequence: 4})

    assert first.token_ids.tolist() == []
    assert len(second.token_ids) == 1


def test_plan_without_rows_only_changes_slots(runner: ModelRunner) -> None:
    launched = runner.launch(StepPlan(step_id=0, seqs=(), num_decode_seqs=0, released=(1,)))

    result = launched.wait()

    assert launched.is_done()
    assert result.token_ids.tolist() == []
    assert result is launched.wait()


def test_result_holds_what_requests_ask_for_by_sampled_row(driver: Driver) -> None:
    plain = driver.add(random_tokens(4))
    unfinished = driver.add(random_tokens(9, seed=1))
    scored = driver.add(random_tokens(6, seed=2), sampling=GREEDY.replace(logprobs=2))

    result = driver.step({plain: 4, unfinished: 3, scored: 6})

    expected = reference_logits(MODEL, scored.tokens[:6])[-1]
    logprobs = result.logprobs[1]
    assert result.logprobs[0] is None
    assert logprobs is not None
    assert sorted(logprobs) == sorted(expected.topk(2).indices.tolist())
    best = int(expected.argmax())
    assert logprobs[best].logprob == pytest.approx(expected.log_softmax(-1)[best].item(), abs=1e-4)
    torch.testing.assert_close(result.logits[1], expected, rtol=1e-4, atol=1e-4)
    assert result.errors == {}


@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("num_rows", [PROMPT_LOGPROB_ROWS, 4])
def test_prompt_logprobs_are_those_of_the_following_tokens(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, chunk: int | None, num_rows: int
) -> None:
    monkeypatch.setattr("nanoserve_core.model_runner.PROMPT_LOGPROB_ROWS", num_rows)
    prompt = random_tokens(20)
    other = driver.add(random_tokens(3, seed=9))
    sequence = driver.add(prompt, sampling=GREEDY.replace(prompt_logprobs=1))
    entries = []

    first = driver.step({other: 3, sequence: chunk or 20})
    entries += first.prompt_logprobs[1]
    while sequence.num_computed < 20:
        left = min(chunk or 20, 20 - sequence.num_computed)
        result = driver.step({sequence: left})
        entries += result.prompt_logprobs.get(0, [])

    expected = reference_logits(MODEL, prompt).log_softmax(-1)
    assert len(entries) == 19
    for position, entry in enumerate(entries):
        token = prompt[position + 1]
        row = expected[position]
        assert entry[token].logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entry[token].rank == int((row > row[token]).sum()) + 1
        assert int(row.argmax()) in entry


def gradients() -> AbstractContextManager[object]:
    return torch.enable_grad()


def inference() -> AbstractContextManager[object]:
    return torch.inference_mode()


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def no_gradients() -> AbstractContextManager[object]:
    return torch.no_grad()


@pytest.mark.parametrize("state", [gradients, inference, autocast, no_gradients])
def test_state_of_the_calling_thread_changes_nothing(
    state: Callable[[], AbstractContextManager[object]],
) -> None:
    prompt = random_tokens(7)
    with state():
        runner = ModelRunner.create(MODEL, small_config(), no_plugins())
        driver = Driver(runner)
        sequence = driver.add(prompt, sampling=GREEDY.replace(logprobs=1))
        driver.prefill(sequence)
        driver.decode([sequence], 2)
    driver.decode([sequence], 2)  # outside again: nothing made inside is of another kind

    expected = reference_logits(MODEL, sequence.tokens[:-1])[6:]
    logits = torch.stack(sequence.logits)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for each in sequence.logits:
        assert not each.is_inference()
        assert not each.requires_grad
        each.add_(1.0)
    runner.close()


def test_default_dtype_of_the_process_changes_nothing() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        runner = ModelRunner.create(MODEL, small_config(), no_plugins())
        driver = Driver(runner)
        sequence = driver.add(random_tokens(5))
        driver.prefill(sequence)
        driver.decode([sequence], 2)
    finally:
        torch.set_default_dtype(torch.float32)

    expected = reference_logits(MODEL, sequence.tokens[:-1])[4:]
    torch.testing.assert_close(torch.stack(sequence.logits), expected, rtol=1e-4, atol=1e-4)
    runner.close()


def test_runner_may_be_made_on_one_thread_and_used_on_another() -> None:
    runner = ModelRunner.create(MODEL, small_config(), no_plugins())
    driver = Driver(runner)
    sequence = driver.add(random_tokens(5))
    thread = threading.Thread(target=driver.prefill, args=(sequence,))

    thread.start()
    thread.join()
    driver.decode([sequence], 1)

    assert sequence.output == reference_logits(MODEL, sequence.tokens[:-1])[4:].argmax(-1).tolist()
    runner.close()


def test_two_runners_in_one_process_do_not_see_each_other() -> None:
    other_model = random_model(seed=1)
    runners = [ModelRunner.create(m, small_config(), no_plugins()) for m in (MODEL, other_model)]
    drivers = [Driver(runner) for runner in runners]
    first, second = (driver.add(random_tokens(6)) for driver in drivers)

    drivers[0].prefill(first)
    drivers[1].prefill(second)
    drivers[0].decode([first], 3)
    drivers[1].decode([second], 3)

    for sequence, model in ((first, MODEL), (second, other_model)):
        logits = reference_logits(model, sequence.tokens[:-1])
        assert sequence.output == logits[5:].argmax(-1).tolist()
    for runner in runners:
        runner.close()


def scale_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def assign_others(model: nn.Module) -> None:
    model.load_state_dict(random_model(seed=4).state_dict(), assign=True)


def change_dtype(model: nn.Module) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [scale_in_place, assign_others, change_dtype])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_changed_weights_are_used_and_give_another_epoch(
    change: Callable[[nn.Module], None], is_frozen: bool
) -> None:
    model = random_model().requires_grad_(not is_frozen)
    runner = ModelRunner.create(model, small_config(), no_plugins())
    driver, before = Driver(runner), runner.weights_epoch()

    change(model)
    epoch = runner.weights_epoch()
    sequence = driver.add(random_tokens(8))
    driver.prefill(sequence)
    driver.decode([sequence], 2)

    expected = reference_logits(model, sequence.tokens[:-1])[7:]
    error = (torch.stack(sequence.logits) - expected).norm() / expected.norm()
    assert epoch == before + 1
    assert error < (1e-5 if runner.spec.dtype == torch.float32 else 0.05)
    runner.close()


def test_running_sequences_keep_their_kv_when_the_dtype_changes() -> None:
    model = random_model()
    runner = ModelRunner.create(model, small_config(), no_plugins())
    driver = Driver(runner)
    sequence = driver.add(random_tokens(30))
    driver.prefill(sequence)

    model.to(torch.bfloat16)
    runner.weights_epoch()
    driver.decode([sequence], 1)

    expected = reference_logits(model, sequence.tokens[:-1])[-1]
    assert (sequence.logits[-1] - expected).norm() < 0.05 * expected.norm()
    runner.close()


def test_module_that_became_unusual_is_refused_and_the_engine_can_still_close() -> None:
    model = random_model()
    runner = ModelRunner.create(model, small_config(), no_plugins())
    model.lm_head.register_forward_hook(lambda *_: None)

    with pytest.raises(UnsupportedOption, match="lm_head has forward hooks"):
        runner.weights_epoch()

    runner.close()


def test_closing_leaves_the_module_working_and_the_runner_closed() -> None:
    model = frozen(random_model())
    logits = reference_logits(model, random_tokens(5))
    runner = ModelRunner.create(model, small_config(), no_plugins())

    runner.close()
    runner.close()

    torch.testing.assert_close(reference_logits(model, random_tokens(5)), logits)
    assert runner.weights_epoch() == 0
    with pytest.raises(EngineClosed):
        runner.launch(StepPlan(step_id=0, seqs=(), num_decode_seqs=0))


class CountingAttention(TorchAttention):
    """Attention of a plugin, with a name and block size of its own."""

    name = "counting"
    default_block_size = 8
    num_plans = 0

    def plan(self, *args: Any, **kwargs: Any) -> AttentionPlan:
        """Counts the steps."""
        self.num_plans += 1
        return super().plan(*args, **kwargs)

    def supports_block_size(self, block_size: int) -> bool:
        """Multiples of eight."""
        return block_size % 8 == 0


class Plugin:
    """Brings one of everything that is asked for at set-up."""

    def __init__(self) -> None:
        self.backend: CountingAttention | None = None
        self.num_samples = 0
        self.num_models = 0

    @hookimpl
    def nanoserve_attention_backend(
        self, spec: ModelSpec, device: torch.device
    ) -> AttentionBackend:
        """Ours instead."""
        self.backend = CountingAttention(spec, device=device)
        return self.backend

    @hookimpl
    def nanoserve_sampler(self) -> Sampler:
        """Counts what it samples."""
        plugin = self

        class CountingSampler(Sampler):
            """Counts steps."""

            def sample(self, *args: Any, **kwargs: Any) -> SamplerOutput:
                """Counts, and samples."""
                plugin.num_samples += 1
                return super().sample(*args, **kwargs)

        return CountingSampler()

    @hookimpl
    def nanoserve_register_models(self) -> Mapping[str, Callable[..., Any]]:
        """Qwen3 itself, counted."""

        def build(*args: Any, **kwargs: Any) -> Qwen3Model:
            self.num_models += 1
            return Qwen3Model(*args, **kwargs)

        return {"Qwen3ForCausalLM": build}

    @hookimpl
    def nanoserve_logits_processors(self) -> list[Forbid]:
        """One processor."""
        return [Forbid()]


class Forbid:
    """Forbids token 0, and everything above 1."""

    def assign(self, _slot: int, _request: Request) -> bool:
        """Serves all."""
        return True

    def release(self, _slot: int) -> None:
        """Nothing to forget."""

    def apply(self, logits: Tensor, _slots: Tensor, _state: BatchState) -> Tensor:
        """Only token 1 is left."""
        logits[:, 0] = -torch.inf
        logits[:, 2:] = -torch.inf
        return logits


def test_plugins_bring_backend_sampler_processors_and_models() -> None:
    plugin = Plugin()
    runner = ModelRunner.create(
        MODEL,
        EngineConfig(max_num_seqs=2, max_model_len=64, attention_backend="counting"),
        PluginManager([plugin], allowed=()),
    )
    driver = Driver(runner)
    sequence = driver.add(random_tokens(3))

    driver.prefill(sequence)
    driver.decode([sequence], 1)

    assert runner.block_size == 8
    assert runner.backend_names["attention"] == "counting"
    assert plugin.backend is not None
    assert (plugin.backend.num_plans, plugin.num_samples, plugin.num_models) == (2, 2, 1)
    assert sequence.output == [1, 1]
    runner.close()


def test_block_size_that_a_plugins_backend_does_not_serve_is_refused() -> None:
    config = EngineConfig(max_num_seqs=2, max_model_len=64, block_size=12)

    with pytest.raises(ConfigError, match=r"block_size=12.*'counting'"):
        ModelRunner.create(MODEL, config, PluginManager([Plugin()], allowed=()))


def test_sampled_rows_are_independent_of_their_neighbours(driver: Driver) -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=None)
    alone = driver.add(random_tokens(5), sampling=sampling)
    driver.prefill(alone)
    driver.decode([alone], 5)

    others = [driver.add(random_tokens(4, seed=n), sampling=sampling) for n in (1, 2)]
    twin = driver.add(random_tokens(5), sampling=sampling)
    twin.seed = alone.seed
    driver.step({others[0]: 4, twin: 5, others[1]: 4})
    driver.decode([others[0], twin, others[1]], 5)

    assert twin.output == alone.output


@pytest.fixture
def runner() -> Iterator[ModelRunner]:
    """A runner over `MODEL`."""
    runner = ModelRunner.create(MODEL, small_config(), no_plugins())
    yield runner
    runner.close()


@pytest.fixture
def driver(runner: ModelRunner) -> Driver:
    """A driver of that runner."""
    return Driver(runner)


def small_config() -> EngineConfig:
    """Few slots, small blocks."""
    return EngineConfig(max_num_seqs=8, max_model_len=128, num_kvcache_blocks=96, block_size=4)


def no_plugins() -> PluginManager:
    """Not even installed ones."""
    return PluginManager(allowed=())
