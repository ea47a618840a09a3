"""What a request is checked for before any work starts."""

from __future__ import annotations

from typing import Any

import pytest

from nanoserve_core import Request, SamplingParams
from nanoserve_core.errors import InvalidRequest, RequestTooLong
from nanoserve_core.validation import RequestValidator

VALIDATE = RequestValidator(
    vocab_size=256, max_model_len=64, num_blocks=4, block_size=4, max_num_seqs=2
)


def _request(prompt: Any, **sampling: Any) -> Request:  # noqa: ANN401 - a caller's value
    return Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(**sampling))


@pytest.mark.parametrize("prompt", [[256], [1, 2, 1000], [-1]])
def test_an_id_outside_the_vocabulary_is_named(prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=rf"contains {prompt[-1]}.*0 <= id < 256"):
        VALIDATE(_request(prompt))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="0 tokens"):
        VALIDATE(_request([]))


@pytest.mark.parametrize("prompt", [["a"], [1.0], [True]])
def test_a_prompt_that_is_no_list_of_ids_is_refused(prompt: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="integer token ids"):
        VALIDATE(_request(prompt))


def test_a_prompt_larger_than_the_pool_names_both_numbers() -> None:
    with pytest.raises(RequestTooLong, match=r"need 10 KV blocks of 4 tokens, but the pool has 4"):
        VALIDATE(_request(range(40)))


def test_output_that_outgrows_the_pool_is_refused_by_the_block() -> None:
    VALIDATE(_request([1] * 8, max_tokens=9))  # K/V of 16 tokens: the last sampled one needs none

    with pytest.raises(RequestTooLong, match=r"max_tokens=10 need 5 KV blocks"):
        VALIDATE(_request([1] * 8, max_tokens=10))


def test_prompt_and_output_longer_than_the_context_are_refused() -> None:
    validate = RequestValidator(
        vocab_size=256, max_model_len=64, num_blocks=100, block_size=4, max_num_seqs=2
    )
    validate(_request([1] * 60, max_tokens=4))

    with pytest.raises(RequestTooLong, match=r"need 65 positions, but max_model_len is 64"):
        validate(_request([1] * 60, max_tokens=5))


def test_a_prompt_that_fills_the_context_leaves_no_room_for_a_token() -> None:
    validate = RequestValidator(
        vocab_size=256, max_model_len=64, num_blocks=100, block_size=4, max_num_seqs=2
    )

    validate(_request([1] * 64, max_tokens=0))
    for max_tokens in (1, None):
        with pytest.raises(RequestTooLong, match="65 positions"):
            validate(_request([1] * 64, max_tokens=max_tokens))


def test_no_max_tokens_means_until_the_nearer_limit() -> None:
    wide = RequestValidator(
        vocab_size=256, max_model_len=64, num_blocks=100, block_size=4, max_num_seqs=2
    )

    assert wide.max_total_tokens(_request([1] * 8, max_tokens=None)) == 64
    assert VALIDATE.max_total_tokens(_request([1] * 8, max_tokens=None)) == 17


def test_stop_strings_without_a_text_check_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="should_stop"):
        VALIDATE(_request([1], stop="x"))


def test_words_without_ids_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="bad_words_to_ids"):
        VALIDATE(_request([1], bad_words="x"))


@pytest.mark.parametrize(
    "options", [{"stop_token_ids": [256]}, {"logit_bias": {300: 1.0}}, {"bad_words_ids": [[256]]}]
)
def test_sampling_ids_outside_the_vocabulary_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        VALIDATE(_request([1], **options))


def test_more_logprobs_than_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="logprobs=257"):
        VALIDATE(_request([1], logprobs=257))
