"""Caches, copies, serialisation and traces tell models and calls apart, and nothing else (B14)."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumpd, load
from langchain_core.messages import HumanMessage
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import ConfigurableField

from langchain_llm import ChatNanoserve, EngineReference, NanoserveLLM

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.langchain_llm.doors import FakeDoor

CLASSES = [ChatNanoserve, NanoserveLLM]


@pytest.fixture(params=["chat", "llm"])
def make_model(request: pytest.FixtureRequest, fake: FakeDoor) -> Callable[..., Any]:
    """Makes models of both classes on one fake engine, with a cache in common."""
    cache = InMemoryCache()
    make = fake.chat if request.param == "chat" else fake.llm
    return lambda **options: make(**{"cache": cache, **options})


def text(answer: object) -> str:
    return answer if isinstance(answer, str) else str(getattr(answer, "content", answer))


def test_identical_call_is_a_hit(fake: FakeDoor, make_model: Callable[..., Any]) -> None:
    model = make_model()

    answers = [text(model.invoke("hi")), text(model.invoke("hi"))]

    assert answers == ["Hello."] * 2
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 5},
        {"temperature": 0.9},
        {"seed": 3},
        {"stop": ["l"]},
        {"logit_bias": {3: 1.0}},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"a": 1}},
        {"top_p": 0.5},
        {"logprobs": None, "min_p": 0.1},
    ],
)
def test_other_options_in_the_call_are_a_miss(
    fake: FakeDoor, make_model: Callable[..., Any], options: dict[str, Any]
) -> None:
    model = make_model()
    model.invoke("hi")

    for _ in range(2):
        model.invoke("hi", **options)
        make_model(**options).invoke("hi")  # the same options as fields are the same call

    assert len(fake.requests) == 2


def test_answers_of_calls_with_other_lengths_differ(make_model: Callable[..., Any]) -> None:
    model = make_model()

    answers = [text(model.invoke("hi", max_tokens=length)) for length in (2, 5, 2)]

    assert answers == ["He", "Hello", "He"]


def test_changed_field_is_a_miss(fake: FakeDoor, make_model: Callable[..., Any]) -> None:
    model = make_model()
    model.invoke("hi")

    model.temperature = 0.9
    model.invoke("hi")

    assert len(fake.requests) == 2
    assert fake.requests[-1].sampling.temperature == 0.9


def test_other_stop_in_the_constructor_is_a_miss(
    fake: FakeDoor, make_model: Callable[..., Any]
) -> None:
    first = text(make_model(stop=["l"]).invoke("hi"))
    second = text(make_model(stop=["o"]).invoke("hi"))

    assert (first, second) == ("He", "Hell")
    assert len(fake.requests) == 2


def test_models_on_other_engines_do_not_share_answers(make_fake: Callable[..., FakeDoor]) -> None:
    cache = InMemoryCache()
    doors = [make_fake("one"), make_fake("two")]

    chats = [text(door.chat(cache=cache).invoke("hi")) for door in doors]
    llms = [text(door.llm(cache=cache).invoke("hi")) for door in doors]

    assert chats == llms == ["one", "two"]


def test_delivery_options_do_not_change_the_key(
    fake: FakeDoor, make_model: Callable[..., Any]
) -> None:
    make_model().invoke("hi")

    make_model(timeout=60, priority=3, stream_interval=4).invoke("hi", timeout=30)

    assert len(fake.requests) == 1


def test_cached_part_of_a_batch_is_not_asked_again(fake: FakeDoor) -> None:
    llm = fake.llm(cache=InMemoryCache())
    llm.invoke("a")

    texts = llm.batch(["a", "b", "c"])

    assert texts == ["Hello."] * 3
    assert len(fake.requests) == 3


def test_generate_with_a_cache_does_not_submit_ahead(fake: FakeDoor) -> None:
    chat = fake.chat(cache=InMemoryCache())
    same = [[HumanMessage("hi")], [HumanMessage("hi")], [HumanMessage("hi")]]

    result = chat.generate(same)

    assert [row[0].text for row in result.generations] == ["Hello."] * 3
    assert len(fake.requests) == 1


def test_key_is_the_same_in_every_process_for_an_engine_from_a_path() -> None:
    keys = {ChatNanoserve(model="some/model")._get_llm_string() for _ in range(2)}  # noqa: SLF001 - LangChain's hook

    assert len(keys) == 1
    assert "0x" not in keys.pop()


class CountingLimiter(BaseRateLimiter):
    """Lets everything pass, and counts."""

    def __init__(self) -> None:
        self.num_acquired = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        del blocking
        self.num_acquired += 1
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        return self.acquire(blocking=blocking)


@pytest.mark.parametrize("way", ["batch", "generate", "stream"])
def test_rate_limiter_is_asked_once_for_each_call(fake: FakeDoor, way: str) -> None:
    limiter = CountingLimiter()
    chat = fake.chat(rate_limiter=limiter)
    ways: dict[str, Callable[[], object]] = {
        "batch": lambda: chat.batch(["a", "b", "c"]),
        "generate": lambda: chat.generate([[HumanMessage(t)] for t in "abc"]),
        "stream": lambda: [list(chat.stream(t)) for t in "abc"],
    }

    ways[way]()

    assert limiter.num_acquired == 3


@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_configurable_fields_keep_the_engine(fake: FakeDoor, kind: str) -> None:
    model: Any = fake.chat() if kind == "chat" else fake.llm()
    configurable = model.configurable_fields(max_tokens=ConfigurableField(id="length"))

    answers = [
        text(configurable.with_config(configurable={"length": length}).invoke("hi"))
        for length in (2, 4)
    ]
    streamed = list(configurable.with_config(configurable={"length": 4}).stream("hi"))

    assert answers == ["He", "Hell"]
    assert "".join(text(chunk) for chunk in streamed) == "Hell"
    assert len(streamed) > 1 or fake.thread.stats().steps >= 4  # still a stream


def test_configurable_streams_are_still_streams(fake: FakeDoor) -> None:
    chat = fake.chat().configurable_fields(max_tokens=ConfigurableField(id="length"))
    prepared, _ = chat.prepare({"configurable": {"length": 3}})

    assert prepared.streaming is None  # False would switch LangChain's streaming off


def test_configurable_model_is_loaded_in_place_of_the_old_engine() -> None:
    chat = ChatNanoserve(model="one", temperature=0)
    switchable = chat.configurable_fields(model=ConfigurableField(id="model"))

    other, _ = switchable.prepare({"configurable": {"model": "two"}})
    same, _ = switchable.prepare({"configurable": {"model": "one"}})

    assert (other.model, other.engine.name, other.temperature) == ("two", "two", 0)
    assert same.engine.identity == chat.engine.identity


@pytest.mark.parametrize("cls", CLASSES)
def test_copies_use_the_same_engine(fake: FakeDoor, cls: type[Any]) -> None:
    model = cls(engine=fake.reference, max_tokens=3)

    for copied in (copy.copy(model), copy.deepcopy(model), model.model_copy(deep=True)):
        assert copied.engine is model.engine
        assert text(copied.invoke("hi")) == "Hel"


@pytest.mark.parametrize("cls", CLASSES)
def test_model_made_from_a_path_can_be_pickled(cls: type[Any]) -> None:
    model = cls(model="some/model", engine_options={"max_num_seqs": 3}, temperature=0.5)

    loaded = pickle.loads(pickle.dumps(model))

    assert (loaded.model, loaded.temperature) == ("some/model", 0.5)
    assert loaded.engine.name == "some/model"
    assert loaded.engine.options == {"max_num_seqs": 3}
    assert not loaded.engine.is_loaded


def test_model_on_weights_in_memory_says_why_it_cannot_be_pickled(fake: FakeDoor) -> None:
    with pytest.raises(TypeError, match=r"weights live in this process.*path or hub id"):
        pickle.dumps(fake.chat())


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
@pytest.mark.parametrize("cls", CLASSES)
def test_model_made_from_a_path_is_dumped_and_loaded(cls: type[Any]) -> None:
    model = cls(model="some/model", temperature=0.5, stop=["END"], api_key="secret")

    dumped = dumpd(model)
    again = load(dumped, allowed_objects=[cls], valid_namespaces=["langchain_llm"])

    assert "secret" not in str(dumped)
    assert dumpd(again) == dumped
    assert again.temperature == 0.5


@pytest.mark.parametrize("cls", CLASSES)
def test_model_on_weights_in_memory_is_dumped_as_not_implemented(
    fake: FakeDoor, cls: type[Any]
) -> None:
    dumped = dumpd(cls(engine=fake.reference))

    assert dumped["type"] == "not_implemented"
    assert dumped["id"][-1] == cls.__name__


def test_engine_and_model_cannot_be_reassigned(fake: FakeDoor) -> None:
    chat = fake.chat()

    with pytest.raises(ValueError, match="frozen"):
        chat.model = "other"
    with pytest.raises(ValueError, match="frozen"):
        chat.engine = EngineReference.to_model("other")


@pytest.mark.parametrize("cls", CLASSES)
def test_trace_names_provider_model_and_parameters_of_the_call(cls: type[Any]) -> None:
    model = cls(model="some/model", temperature=0.5, max_tokens=9, stop=["END"])

    own = model._get_ls_params()
    of_call = model._get_ls_params(stop=["X"], model="alias", max_new_tokens=3)

    assert own["ls_provider"] == "nanoserve"
    assert own["ls_model_type"] == ("chat" if cls is ChatNanoserve else "llm")
    assert own["ls_model_name"] == "some/model"
    assert (own["ls_temperature"], own["ls_max_tokens"], own["ls_stop"]) == (0.5, 9, ["END"])
    assert of_call["ls_model_name"] == "alias"
    assert (of_call["ls_max_tokens"], of_call["ls_stop"]) == (3, ["X"])


@pytest.mark.parametrize("cls", CLASSES)
def test_trace_names_our_version(cls: type[Any]) -> None:
    from nanoserve_core import __version__

    model = cls(model="x", metadata={"mine": 1})

    if "lc_versions" not in model.metadata:
        pytest.skip("this langchain-core does not record versions")
    assert model.metadata["lc_versions"]["nanoserve"] == __version__
    assert "langchain-core" in model.metadata["lc_versions"]
    assert model.metadata["mine"] == 1


def test_profile_says_what_is_served() -> None:
    profile = ChatNanoserve(model="x", engine_options={"max_model_len": 128}).profile

    assert profile is not None
    assert profile["max_input_tokens"] == profile["max_output_tokens"] == 128
    assert profile["text_inputs"]
    assert profile["tool_calling"]
    assert profile["tool_choice"]
    assert profile["tool_call_streaming"]
    assert profile["structured_output"]
    assert profile["reasoning_output"]
    assert not profile["image_inputs"]


def test_profile_of_a_checkpoint_knows_its_context(tiny_checkpoint: Path) -> None:
    profile = ChatNanoserve(model=tiny_checkpoint, max_tokens=7, enable_thinking=False).profile

    assert profile is not None
    assert profile["max_input_tokens"] == 2048
    assert profile["max_output_tokens"] == 7
    assert not profile["reasoning_output"]
