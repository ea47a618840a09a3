"""LangSmith: no trace unless asked for; with it every run has an end, and a dead tracer harms
nothing.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.tracers.context import tracing_v2_enabled
from langsmith.utils import get_env_var

from nanoserve_adapters.testing import AdmissionGate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.langchain_llm.doors import FakeDoor


class Recorder:
    """A LangSmith client that keeps what it is told, or fails whatever it is told."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self.created: dict[str, dict[str, Any]] = {}
        self.updated: dict[str, dict[str, Any]] = {}
        self.tracing_queue = None

    def create_run(self, **run: Any) -> None:
        if self.is_broken:
            raise ConnectionError("no way to the tracer")
        self.created[str(run["id"])] = run

    def update_run(self, run_id: object, **run: Any) -> None:
        if self.is_broken:
            raise ConnectionError("no way to the tracer")
        self.updated[str(run_id)] = run

    @property
    def model_runs(self) -> list[dict[str, Any]]:
        """What is known of each model run at its end."""
        kinds = ("llm", "chat_model")
        ids = [run_id for run_id, run in self.created.items() if run["run_type"] in kinds]
        return [self.created[run_id] | self.updated.get(run_id, {}) for run_id in ids]


@pytest.fixture(autouse=True)
def no_tracing_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the machine's environment says about tracing."""
    for prefix in ("LANGSMITH", "LANGCHAIN"):
        for name in ("TRACING", "TRACING_V2", "API_KEY", "ENDPOINT"):
            monkeypatch.delenv(f"{prefix}_{name}", raising=False)
    get_env_var.cache_clear()
    yield
    get_env_var.cache_clear()


def test_nothing_is_traced_by_default(fake: FakeDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(
        "langchain_core.tracers.langchain.get_client", lambda: made.append(1) or Recorder()
    )

    (fake.chat() | StrOutputParser()).batch(["a", "b"])
    fake.llm().invoke("c")

    assert not made


@pytest.mark.parametrize("kind", ["chat", "llm"])
def test_run_is_traced_with_its_model_and_its_settings(fake: FakeDoor, kind: str) -> None:
    client: Any = Recorder()
    model: Any = fake.chat(max_tokens=9) if kind == "chat" else fake.llm(max_tokens=9)

    with tracing_v2_enabled(client=client):
        model.invoke("hi")

    (run,) = client.model_runs
    metadata = run["extra"]["metadata"]
    assert metadata["ls_provider"] == "nanoserve"
    assert metadata["ls_model_name"] == "tiny"
    assert metadata["ls_max_tokens"] == 9
    assert run["end_time"] is not None
    assert run["error"] is None


def test_every_branch_of_a_batch_is_a_child_of_the_chains_run(fake: FakeDoor) -> None:
    client: Any = Recorder()
    chain: Any = fake.chat() | StrOutputParser()

    with tracing_v2_enabled(client=client), AdmissionGate(fake.thread, 3):
        chain.batch(["a", "b", "c"])

    chains = {run_id for run_id, run in client.created.items() if run["run_type"] == "chain"}
    assert {str(run["parent_run_id"]) for run in client.model_runs} == chains
    assert len(chains) == 3


def test_cancelled_call_has_an_end_in_its_trace(make_fake: Callable[..., FakeDoor]) -> None:
    client: Any = Recorder()
    reached = threading.Event()
    door = make_fake("x" * 2000, before_step=lambda step: reached.set() if step == 3 else None)

    async def cancel() -> None:
        with tracing_v2_enabled(client=client):
            task = asyncio.ensure_future(door.chat().ainvoke("hi"))
            await asyncio.to_thread(reached.wait, 30)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())

    (run,) = client.model_runs
    assert "CancelledError" in run["error"]
    assert run["end_time"] is not None
    door.assert_nothing_left()


@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke"])
def test_broken_tracer_changes_no_answer(fake: FakeDoor, way: str) -> None:
    client: Any = Recorder(is_broken=True)
    chat = fake.chat()
    ways: dict[str, Callable[[], str]] = {
        "invoke": lambda: chat.invoke("hi").text,
        "stream": lambda: "".join(chunk.text for chunk in chat.stream("hi")),
        "ainvoke": lambda: asyncio.run(chat.ainvoke("hi")).text,
    }

    with tracing_v2_enabled(client=client):
        text = ways[way]()

    assert text == "Hello."
