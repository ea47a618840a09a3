"""lm-evaluation-harness's `hf` model over an installed one, on a task that needs no data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import hf_generate_shim
from nanoserve_adapters.testing import tiny_tokenizer
from tests.hf_generate_shim.wild.optional import optional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Qwen3ForCausalLM

lm_eval = optional("lm_eval")
api = optional("lm_eval.api.task")
instances = optional("lm_eval.api.instance")
huggingface = optional("lm_eval.models.huggingface")
evaluator = optional("lm_eval.evaluator")
pytestmark = pytest.mark.filterwarnings("ignore")

QUESTIONS = [f"{number} times two is{'!' * (number % 4)}" for number in range(10)]
STOPS = {"one token": ["\n", "a"], "two tokens": ["ab", "\n\n"], "none": []}

Doc = dict[str, str]


def generate_until(
    lm: Any,  # noqa: ANN401 - lm_eval has no types
    until: Sequence[str],
) -> list[str]:
    """Ragged questions of ten characters and more, four at a time."""
    options = {"until": list(until), "max_gen_toks": 12, "do_sample": False}
    requests = [
        instances.Instance(
            request_type="generate_until", doc={}, arguments=(question, dict(options)), idx=index
        )
        for index, question in enumerate(QUESTIONS)
    ]
    texts: list[str] = lm.generate_until(requests, disable_tqdm=True)
    return texts


class Doubling(api.Task):  # type: ignore[misc, name-defined]  # lm_eval has no types
    """Questions made here, and how long the answers are."""

    VERSION = 0
    OUTPUT_TYPE = "generate_until"

    def download(self, *args: object, **kwargs: object) -> None:
        """Nothing."""

    def has_training_docs(self) -> bool:
        """None."""
        return False

    def has_validation_docs(self) -> bool:
        """None."""
        return False

    def has_test_docs(self) -> bool:
        """All."""
        return True

    def test_docs(self) -> list[Doc]:
        """In the order of `QUESTIONS`."""
        return [{"question": question} for question in QUESTIONS]

    def doc_to_text(self, doc: Doc) -> str:
        """The question."""
        return doc["question"]

    def doc_to_target(self, doc: Doc) -> str:
        """Unused."""
        return " " + doc["question"]

    def fewshot_context(self, doc: Doc, *args: object, **kwargs: object) -> str:
        """Without examples."""
        del args, kwargs
        return doc["question"]

    def construct_requests(self, doc: Doc, ctx: str, **kwargs: object) -> object:
        """One greedy continuation."""
        kwargs = {name: value for name, value in kwargs.items() if name in ("metadata",)}
        arguments = (ctx, {"until": ["a", "\n"], "max_gen_toks": 8, "do_sample": False})
        return instances.Instance("generate_until", doc, arguments, idx=0, **kwargs)

    def process_results(self, doc: Doc, results: list[str]) -> dict[str, float]:
        """Its length, so that the figure depends on every character."""
        del doc
        return {"length": float(len(results[0]))}

    def aggregation(self) -> dict[str, object]:
        """The mean."""
        return {"length": lambda values: sum(values) / len(values)}

    def higher_is_better(self) -> dict[str, bool]:
        """It is not."""
        return {"length": False}


@pytest.fixture
def lm(model: Qwen3ForCausalLM) -> Any:  # noqa: ANN401 - lm_eval has no types
    """Their model over ours."""
    tokenizer = tiny_tokenizer()
    return huggingface.HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=128, device="cpu"
    )


@pytest.mark.parametrize("name", STOPS)
def test_generate_until_gives_the_same(
    lm: Any,  # noqa: ANN401 - as above
    model: Qwen3ForCausalLM,
    name: str,
) -> None:
    expected = generate_until(lm, STOPS[name])

    with hf_generate_shim.installed(model, num_kvcache_blocks=256) as handle:
        texts = generate_until(lm, STOPS[name])
        counters = handle.counters

    assert texts == expected
    assert (counters.fast + counters.lockstep, counters.fallback) == (3, 0)


def test_task_is_evaluated_to_the_same_figure(
    lm: Any,  # noqa: ANN401 - as above
    model: Qwen3ForCausalLM,
) -> None:
    def figure() -> float:
        results = evaluator.evaluate(lm, {"doubling": Doubling()}, bootstrap_iters=0)
        return float(results["results"]["doubling"]["length,none"])

    expected = figure()

    with hf_generate_shim.installed(model, num_kvcache_blocks=256) as handle:
        found = figure()
        counters = handle.counters

    assert found == expected
    assert counters.lockstep > 0
    assert counters.fallback == 0
