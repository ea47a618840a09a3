"""Calls in lockstep: what transformers' and users' objects are shown, and what comes back.

Oracle: transformers' own loop on the same float32 model, before anything was installed.
"""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import LogitsProcessor, StoppingCriteria

import hf_generate_shim
from hf_generate_shim import NanoserveFallbackWarning, Path
from nanoserve_adapters.testing import leak_check, settle
from nanoserve_core import hookimpl
from nanoserve_core.errors import RequestFailed
from nanoserve_core.kernels import reference_sampling
from nanoserve_core.sampler import SamplerOutput
from tests.hf_generate_shim.calls import PAD, Options, batch, new_model, new_tokens, prompt, ragged
from tests.hf_generate_shim.test_parity import Output, assert_equal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import Qwen3ForCausalLM

    from hf_generate_shim import Handle

FEW = list(range(40))
"""Ids of which a row meets one after some six tokens: rows end at different steps."""
DICT: Options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
ENDING: Options = {"eos_token_id": FEW, "max_new_tokens": 16}
SAMPLED: Options = {"do_sample": True, "top_k": 0, "temperature": 1.3}
SYNTH_ID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 11, 29, 47], context_history_size=16)


def even_tokens(row: int, ids: torch.Tensor) -> list[int]:
    """Allowed after ``ids``: depends on the prompt's number and on the newest token."""
    return [2 * i + (row + int(ids[-1])) % 2 for i in range(100)]


