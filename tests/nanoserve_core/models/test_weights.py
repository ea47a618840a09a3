"""Loading a checkpoint: every tensor used, every weight filled, else an error that names it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoserve_core.config import ModelSpec
from nanoserve_core.errors import ConfigError
from nanoserve_core.models.weights import (
    checkpoint_dtype,
    checkpoint_eos_token_ids,
    checkpoint_folder,
    load_weights,
    read_hf_config,
)
from tests.nanoserve_core.random_qwen3 import random_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from nanoserve_core.models.qwen3 import Qwen3Weights

CPU = torch.device("cpu")


def test_qkv_and_gate_up_are_fused_in_order(tmp_path: Path) -> None:
    tensors = save_checkpoint(tmp_path, attention_bias=True)

    weights = load(tmp_path)

    layer, prefix = weights.layers[1], "model.layers.1"
    qkv = [tensors[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"]
    bias = [tensors[f"{prefix}.self_attn.{name}_proj.bias"] for name in "qkv"]
    gate_up = [tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.qkv.weight, torch.cat(qkv))
    assert torch.equal(layer.qkv.bias, torch.cat(bias))
    assert torch.equal(layer.gate_up.weight, torch.cat(gate_up))
    assert layer.gate_up.bias is None
    assert torch.equal(layer.q_norm, tensors[f"{prefix}.self_attn.q_norm.weight"])
    assert torch.equal(weights.norm, tensors["model.norm.weight"])


def test_sharded_checkpoint_is_read_through_its_index(tmp_path: Path) -> None:
    model = random_model()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    weights = load(tmp_path)

    assert torch.equal(weights.layers[0].down.weight, model.model.layers[0].mlp.down_proj.weight)
    assert torch.equal(weights.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path, change=lambda tensors: tensors.pop(name))

    with pytest.raises(ConfigError, match=f"lacks 1 tensor.*{name}"):
        load(tmp_path)


def test_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.lora_A"] = torch.zeros(2)

    save_checkpoint(tmp_path, change=change)

    with pytest.raises(ConfigError, match=r"q_proj\.lora_A.*no place"):
        load(tmp_path)


def test_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = torch.zeros(65)

    save_checkpoint(tmp_path, change=change)

    with pytest.raises(ConfigError, match=r"model\.norm\.weight.*\[65\].*\[64\]"):
        load(tmp_path)


def test_stored_rotary_frequencies_are_not_needed(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    save_checkpoint(tmp_path, change=change)

    assert load(tmp_path).rotary.inv_freq[0] == 1.0


def test_tied_head_shares_the_embeddings_storage(tmp_path: Path) -> None:
    tensors = save_checkpoint(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors

    weights = load(tmp_path)

    assert weights.lm_head.weight.data_ptr() == weights.embedding.data_ptr()


def test_tied_head_in_the_file_too_shares_the_embeddings_storage(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    save_checkpoint(tmp_path, tie_word_embeddings=True, change=change)

    weights = load(tmp_path)

    assert weights.lm_head.weight.data_ptr() == weights.embedding.data_ptr()


def test_head_stands_in_for_a_missing_tied_embedding(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    tensors = save_checkpoint(tmp_path, tie_word_embeddings=True, change=change)

    weights = load(tmp_path)

    assert torch.equal(weights.embedding, tensors["lm_head.weight"])
    assert weights.lm_head.weight.data_ptr() == weights.embedding.data_ptr()


def test_other_head_of_a_tied_config_is_kept_as_transformers_keeps_it(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0

    tensors = save_checkpoint(tmp_path, tie_word_embeddings=True, change=change)

    weights = load(tmp_path)

    assert torch.equal(weights.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])


def test_weights_are_converted_to_the_dtype_asked_for(tmp_path: Path) -> None:
    model = random_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path)

    weights = load(tmp_path, dtype=torch.float32)

    expected = model.model.layers[0].self_attn.o_proj.weight
    assert weights.layers[0].o.weight.dtype == torch.float32
    assert torch.equal(weights.layers[0].o.weight, expected.float())


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")

    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*safetensors.*save_pretrained"):
        load(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    with pytest.raises(ConfigError, match="no weight files"):
        load(tmp_path)


def test_damaged_file_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)

    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)


def test_shard_that_the_index_names_must_exist(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path, max_shard_size="60KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()

    with pytest.raises(ConfigError, match=r"model-00002-.*cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([5, 6], 7, None, (5, 6, 7)),
        (7, 7, None, (7,)),
        (None, None, None, ()),
        (-1, 7, None, (7,)),
        (None, 7, {"eos_token": "<end>"}, (7, 31)),
        (None, 7, {"eos_token": {"content": "<end>"}}, (7, 31)),
        (
            None,
            7,
            {"eos_token": "<eot>", "added_tokens_decoder": {"9": {"content": "<eot>"}}},
            (7, 9),
        ),
        (None, 7, {"eos_token": "b"}, (7, 1)),
        (None, 7, {"eos_token": "nowhere"}, (7,)),
        (None, 7, {"eos_token": None}, (7,)),
    ],
)
def test_all_end_of_sequence_ids_are_found(
    tmp_path: Path,
    generation: int | list[int] | None,
    config: int | None,
    tokenizer: dict[str, object] | None,
    expected: tuple[int, ...],
) -> None:
    model = random_model()
    model.config.save_pretrained(tmp_path)
    hf_config = read_hf_config(tmp_path)
    hf_config.eos_token_id = config
    write_json(tmp_path / "generation_config.json", {"eos_token_id": generation})
    vocabulary = {"model": {"vocab": {"a": 0, "b": 1}}}
    added = {"added_tokens": [{"id": 31, "content": "<end>"}]}
    write_json(tmp_path / "tokenizer.json", {**vocabulary, **added})
    if tokenizer is not None:
        write_json(tmp_path / "tokenizer_config.json", tokenizer)

    assert checkpoint_eos_token_ids(tmp_path, hf_config) == expected


def test_dtype_is_the_configs_or_else_that_of_the_tensors(tmp_path: Path) -> None:
    random_model().to(torch.bfloat16).save_pretrained(tmp_path)
    hf_config = read_hf_config(tmp_path)
    named = checkpoint_dtype(tmp_path, hf_config)
    hf_config.dtype = None

    stored = checkpoint_dtype(tmp_path, hf_config)

    assert named == stored == torch.bfloat16


def test_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config.*config\.json"):
        read_hf_config(tmp_path)


def test_hub_id_is_found_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "0" * 40
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / revision
    save_checkpoint(snapshot)
    refs = tmp_path / "models--someone--tiny" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(revision)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    folder = checkpoint_folder("someone/tiny")

    assert folder == snapshot


@pytest.mark.parametrize("name", ["no/such-model", "not a hub id!", "./missing/folder/here"])
def test_what_is_neither_folder_nor_known_hub_id_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(ConfigError, match=f"model='{name}' is neither"):
        checkpoint_folder(name)


def save_checkpoint(
    folder: Path,
    *,
    change: Callable[[dict[str, Tensor]], object] = lambda tensors: tensors,
    **overrides: Any,  # Any: Qwen3Config's fields
) -> dict[str, Tensor]:
    """Save a random model, its file changed by ``change``; returns what the file holds."""
    random_model(**overrides).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return tensors


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> Qwen3Weights:
    """The weights of a folder as the engine loads them."""
    spec = ModelSpec.from_hf_config(read_hf_config(folder), dtype=dtype)
    return load_weights(folder, spec, device=CPU)


def write_json(path: Path, content: object) -> None:
    """A JSON file."""
    path.write_text(json.dumps(content), encoding="utf-8")
