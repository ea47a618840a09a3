"""The plugin serves the models of other people's tests. The tests here are twins of transformers'
own tests of generation, in their form: a class of `unittest`, tiny models made in each test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_generate_shim.seam import QWEN3
from tests.hf_generate_shim.calls import new_model, ragged

if TYPE_CHECKING:
    import pytest

pytest_plugins = ["pytester"]

TWINS = """
import unittest

import torch
from transformers import GenerationConfig
from tests.hf_generate_shim.calls import CACHE, new_model, ragged

PLAIN = {"max_new_tokens": 5, "do_sample": False}


class GenerationTwins(unittest.TestCase):
    def setUp(self):
        self.model = new_model()

    def test_greedy_generate(self):
        inputs = ragged()
        output = self.model.generate(**inputs, **PLAIN)
        self.assertEqual(output.shape[1], inputs["input_ids"].shape[1] + 5)

    def test_sample_generate(self):
        output = self.model.generate(**ragged(), max_new_tokens=5, do_sample=True, top_k=5)
        self.assertEqual(len(output), 4)

    def test_generate_without_input_ids(self):
        output = self.model.generate(bos_token_id=3, **PLAIN)
        self.assertEqual(output.shape, (1, 6))

    def test_beam_search_generate(self):
        output = self.model.generate(**ragged(), num_beams=2, **PLAIN)
        self.assertIsNotNone(output)

    def test_generate_from_inputs_embeds(self):
        ids = ragged(1)["input_ids"]
        embeds = self.model.get_input_embeddings()(ids)
        from_embeds = self.model.generate(inputs_embeds=embeds, **PLAIN)
        from_ids = self.model.generate(ids, **PLAIN)
        self.assertEqual(from_embeds.tolist(), from_ids[:, ids.shape[1]:].tolist())

    def test_generate_continue_from_past_key_values(self):
        ids = ragged(1)["input_ids"]
        whole = self.model.generate(ids, max_new_tokens=6, do_sample=False)
        half = self.model.generate(
            ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True
        )
        rest = self.model.generate(
            half.sequences, max_new_tokens=3, do_sample=False, **{CACHE: half[CACHE]}
        )
        self.assertEqual(rest.tolist(), whole.tolist())

    def test_forward_only(self):
        self.assertEqual(self.model(torch.tensor([[1, 2]])).logits.shape[1], 2)
"""


def test_calls_are_counted_by_test_and_in_all(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_twins=TWINS)

    result = run(pytester)

    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines_random(
        [
            "*::test_greedy_generate: 1 fast, 0 lockstep, 0 fallback",
            "*::test_beam_search_generate: 0 fast, 0 lockstep, 1 fallback (num_beams: *)",
            "*::test_generate_from_inputs_embeds: 1 fast, 0 lockstep, 1 fallback (inputs_embeds*",
            "*::test_generate_continue_from_past*: 2 fast, 0 lockstep, 1 fallback (past_key*",
            "6 tests generate: 6 fast, 0 lockstep, 3 fallback",
        ]
    )
    result.stdout.no_fnmatch_line("*test_forward_only:*")


def test_listed_test_that_fell_back_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_twins=TWINS)
    listed = pytester.makefile(".txt", listed="# must be served\ntest_beam_*  # never is\n")

    result = run(pytester, f"--nanoserve-must-be-fast={listed}")

    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(["*test_beam_search_generate must be served by nanoserve*"])


def test_switched_off_it_leaves_everything_to_transformers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_twins=TWINS)

    result = run(pytester, "--nanoserve=off")

    result.assert_outcomes(passed=7)
    result.stdout.no_fnmatch_line("*tests generate:*")


def test_nothing_is_served_after_the_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from tests.hf_generate_shim.calls import new_model, ragged

        MODEL = new_model()

        def test_first():
            MODEL.generate(**ragged(), max_new_tokens=2)

        def test_second():
            MODEL.generate(**ragged(), max_new_tokens=2)
        """
    )

    result = run(pytester)

    result.stdout.fnmatch_lines(["2 tests generate: 2 fast, 0 lockstep, 0 fallback"])
    model = new_model()
    model.generate(**ragged(), max_new_tokens=2)
    assert QWEN3.handle_of(model) is None


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """pytest in this process, with the plugin and without the outer run's settings."""
    plugins = ("-p", "hf_generate_shim.pytest_plugin", "-p", "no:cacheprovider")
    return pytester.runpytest_inprocess(*plugins, "-p", "no:asyncio", *arguments)
