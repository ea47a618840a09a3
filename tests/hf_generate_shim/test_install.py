"""Installing, uninstalling, and what they leave alone."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import GenerationMixin, Qwen3ForCausalLM

import hf_generate_shim
from hf_generate_shim import NanoserveFallbackWarning
from nanoserve_core.errors import ConfigError, EngineClosed, UnsupportedOption
from tests.hf_generate_shim.calls import new_model, new_tokens, prompt, ragged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hf_generate_shim import Handle

CALL = {**ragged(), "max_new_tokens": 4}


def is_patched() -> bool:
    """Whether the class holds methods that it inherits from transformers otherwise."""
    return "_sample" in vars(Qwen3ForCausalLM) or "generate" in vars(Qwen3ForCausalLM)


def sample_of(owner: type) -> Callable[..., object]:
    """The decoding loop as transformers finds it."""
    method: Callable[..., object] = inspect.getattr_static(owner, "_sample")
    return method


def test_class_is_patched_from_the_first_install_to_the_last_uninstall() -> None:
    first, second = new_model(), new_model()

    hf_generate_shim.install(first)
    hf_generate_shim.install(second)
    hf_generate_shim.uninstall(first)
    between = is_patched()
    hf_generate_shim.uninstall(second)

    assert between
    assert not is_patched()
    assert Qwen3ForCausalLM.generate is GenerationMixin.generate
    assert sample_of(Qwen3ForCausalLM) is sample_of(GenerationMixin)


def test_patched_methods_keep_their_signatures(model: Qwen3ForCausalLM) -> None:
    expected = inspect.signature(model.generate), inspect.signature(sample_of(type(model)))

    with hf_generate_shim.installed(model):
        found = inspect.signature(model.generate), inspect.signature(sample_of(type(model)))

    assert found == expected


def test_a_patch_on_top_of_ours_is_left_in_place(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_generate_shim.install(model)
    ours = Qwen3ForCausalLM.generate

    def theirs(self: Qwen3ForCausalLM, **options: Any) -> torch.Tensor:
        return ours(self, **options)

    monkeypatch.setattr(Qwen3ForCausalLM, "generate", theirs)
    hf_generate_shim.uninstall(model)
    is_left = Qwen3ForCausalLM.generate is theirs
    output = model.generate(**CALL)
    monkeypatch.undo()
    del Qwen3ForCausalLM.generate  # monkeypatch put ours back

    assert is_left
    assert output.tolist() == model.generate(**CALL).tolist()


def test_install_takes_nothing_before_the_first_call(model: Qwen3ForCausalLM) -> None:
    with hf_generate_shim.installed(model) as handle:
        stats = handle.stats()

        assert (stats.num_blocks, stats.steps) == (0, 0)
        assert handle.counters == hf_generate_shim.Counters()


def test_installing_again_gives_the_same_handle(model: Qwen3ForCausalLM, handle: Handle) -> None:
    again = hf_generate_shim.install(model, num_kvcache_blocks=256)

    assert again is handle


def test_installing_again_with_other_arguments_is_refused(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    assert not handle.settings.strict

    with pytest.raises(ConfigError, match="uninstall"):
        hf_generate_shim.install(model, strict=True, num_kvcache_blocks=256)


def test_inner_block_does_not_end_the_outer_install(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    with hf_generate_shim.installed(model, num_kvcache_blocks=256):
        pass
    model.generate(**CALL)

    assert handle.counters.fast == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rng": "numpy"}, ConfigError, "rng='numpy'"),
        ({"max_num_sequences": 3}, ConfigError, "max_num_seqs"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs=0"),
    ],
)
def test_wrong_options_are_refused_at_install(
    model: Qwen3ForCausalLM, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        hf_generate_shim.install(model, **options)

    assert not is_patched()


def test_other_models_are_refused() -> None:
    with pytest.raises(UnsupportedOption, match="Linear"):
        hf_generate_shim.install(torch.nn.Linear(2, 2))


def test_uninstall_is_idempotent_and_ignores_other_models(model: Qwen3ForCausalLM) -> None:
    hf_generate_shim.uninstall(model)
    handle = hf_generate_shim.install(model)
    hf_generate_shim.uninstall(model)
    hf_generate_shim.uninstall(model)
    handle.close()

    assert not is_patched()


def test_closed_handle_says_so(model: Qwen3ForCausalLM) -> None:
    handle = hf_generate_shim.install(model)
    handle.close()

    with pytest.raises(EngineClosed, match="Install it again"):
        _ = handle.thread


def test_model_can_be_installed_again(model: Qwen3ForCausalLM) -> None:
    expected = new_tokens(model.generate(**CALL), CALL)

    for _ in range(2):
        with hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle:
            assert new_tokens(model.generate(**CALL), CALL) == expected
            assert handle.counters.fast == 1


def test_deep_copy_is_clean_and_not_served(model: Qwen3ForCausalLM, handle: Handle) -> None:
    model.generate(**CALL)

    twin = copy.deepcopy(model)
    output = twin.generate(**CALL)

    assert handle.counters.fast == 1
    assert output.tolist() == model.generate(**CALL).tolist()
    assert vars(twin).keys() == vars(model).keys()


def test_pickle_and_checkpoint_are_unaffected(
    model: Qwen3ForCausalLM, handle: Handle, tmp_path: Path
) -> None:
    output = model.generate(**CALL)

    unpickled = pickle.loads(pickle.dumps(model))
    model.save_pretrained(tmp_path)
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path).eval()

    assert unpickled.generate(**CALL).tolist() == output.tolist()
    assert loaded.generate(**CALL).tolist() == output.tolist()
    assert handle.counters.fast == 1


def test_model_is_left_as_it_was(model: Qwen3ForCausalLM) -> None:
    model.train()
    before = facts(model)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle:
        model.generate(**CALL)
        during = facts(model)

    assert handle.counters.fast == 1
    assert before == during == facts(model)


def facts(model: Qwen3ForCausalLM) -> dict[str, object]:
    """Everything about a model that a user could have set."""
    return {
        "attributes": sorted(vars(model)),
        "training": [module.training for module in model.modules()],
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "parameters": [id(parameter) for parameter in model.parameters()],
        "hooks": [len(vars(module)["_forward_hooks"]) for module in model.modules()],
        "class": type(model),
    }


def test_frozen_model_can_share_fused_weights(model: Qwen3ForCausalLM) -> None:
    model.requires_grad_(False)
    expected = model.generate(**CALL).tolist()
    before = facts(model)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64):
        assert model.generate(**CALL).tolist() == expected

    assert facts(model) == before
    assert model.generate(**CALL).tolist() == expected


@pytest.mark.parametrize("is_started", [False, True])
def test_dropped_model_is_collected_and_the_class_restored(is_started: bool) -> None:
    model = new_model()
    hf_generate_shim.install(model, num_kvcache_blocks=64)
    if is_started:
        model.generate(**CALL)
    reference = weakref.ref(model)

    del model
    gc.collect()

    assert reference() is None
    assert not is_patched()


def test_bfloat16_model_is_served(model: Qwen3ForCausalLM) -> None:
    model.to(torch.bfloat16)
    call = {"input_ids": torch.tensor([prompt(5)]), "max_new_tokens": 6}
    expected = model.generate(**call)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle:
        output = model.generate(
            **call, return_dict_in_generate=True, output_scores=True, output_logits=True
        )

    assert output.sequences.tolist() == expected.tolist()
    assert {step.dtype for step in (*output.scores, *output.logits)} == {torch.float32}
    assert handle.counters.fast == 1


def test_ineligible_model_falls_back_until_it_is_plain_again(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    expected = model.generate(**CALL).tolist()
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)

    with pytest.warns(NanoserveFallbackWarning, match="forward hooks"):
        hooked = model.generate(**CALL).tolist()
    hook.remove()
    plain = model.generate(**CALL).tolist()

    assert expected == hooked == plain
    assert (handle.counters.fast, handle.counters.fallback) == (2, 1)


def test_active_dropout_falls_back() -> None:
    model = new_model(attention_dropout=0.5)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle:
        model.generate(**CALL)
        model.train()
        with pytest.warns(NanoserveFallbackWarning, match="dropout"):
            model.generate(**CALL)

    assert (handle.counters.fast, handle.counters.fallback) == (1, 1)


def test_replaced_preparation_falls_back(model: Qwen3ForCausalLM, handle: Handle) -> None:
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation

    with pytest.warns(NanoserveFallbackWarning, match="prepare_inputs_for_generation"):
        model.generate(**CALL)
    del model.prepare_inputs_for_generation

    assert handle.counters.fallback == 1
