"""The manager that `init_continuous_batching` gives: its life, its requests, its readers."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

import hf_generate_shim
from nanoserve_adapters.testing import AdmissionGate, StepGate, settle
from nanoserve_core import hookimpl
from nanoserve_core.errors import EngineClosed, EngineDead, InvalidRequest, UnsupportedOption
from tests.hf_generate_shim.calls import EOS, PAD, new_model, prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import Qwen3ForCausalLM
    from transformers.generation.continuous_batching.requests import GenerationOutput

    from hf_generate_shim import Handle
    from hf_generate_shim.manager import BatchingManager

CONFIG = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=EOS)
PATIENCE_SECONDS = 30


def alone(row: list[int], **options: Any) -> list[int]:
    """The oracle: transformers' new tokens after one prompt, on a model like the fixture's."""
    ids = torch.tensor([row])
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, **options}
    output = new_model().generate(ids, **call)
    return [int(token) for token in output[0, len(row) :]]


@pytest.fixture
def manager(model: Qwen3ForCausalLM, handle: Handle) -> Iterator[BatchingManager]:
    """A manager that runs."""
    assert handle.counters.fast == 0
    manager = model.init_continuous_batching(generation_config=CONFIG)
    manager.start()
    yield manager
    manager.stop(hard_stop=True)


def test_results_come_for_requests_of_several_threads(manager: BatchingManager) -> None:
    rows = [prompt(3 + length) for length in range(12)]
    expected = [alone(row) for row in rows]

    def call(row: list[int]) -> list[int]:
        request_id = manager.add_request(row)
        result = manager.get_result(request_id, timeout=PATIENCE_SECONDS)
        tokens: list[int] = result.generated_tokens
        return tokens

    with ThreadPoolExecutor(12) as executor:
        found = list(executor.map(call, rows))

    assert found == expected


def test_any_result_is_given_when_no_id_is_named(manager: BatchingManager) -> None:
    ids = manager.add_requests([prompt(4), prompt(6), prompt(9)])

    results = [manager.get_result(timeout=PATIENCE_SECONDS) for _ in ids]

    assert ids == ["req_0", "req_1", "req_2"]
    assert {result.request_id for result in results} == set(ids)
    assert all(result.status is RequestStatus.FINISHED for result in results)


def test_reader_of_one_request_leaves_the_others_theirs(manager: BatchingManager) -> None:
    first, second = manager.add_requests([prompt(4), prompt(6)])

    late = manager.get_result(second, timeout=PATIENCE_SECONDS)
    early = manager.get_result(first, timeout=PATIENCE_SECONDS)

    assert (early.request_id, late.request_id) == (first, second)


def test_nothing_comes_in_time_when_nothing_was_asked(manager: BatchingManager) -> None:
    assert manager.get_result(timeout=0.01) is None


def test_own_ids_are_kept_and_not_given_twice(manager: BatchingManager, handle: Handle) -> None:
    with StepGate(handle.thread, at_step=1):
        name = manager.add_request(prompt(4), request_id="mine")
        with pytest.raises(InvalidRequest, match="mine"):
            manager.add_request(prompt(5), request_id="mine")

    assert name == "mine"
    assert manager.get_result("mine", timeout=PATIENCE_SECONDS).prompt_ids == prompt(4)


def test_each_request_has_options_of_its_own(manager: BatchingManager) -> None:
    options: list[dict[str, Any]] = [
        {"max_new_tokens": 3},
        {"eos_token_id": list(range(60))},
        {"repetition_penalty": 5.0},
        {"do_sample": True, "temperature": 2.0, "top_k": 1},
        {"bad_words_ids": [[97], [118]]},
    ]
    expected = [alone(prompt(6), pad_token_id=PAD, **option) for option in options]

    ids = [manager.add_request(prompt(6), pad_token_id=PAD, **option) for option in options]
    found = [manager.get_result(i, timeout=PATIENCE_SECONDS).generated_tokens for i in ids]

    assert found == expected


def test_streamed_request_grows_token_by_token(manager: BatchingManager) -> None:
    request_id = manager.add_request(prompt(5), streaming=True, record_timestamps=True)

    outputs = list(manager.request_id_iter(request_id))

    *partial, last = outputs
    assert [len(output.generated_tokens) for output in outputs] == list(range(1, 9))
    assert {output.status for output in partial} == {RequestStatus.DECODING}
    assert (last.status, last.generated_tokens) == (RequestStatus.FINISHED, alone(prompt(5)))
    assert len(last.timestamps) == 8


def test_request_that_is_not_streamed_gives_one_result(manager: BatchingManager) -> None:
    request_id = manager.add_request(prompt(5))

    outputs = list(manager.request_id_iter(request_id))

    assert [output.status for output in outputs] == [RequestStatus.FINISHED]


def test_unknown_request_has_no_results(manager: BatchingManager) -> None:
    assert list(manager.request_id_iter("unknown")) == []


def test_requests_added_before_the_start_run_after_it(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    manager = model.init_continuous_batching(generation_config=CONFIG)
    ids = manager.add_requests([prompt(4), prompt(6)])
    before = manager.is_running(), manager.get_result(timeout=0.01), handle.stats().steps

    manager.start()
    found = [manager.get_result(i, timeout=PATIENCE_SECONDS).generated_tokens for i in ids]
    manager.stop()

    assert before == (False, None, 0)
    assert found == [alone(prompt(4)), alone(prompt(6))]


def test_start_without_a_request_and_requests_much_later(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    manager = model.init_continuous_batching(generation_config=CONFIG)
    manager.start()
    settle(handle.thread)
    start = threading.Barrier(3)

    def call(row: list[int]) -> list[int]:
        start.wait(timeout=PATIENCE_SECONDS)
        request_id = manager.add_request(row)
        tokens: list[int] = manager.get_result(request_id, PATIENCE_SECONDS).generated_tokens
        return tokens

    with ThreadPoolExecutor(3) as executor:
        found = list(executor.map(call, [prompt(3), prompt(4), prompt(5)]))
    manager.stop()

    assert found == [alone(prompt(3)), alone(prompt(4)), alone(prompt(5))]


def test_stop_finishes_what_runs_and_takes_nothing_more(
    manager: BatchingManager, handle: Handle
) -> None:
    ids = manager.add_requests([prompt(4), prompt(6)])

    manager.stop()

    assert not manager.is_running()
    with pytest.raises(RuntimeError, match="takes no more"):
        manager.add_request(prompt(5))
    results = list(manager)
    assert {result.request_id for result in results} == set(ids)
    assert all(result.error is None for result in results)
    assert manager.get_result() is None
    assert handle.counters.fast == 2


def test_hard_stop_ends_what_runs(manager: BatchingManager, handle: Handle) -> None:
    with StepGate(handle.thread, at_step=4):
        request_id = manager.add_request(prompt(4), max_new_tokens=100)
        manager.stop(hard_stop=True, block=False)
    manager.join(0.0, timeout=PATIENCE_SECONDS)

    result = manager.get_result(request_id)
    assert result.status is RequestStatus.FAILED
    assert "cancelled" in result.error
    assert len(result.generated_tokens) < 100
    assert not manager.is_running()


def test_manager_starts_again_after_a_stop(manager: BatchingManager) -> None:
    first = manager.add_request(prompt(4))
    manager.stop()
    manager.start()
    second = manager.add_request(prompt(6))

    found = [manager.get_result(i, timeout=PATIENCE_SECONDS) for i in (first, second)]

    assert [result.generated_tokens for result in found] == [alone(prompt(4)), alone(prompt(6))]
    assert second == "req_1"


def test_destroyed_manager_is_gone_for_good(manager: BatchingManager) -> None:
    manager.destroy()
    manager.destroy()

    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()


def test_stop_of_a_manager_that_never_ran_does_nothing(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    manager = model.init_continuous_batching(generation_config=CONFIG)

    manager.stop()

    assert handle.stats().steps == 0


def test_cancelled_request_ends_and_others_go_on(manager: BatchingManager, handle: Handle) -> None:
    with StepGate(handle.thread, at_step=3):
        gone, stays = manager.add_requests([prompt(4), prompt(6)])
        manager.cancel_request(gone)
        manager.cancel_request("unknown")

    result = manager.get_result(gone, timeout=PATIENCE_SECONDS)
    other = manager.get_result(stays, timeout=PATIENCE_SECONDS)

    assert (result.status, other.error) == (RequestStatus.FAILED, None)
    assert other.generated_tokens == alone(prompt(6))
    manager.cancel_request(gone)


def test_cancelling_everything_ends_its_requests_too(
    manager: BatchingManager, handle: Handle
) -> None:
    with StepGate(handle.thread, at_step=3):
        ids = manager.add_requests([prompt(4), prompt(6)], max_new_tokens=100)
        handle.cancel()

    results = [manager.get_result(i, timeout=PATIENCE_SECONDS) for i in ids]

    assert {result.status for result in results} == {RequestStatus.FAILED}


def test_request_cancelled_before_the_start_does_not_run(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    manager = model.init_continuous_batching(generation_config=CONFIG)
    gone, stays = manager.add_requests([prompt(4), prompt(6)])

    manager.cancel_request(gone)
    manager.start()
    results = [manager.get_result(i, timeout=PATIENCE_SECONDS) for i in (gone, stays)]
    manager.stop()

    assert [result.status for result in results] == [RequestStatus.FAILED, RequestStatus.FINISHED]
    assert handle.counters.fast == 1


def test_readers_of_a_cancelled_stream_are_released(
    manager: BatchingManager, handle: Handle
) -> None:
    with ThreadPoolExecutor(1) as executor, StepGate(handle.thread, at_step=3):
        request_id = manager.add_request(prompt(4), streaming=True, max_new_tokens=100)
        reader = executor.submit(list, manager.request_id_iter(request_id))
        manager.cancel_request(request_id)
    outputs = reader.result(timeout=PATIENCE_SECONDS)

    assert outputs[-1].status is RequestStatus.FAILED


async def test_handlers_get_outputs_on_their_loop(manager: BatchingManager) -> None:
    done = asyncio.get_running_loop().create_future()
    outputs: list[GenerationOutput] = []
    threads = set()

    def take(output: GenerationOutput) -> None:
        outputs.append(output)
        threads.add(threading.current_thread())
        if output.is_finished():
            done.set_result(None)

    manager.register_result_handler("stream", take)
    manager.add_request(prompt(5), request_id="stream", streaming=True)
    await asyncio.wait_for(done, PATIENCE_SECONDS)

    assert [len(output.generated_tokens) for output in outputs] == list(range(1, 9))
    assert outputs[-1].generated_tokens == alone(prompt(5))
    assert threads == {threading.current_thread()}
    assert manager.get_result(timeout=0.01) is None


async def test_handler_registered_late_gets_what_came_before(manager: BatchingManager) -> None:
    request_id = manager.add_request(prompt(5), streaming=True)
    manager.stop()  # returns when the last token is there
    done = asyncio.get_running_loop().create_future()
    outputs: list[GenerationOutput] = []

    def take(output: GenerationOutput) -> None:
        outputs.append(output)
        if output.is_finished():
            done.set_result(None)

    manager.register_result_handler(request_id, take)
    await asyncio.wait_for(done, PATIENCE_SECONDS)

    assert [len(output.generated_tokens) for output in outputs] == list(range(1, 9))


async def test_many_coroutines_share_a_batch(
    model: Qwen3ForCausalLM, manager: BatchingManager, handle: Handle
) -> None:
    del model
    rows = [prompt(3 + length) for length in range(10)]

    async def call(row: list[int]) -> list[int]:
        future: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        name = f"call-{len(row)}"
        manager.register_result_handler(name, future.set_result)
        manager.add_request(row, request_id=name)
        tokens: list[int] = (await future).generated_tokens
        return tokens

    with AdmissionGate(handle.thread, len(rows)):
        tasks = [asyncio.ensure_future(call(row)) for row in rows]
        await asyncio.sleep(0)
    found = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)

    assert found == [alone(row) for row in rows]
    assert handle.stats().peak_batch == 10


def test_handler_needs_a_running_loop(manager: BatchingManager) -> None:
    with pytest.raises(RuntimeError, match="loop"):
        manager.register_result_handler("any", print)


class DieAtStep:
    """A plugin whose processors end the engine when a sequence has so many tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    @hookimpl
    def nanoserve_request_processor(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Raises what no border catches."""

        def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] >= self.num_tokens:
                raise KeyboardInterrupt
            return scores

        return process


def test_death_of_the_engine_reaches_every_waiting_caller(model: Qwen3ForCausalLM) -> None:
    with hf_generate_shim.installed(model, plugins=[DieAtStep(8)]) as handle:
        manager = model.init_continuous_batching(generation_config=CONFIG)
        manager.start()

        def call(_: int) -> GenerationOutput:
            request_id = manager.add_request(prompt(5))
            return manager.get_result(request_id, timeout=PATIENCE_SECONDS)

        with AdmissionGate(handle.thread, 4), ThreadPoolExecutor(4) as executor:
            futures = [executor.submit(call, i) for i in range(4)]
        results = [future.result(timeout=PATIENCE_SECONDS) for future in futures]

        assert {result.status for result in results} == {RequestStatus.FAILED}
        assert all("KeyboardInterrupt" in result.error for result in results)
        assert isinstance(manager.background_thread_status.fatal_error, EngineDead)
        assert not manager.is_running()
        with pytest.raises(EngineDead):
            manager.get_result()
        with pytest.raises(EngineDead):
            manager.add_request(prompt(3))

        manager.start()  # a new engine
        request_id = manager.add_request(prompt(3), max_new_tokens=2)
        assert len(manager.get_result(request_id).generated_tokens) == 2
        manager.stop()


def test_uninstalling_ends_requests_and_readers(model: Qwen3ForCausalLM) -> None:
    handle = hf_generate_shim.install(model, num_kvcache_blocks=64)
    manager = model.init_continuous_batching(generation_config=CONFIG)
    manager.start()
    thread = handle.thread

    with ThreadPoolExecutor(1) as executor, StepGate(thread, at_step=2):
        request_id = manager.add_request(prompt(5))
        reader = executor.submit(manager.get_result, request_id)
        closer = threading.Thread(target=hf_generate_shim.uninstall, args=(model,))
        closer.start()
    closer.join(PATIENCE_SECONDS)

    assert "EngineClosed" in reader.result(timeout=PATIENCE_SECONDS).error
    with pytest.raises(EngineClosed):
        manager.get_result()


@pytest.mark.filterwarnings("ignore::hf_generate_shim.NanoserveFallbackWarning")
def test_request_for_transformers_own_loop_streams_and_can_be_cancelled(
    model: Qwen3ForCausalLM, manager: BatchingManager
) -> None:
    del model
    options = {"exponential_decay_length_penalty": (4, 1.1), "eos_token_id": 5, "pad_token_id": PAD}
    request_id = manager.add_request(prompt(5), streaming=True, **options)
    outputs = list(manager.request_id_iter(request_id))
    gone = manager.add_request(prompt(5), streaming=True, max_new_tokens=100, **options)
    stream = manager.request_id_iter(gone)
    next(stream)
    manager.cancel_request(gone)
    *_, last = stream

    assert outputs[-1].generated_tokens == alone(prompt(5), **options)
    assert len(outputs) >= len(outputs[-1].generated_tokens)
    assert last.status is RequestStatus.FAILED
    assert len(last.generated_tokens) < 100


def test_pause_holds_every_request_and_they_go_on_with_their_cache(
    model: Qwen3ForCausalLM, manager: BatchingManager, handle: Handle
) -> None:
    request_id = manager.add_request(prompt(5), streaming=True)
    stream = manager.request_id_iter(request_id)
    next(stream)

    with manager.pause(), manager.pause():
        steps = handle.stats().steps
        with pytest.raises(RuntimeError, match="pause"):
            manager.stop()
        with pytest.raises(RuntimeError, match="pause"):
            manager.add_request(prompt(3))
        model(torch.tensor([prompt(4)]))
        steps_later = handle.stats().steps
    *_, last = stream

    assert steps == steps_later
    assert last.generated_tokens == alone(prompt(5))


def test_weights_changed_in_a_pause_hold_afterwards(
    model: Qwen3ForCausalLM, manager: BatchingManager
) -> None:
    other = new_model()
    row = prompt(40)
    before = manager.get_result(manager.add_request(row), timeout=PATIENCE_SECONDS)

    with manager.pause(), torch.no_grad():
        for changed in (model, other):
            changed.model.layers[0].self_attn.k_proj.weight.data[3] += 0.5
    after = manager.get_result(manager.add_request(row), timeout=PATIENCE_SECONDS)

    ids = torch.tensor([row])
    expected = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
    assert after.generated_tokens == expected[0, 40:].tolist() != before.generated_tokens


def test_generate_in_a_pause_runs_in_transformers_own_loop(
    model: Qwen3ForCausalLM, manager: BatchingManager, handle: Handle
) -> None:
    ids = torch.tensor([prompt(5)])
    with (
        manager.pause(),
        pytest.warns(hf_generate_shim.NanoserveFallbackWarning, match="pause"),
    ):
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)

    assert found[0, 5:].tolist() == alone(prompt(5))
    assert (handle.counters.fast, handle.counters.fallback) == (0, 1)


def test_pause_of_a_manager_that_does_not_run_is_refused(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    manager = model.init_continuous_batching(generation_config=CONFIG)

    with pytest.raises(RuntimeError, match="does not run"), manager.pause():
        pass

    assert handle.stats().steps == 0


def test_kept_manager_is_given_again_for_an_equal_config(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    manager = model.init_continuous_batching(generation_config=CONFIG)
    manager.start()
    manager.add_request(prompt(3))
    manager.stop(keep_for_next_session=True)

    again = model.init_continuous_batching(generation_config=CONFIG)
    other = model.init_continuous_batching(generation_config=GenerationConfig(max_new_tokens=2))
    model.destroy_cached_continuous_batching_manager()
    fresh = model.init_continuous_batching(generation_config=CONFIG)

    assert again is manager
    assert other is not manager
    assert fresh is not manager
    assert handle.counters.fast == 1


def test_persistent_batches_count_their_requests_on(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    options = {"generation_config": CONFIG, "persistent_manager": True}
    first = model.generate_batch([prompt(3), prompt(4)], **options)
    second = model.generate_batch([prompt(3)], **options)

    assert (list(first), list(second)) == (["req_0", "req_1"], ["req_2"])
    assert second["req_2"].generated_tokens == first["req_0"].generated_tokens
    assert handle.counters.fast == 3


def test_context_manager_starts_and_stops(model: Qwen3ForCausalLM, handle: Handle) -> None:
    with model.continuous_batching_context_manager(generation_config=CONFIG) as manager:
        was_running = manager.is_running()
        request_id = manager.add_request(prompt(6))

    assert was_running
    assert not manager.is_running()
    assert manager.get_result(request_id).generated_tokens == alone(prompt(6))
    assert handle.counters.fast == 1


def test_context_that_raises_cancels_its_requests(model: Qwen3ForCausalLM, handle: Handle) -> None:
    managers: list[BatchingManager] = []

    def run() -> None:
        with model.continuous_batching_context_manager(generation_config=CONFIG) as manager:
            managers.append(manager)
            manager.add_request(prompt(6), max_new_tokens=200)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()

    assert managers[0].get_result().status is RequestStatus.FAILED
    assert handle.counters.fast == 1


def test_config_is_read_when_the_manager_is_made(model: Qwen3ForCausalLM, handle: Handle) -> None:
    config = GenerationConfig(max_new_tokens=3)
    manager = model.init_continuous_batching(generation_config=config)
    config.max_new_tokens = 5
    manager.start()

    request_id = manager.add_request(prompt(6))
    result = manager.get_result(request_id, timeout=PATIENCE_SECONDS)
    manager.stop()

    assert len(result.generated_tokens) == 3
    assert manager.generation_config.max_new_tokens == 3
    assert handle.counters.fast == 1


def test_what_a_request_cannot_have_is_refused_by_name(manager: BatchingManager) -> None:
    with pytest.raises(UnsupportedOption, match="streamer"):
        manager.add_request(prompt(3), streamer=object())
    with pytest.raises(ValueError, match="typo"):
        manager.add_request(prompt(3), typo=1)
    with pytest.raises(ValueError, match="temperature"):
        manager.add_request(prompt(3), do_sample=True, temperature=2)  # as generate: a float


def test_manager_does_not_keep_its_model_alive(model: Qwen3ForCausalLM) -> None:
    del model
    own = new_model()
    hf_generate_shim.install(own)
    manager = own.init_continuous_batching(generation_config=CONFIG)
    manager.start()
    manager.add_request(prompt(3))
    manager.stop(keep_for_next_session=True)

    del own
    gc.collect()

    with pytest.raises(EngineClosed, match="deleted"):
        _ = manager.model
    del manager
    gc.collect()
