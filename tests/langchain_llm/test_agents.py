"""`create_agent` with two tools and memory: scripted, and on the shipped checkpoint as it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.tools import tool

from langchain_llm import ChatNanoserve
from nanoserve_adapters.testing import AdmissionGate
from tests.langchain_llm.doors import SayText

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.messages import BaseMessage

    from tests.langchain_llm.doors import FakeDoor

agents = pytest.importorskip("langchain.agents")
memory = pytest.importorskip("langgraph.checkpoint.memory")

QWEN3 = (Path(__file__).parents[2] / "examples" / "tiny_qwen3" / "chat_template.jinja").read_text(
    encoding="utf-8"
)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"rain in {city}"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# What the scripted model says, by what its prompt holds; the first that fits counts.
SCRIPT = {
    "rain in Bath\n</tool_response>": "It rains in Bath.",
    "How is Bath?": call("get_weather", '{"city": "Bath"}'),
    "42\n</tool_response>": "The sum is 42.",
    "Both": call("add", '{"a": 1, "b": 2}') + call("get_weather", '{"city": "Rome"}'),
    "17 and 25": call("add", '{"a": 17, "b": 25}'),
}


@pytest.fixture
def scripted(make_fake: Callable[..., FakeDoor]) -> FakeDoor:
    """An engine that plays the model's part."""
    return make_fake(next_token=SayText("Hello.", SCRIPT))


def agent_on(door: FakeDoor, **options: Any) -> Any:  # noqa: ANN401 - LangGraph's own type
    chat = door.chat(chat_template=QWEN3)
    return agents.create_agent(chat, [add, get_weather], **options)


def ask(text: str) -> dict[str, Any]:
    return {"messages": [("user", text)]}


def thread_named(name: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": name}}


def story(messages: list[BaseMessage]) -> list[tuple[str, str]]:
    """Who said what, a tool call by its tool's name."""
    return [
        (m.type, " ".join(c["name"] for c in getattr(m, "tool_calls", None) or ()) or m.text)
        for m in messages
    ]


SUM = [("human", "17 and 25"), ("ai", "add"), ("tool", "42"), ("ai", "The sum is 42.")]
BATH = [
    ("human", "How is Bath?"),
    ("ai", "get_weather"),
    ("tool", "rain in Bath"),
    ("ai", "It rains in Bath."),
]


def test_agent_calls_two_tools_over_two_turns_and_remembers(scripted: FakeDoor) -> None:
    agent = agent_on(scripted, checkpointer=memory.InMemorySaver())

    async def two_turns() -> dict[str, Any]:
        await agent.ainvoke(ask("17 and 25"), thread_named("a"))
        state: dict[str, Any] = await agent.ainvoke(ask("How is Bath?"), thread_named("a"))
        return state

    state = asyncio.run(two_turns())
    other = agent.invoke(ask("How is Bath?"), thread_named("b"))

    assert story(state["messages"]) == SUM + BATH
    assert story(other["messages"]) == BATH
    assert "The sum is 42." in scripted.prompts()[2]
    assert '"description": "Add two numbers."' in scripted.prompts()[0]


def test_two_calls_of_one_answer_are_both_carried_out(scripted: FakeDoor) -> None:
    state = agent_on(scripted).invoke(
        ask("Both"), {"recursion_limit": 6}, interrupt_after=["tools"]
    )

    assert story(state["messages"])[1:] == [
        ("ai", "add get_weather"),
        ("tool", "3"),
        ("tool", "rain in Rome"),
    ]


def test_agents_of_many_users_run_in_one_batch(scripted: FakeDoor) -> None:
    agent = agent_on(scripted, checkpointer=memory.InMemorySaver())

    async def users() -> list[Any]:
        turns = (agent.ainvoke(ask("17 and 25"), thread_named(str(n))) for n in range(20))
        return await asyncio.gather(*turns)

    with AdmissionGate(scripted.thread, 20):
        states = asyncio.run(users())

    assert [story(state["messages"]) for state in states] == [SUM] * 20
    assert scripted.thread.stats().peak_batch == 20


def test_messages_mode_streams_calls_results_and_the_answer_in_pieces(scripted: FakeDoor) -> None:
    agent = agent_on(scripted)

    async def read() -> list[BaseMessage]:
        stream = agent.astream(ask("17 and 25"), stream_mode="messages")
        return [message async for message, _ in stream]

    messages = asyncio.run(read())

    results = [m for m in messages if m.type == "tool"]
    split = messages.index(results[0])
    calls = [c for m in messages[:split] for c in getattr(m, "tool_call_chunks", ())]
    assert [c["name"] for c in calls if c["name"]] == ["add"]
    assert [m.content for m in results] == ["42"]
    assert "".join(m.text for m in messages[split + 1 :]) == "The sum is 42."


def test_events_of_an_agent_name_the_tool_and_carry_every_token(scripted: FakeDoor) -> None:
    agent = agent_on(scripted)

    async def read() -> list[Any]:
        return [e async for e in agent.astream_events(ask("17 and 25"), version="v2")]

    events = asyncio.run(read())

    tools = [(e["event"], e["name"]) for e in events if "tool" in e["event"]]
    pieces = [e["data"]["chunk"].text for e in events if e["event"] == "on_chat_model_stream"]
    assert tools == [("on_tool_start", "add"), ("on_tool_end", "add")]
    assert "".join(pieces) == "The sum is 42."


def test_shipped_checkpoint_calls_both_tools_and_reads_their_results(tiny_checkpoint: Path) -> None:
    with ChatNanoserve(
        model=tiny_checkpoint,
        temperature=0,
        max_tokens=64,
        enable_thinking=False,
        engine_options={"num_kvcache_blocks": 512},
    ) as chat:
        agent = agents.create_agent(chat, [add, get_weather], checkpointer=memory.InMemorySaver())

        async def three_turns() -> Any:  # noqa: ANN401 - the state of the graph
            for text in ("Use get_weather: city Paris.", "Use add: a 17 and b 25."):
                state = await agent.ainvoke(ask(text), thread_named("a"))
            return state

        state = asyncio.run(three_turns())
        chunks = [
            m
            for m, _ in agent.stream(
                ask("Use add: a 3 and b 4."), thread_named("b"), stream_mode="messages"
            )
        ]

    said = story(state["messages"])
    assert said[1:3] == [("ai", "get_weather"), ("tool", "rain in Paris")]
    assert "rain in Paris" in said[3][1]
    assert said[5:7] == [("ai", "add"), ("tool", "42")]
    assert "42" in said[7][1]
    assert any(m.type == "tool" and m.content == "7" for m in chunks)
