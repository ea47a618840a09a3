"""`LLM`: forms of prompts, order of results, text, errors, interrupted calls."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from nanoserve_adapters.testing import tiny_tokenizer
from nanoserve_core import LLM, RequestFailed, SamplingParams, hookimpl
from nanoserve_core.errors import ConfigError, EngineClosed, InvalidRequest, RequestTooLong
from tests.tiny_qwen3_models import greedy_tokens, prompt_of, tiny_qwen3

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from nanoserve_core import Request
    from nanoserve_core.request import LogitsProcessor, StepOutput

SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_kvcache_blocks": 128,
    "max_model_len": 256,
    "max_num_seqs": 8,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(tiny_qwen3(), **SMALL) as llm:
        yield llm
        stats = llm.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_blocks == stats.num_blocks


@pytest.fixture(scope="module")
def text_llm(tiny_checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(tiny_checkpoint), num_kvcache_blocks=256) as llm:
        yield llm


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [prompt_of(3 + 11 * ((n * 5) % 7), seed=n) for n in range(7)]
    params = [GREEDY.replace(max_tokens=1 + (n * 3) % 5) for n in range(7)]

    outputs = llm.generate(prompts, params, use_tqdm=False)

    for prompt, sampling, output in zip(prompts, params, outputs, strict=True):
        assert sampling.max_tokens is not None
        assert output.prompt_token_ids == list(prompt)
        assert tuple(output.token_ids) == greedy_tokens("gqa", prompt, sampling.max_tokens)


def test_one_list_of_ids_is_one_prompt(llm: LLM) -> None:
    prompt = list(prompt_of(5))

    outputs = llm.generate(prompt, GREEDY, use_tqdm=False)

    assert [tuple(o.token_ids) for o in outputs] == [greedy_tokens("gqa", tuple(prompt), 6)]


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_lists_of_unequal_length_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 sampling_params for 3 prompts"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY])


def test_a_bad_prompt_is_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="contains 300"):
        llm.generate([[1, 2], [300]], GREEDY)

    assert llm.stats().steps == 0


def test_the_next_call_after_a_refused_one_works(llm: LLM) -> None:
    with pytest.raises(RequestTooLong):
        llm.generate([[1] * 300], GREEDY)

    outputs = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)

    assert tuple(outputs[0].token_ids) == greedy_tokens("gqa", (1, 2, 3), 6)


def test_text_without_a_tokenizer_is_refused_with_the_way_out(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="tokenizer=tokenizer"):
        llm.generate("hello", GREEDY)


def test_all_samples_of_a_request_are_in_outputs(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=4, logprobs=0)

    output = llm.generate([prompt_of(6)], params, use_tqdm=False)[0]

    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert output.token_ids == output.outputs[0].token_ids
    for sample in output.outputs:
        assert sample.logprobs is not None
        chosen = [row[t].logprob for row, t in zip(sample.logprobs, sample.token_ids, strict=True)]
        assert sample.cumulative_logprob == pytest.approx(sum(chosen))


class FailsOne:
    """A plugin whose processor raises for prompts that begin with 66."""

    @hookimpl
    def nanoserve_request_processor(self, request: Request) -> LogitsProcessor | None:
        return self.fail if request.prompt_token_ids[0] == 66 else None

    def fail(self, _input_ids: torch.Tensor, _scores: torch.Tensor) -> torch.Tensor:
        raise LookupError("no 66 today")


def test_a_failed_request_raises_and_loses_no_other_result() -> None:
    with LLM(tiny_qwen3(), plugins=[FailsOne()], **SMALL) as llm:
        with pytest.raises(RequestFailed, match=r"1 of 3 requests failed.*no 66 today") as raised:
            llm.generate([(1, 2), (66,), (3, 4)], GREEDY, use_tqdm=False)

        outputs = raised.value.outputs
        assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
        assert tuple(outputs[2].token_ids) == greedy_tokens("gqa", (3, 4), 6)


class Interrupts:
    """A plugin that sends this process one Ctrl-C, during the first step that yields tokens."""

    def __init__(self) -> None:
        self.has_sent = False

    @hookimpl
    def nanoserve_tokens(self, outputs: list[StepOutput]) -> None:
        if outputs and not self.has_sent:
            self.has_sent = True
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_call_leaves_nothing_behind_for_the_next() -> None:
    with LLM(tiny_qwen3(), plugins=[Interrupts()], **SMALL) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([(5, 6, 7)], GREEDY, use_tqdm=False)

        outputs = llm.generate([(1, 2, 3)], GREEDY, use_tqdm=False)

        assert [tuple(o.token_ids) for o in outputs] == [greedy_tokens("gqa", (1, 2, 3), 6)]
        assert llm.stats().free_blocks == 128


def test_two_threads_take_turns(llm: LLM) -> None:
    results: dict[int, tuple[int, ...]] = {}

    def call(first: int) -> None:
        output = llm.generate([(first, 2, 3)], GREEDY, use_tqdm=False)[0]
        results[first] = tuple(output.token_ids)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(10, 14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == {n: greedy_tokens("gqa", (n, 2, 3), 6) for n in range(10, 14)}


def test_a_closed_llm_says_so() -> None:
    llm = LLM(tiny_qwen3(), **SMALL)
    llm.close()

    with pytest.raises(EngineClosed):
        llm.generate([[1]], GREEDY)


def test_an_unknown_engine_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seq=3 .*'max_num_seqs'"):
        LLM(tiny_qwen3(), max_num_seq=3)


def test_a_live_model_with_its_tokenizer_serves_text() -> None:
    tokenizer = tiny_tokenizer()
    with LLM(tiny_qwen3(), tokenizer=tokenizer, **SMALL) as llm:
        ids = tuple(tokenizer.encode("ab"))
        if max(ids) < 256:
            output = llm.generate("ab", GREEDY, use_tqdm=False)[0]
            assert tuple(output.token_ids) == greedy_tokens("gqa", ids, 6)
            assert output.prompt == "ab"


def test_text_equals_the_decoded_tokens(text_llm: LLM) -> None:
    output = text_llm.generate("She was the youngest of", GREEDY.replace(max_tokens=24), False)[0]

    assert output.text == text_llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_a_stop_string_ends_and_is_cut_from_the_text(text_llm: LLM) -> None:
    whole = text_llm.generate("She was the youngest of", GREEDY.replace(max_tokens=24), False)[0]
    stop = whole.text[9:14]

    output = text_llm.generate(
        "She was the youngest of", GREEDY.replace(max_tokens=24, stop=(stop,)), False
    )[0]

    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert len(output.token_ids) < 24


def test_chat_renders_the_template_once_and_stops_by_itself(text_llm: LLM) -> None:
    question = [{"role": "user", "content": "What is 12 + 7?"}]

    output = text_llm.chat(question, GREEDY.replace(max_tokens=64), False, enable_thinking=False)[0]

    rendered = text_llm.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert output.prompt_token_ids == text_llm.tokenizer.encode(rendered, add_special_tokens=False)
    assert output.finish_reason == "stop"
    assert "<|im_end|>" not in output.text


def test_a_bad_word_is_never_written(text_llm: LLM) -> None:
    prompt = "She was the youngest of"
    first = text_llm.generate(prompt, GREEDY.replace(max_tokens=12), False)[0].text.split()[0]

    output = text_llm.generate(prompt, GREEDY.replace(max_tokens=12, bad_words=(first,)), False)[0]

    assert first not in output.text.split()
