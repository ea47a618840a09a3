"""What `nanoserve_adapters.testing` offers does what it says, and the contract finds faults."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from nanoserve_adapters.engine_thread import EngineThread
from nanoserve_adapters.testing import (
    AdapterContract,
    AdmissionGate,
    FakeEngine,
    leak_check,
    scripted,
    settle,
    tiny_model,
    tiny_tokenizer,
)
from nanoserve_core.config import EngineConfig
from nanoserve_core.errors import EngineClosed
from nanoserve_core.request import FinishReason
from tests.adapters.support import (
    RecordingSink,
    endless_request,
    hashed_tokens,
    new_engine,
    new_request,
    running,
    tokens_in,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from nanoserve_core.request import Request


def run(engine: FakeEngine, *requests: Request) -> dict[str, list[int]]:
    """Tokens by request, of an engine without a thread."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return tokens


def test_hashed_tokens_depend_on_everything_before_and_on_nothing_else() -> None:
    request, other = new_request((1, 2)), new_request((1, 3))

    alone = run(FakeEngine(), request)
    together = run(FakeEngine(), other, request)

    assert together[request.request_id] == alone[request.request_id] == hashed_tokens(request)
    assert together[other.request_id] != together[request.request_id]


def test_script_is_followed_and_then_ended() -> None:
    engine = FakeEngine(next_token=scripted([5, 6], then=9), eos_token_ids=(9,))

    assert list(run(engine, new_request(max_tokens=20)).values()) == [[5, 6, 9]]


def test_batch_is_bounded_and_counted() -> None:
    engine = FakeEngine(config=EngineConfig(max_num_seqs=2))

    run(engine, *[new_request(max_tokens=2) for _ in range(5)])

    assert engine.batch_sizes == [2, 2, 2, 2, 1, 1]
    assert engine.stats().peak_batch == 2
    assert engine.stats().generated_tokens == 10


def test_fake_engine_answers_no_tokens_with_an_empty_end() -> None:
    engine = FakeEngine()
    engine.add_request(new_request(max_tokens=0))

    (output,) = engine.step()

    assert (output.token_ids, output.finish_reason) == ((), FinishReason.LENGTH)
    assert output.request_finished
    leak_check(engine)


def test_fake_engine_ends_every_sample_and_the_request_once() -> None:
    with running() as thread:
        thread.submit(new_request(n=3, max_tokens=4), sink := RecordingSink())
        sink.wait()

    ends = [o for step in sink.deliveries for o in step if o.finish_reason is not None]
    assert sorted(output.index for output in ends) == [0, 1, 2]
    assert [output.request_finished for output in ends] == [False, False, True]
    assert ends[-1].metrics is not None


def test_closed_fake_engine_refuses() -> None:
    engine = FakeEngine()
    engine.close()

    with pytest.raises(EngineClosed):
        engine.add_request(new_request())


def test_tiny_model_is_the_same_for_a_seed_and_leaves_the_global_generator_alone() -> None:
    import torch

    before = torch.get_rng_state()
    same, twin, other = tiny_model(seed=3), tiny_model(seed=3), tiny_model(seed=4)

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(same.lm_head.weight, twin.lm_head.weight)
    assert not torch.equal(same.lm_head.weight, other.lm_head.weight)
    assert same.dtype == torch.float32
    assert not same.training


def test_tiny_model_takes_fields_of_its_config() -> None:
    model = tiny_model(num_hidden_layers=1, head_dim=8, tie_word_embeddings=True)

    assert len(model.model.layers) == 1
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tiny_tokenizer_has_one_token_per_byte() -> None:
    tokenizer = tiny_tokenizer()
    text = "Grüße, 世界! 🙂\n"

    token_ids = tokenizer(text).input_ids

    assert token_ids == list(text.encode())
    assert tokenizer.decode(token_ids) == text
    assert len(tokenizer) == tiny_model().config.vocab_size


def test_tiny_tokenizer_writes_chatml() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]

    text = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    closed = tokenizer.apply_chat_template(messages, tokenize=False)
    quick = tokenizer.apply_chat_template(
        messages[:1], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )

    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert closed == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n")
    assert quick == text + "<think>\n\n</think>\n\n"
    assert tokenizer("<|im_end|><think>").input_ids == [tokenizer.eos_token_id, 259]
    assert tokenizer.decode([258, 259, 65], skip_special_tokens=True) == "<think>A"


