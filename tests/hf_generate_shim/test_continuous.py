"""`generate_batch` against transformers' plain `generate` of one prompt at a time, un-patched."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

import hf_generate_shim
from hf_generate_shim import NanoserveFallbackWarning
from nanoserve_adapters.testing import tiny_tokenizer
from nanoserve_core import hookimpl
from nanoserve_core.errors import EngineDead, UnsupportedOption
from tests.hf_generate_shim.calls import EOS, PAD, VOCAB_SIZE, new_model, prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle

PROMPTS = [prompt(length, seed=3) for length in (5, 1, 9, 14, 5, 2)]
may_fall_back = pytest.mark.filterwarnings("ignore::hf_generate_shim.NanoserveFallbackWarning")


def alone(model: Qwen3ForCausalLM, row: Sequence[int], **options: Any) -> list[int]:
    """The oracle: the new tokens of transformers' `generate` after one prompt."""
    ids = torch.tensor([row])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    return [int(token) for token in sequences[0, len(row) :]]


def tokens(results: dict[str, GenerationOutput]) -> list[list[int]]:
    """What was generated, in the order of the results."""
    return [result.generated_tokens for result in results.values()]


OPTIONS: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_new_tokens": 8},
    "max_length": {"max_length": 16},
    "repetition penalty": {"max_new_tokens": 8, "repetition_penalty": 5.0},
    "min_new_tokens": {"max_new_tokens": 8, "min_new_tokens": 6, "eos_token_id": list(range(90))},
    "min_length": {"max_new_tokens": 8, "min_length": 7, "eos_token_id": list(range(90))},
    "no_repeat_ngram_size": {"max_new_tokens": 12, "no_repeat_ngram_size": 1},
    "bad words": {"max_new_tokens": 8, "bad_words_ids": [[97], [118], [61]]},
    "sequence bias": {"max_new_tokens": 8, "sequence_bias": [[[97], 9.0]]},
    "suppress_tokens": {"max_new_tokens": 8, "suppress_tokens": list(range(100))},
    "several ends": {"max_new_tokens": 12, "eos_token_id": list(range(40)), "pad_token_id": 9},
    "no end": {"max_new_tokens": 8, "eos_token_id": -1},
    "beams": {"max_new_tokens": 5, "num_beams": 3, "eos_token_id": list(range(30))},
    "typical_p": {"max_new_tokens": 6, "do_sample": True, "top_k": 1, "typical_p": 0.9},
    "encoder penalty": {"max_new_tokens": 6, "encoder_repetition_penalty": 2.0},
    "renormalize_logits": {"max_new_tokens": 6, "renormalize_logits": True},
    "top_k 1": {"max_new_tokens": 8, "do_sample": True, "top_k": 1},
    "no cache": {"max_new_tokens": 6, "use_cache": False},
    "dict": {"max_new_tokens": 6, "return_dict_in_generate": True},
}


@may_fall_back
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("as_config", [False, True], ids=["arguments", "config"])
def test_batch_equals_prompts_alone(options: dict[str, Any], as_config: bool) -> None:
    model = new_model()
    common = {"pad_token_id": PAD, **options}
    given = {"generation_config": GenerationConfig(**common)} if as_config else common
    expected = [alone(model, row, **given) for row in PROMPTS]

    with hf_generate_shim.installed(model, num_kvcache_blocks=256):
        results = model.generate_batch(PROMPTS, **given)

    assert tokens(results) == expected


def test_results_have_transformers_form(model: Qwen3ForCausalLM, handle: Handle) -> None:
    results = model.generate_batch(PROMPTS, max_new_tokens=4, record_timestamps=True)

    assert list(results) == [f"req_{i}" for i in range(len(PROMPTS))]
    assert handle.counters.fast == len(PROMPTS)
    for (name, result), row in zip(results.items(), PROMPTS, strict=True):
        assert type(result) is GenerationOutput
        assert (result.request_id, result.prompt_ids) == (name, row)
        assert (result.status, result.error) == (RequestStatus.FINISHED, None)
        assert result.is_finished()
        created, (begun, ended) = result.created_time, result.lifespan
        assert created <= begun <= ended
        assert result.timestamps == sorted(result.timestamps)
        assert len(result.timestamps) == 4


