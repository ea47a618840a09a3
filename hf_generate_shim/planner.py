"""`Planner`: how each prompt of a batch is generated, with few preparations by transformers.

The oracle of a batch is one plain `generate` per prompt. transformers prepares such a call in about
1.5 ms, which is too much for each of many prompts; where the outcome depends on the number of
tokens at most, one preparation serves all prompts of a length, or all prompts.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers.generation import logits_process, stopping_criteria

from hf_generate_shim.call_options import given_options
from hf_generate_shim.route import Path, Route
from hf_generate_shim.task import Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from hf_generate_shim.call import HFObject, SampleCall
    from hf_generate_shim.handle import Handle
    from hf_generate_shim.preparation import Preparation
    from nanoserve_adapters.unsupported import Unsupported

# What these make of a call depends on its config and the prompt's length, never on its tokens.
_READ_NO_TOKENS = {
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.EosTokenCriteria,
}
_LONG_ENOUGH = 16
"""A length at which nothing tells short prompts from long ones: forced first tokens, bad words."""

_NUM_TRIES = 4
"""Lengths at which to look for a recipe of all longer ones, at a preparation each."""

# They may keep a state from step to step, so two calls never use them at the same time.
_OWN_OBJECTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One prompt's way: a ``task`` for the engine, or a call of its own when its turn comes."""

    route: Route
    takes_turns: bool = False
    """Run as a blocking call of `generate`, one at a time."""
    call: SampleCall | None = None
    """The call that transformers prepared for this very prompt, if it did."""

    @property
    def can_stream(self) -> bool:
        """Whether transformers takes a streamer there: only its loop `_sample` does."""
        return self.call is not None

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is drawn."""
        if self.call is not None:
            return not self.call.generation_config.do_sample
        return self.task is not None and self.task.sampling.is_greedy

    @property
    def task(self) -> Task | None:
        """What the engine runs among all others; None when the prompt takes its turn."""
        return None if self.takes_turns else self.route.task


class Planner:
    """Plans for prompts that share their arguments. Any thread; holds the model weakly.

    ``arguments`` are those of `generate` by name, without the prompt.
    """

    def __init__(self, handle: Handle, model: nn.Module, arguments: Mapping[str, HFObject]) -> None:
        self._handle = handle
        self._reference = weakref.ref(model)
        self._arguments = dict(arguments)
        self._recipes: dict[tuple[int, bool], Task | None] = {}
        self._general_from: float = math.inf
        """Prompts of this length and longer ones have one recipe."""
        self._num_tries = _NUM_TRIES
        self._reads_tokens = False
        """Each prompt needs a preparation of its own."""

    @property
    def _model(self) -> HFObject:
        model = self._reference()
        assert model is not None, "whoever plans holds the model"
        return model

    def fails_for_any_prompt(self) -> bool:
        """Whether transformers refuses these arguments, and not one prompt that has just failed."""
        try:
            self._prepare((0,))
        except ValueError:
            return True
        return False

    @property
    def num_rows(self) -> int:
        """Results of one prompt."""
        return int(self.resolved("num_return_sequences") or 1)

    def resolved(self, name: str) -> HFObject:
        """A field of the config as transformers merges it: argument, given config, model's."""
        configs = (self._arguments.get("generation_config"), self._model.generation_config)
        given = (self._arguments.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in given if value is not None), None)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a row."""
        ids = self.resolved("eos_token_id")
        ids = ids.flatten().tolist() if isinstance(ids, torch.Tensor) else ids
        return frozenset(ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,))

    @property
    def own_options(self) -> dict[str, object]:
        """nanoserve's own options in the configs, which transformers' own loop cannot serve."""
        configs = (self._model.generation_config, self._arguments.get("generation_config"))
        return {name: value for each in configs for name, value in given_options(each).items()}

    def call_arguments(self, prompt: tuple[int, ...]) -> dict[str, HFObject]:
        """The arguments of the plain call for one prompt."""
        device = next(self._model.parameters()).device
        ids = torch.tensor([prompt], dtype=torch.long, device=device)
        # Given, because otherwise transformers would take pad ids in the prompt for padding.
        return {**self._arguments, "input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def learn_from(self, other: Planner, max_new_tokens: HFObject) -> None:
        """Take over what ``other`` knows, whose arguments differ in ``max_new_tokens`` only: the
        usual case of a service, where it would be found out again for each request.
        """
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            return
        for key, recipe in other._recipes.items():
            if recipe is None or key[0] != other._general_from:
                continue
            sampling = recipe.sampling
            if sampling.min_tokens == 0 and sampling.max_tokens == other.resolved("max_new_tokens"):
                limited = sampling.replace(max_tokens=max_new_tokens)
                self._recipes[key] = replace(recipe, sampling=limited)
                self._general_from = other._general_from

    def plan(
        self, prompt: tuple[int, ...], *, model_reasons: Sequence[Unsupported] | None = None
    ) -> Plan:
        """How to generate after ``prompt``, known ids and at least one.

        ``model_reasons``: what the engine has just said of the model, if it was asked. Raises what
        transformers' preparation raises: `ValueError` for a prompt that leaves no room below
        ``max_length``.
        """
        recipe = self._recipe(len(prompt))
        if recipe is None:
            return self._planned(self._prepare(prompt))
        reasons = self._handle.engine.reasons() if model_reasons is None else model_reasons
        if reasons:
            return Plan(route=Route.fallback(reasons), takes_turns=True)
        task = replace(recipe, rows=(prompt,) * len(recipe.rows))
        return Plan(route=Route(path=Path.FAST, task=task))

    def _planned(self, preparation: Preparation) -> Plan:
        route = preparation.route
        has_own = any(self._arguments.get(name) is not None for name in _OWN_OBJECTS)
        # Who draws from torch's generator does it in the order of the prompts.
        takes_turns = has_own or route.task is None or route.task.draws_one_block
        return Plan(route=route, takes_turns=takes_turns, call=preparation.call)

    def _prepare(self, prompt: tuple[int, ...]) -> Preparation:
        return self._handle.prepare(self._model, self.call_arguments(prompt))

    def _recipe(self, length: int) -> Task | None:
        """The task of every prompt of ``length`` tokens but for its rows, if there is one.

        Lengths count in differences to a maximum or a minimum, and a minimum that has passed counts
        no more. So what is equal for a length and the next one is equal for all longer ones.
        """
        if self._reads_tokens:
            return None
        if length >= self._general_from:
            return self._found(int(self._general_from))
        if self._num_tries > 0:
            self._num_tries -= 1
            # A shorter one than the prompt may give a warning that is not the caller's.
            low = length if self.resolved("min_length") else min(length, _LONG_ENOUGH)
            here = self._found(low)
            if here is not None and here == self._found(low + 1):
                self._general_from = low
                return here
        return self._found(length)

    def _found(self, length: int) -> Task | None:
        autocast = torch.is_autocast_enabled(next(self._model.parameters()).device.type)
        key = (length, autocast)
        if key not in self._recipes:
            self._recipes[key] = self._find(length)
        return self._recipes[key]

    def _find(self, length: int) -> Task | None:
        try:
            preparation = self._prepare((0,) * length)
        except ValueError:  # no room below max_length: the prompt itself will meet it
            return None
        task = preparation.route.task
        if task is None or self._planned(preparation).takes_turns or not _is_recipe(preparation):
            self._reads_tokens = True
            return None
        return replace(task, rows=((),) * len(task.rows))


def _is_recipe(preparation: Preparation) -> bool:
    """Whether another prompt of the same length would give the same task."""
    call, task = preparation.call, preparation.route.task
    if call is None or task is None or preparation.route.path is not Path.FAST:
        return False
    objects = [*call.logits_processor, *call.stopping_criteria]
    if any(type(found) not in _READ_NO_TOKENS for found in objects):
        return False
    plain = Task(rows=task.rows, sampling=task.sampling, pad_token_id=task.pad_token_id)
    return task == plain
