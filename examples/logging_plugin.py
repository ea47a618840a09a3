"""A plugin that logs: one line per finished request, one per hundred steps.

python examples/logging_plugin.py --model examples/tiny_qwen3
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve_core import LLM, FinishReason, Request, SamplingParams, StepStats, hookimpl

if TYPE_CHECKING:
    from nanoserve_core.request import RequestMetrics

TINY = Path(__file__).resolve().parent / "tiny_qwen3"
logger = logging.getLogger("nanoserve.example")


class RequestLog:
    """Observers cost a running request nothing: they are called per request or per step, never per
    token.
    """

    @hookimpl
    def nanoserve_request_finished(
        self, request: Request, finish_reason: FinishReason, metrics: RequestMetrics
    ) -> None:
        """Log how long the request waited and ran, and what the prefix cache saved."""
        assert metrics.finished_time is not None, "given with every finished request"
        seconds = metrics.finished_time - metrics.arrival_time
        logger.info(
            "%s %s after %.3f s, %d prompt tokens (%d cached)",
            request.request_id,
            finish_reason,
            seconds,
            len(request.prompt_token_ids),
            metrics.num_cached_tokens,
        )

    @hookimpl
    def nanoserve_step_finished(self, stats: StepStats) -> None:
        """Log the state of the engine now and then."""
        if stats.step_id % 100 == 0:
            logger.info(
                "step %d: %d run, %d blocks free",
                stats.step_id,
                stats.num_running,
                stats.num_free_blocks,
            )


def main() -> None:
    """Serve a few prompts with the plugin."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=str(TINY), help="directory or hub id of a Qwen3 checkpoint"
    )
    arguments = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    with LLM(arguments.model, plugins=[RequestLog()]) as llm:
        outputs = llm.generate(
            ["She was", "He had", "They went"] * 2, SamplingParams(temperature=0, max_tokens=20)
        )
    print(f"{len(outputs)} requests served and logged")


if __name__ == "__main__":
    main()
