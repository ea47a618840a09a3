"""`LLM`: the offline door. Prompts in, finished results out, in the order of the prompts.

The engine runs in the caller's thread. One call at a time: a second thread that calls waits for the
first.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tqdm import tqdm

from nanoserve_core.collect import OutputCollector
from nanoserve_core.config import EngineConfig, recommended_sampling
from nanoserve_core.engine import Engine
from nanoserve_core.errors import ConfigError, InvalidRequest, RequestFailed
from nanoserve_core.request import Request, RequestOutput
from nanoserve_core.sampling_params import SamplingParams
from nanoserve_core.text import TextStop, bad_words_to_ids

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from torch import nn

    from nanoserve_core.engine_stats import EngineStats

Prompt: TypeAlias = "str | Sequence[int]"
Message: TypeAlias = Mapping[str, Any]
"""One chat message, ``{"role": ..., "content": ...}`` and what else the template reads."""


class LLM:
    """An engine with a tokenizer: ``LLM(path_or_model).generate(prompts, sampling_params)``.

    ``model``: a local directory, a hub id, or a live ``Qwen3ForCausalLM``, whose weights are then
    shared, not copied. ``tokenizer``: only needed for text; loaded from the directory or hub id
    when not given. ``engine_options``: the fields of `EngineConfig`; an unknown one raises
    `ConfigError`.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        tokenizer: Any = None,  # noqa: ANN401 - HuggingFace tokenizers share no public base type
        **engine_options: Any,  # Any: each option is checked by EngineConfig
    ) -> None:
        config = EngineConfig.from_options(**engine_options)
        self._source = model
        self._tokenizer = tokenizer
        self._engine = Engine(model, config)
        self._lock = threading.Lock()
        self._request_ids = (f"llm-{number}" for number in count())

    @property
    def engine(self) -> Engine:
        """The engine under this door."""
        return self._engine

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 - HuggingFace tokenizers share no public base type
        """The tokenizer, loaded at first use; `ConfigError` when there is none to load."""
        if self._tokenizer is None:
            self._tokenizer = _load_tokenizer(self._source)
        return self._tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config recommends; plain `SamplingParams` when it says
        nothing.
        """
        return SamplingParams.from_options(**recommended_sampling(self._source))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One `RequestOutput` per prompt, in order.

        ``prompts``: a text, a list of texts, a list of token ids, or a list of such lists.
        ``sampling_params``: one for all, or one per prompt; None takes `default_sampling_params`. A
        malformed prompt raises `InvalidRequest` before any work starts. When a request fails while
        running, the others go on; then `RequestFailed` is raised, with all ``outputs``.
        """
        prompt_list = _as_prompt_list(prompts)
        params = self._params_for(len(prompt_list), sampling_params)
        requests = [self._make_request(p, s) for p, s in zip(prompt_list, params, strict=True)]
        texts = [p if isinstance(p, str) else None for p in prompt_list]
        with self._lock:
            return self._run(requests, texts, use_tqdm)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Any] | None = None,  # Any: whatever the chat template accepts as a tool
        enable_thinking: bool | None = None,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Like `generate` on conversations (one, or a list), rendered with the chat template
        exactly once.
        """
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        batch: Sequence[Any] = (
            [conversations] if single else conversations
        )  # Any: messages are the template's business
        options: dict[str, Any] = (
            {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        )
        prompts = [
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools is not None else None,
                chat_template=chat_template,
                add_generation_prompt=True,
                tokenize=False,
                **options,
            )
            for messages in batch
        ]
        token_ids = [self.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        return self.generate(token_ids, sampling_params, use_tqdm)

    def warmup(self, *, max_num_seqs: int | None = None, max_prompt_tokens: int = 512) -> int:
        """Compile and capture now what the first calls would wait for: see `Engine.warmup`."""
        with self._lock:
            return self._engine.warmup(
                max_num_seqs=max_num_seqs, max_prompt_tokens=max_prompt_tokens
            )

    def weights_changed(self) -> None:
        """Tell the engine that the weights were changed: nothing cached before is used again."""
        self._engine.weights_changed()

    def stats(self) -> EngineStats:
        """Counters of the engine since it started."""
        return self._engine.stats()

    def close(self) -> None:
        """Give the memory back; later calls raise `EngineClosed`."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _params_for(
        self, num_prompts: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None:
            return [self.default_sampling_params()] * num_prompts
        if isinstance(given, SamplingParams):
            return [given] * num_prompts
        if len(given) != num_prompts:
            raise InvalidRequest(
                f"{len(given)} sampling_params for {num_prompts} prompts: expected one for all or "
                "one per prompt."
            )
        return given

    def _make_request(self, prompt: Prompt, sampling: SamplingParams) -> Request:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if sampling.bad_words:
            ids = bad_words_to_ids(self.tokenizer, sampling.bad_words)
            sampling = sampling.replace(bad_words=(), bad_words_ids=sampling.bad_words_ids + ids)
        request = Request(
            request_id=next(self._request_ids),
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            should_stop=TextStop(self.tokenizer, sampling) if sampling.stop else None,
            metadata={"source": "llm"},
        )
        self._engine.validate(request)
        return request

    def _run(
        self, requests: Sequence[Request], texts: Sequence[str | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        collectors = {
            request.request_id: OutputCollector(request, self._text_tokenizer(request), prompt=text)
            for request, text in zip(requests, texts, strict=True)
        }
        try:
            for request in requests:
                self._engine.add_request(request)
            with tqdm(
                total=len(requests), desc="Generating", disable=not use_tqdm, dynamic_ncols=True
            ) as bar:
                self._step_until_done(collectors, bar)
        finally:
            for request in requests:
                self._engine.abort(request.request_id)
        return _results([collectors[request.request_id] for request in requests])

    def _step_until_done(
        self, collectors: Mapping[str, OutputCollector], bar: tqdm[Any]
    ) -> None:  # Any: tqdm is generic
        num_open, num_tokens = len(collectors), 0
        with _interrupts_between_steps() as check_interrupt:
            while num_open:
                for output in self._engine.step():
                    collector = collectors.get(output.request_id)
                    if (
                        collector is None
                    ):  # the end of a request that an earlier, interrupted call left behind
                        continue
                    collector.add(output)
                    num_tokens += len(output.token_ids)
                    if output.request_finished:
                        num_open -= 1
                        bar.set_postfix_str(
                            f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s",
                            refresh=False,
                        )
                        bar.update()
                check_interrupt()

    def _text_tokenizer(self, request: Request) -> Any:  # noqa: ANN401 - HuggingFace tokenizers share no public base type
        if not request.sampling.detokenize:
            return None
        if self._tokenizer is None and not isinstance(self._source, (str, Path)):
            return None  # a live model without a tokenizer: results have ids and empty text
        return self.tokenizer


def _as_prompt_list(
    prompts: Any,  # noqa: ANN401 - a caller's value
) -> list[Prompt]:  # Any: every accepted form of prompts, and wrong ones
    if isinstance(prompts, str):
        return [prompts]
    result = list(prompts)
    if result and all(hasattr(item, "__index__") for item in result):
        return [result]
    for position, item in enumerate(result):
        if not isinstance(item, str) and not isinstance(item, Sequence):
            raise InvalidRequest(
                f"prompts[{position}] is a {type(item).__name__}: expected a text or a list of "
                "token ids for each prompt."
            )
    return result


def _results(collectors: Sequence[OutputCollector]) -> list[RequestOutput]:
    outputs = [collector.result() for collector in collectors]
    failed = [
        (output, collector.error)
        for output, collector in zip(outputs, collectors, strict=True)
        if collector.error
    ]
    if failed:
        names = ", ".join(output.request_id for output, _ in failed)
        raise RequestFailed(
            f"{len(failed)} of {len(outputs)} requests failed ({names}): {failed[0][1]}. "
            "The others finished: all results are in this exception's `outputs`.",
            outputs,
        ) from failed[0][1]
    return outputs


def _load_tokenizer(source: object) -> Any:  # noqa: ANN401 - HuggingFace tokenizers share no public base type
    if not isinstance(source, (str, Path)):
        raise ConfigError(
            f"this LLM was made from a live {type(source).__name__} without a tokenizer: text "
            "prompts, chat and stop strings "
            "need one. Pass LLM(model, tokenizer=tokenizer), or use token ids."
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(source))


@contextmanager
def _interrupts_between_steps() -> Iterator[Any]:
    """Hold a Ctrl-C back until the running step is done: an interrupted engine stays usable.

    Yields a function that raises the held `KeyboardInterrupt`. Only Python's own handler in the
    main thread is held back.
    """
    pending: list[int] = []

    def check() -> None:
        if pending:
            raise KeyboardInterrupt

    def hold(signum: int, _frame: FrameType | None) -> None:
        pending.append(signum)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
