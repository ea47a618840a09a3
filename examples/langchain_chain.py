"""LangChain on local weights: 32 concurrent chain calls join one running batch.

python examples/langchain_chain.py --model examples/tiny_qwen3
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_llm import ChatNanoserve

TINY = Path(__file__).resolve().parent / "tiny_qwen3"


async def ask_all(chat: ChatNanoserve) -> list[str]:
    """Ask 32 sums at a time and return the answers in order."""
    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "You are a careful clerk. Answer with the number only."),
            ("user", "What is {a} + {b}?"),
        ]
    )
    chain = prompt | chat | StrOutputParser()
    questions = [{"a": a, "b": a + 3} for a in range(1, 33)]
    return await asyncio.gather(*(chain.ainvoke(question) for question in questions))


def main() -> None:
    """Run the chains, stream one answer, print what the engine saw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=str(TINY), help="directory or hub id of a Qwen3 checkpoint"
    )
    arguments = parser.parse_args()

    chat = ChatNanoserve(model=arguments.model, temperature=0, max_tokens=32, enable_thinking=False)
    try:
        answers = asyncio.run(ask_all(chat))
        print("answers:", answers[:8], "...")
        print("streamed: ", end="")
        for chunk in chat.stream("Repeat: the rain in May"):
            print(chunk.content, end="|", flush=True)
        stats = chat.stats()
        print(f"\npeak batch {stats.peak_batch}, cache hits {stats.prefix_cache_hit_rate:.0%}")
    finally:
        chat.close()


if __name__ == "__main__":
    main()
