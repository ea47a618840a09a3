"""Where a model comes from: dtype, device and architecture are chosen, or refused with a reason."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from nanoserve_core.config import EngineConfig
from nanoserve_core.errors import ConfigError, UnsupportedOption
from nanoserve_core.models.qwen3 import Qwen3Model
from nanoserve_core.models.source import open_source
from tests.nanoserve_core.random_qwen3 import random_model

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import Qwen3ForCausalLM


def test_checkpoint_is_float32_on_a_cpu_whatever_it_stores(tmp_path: Path) -> None:
    random_model().to(torch.bfloat16).save_pretrained(tmp_path)

    source = open_source(tmp_path, EngineConfig(device="cpu"), {})

    assert source.spec.dtype == source.weights.norm.dtype == torch.float32
    assert source.adoption is None
    assert source.builder is Qwen3Model


def test_dtype_that_is_asked_for_is_used(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)

    source = open_source(str(tmp_path), EngineConfig(device="cpu", dtype="bfloat16"), {})

    assert source.spec.dtype == source.weights.norm.dtype == torch.bfloat16


def test_all_end_ids_of_the_files_are_in_the_spec(tmp_path: Path) -> None:
    model = random_model()
    model.generation_config.eos_token_id = [5, 6]
    model.save_pretrained(tmp_path)

    source = open_source(tmp_path, EngineConfig(device="cpu"), {})

    assert source.spec.eos_token_ids == (5, 6, 7)


def test_live_module_keeps_its_dtype_and_device(adopted_bf16: Qwen3ForCausalLM) -> None:
    source = open_source(adopted_bf16, EngineConfig(), {})

    assert source.spec.dtype == torch.bfloat16
    assert source.device == torch.device("cpu")
    assert source.adoption is not None
    source.adoption.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [({"dtype": "float32"}, "dtype='float32'.*'bfloat16'"), ({"device": "cuda"}, "device='cuda'")],
)
def test_live_module_is_not_converted(
    adopted_bf16: Qwen3ForCausalLM, options: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"{named}.*shared, not copied"):
        open_source(adopted_bf16, EngineConfig.from_options(**options), {})


def test_dtype_and_device_that_fit_the_live_module_may_be_said(
    adopted_bf16: Qwen3ForCausalLM,
) -> None:
    config = EngineConfig(dtype="bfloat16", device="cpu")

    source = open_source(adopted_bf16, config, {})

    assert source.adoption is not None
    source.adoption.close()


def test_module_that_cannot_be_served_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match="no Qwen3ForCausalLM"):
        open_source(random_model().model, EngineConfig(), {})


@pytest.mark.parametrize("name", ["cuda:99", "nonsense", "cuda:x"])
def test_device_that_cannot_be_used_is_named(tmp_path: Path, name: str) -> None:
    random_model().save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=f"device='{name}' cannot be used"):
        open_source(tmp_path, EngineConfig(device=name), {})


def test_architecture_without_a_builder_is_named(tmp_path: Path) -> None:
    save_as(tmp_path, "Qwen3ForSequenceClassification")

    with pytest.raises(ConfigError, match=r"'Qwen3ForSequenceClassification'.*Qwen3ForCausalLM"):
        open_source(tmp_path, EngineConfig(device="cpu"), {})


def test_plugin_teaches_another_architecture(tmp_path: Path) -> None:
    class MyModel(Qwen3Model):
        """Qwen3 under another name."""

    save_as(tmp_path, "MyForCausalLM")

    source = open_source(tmp_path, EngineConfig(device="cpu"), {"MyForCausalLM": MyModel})

    assert source.builder is MyModel
    assert source.spec.architecture == "MyForCausalLM"


@pytest.fixture
def adopted_bf16() -> Qwen3ForCausalLM:
    """A bfloat16 module."""
    return random_model().to(torch.bfloat16)


def save_as(folder: Path, architecture: str) -> None:
    """A checkpoint whose config names another class."""
    random_model().save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "architectures": [architecture]}), encoding="utf-8")