def test_one_step_serves_all_prompts(model: Qwen3ForCausalLM, handle: Handle) -> None:
    rows = [prompt(4 + length) for length in range(24)]

    model.generate_batch(rows, max_new_tokens=8)

    assert handle.stats().peak_batch == 24
    assert handle.counters.fast == 24


def test_no_prompts_give_no_results(model: Qwen3ForCausalLM, handle: Handle) -> None:
    assert model.generate_batch([]) == {}
    assert handle.counters == hf_generate_shim.Counters()


def test_prompts_in_lockstep_share_the_batch_too(model: Qwen3ForCausalLM, handle: Handle) -> None:
    rows = [prompt(4 + length) for length in range(12)]

    results = model.generate_batch(rows, max_new_tokens=8, no_repeat_ngram_size=2)

    assert handle.stats().peak_batch == 12
    assert handle.counters.lockstep == 12
    assert {result.error for result in results.values()} == {None}


def test_sampled_prompts_in_lockstep_draw_from_streams_of_their_own(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    config = ContinuousBatchingConfig(seed=5)
    options = {"max_new_tokens": 8, "do_sample": True, "typical_p": 0.9}
    options |= {"num_return_sequences": 2, "continuous_batching_config": config}

    together = tokens(model.generate_batch([prompt(6)] * 2, **options))
    again = tokens(model.generate_batch([prompt(6), prompt(9)], **options))

    assert together[:2] == again[:2]
    assert len({tuple(row) for row in together}) == 4
    assert handle.counters.lockstep == 4


@pytest.mark.filterwarnings("ignore:.*max_length.*:UserWarning")
def test_default_length_is_that_of_generate(model: Qwen3ForCausalLM, handle: Handle) -> None:
    results = model.generate_batch(PROMPTS[:2])

    assert [len(row) for row in tokens(results)] == [20, 20]
    assert handle.counters.fast == 2


def test_end_of_sequence_of_the_model_holds_for_a_config_without_one() -> None:
    ends = list(range(40))
    model = new_model()
    model.generation_config.eos_token_id = ends
    config = GenerationConfig(max_new_tokens=16, pad_token_id=PAD)
    before = config.to_dict()
    expected = [alone(model, row, generation_config=config) for row in PROMPTS]

    with hf_generate_shim.installed(model, num_kvcache_blocks=256):
        results = model.generate_batch(PROMPTS, generation_config=config)

    assert tokens(results) == expected
    assert any(len(row) < 16 for row in expected)
    assert config.to_dict() == before
    assert model.generation_config.eos_token_id == ends


def test_sampled_tokens_are_among_the_fifty_best_by_default(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    results = model.generate_batch([prompt(6)] * 64, max_new_tokens=1, do_sample=True)

    assert handle.counters.fast == 64
    logits = model(torch.tensor([prompt(6)])).logits[0, -1]
    best = set(logits.topk(50).indices.tolist())
    found = {row[0] for row in tokens(results)}
    assert found <= best
    assert len(found) > 5


def test_prompt_s_random_numbers_do_not_depend_on_its_neighbours(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    config = ContinuousBatchingConfig(seed=5)
    options = {"max_new_tokens": 8, "do_sample": True, "continuous_batching_config": config}

    together = tokens(model.generate_batch([prompt(6)] * 4, **options))
    again = tokens(model.generate_batch([prompt(6), prompt(9)], **options))

    assert together[0] == again[0]
    assert together[0] != together[1]
    assert handle.counters.fast == 6


def test_manual_seed_reproduces_a_batch(model: Qwen3ForCausalLM, handle: Handle) -> None:
    def run(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return tokens(model.generate_batch(PROMPTS, max_new_tokens=6, do_sample=True))

    first, second, other = run(1), run(1), run(2)

    assert first == second != other
    assert handle.counters.fast == 18


@pytest.mark.parametrize("seed", [7, [7]], ids=["of the call", "of the row"])
def test_seed_in_the_config_is_that_of_each_prompt_s_call(
    model: Qwen3ForCausalLM, handle: Handle, seed: int | list[int]
) -> None:
    config = GenerationConfig(max_new_tokens=6, do_sample=True, nanoserve_seed=seed)
    expected = [alone(model, row, generation_config=config) for row in PROMPTS[:3]]

    results = model.generate_batch(PROMPTS[:3], generation_config=config)

    assert tokens(results) == expected
    assert handle.counters.fast == 6


def test_own_options_are_not_dropped_by_transformers_own_loop(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    config = GenerationConfig(max_new_tokens=6, num_beams=2, nanoserve_seed=7)

    with pytest.raises(UnsupportedOption, match="nanoserve_seed"):
        model.generate_batch(PROMPTS, generation_config=config)

    assert handle.stats().generated_tokens == 0


def test_greedy_batch_draws_no_random_number(model: Qwen3ForCausalLM, handle: Handle) -> None:
    state = torch.random.get_rng_state()

    model.generate_batch(PROMPTS, max_new_tokens=2)

    assert torch.equal(torch.random.get_rng_state(), state)
    assert handle.counters.fast == len(PROMPTS)


def test_several_sequences_of_a_prompt_stand_before_its_own(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    results = model.generate_batch(
        PROMPTS[:2], max_new_tokens=6, do_sample=True, num_return_sequences=3
    )

    names = ["req_0__child#0", "req_0__child#1", "req_0"]
    assert list(results) == [*names, *(name.replace("req_0", "req_1") for name in names)]
    assert len({tuple(results[name].generated_tokens) for name in names}) == 3
    assert all(results[name].prompt_ids == PROMPTS[0] for name in names)
    assert handle.counters.fast == 2


@may_fall_back
def test_several_sequences_of_beams_are_those_of_generate(model: Qwen3ForCausalLM) -> None:
    options = {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 3, "pad_token_id": PAD}
    row = torch.tensor([prompt(6)])
    expected = model.generate(row, attention_mask=torch.ones_like(row), **options)[:, 6:].tolist()

    with hf_generate_shim.installed(model):
        results = model.generate_batch([prompt(6)], **options)

    assert tokens(results) == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 3.0},
        {"do_sample": True, "top_k": 5, "temperature": 0.7},
        {"no_repeat_ngram_size": 2},
        {"num_beams": 2},
    ],
    ids=["greedy", "penalty", "sampled", "lockstep", "beams"],
)
@may_fall_back
def test_logprobs_are_those_of_the_processed_scores(
    model: Qwen3ForCausalLM, handle: Handle, options: dict[str, Any]
) -> None:
    wanted = ContinuousBatchingConfig(return_logprobs=True)
    results = model.generate_batch(
        PROMPTS[:3], max_new_tokens=5, continuous_batching_config=wanted, **options
    )

    if "num_beams" in options:
        assert all(len(result.logprobs) == 5 for result in results.values())
        return
    for result in results.values():
        expected = scores_after(new_model(), result, options)
        assert result.logprobs == pytest.approx(expected, abs=1e-4)
    assert handle.counters.fast + handle.counters.lockstep == 3


def scores_after(
    model: Qwen3ForCausalLM, result: GenerationOutput, options: dict[str, Any]
) -> list[float]:
    """Log-probabilities of given tokens: one step of `generate` after each prefix."""
    logprobs = []
    for place, token in enumerate(result.generated_tokens):
        ids = torch.tensor([[*result.prompt_ids, *result.generated_tokens[:place]]])
        step = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        logprobs.append(float(step.scores[0].log_softmax(dim=-1)[0, token]))
    return logprobs


def test_prompt_that_is_none_fails_alone(model: Qwen3ForCausalLM) -> None:
    rows = [PROMPTS[0], [1, VOCAB_SIZE], [], [1, -1], [1.5], PROMPTS[2]]
    expected = [alone(model, row, max_new_tokens=6) for row in (PROMPTS[0], PROMPTS[2])]

    with hf_generate_shim.installed(model, num_kvcache_blocks=256) as handle:
        results = model.generate_batch(rows, max_new_tokens=6)

    assert [results["req_0"].generated_tokens, results["req_5"].generated_tokens] == expected
    errors = [result.error for result in results.values()]
    assert errors[0] is errors[5] is None
    texts = ["not in the vocabulary", "0 tokens", "is -1", "expected a list of integers"]
    for place, text in enumerate(texts, start=1):
        failed = results[f"req_{place}"]
        assert failed.status is RequestStatus.FAILED
        assert (failed.generated_tokens, failed.prompt_ids) == ([], rows[place])
        assert text in str(failed.error)
    assert handle.counters.fast == 2


def test_prompt_without_room_below_max_length_fails_alone(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    results = model.generate_batch([prompt(6), prompt(12)], max_length=10)

    assert len(results["req_0"].generated_tokens) == 4
    assert "max_length" in str(results["req_1"].error)
    assert handle.counters.fast == 1


@pytest.mark.filterwarnings("ignore::hf_generate_shim.NanoserveFallbackWarning")
def test_prompt_larger_than_the_pool_runs_in_transformers_own_loop(
    model: Qwen3ForCausalLM,
) -> None:
    rows = [prompt(40), prompt(5)]
    expected = [alone(model, row, max_new_tokens=6) for row in rows]

    with hf_generate_shim.installed(model, num_kvcache_blocks=2, block_size=16) as handle:
        results = model.generate_batch(rows, max_new_tokens=6)

    assert tokens(results) == expected
    assert (handle.counters.fast, handle.counters.fallback) == (1, 1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"temperature": -1.0, "do_sample": True}, ValueError, "temperature"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"typo": 1}, ValueError, "typo"),
        ({"num_return_sequences": 2}, ValueError, "num_return_sequences"),
        ({"streamer": object()}, UnsupportedOption, "streaming=True"),
        ({"attention_mask": object()}, UnsupportedOption, "without pads"),
        (
            {"return_dict_in_generate": True, "output_scores": True},
            UnsupportedOption,
            "output_scores",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_for_every_prompt_is_raised(
    model: Qwen3ForCausalLM,
    handle: Handle,
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        model.generate_batch(PROMPTS, **{"max_new_tokens": 4, **options})

    assert handle.counters.fast == 0


def test_strict_refuses_what_the_engine_does_not_do(model: Qwen3ForCausalLM) -> None:
    with (
        hf_generate_shim.installed(model, strict=True),
        pytest.raises(UnsupportedOption, match="num_beams"),
    ):
        model.generate_batch(PROMPTS, max_new_tokens=4, num_beams=2)


def test_fallback_is_warned_of_once_where_the_call_stands(model: Qwen3ForCausalLM) -> None:
    with (
        hf_generate_shim.installed(model) as handle,
        pytest.warns(NanoserveFallbackWarning, match="num_beams") as caught,
    ):
        model.generate_batch(PROMPTS, max_new_tokens=2, num_beams=2)

    assert [warning.filename for warning in caught] == [__file__]
    assert handle.counters.fallback == len(PROMPTS)


@may_fall_back
def test_stop_strings_end_each_prompt(model: Qwen3ForCausalLM) -> None:
    tokenizer = tiny_tokenizer()
    stops = [chr(byte) for byte in range(33, 60)]
    options = {"max_new_tokens": 16, "stop_strings": stops, "tokenizer": tokenizer}
    expected = [alone(model, row, **options) for row in PROMPTS]

    with hf_generate_shim.installed(model, num_kvcache_blocks=256):
        results = model.generate_batch(PROMPTS, **options)

    assert tokens(results) == expected
    assert any(len(row) < 16 for row in expected)


class EveryThirdToken:
    """A processor with a state: wrong as soon as two calls use it at the same time."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        banned = input_ids[:, -1] if self.num_calls % 3 else input_ids[:, 0]
        return scores.scatter(1, banned[:, None], -torch.inf)


class AtTokens:
    """A criterion of the user's own."""

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return input_ids[:, -1] < 60


@may_fall_back
def test_own_processors_and_criteria_take_turns(model: Qwen3ForCausalLM) -> None:
    def options() -> dict[str, Any]:
        return {
            "max_new_tokens": 8,
            "logits_processor": LogitsProcessorList([EveryThirdToken()]),
            "stopping_criteria": StoppingCriteriaList([AtTokens()]),
            "pad_token_id": PAD,
        }

    shared = options()
    expected = [alone(model, row, **shared) for row in PROMPTS]

    with hf_generate_shim.installed(model, num_kvcache_blocks=256):
        results = model.generate_batch(PROMPTS, **options())

    assert tokens(results) == expected


def test_model_is_left_as_it_was(model: Qwen3ForCausalLM, handle: Handle) -> None:
    model.train()
    config = model.config.to_dict()
    generation_config = model.generation_config.to_dict()
    attributes = set(vars(model))

    model.generate_batch(PROMPTS, max_new_tokens=3, persistent_manager=True)

    assert model.training
    assert set(vars(model)) == attributes
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation_config
    assert handle.counters.fast == len(PROMPTS)


def test_copy_of_the_model_is_not_served(model: Qwen3ForCausalLM, handle: Handle) -> None:
    model.generate_batch(PROMPTS, max_new_tokens=2, persistent_manager=True)
    config = GenerationConfig(max_new_tokens=2, eos_token_id=EOS)

    manager = copy.deepcopy(model).init_continuous_batching(generation_config=config)

    assert type(manager) is ContinuousBatchingManager
    assert handle.counters.fast == len(PROMPTS)


def test_weights_of_the_moment_are_used(model: Qwen3ForCausalLM) -> None:
    other = new_model(vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    expected = [alone(other, row, max_new_tokens=6) for row in PROMPTS]

    with hf_generate_shim.installed(model, num_kvcache_blocks=256):
        model.generate_batch(PROMPTS, max_new_tokens=6)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        results = model.generate_batch(PROMPTS, max_new_tokens=6)

    assert tokens(results) == expected


class DieAtStep:
    """A plugin whose hook breaks the engine itself, not a request."""

    @hookimpl
    def nanoserve_request_processor(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Raises what no border catches."""

        def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] > 8:
                raise KeyboardInterrupt
            return scores

        return process


def test_dead_engine_is_raised_and_replaced(model: Qwen3ForCausalLM) -> None:
    with hf_generate_shim.installed(model, plugins=[DieAtStep()]) as handle:
        with pytest.raises(EngineDead, match="KeyboardInterrupt"):
            model.generate_batch([prompt(7), prompt(4)], max_new_tokens=8)
        results = model.generate_batch([prompt(4)], max_new_tokens=2)

    assert len(results["req_0"].generated_tokens) == 2
    assert handle.counters.fast == 3


def test_progress_bar_counts_results(
    model: Qwen3ForCausalLM, handle: Handle, capsys: pytest.CaptureFixture[str]
) -> None:
    model.generate_batch(PROMPTS, max_new_tokens=2, progress_bar=True)

    shown = capsys.readouterr().err
    assert "Solving 6 requests: 100%" in shown
    assert handle.counters.fast == 6