def test_gate_holds_the_engine_until_all_requests_are_there() -> None:
    engine = FakeEngine()
    with running(engine) as thread:
        with AdmissionGate(thread, 3):
            streams = [thread.stream(new_request(max_tokens=2)) for _ in range(3)]
        for stream in streams:
            tokens_in(stream)

    assert engine.batch_sizes == [3, 3]


def test_gate_is_opened_by_an_error_inside() -> None:
    with running() as thread:
        with pytest.raises(ZeroDivisionError), AdmissionGate(thread, 3):
            raise ZeroDivisionError

        assert tokens_in(thread.stream(request := new_request())) == hashed_tokens(request)


@pytest.mark.parametrize("state", ["unfinished", "kept block"])
def test_leak_check_finds_what_is_left(state: str) -> None:
    class Leaking(FakeEngine):
        def has_unfinished_requests(self) -> bool:
            return super().has_unfinished_requests() and state == "unfinished"

    engine = Leaking()
    engine.add_request(new_request())

    with pytest.raises(AssertionError, match="running=1"):
        leak_check(engine)


def test_settle_gives_up_on_an_engine_that_is_never_done() -> None:
    with EngineThread(new_engine()) as thread:
        stream = thread.stream(endless_request())

        with pytest.raises(AssertionError, match="busy after 10 steps"):
            settle(thread, max_steps=10)

        stream.close()


class PlainAdapter:
    """The thinnest adapter: an engine thread's stream, nothing else."""

    def __init__(self, thread: EngineThread) -> None:
        self.thread = thread

    def complete(self, prompt_token_ids: list[int], *, max_tokens: int) -> list[int]:
        """One blocking call."""
        return tokens_in(self.thread.stream(new_request(prompt_token_ids, max_tokens=max_tokens)))

    def stream(
        self, prompt_token_ids: list[int], *, max_tokens: int
    ) -> Generator[list[int], None, None]:
        """The same in pieces."""
        with self.thread.stream(new_request(prompt_token_ids, max_tokens=max_tokens)) as stream:
            for outputs in stream:
                yield tokens_in([outputs])

    def expected(self, prompt_token_ids: list[int], *, max_tokens: int) -> list[int]:
        """By the definition of `hashed_token`."""
        return hashed_tokens(new_request(prompt_token_ids, max_tokens=max_tokens))


class TestContractOfAPlainAdapter(AdapterContract):
    """The contract holds for the thinnest adapter there is."""

    @pytest.fixture
    def adapter(self) -> Iterator[PlainAdapter]:
        """On a `FakeEngine`."""
        with EngineThread(FakeEngine()) as thread:
            yield PlainAdapter(thread)


class OneAtATime(PlainAdapter):
    """Serialises its callers."""

    def __init__(self, thread: EngineThread) -> None:
        super().__init__(thread)
        self._lock = threading.Lock()

    def complete(self, prompt_token_ids: list[int], *, max_tokens: int) -> list[int]:
        """One caller after the other."""
        with self._lock:
            return super().complete(prompt_token_ids, max_tokens=max_tokens)


class NeverCancels(PlainAdapter):
    """Forgets its request when the consumer leaves."""

    def stream(
        self, prompt_token_ids: list[int], *, max_tokens: int
    ) -> Generator[list[int], None, None]:
        """Holds on to the stream."""
        self.kept = self.thread.stream(new_request(prompt_token_ids, max_tokens=max_tokens))
        for outputs in self.kept:
            yield tokens_in([outputs])


class LosesATokens(PlainAdapter):
    """Drops the last token."""

    def complete(self, prompt_token_ids: list[int], *, max_tokens: int) -> list[int]:
        """All but one."""
        return super().complete(prompt_token_ids, max_tokens=max_tokens)[:-1]


@pytest.mark.parametrize(
    ("faulty", "test"),
    [
        (OneAtATime, "test_concurrent_callers_join_one_batch"),
        (NeverCancels, "test_closed_stream_leaves_nothing_behind"),
        (LosesATokens, "test_complete_gives_the_tokens_of_the_framework"),
    ],
)
def test_contract_finds_a_faulty_adapter(
    faulty: type[PlainAdapter], test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve_adapters.testing.engine_checks.PATIENCE_SECONDS", 0.05)

    with EngineThread(FakeEngine()) as thread, pytest.raises((AssertionError, KeyError)):
        getattr(AdapterContract(), test)(faulty(thread))
