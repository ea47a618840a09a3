"""`DrawnCall`: one call of `generate`, drawn by hypothesis, that can be made again and again."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from transformers import GenerationConfig

from nanoserve_adapters.testing import tiny_tokenizer
from tests.conformance.fields import DRAWN, NEEDS
from tests.conformance.own_objects import (
    AfterEven,
    AtColumn,
    NoThrees,
    Recorder,
    RowAutomaton,
    allow_by_row,
)
from tests.hf_generate_shim.calls import PAD, Options, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENIZER = tiny_tokenizer()
TOKENIZER.bos_token = "<|im_start|>"  # token healing compares with it

# Objects that a call may be given: name of the argument -> makers of a fresh one.
OBJECTS: dict[str, dict[str, Callable[[], Any]]] = {  # Any: transformers' protocols
    "logits_processor": {
        "no threes": lambda: [NoThrees()],
        "automaton": lambda: [RowAutomaton()],
        "both": lambda: [RowAutomaton(), NoThrees()],
    },
    "stopping_criteria": {
        "column, bool": lambda: [AtColumn(12, "bool")],
        "column, rows": lambda: [AtColumn(12, "rows")],
        "column, rows and 1": lambda: [AtColumn(11, "matrix")],
        "even": lambda: [AfterEven(9)],
        "both": lambda: [AtColumn(13, "rows"), AfterEven(11)],
    },
    "prefix_allowed_tokens_fn": {"by row": lambda: allow_by_row},
    "streamer": {"recorder": Recorder},
}
NEEDS_TOKENIZER = {"stop_strings", "token_healing"}
DICT = ("return_dict_in_generate", "output_scores", "output_logits")
SINGLE_ROW = {"prompt_lookup_num_tokens"}


@dataclass(frozen=True, kw_only=True)
class DrawnCall:
    """The parts of a call. `arguments` makes them into fresh objects."""

    inputs: Options
    config: Options
    """Fields of `GenerationConfig`."""
    objects: dict[str, str] = field(default_factory=dict)
    """Argument -> name in `OBJECTS`."""
    as_config: bool = False
    """The fields travel in a `GenerationConfig`, not as arguments."""
    seed: int = 0

    @property
    def options(self) -> set[str]:
        """Names of everything that the call says, beside its prompts."""
        return {*self.config, *self.objects}

    def arguments(self) -> Options:
        """For one call of `generate`; raises what `GenerationConfig` raises."""
        config = copy.deepcopy(self.config)
        objects = {name: OBJECTS[name][kind]() for name, kind in self.objects.items()}
        given = {"generation_config": GenerationConfig(**config)} if self.as_config else config
        tokenizer = {"tokenizer": TOKENIZER} if NEEDS_TOKENIZER & set(config) else {}
        return {**copy.deepcopy(self.inputs), **given, **objects, **tokenizer}


@st.composite
def prompts(draw: st.DrawFn) -> Options:
    """Rows of random bytes: ragged and left-padded, equal, repeated, with holes, in any dtype."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    if draw(st.booleans()):
        lengths = [lengths[0]] * len(lengths)
    rows = [prompt(length, draw(st.integers(0, 2))) for length in lengths]
    width = max(lengths)
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    if draw(st.integers(0, 4)) == 0:
        column = draw(st.integers(0, width - 1))
        mask[:, column] = torch.where(mask.sum(dim=1) > 1, 0, mask[:, column])
        mask[:, -1] = 1  # a mask that ends in zeros gets wrong text from transformers itself
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    mask_dtype = draw(st.sampled_from([torch.int64, torch.bool, torch.float32]))
    if bool(mask.all()) and draw(st.booleans()):
        return {"input_ids": ids.to(dtype)}
    return {"input_ids": ids.to(dtype), "attention_mask": mask.to(mask_dtype)}


@st.composite
def drawn_calls(draw: st.DrawFn, *, may_sample: bool = True) -> DrawnCall:
    """Any call: up to five fields and up to two objects. Without ``may_sample`` its tokens depend
    on no random numbers.
    """
    names = draw(st.lists(st.sampled_from(list(DRAWN)), max_size=5, unique=True))
    if draw(st.integers(0, 2)) == 0:
        names += [name for name in DICT if name not in names]
    config = {name: draw(st.sampled_from(DRAWN[name])) for name in names}
    if draw(st.integers(0, 9)):  # seldom without: then transformers raises, and so must we
        for name in names:
            config.update({**NEEDS.get(name, {}), **config})
    config["max_new_tokens"] = draw(st.integers(1, 9))
    config["do_sample"] = draw(st.booleans())
    if config["do_sample"] and not may_sample:
        config["top_k"] = 1
    wants_objects = draw(st.integers(0, 2)) == 0
    kinds = [st.sampled_from([*OBJECTS]) for _ in range(wants_objects)]
    chosen = {name for kind in kinds for name in draw(st.lists(kind, max_size=2, unique=True))}
    objects = {name: draw(st.sampled_from([*OBJECTS[name]])) for name in sorted(chosen)}
    return DrawnCall(
        inputs=draw(inputs_for(config)),
        config=config,
        objects=objects,
        as_config=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def inputs_for(draw: st.DrawFn, config: Options) -> Options:
    """Prompts that go with the config; now and then none, with a prompt to steer away from."""
    inputs: Options = draw(prompts())
    if SINGLE_ROW & set(config):
        inputs = {name: tensor[:1] for name, tensor in inputs.items()}
    if "bos_token_id" in config and draw(st.booleans()):
        return {}
    if "guidance_scale" in config and draw(st.booleans()):
        inputs["negative_prompt_ids"] = inputs["input_ids"].flip(0).clone()
    return inputs
