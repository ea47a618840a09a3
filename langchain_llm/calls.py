"""One call's way through the engine: requests in, their outputs back, cancelled when nobody waits.

It knows token ids and streams; it knows no LangChain class. A caller that leaves early, by whatever
exception, cancels its requests: their blocks return at the next step.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from langchain_llm.call_scope import registered
from langchain_llm.whole_inbox import WholeInbox
from nanoserve_adapters.streams import AsyncRequestStream, RequestStream
from nanoserve_core.collect import OutputCollector
from nanoserve_core.errors import RequestFailed
from nanoserve_core.request import FinishReason, Request, RequestOutput, StepOutput
from nanoserve_core.text import TextStop, bad_words_to_ids

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping, Sequence

    from langchain_llm.engine_reference import EngineReference
    from langchain_llm.options import CallOptions
    from nanoserve_core.grammar import Grammar
    from nanoserve_core.text import Tokenizer


def make_request(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    options: CallOptions,
    metadata: Mapping[str, Any],  # Any: whatever plugins may want to know of the run
    grammar: Grammar | None = None,
) -> Request:
    """The engine's form of one prompt with its options."""
    sampling = options.sampling
    if sampling.bad_words:
        ids = bad_words_to_ids(tokenizer, sampling.bad_words)
        sampling = sampling.replace(bad_words=(), bad_words_ids=sampling.bad_words_ids + ids)
    return Request(
        request_id=f"langchain-{uuid.uuid4().hex}",
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=sampling,
        priority=options.priority,
        cache_salt=options.cache_salt,
        should_stop=TextStop(tokenizer, sampling) if sampling.stop else None,
        grammar=grammar,
        metadata=metadata,
    )


def run(
    engine: EngineReference, requests: Sequence[Request], timeout: float | None
) -> list[StepOutput]:
    """Run the requests together and wait for all of them; everything they gave, for `collect`.

    Raises `RequestFailed` when one fails or is cancelled, `TimeoutError`, `EngineClosed`,
    `EngineDead`; the others are then cancelled.
    """
    stream = RequestStream(engine.thread, [r.request_id for r in requests], timeout)
    try:
        inbox = WholeInbox(stream.inbox, len(requests))
        engine.thread.submit_many(requests, [inbox] * len(requests))
    except BaseException:
        stream.discard()
        raise
    with engine.sync_call():
        return [output for step in read(stream) for output in step]


async def arun(
    engine: EngineReference, requests: Sequence[Request], timeout: float | None
) -> list[StepOutput]:
    """`run` for coroutines; the waiting task costs its loop one wake-up in all."""
    thread = engine.thread
    stream = AsyncRequestStream(thread, [r.request_id for r in requests], timeout, engine.mailbox())
    try:
        inbox = WholeInbox(stream.inbox, len(requests))
        thread.submit_soon(requests, [inbox] * len(requests), stream.is_open)
    except BaseException:
        stream.discard()
        raise
    return [output async for step in aread(stream) for output in step]


def read(stream: RequestStream) -> Generator[list[StepOutput], None, None]:
    """What arrives in `stream`, until all is there; leaving early cancels the rest.

    A request that somebody else cancelled raises `RequestFailed`: a chain must not go on with half
    an answer.
    """
    is_finished = False
    with registered(stream), stream:
        for outputs in stream:
            is_finished = _check(outputs)
            yield outputs
    if not is_finished:
        raise _cancelled()


async def aread(stream: AsyncRequestStream) -> AsyncGenerator[list[StepOutput], None]:
    """`read` for coroutines; to be closed by who leaves early."""
    is_finished = False
    async with stream:
        async for outputs in stream:
            is_finished = _check(outputs)
            yield outputs
    if not is_finished:
        raise _cancelled()


def collect(
    requests: Sequence[Request], tokenizer: Tokenizer, outputs: Sequence[StepOutput]
) -> list[RequestOutput]:
    """All outputs of finished requests as one result for each, in the order of `requests`."""
    collectors = {request.request_id: OutputCollector(request, tokenizer) for request in requests}
    for output in merge_by_sample(outputs):
        collectors[output.request_id].add(output)
    return [collector.result() for collector in collectors.values()]


def merge_by_sample(outputs: Sequence[StepOutput]) -> list[StepOutput]:
    """One output for each sample with all its tokens: text is decoded once, not once for each
    token.
    """
    by_sample: dict[tuple[str, int], list[StepOutput]] = {}
    for output in outputs:
        by_sample.setdefault((output.request_id, output.index), []).append(output)
    return [_merge(parts) for parts in by_sample.values()]


def _merge(parts: list[StepOutput]) -> StepOutput:
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[-1],
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=_joined_logprobs(parts),
    )


def _joined_logprobs(parts: list[StepOutput]) -> tuple[Any, ...] | None:  # Any: PositionLogprobs
    if all(part.logprobs is None for part in parts):
        return None
    return tuple(position for part in parts for position in part.logprobs or ())


def _check(outputs: list[StepOutput]) -> bool:
    for output in outputs:
        if output.finish_reason is FinishReason.ABORT:
            raise _cancelled()
    return outputs[-1].request_finished


def _cancelled() -> RequestFailed:
    return RequestFailed(
        "the request was cancelled before it was finished: by cancel(), or because another input "
        "of its batch failed. Call again if the answer is still wanted."
    )