CASES: dict[str, Options] = {
    "n-grams": {"no_repeat_ngram_size": 2},
    "encoder penalty": {"encoder_repetition_penalty": 1.5},
    "encoder n-grams": {"encoder_no_repeat_ngram_size": 1},
    "decay": {"exponential_decay_length_penalty": (2, 1.5)},
    "finite values": {"remove_invalid_values": True},
    "bias on phrases": {"sequence_bias": [[[97, 97], -3.0], [[20, 5], 8.0]]},
    "prefix function": {"prefix_allowed_tokens_fn": even_tokens},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
    "guidance": {"guidance_scale": 1.5},
    "guidance away from a prompt": {
        "guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[5, 6, 7]] * 4)
    },
    "plain sampling": {**SAMPLED},
    "filtered sampling": {"do_sample": True, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    "several sequences": {**SAMPLED, "num_return_sequences": 3},
    "typical": {**SAMPLED, "typical_p": 0.9},
    "epsilon": {**SAMPLED, "epsilon_cutoff": 3e-3},
    "eta": {**SAMPLED, "eta_cutoff": 3e-3},
    "top_h": {**SAMPLED, "top_h": 0.8},
    "sampled watermark": {**SAMPLED, "watermarking_config": {"bias": 4.0}},
    "sampled SynthID": {**SAMPLED, "watermarking_config": SYNTH_ID},
    "prefix function, several sequences": {
        **SAMPLED, "prefix_allowed_tokens_fn": even_tokens, "num_return_sequences": 2
    },
    "dict of n-grams": {**DICT, "no_repeat_ngram_size": 2},
    "dict of plain sampling": {**DICT, **SAMPLED},
    "dict of filtered sampling": {**DICT, "do_sample": True, "top_k": 5, "typical_p": 0.9},
    "holes": {"no_repeat_ngram_size": 2, "attention_mask": torch.tensor(
        [[0] * 6 + [1] * 3, [0] * 4 + [1] * 5, [0, 0, 1, 1, 0, 1, 1, 1, 1], [1] * 9])},
    "int32 ids": {**batch(prompt(6)), "input_ids": torch.tensor([prompt(6)], dtype=torch.int32),
                  "no_repeat_ngram_size": 2},
}  # fmt: skip


def run(model: Qwen3ForCausalLM, **options: Any) -> Output:  # Any: see Options
    """Four ragged rows that end at different steps, from the same random state."""
    torch.manual_seed(11)
    return model.generate(**{**ragged(), **ENDING, **options})


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    """One model for all cases."""
    return new_model()


@pytest.fixture(scope="module")
def expected(model: Qwen3ForCausalLM) -> dict[str, Any]:
    """Every case by transformers' own loop."""
    return {name: run(model, **options) for name, options in CASES.items()}


@pytest.fixture(scope="module")
def handle(model: Qwen3ForCausalLM, expected: dict[str, Any]) -> Iterator[Handle]:
    """The model installed with transformers' own random numbers."""
    assert expected
    with hf_generate_shim.installed(model, rng="hf", num_kvcache_blocks=256) as handle:
        assert handle.thread.is_alive
        yield handle
        settle(handle.thread)
        handle.thread.call(leak_check)


@pytest.mark.parametrize("name", CASES)
def test_call_equals_transformers(
    model: Qwen3ForCausalLM, expected: dict[str, Any], handle: Handle, name: str
) -> None:
    before = handle.counters

    output = run(model, **CASES[name])

    assert_equal(output, expected[name], FEW)
    counters = handle.counters
    assert (counters.lockstep, counters.fallback) == (before.lockstep + 1, before.fallback)
    assert sum(counters.lockstep_reasons.values()) > sum(before.lockstep_reasons.values())


def test_random_state_afterwards_is_that_of_transformers(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    run(new_model(), **SAMPLED)
    theirs = torch.random.get_rng_state()

    run(model, **SAMPLED)

    assert torch.equal(torch.random.get_rng_state(), theirs)
    assert handle.counters.fallback == 0


class Automaton(LogitsProcessor):
    """Walks a state per row, and breaks when rows are missing, reordered or skipped."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.states: torch.Tensor | None = None
        self.prompt: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Ids below the state are forbidden; the state follows the row's own tokens."""
        if self.states is None or self.prompt is None:
            self.prompt, self.states = input_ids.clone(), torch.zeros(len(input_ids)).long()
        else:
            assert tuple(input_ids.shape) == (self.shapes[-1][0], self.shapes[-1][1] + 1)
            assert torch.equal(input_ids[:, : self.prompt.shape[1]], self.prompt)
        assert (input_ids.dtype, scores.dtype) == (torch.int64, torch.float32)
        assert not torch.is_grad_enabled()
        self.shapes.append(tuple(input_ids.shape))
        self.states = (self.states * 7 + input_ids[:, -1]) % 50
        below = torch.arange(scores.shape[1])[None, :] < self.states[:, None]
        return scores.masked_fill(below, -torch.inf)


def test_stateful_processor_sees_constant_rows_that_grow_by_one_column(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    theirs, ours = Automaton(), Automaton()
    expected = run(new_model(), logits_processor=[theirs])

    output = run(model, logits_processor=[ours])

    assert output.tolist() == expected.tolist()
    assert ours.shapes == theirs.shapes
    assert {shape[0] for shape in ours.shapes} == {4}
    assert (output == PAD).any()
    assert handle.counters.fallback == 0


class AtColumn(StoppingCriteria):
    """Ends rows from a column on, in one of the forms that transformers takes."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.seen: list[tuple[int, ...]] = []
        self.scores: list[int | None] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: object) -> Any:  # noqa: ANN401 - any form
        """True for all rows at column 14; in the form of rows for even ones before."""
        assert not kwargs
        self.seen.append(tuple(input_ids.shape))
        self.scores.append(None if scores is None else len(scores))
        is_over = input_ids.shape[1] >= 14
        if self.form == "bool":
            return is_over
        if self.form == "scalar":
            return torch.tensor(is_over)
        is_late = input_ids.shape[1] >= 11
        rows = torch.tensor([is_over or (is_late and row % 2 == 0) for row in range(4)])
        return rows if self.form == "rows" else rows[:, None]


@pytest.mark.parametrize(
    ("form", "eos"),
    [
        *product(("bool", "scalar", "rows"), (None, FEW)),
        ("column", None),  # with an EOS transformers' own loop raises
    ],
)
def test_criteria_may_answer_in_any_form(
    model: Qwen3ForCausalLM, handle: Handle, form: str, eos: list[int] | None
) -> None:
    theirs, ours = AtColumn(form), AtColumn(form)
    options: Options = {"eos_token_id": eos, "pad_token_id": 200}
    expected = run(new_model(), **options, stopping_criteria=[theirs])

    output = run(model, **options, stopping_criteria=[ours])

    assert output.tolist() == expected.tolist()
    assert (ours.seen, ours.scores) == (theirs.seen, theirs.scores)
    assert handle.counters.fallback == 0


def test_rows_stopped_by_a_criterion_alone_go_on_until_all_have_stopped(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    output = run(model, eos_token_id=None, stopping_criteria=[AtColumn("rows")])

    without = run(model, eos_token_id=None, max_new_tokens=5)
    assert new_tokens(output, ragged()) == new_tokens(without, ragged())
    assert handle.counters.fallback == 0


def test_criteria_see_the_scores_that_are_asked_for(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    criterion = AtColumn("rows")

    run(model, eos_token_id=None, **DICT, stopping_criteria=[criterion])

    assert criterion.scores == [1, 2, 3, 4, 5]
    assert handle.counters.fallback == 0


class EndsAll(LogitsProcessor):
    """Edits in place, as many do; transformers' raw logits then show the edit."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Forbid the id that came last."""
        return scores.scatter_(1, input_ids[:, -1:], -1e9)


def test_edit_in_place_shows_in_the_raw_logits_as_in_transformers(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    options: Options = {**DICT, "eos_token_id": None, "logits_processor": [EndsAll()]}
    expected = run(new_model(), **options)

    output = run(model, **options)

    assert all(a is b for a, b in zip(output.scores, output.logits, strict=True))
    for ours, theirs in zip(output.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    assert handle.counters.fallback == 0


class RaiseAtStep:
    """Raises in its third call."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.num_calls = 0

    def count(self) -> bool:
        """False, unless it raises."""
        self.num_calls += 1
        if self.num_calls == 3:
            raise self.error
        return False


class ProcessorThatRaises(RaiseAtStep, LogitsProcessor):
    """A logits processor."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Changes nothing."""
        del input_ids
        self.count()
        return scores


class CriterionThatRaises(RaiseAtStep, StoppingCriteria):
    """A stopping criterion."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> bool:
        """Ends nothing."""
        del input_ids, scores, kwargs
        return self.count()


RAISING: dict[str, type[RaiseAtStep]] = {
    "logits_processor": ProcessorThatRaises,
    "stopping_criteria": CriterionThatRaises,
}


@pytest.mark.parametrize("where", RAISING)
@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
def test_error_is_raised_as_it_is_and_hurts_no_other_call(
    model: Qwen3ForCausalLM, handle: Handle, where: str, kind: type[BaseException]
) -> None:
    other: Options = {**batch(prompt(9)), "max_new_tokens": 30}
    expected = model.generate(**other).tolist()
    error = kind("as told")
    error.__cause__ = KeyError("why")

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(model.generate, **other)
        with pytest.raises(kind) as caught:
            run(model, eos_token_id=None, **{where: [RAISING[where](error)]})
        output = running.result(timeout=60)
    settle(handle.thread)

    assert caught.value is error
    assert isinstance(error.__cause__, KeyError)
    assert output.tolist() == expected
    stats = handle.stats()
    assert stats.free_blocks == stats.num_blocks


class NestedGenerate(LogitsProcessor):
    """Asks the same model for advice in the middle of a step."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.model = model
        self.advice: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Once."""
        if not self.advice:
            self.advice = self.model.generate(input_ids, max_new_tokens=2).tolist()
        return scores


def test_generate_inside_a_processor_runs_in_transformers_own_loop(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    nested = NestedGenerate(model)
    options: Options = {**batch(prompt(6)), "eos_token_id": None, "max_new_tokens": 3}
    before = handle.counters

    with pytest.warns(NanoserveFallbackWarning, match="a step of its own waits"):
        output = model.generate(**options, logits_processor=[nested])

    assert nested.advice[0] == output[0, :8].tolist()
    assert handle.counters.fallback == before.fallback + 1


CONTEXT: contextvars.ContextVar[str] = contextvars.ContextVar("CONTEXT", default="none")


class ReadsContext(LogitsProcessor):
    """Notes the context variable and the thread."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.threads: set[threading.Thread] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Changes nothing."""
        del input_ids
        self.seen.add(CONTEXT.get())
        self.threads.add(threading.current_thread())
        return scores


def test_processors_run_in_the_context_of_their_caller(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    processor = ReadsContext()
    token = CONTEXT.set("the caller's")

    run(model, logits_processor=[processor])
    CONTEXT.reset(token)

    assert processor.seen == {"the caller's"}
    assert {thread.name for thread in processor.threads} == {"nanoserve-engine"}
    assert handle.thread.is_alive


def test_calls_of_all_kinds_at_once_equal_transformers(
    model: Qwen3ForCausalLM, expected: dict[str, Any], handle: Handle
) -> None:
    greedy = [name for name, options in CASES.items() if "do_sample" not in options]
    plain: Options = {**ragged(6), "max_new_tokens": 20}
    alone = model.generate(**plain).tolist()

    with ThreadPoolExecutor(8) as executor:
        others = [executor.submit(model.generate, **plain) for _ in range(4)]
        calls = {name: executor.submit(run, model, **CASES[name]) for name in greedy}
        outputs = {name: call.result(timeout=120) for name, call in calls.items()}
        plains = [call.result(timeout=120).tolist() for call in others]

    for name, output in outputs.items():
        assert_equal(output, expected[name], FEW)
    assert plains == [alone] * 4
    assert handle.stats().peak_batch > 6


def test_small_pool_preempts_the_group_and_changes_no_token(
    model: Qwen3ForCausalLM, expected: dict[str, Any]
) -> None:
    fresh = new_model()
    long: Options = {**batch(prompt(20)), "max_new_tokens": 60}
    alone = model.generate(**long).tolist()

    with (
        hf_generate_shim.installed(
            fresh, block_size=4, num_kvcache_blocks=28, watermark=0.0
        ) as handle,
        ThreadPoolExecutor(2) as executor,
    ):
        first = executor.submit(fresh.generate, **long)
        output = executor.submit(run, fresh, **CASES["n-grams"])
        outputs = output.result(timeout=60), first.result(timeout=60)
        settle(handle.thread)
        handle.thread.call(leak_check)

    assert [o.tolist() for o in outputs] == [expected["n-grams"].tolist(), alone]
    assert handle.counters.lockstep == 1


def test_batch_larger_than_a_step_falls_back(model: Qwen3ForCausalLM) -> None:
    fresh = new_model()
    options: Options = {**ragged(4), "no_repeat_ngram_size": 2, "max_new_tokens": 4}

    with hf_generate_shim.installed(fresh, num_kvcache_blocks=64, max_num_seqs=3) as handle:
        explained = hf_generate_shim.explain(fresh, **options)
        with pytest.warns(NanoserveFallbackWarning, match="at most 3 rows in one step"):
            output = fresh.generate(**options)
        free = fresh.generate(**{**options, "no_repeat_ngram_size": None})

    assert explained.path is Path.FALLBACK
    assert output.tolist() == model.generate(**options).tolist()
    assert free.shape == output.shape
    assert (handle.counters.fast, handle.counters.fallback) == (1, 1)


def test_batch_larger_than_the_pool_falls_back() -> None:
    fresh = new_model()

    with hf_generate_shim.installed(fresh, num_kvcache_blocks=3, block_size=16) as handle:
        with pytest.warns(NanoserveFallbackWarning, match="all rows of that length at once"):
            fresh.generate(**ragged(4), no_repeat_ngram_size=2, max_new_tokens=4)
        fresh.generate(**ragged(3), no_repeat_ngram_size=2, max_new_tokens=4)

    assert (handle.counters.lockstep, handle.counters.fallback) == (1, 1)


@pytest.fixture
def by_row() -> Iterator[Callable[..., torch.Tensor]]:
    """Sampled calls with a processor of the caller's, each row from a stream of its own."""
    fresh = new_model()

    def call(seed: int | None, options: Options, **more: Any) -> torch.Tensor:  # Any: see Options
        if seed is not None:
            torch.manual_seed(seed)
        given = {**options, "max_new_tokens": 8, "do_sample": True, "top_k": 0, **more}
        output: torch.Tensor = fresh.generate(**given, logits_processor=[Automaton()])
        return output

    with hf_generate_shim.installed(fresh, num_kvcache_blocks=64) as handle:
        yield call
        assert handle.counters.fast == handle.counters.fallback == 0


def test_rows_draw_from_streams_of_their_own(by_row: Callable[..., torch.Tensor]) -> None:
    first, again, other = (by_row(seed, ragged()) for seed in (3, 3, 4))
    fewer = by_row(3, {name: rows[:2] for name, rows in ragged().items()})

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first[:2], fewer)


def test_equal_prompts_draw_different_tokens(by_row: Callable[..., torch.Tensor]) -> None:
    output = by_row(3, batch(prompt(5)), num_return_sequences=4)

    assert len({tuple(row) for row in output.tolist()}) == 4


def test_rows_draw_by_their_probabilities(by_row: Callable[..., torch.Tensor]) -> None:
    class TwoToOne(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            del input_ids
            scores = torch.full_like(scores, -torch.inf)
            scores[:, 7], scores[:, 9] = torch.tensor(2.0).log(), 0.0
            return scores

    fresh = new_model()
    torch.manual_seed(0)
    with hf_generate_shim.installed(fresh, num_kvcache_blocks=64):
        output = fresh.generate(
            **batch(prompt(3)), num_return_sequences=64, do_sample=True, max_new_tokens=10,
            logits_processor=[TwoToOne()],
        )  # fmt: skip

    drawn = output[:, 3:]
    assert set(drawn.unique().tolist()) == {7, 9}
    assert abs((drawn == 7).float().mean().item() - 2 / 3) < 0.06  # 3 standard deviations of 640
    assert by_row(0, batch(prompt(3))).shape == (1, 11)


def test_row_without_a_finite_score_raises(by_row: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="row 0: no token can be drawn"):
        by_row(0, ragged(), suppress_tokens=list(range(263)))


class OwnSampler:
    """Takes the largest logit and knows nothing of groups."""

    @hookimpl
    def nanoserve_sampler(self) -> OwnSampler:
        """Itself."""
        return self

    def sample(self, logits: torch.Tensor, *_: object) -> SamplerOutput:
        """As `Sampler.sample`."""
        return SamplerOutput(token_ids=reference_sampling.argmax(logits))


def test_sampler_of_a_plugin_that_asks_no_group_is_noticed() -> None:
    fresh = new_model()

    with (
        hf_generate_shim.installed(fresh, plugins=(OwnSampler(),), num_kvcache_blocks=64),
        pytest.raises(RequestFailed, match="nanoserve_sampler"),
    ):
        fresh.generate(**ragged(), no_repeat_ngram_size=2, max_new_tokens=4)


def test_own_options_of_a_call_hold_in_lockstep(by_row: Callable[..., torch.Tensor]) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=8, do_sample=True, top_k=0, pad_token_id=PAD, eos_token_id=260,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
        nanoserve_seed=[1, 2, 1, 2], nanoserve_max_new_tokens=[8, 3, 8, 5],
        nanoserve_logprobs="processed_logprobs",
    )  # fmt: skip
    equal = batch(*[prompt(5)] * 4)

    output = by_row(None, {**equal, "generation_config": config})

    rows = new_tokens(output.sequences, equal)
    assert rows[0] != rows[1]
    assert rows[1][3:] == [PAD] * 5
    assert rows[3][5:] == [PAD] * 3
    assert rows[1][:3] == rows[3][:3]
    for step, scores in enumerate(output.scores):
        chosen = scores.log_softmax(-1)[torch.arange(4), output.sequences[:, 5 + step]]
        alive = torch.tensor([8, 3, 8, 5]) > step
        torch.testing.assert_close(output.logprobs[alive, step], chosen[alive])
        assert (output.logprobs[~alive, step] == 0).all()
