"""LangGraph: all branches and all users of a graph join one batch, and every token is streamed."""

from __future__ import annotations

import asyncio
import operator
import threading
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from typing_extensions import TypedDict

from nanoserve_adapters.testing import AdmissionGate
from tests.langchain_llm.doors import SayText

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.language_models import BaseChatModel
    from langchain_core.runnables import RunnableConfig

    from tests.langchain_llm.doors import FakeDoor, RealDoor

langgraph_graph = pytest.importorskip("langgraph.graph")
langgraph_memory = pytest.importorskip("langgraph.checkpoint.memory")

BRANCHES = ("a", "b", "c")


class Topic(TypedDict):
    """What goes through the graph: each branch adds its answer."""

    topic: str
    answers: Annotated[list[str], operator.add]


def fan_out(chat: BaseChatModel, *, is_async: bool = True) -> Any:  # noqa: ANN401 - LangGraph's own
    """A graph of three branches that ask the model at the same time."""
    graph = langgraph_graph.StateGraph(Topic)
    for name in BRANCHES:
        graph.add_node(name, async_node(chat, name) if is_async else sync_node(chat, name))
        graph.add_edge(langgraph_graph.START, name)
    return graph.compile()


def async_node(chat: BaseChatModel, name: str) -> Callable[..., Any]:
    async def node(state: Topic, config: RunnableConfig) -> dict[str, list[str]]:
        answer = await chat.ainvoke(f"<{name}> on {state['topic']}", config)
        return {"answers": [answer.text]}

    return node


def sync_node(chat: BaseChatModel, name: str) -> Callable[..., Any]:
    def node(state: Topic, config: RunnableConfig) -> dict[str, list[str]]:
        return {"answers": [chat.invoke(f"<{name}> on {state['topic']}", config).text]}

    return node


def topic(number: int) -> Topic:
    return {"topic": f"subject {number}", "answers": []}


@pytest.fixture
def three(make_fake: Callable[..., FakeDoor]) -> FakeDoor:
    """An engine that answers each branch in its own words."""
    texts = {f"<{name}>": f"said by {name}" for name in BRANCHES}
    return make_fake(next_token=SayText("?", texts))


def test_branches_of_20_users_run_in_one_batch_of_60(real: RealDoor) -> None:
    graph = fan_out(real.chat(max_tokens=4))
    real.watch.peak = 0

    async def users() -> list[Any]:
        return await asyncio.gather(*(graph.ainvoke(topic(number)) for number in range(20)))

    with AdmissionGate(real.thread, 60):
        states = asyncio.run(users())

    assert [len(state["answers"]) for state in states] == [3] * 20
    assert real.watch.peak == 60
    real.assert_nothing_left()


def test_sync_nodes_of_a_graph_run_in_one_batch_too(three: FakeDoor) -> None:
    graph = fan_out(three.chat(), is_async=False)

    with AdmissionGate(three.thread, 3):
        state = graph.invoke(topic(1))

    assert state["answers"] == [f"said by {name}" for name in BRANCHES]
    assert three.thread.stats().peak_batch == 3


@pytest.mark.parametrize("is_async", [True, False])
def test_messages_mode_streams_every_token_of_every_branch(three: FakeDoor, is_async: bool) -> None:
    graph = fan_out(three.chat(), is_async=is_async)
    texts = dict.fromkeys(BRANCHES, "")

    async def read() -> None:
        async for chunk, about in graph.astream(topic(1), stream_mode="messages"):
            texts[about["langgraph_node"]] += chunk.content

    asyncio.run(read())

    assert texts == {name: f"said by {name}" for name in BRANCHES}


def test_events_of_a_graph_carry_every_token_once(three: FakeDoor) -> None:
    graph = fan_out(three.chat())

    async def read() -> list[Any]:
        return [event async for event in graph.astream_events(topic(1), version="v2")]

    events = asyncio.run(read())

    pieces = dict.fromkeys(BRANCHES, "")
    for event in events:
        if event["event"] == "on_chat_model_stream":
            pieces[event["metadata"]["langgraph_node"]] += event["data"]["chunk"].content
    assert pieces == {name: f"said by {name}" for name in BRANCHES}
    assert [event["event"] for event in events].count("on_chat_model_end") == 3


def test_cancelled_graph_cancels_all_its_branches(make_fake: Callable[..., FakeDoor]) -> None:
    reached = threading.Event()
    door = make_fake("x" * 2000, before_step=lambda step: reached.set() if step == 3 else None)
    graph = fan_out(door.chat())

    async def cancel() -> None:
        task = asyncio.ensure_future(graph.ainvoke(topic(1)))
        await asyncio.to_thread(reached.wait, 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())

    door.assert_nothing_left()
    assert door.thread.stats().finished_requests == {"abort": 3}


def test_graph_with_memory_sends_the_history_and_reads_it_from_the_cache(real: RealDoor) -> None:
    chat = real.chat(max_tokens=4, cache_salt="memory")
    state_graph = langgraph_graph.StateGraph(langgraph_graph.MessagesState)

    async def model(state: Any) -> dict[str, list[Any]]:  # noqa: ANN401 - LangGraph's state
        return {"messages": [await chat.ainvoke(state["messages"])]}

    state_graph.add_node("model", model)
    state_graph.add_edge(langgraph_graph.START, "model")
    graph = state_graph.compile(checkpointer=langgraph_memory.InMemorySaver())
    config: Any = {"configurable": {"thread_id": "one user"}}

    async def two_turns() -> list[Any]:
        turns = ["My name is Fanny and I come from Portsmouth.", "What is my name?"]
        return [await graph.ainvoke({"messages": [("user", text)]}, config) for text in turns]

    first, second = asyncio.run(two_turns())

    assert [message.type for message in second["messages"]] == ["human", "ai"] * 2
    usage = second["messages"][-1].usage_metadata
    num_first = first["messages"][-1].usage_metadata["input_tokens"]
    assert usage["input_tokens"] > num_first
    assert usage["input_token_details"]["cache_read"] >= num_first - real.block_size
