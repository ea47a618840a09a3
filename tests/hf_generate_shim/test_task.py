"""One request for each distinct prompt, with a random stream of its own."""

from __future__ import annotations

from hf_generate_shim.task import Task, longest_request, make_requests
from nanoserve_core.philox import derive_seed
from nanoserve_core.sampling_params import SamplingParams

A, B, C = (1, 2, 3), (1, 2), (9,)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def task(*rows: tuple[int, ...], sampling: SamplingParams = SAMPLED) -> Task:
    """A task with these prompts."""
    return Task(rows=rows, sampling=sampling, pad_token_id=0)


def test_equal_prompts_are_samples_of_one_request() -> None:
    group = make_requests(task(A, B, A, C, A), seed=5)

    assert [request.prompt_token_ids for request in group.requests] == [A, B, C]
    assert [request.sampling.n for request in group.requests] == [3, 1, 1]
    a, b, c = (request.request_id for request in group.requests)
    assert group.sources == ((a, 0), (b, 0), (a, 1), (c, 0), (a, 2))


def test_equal_greedy_prompts_are_computed_once() -> None:
    group = make_requests(task(A, B, A, sampling=GREEDY), seed=None)

    assert [request.sampling.n for request in group.requests] == [1, 1]
    assert group.sources[0] == group.sources[2] != group.sources[1]


def test_no_two_samples_of_a_call_share_a_stream() -> None:
    group = make_requests(task(A, B, A, C, A, C, B), seed=5)

    seeds = [
        derive_seed(request.sampling.seed or 0, index)
        for request in group.requests
        for index in range(request.sampling.n)
    ]
    assert len(set(seeds)) == 7


def test_seeds_depend_on_the_call_s_seed_and_the_row_alone() -> None:
    first = make_requests(task(A, B, C), seed=5)
    again = make_requests(task(A, A, C), seed=5)
    other = make_requests(task(A, B, C), seed=6)

    assert first.requests[2].sampling.seed == again.requests[1].sampling.seed
    assert first.requests[2].sampling.seed != other.requests[2].sampling.seed


def test_request_ids_are_new_for_every_call() -> None:
    first, second = (make_requests(task(A, B), seed=None) for _ in range(2))

    ids = [request.request_id for request in (*first.requests, *second.requests)]
    assert len(set(ids)) == 4


def test_longest_request_stands_for_all_rows() -> None:
    request = longest_request(task(C, A, B))

    assert request.prompt_token_ids == A
    assert request.sampling.max_tokens == 4
