"""A checkpoint's files -> `Qwen3Weights`: every tensor of the files used, every weight filled, or
an error that names it.

q/k/v and gate/up become one tensor each, so that a step makes one product of them. Adopting a live
module instead is `adopt`'s business.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanoserve_core.errors import ConfigError
from nanoserve_core.layers.linear import Linear
from nanoserve_core.layers.norm_rope import rotary_frequencies
from nanoserve_core.models.qwen3 import LayerWeights, Qwen3Weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PretrainedConfig

    from nanoserve_core.config import ModelSpec

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]


def checkpoint_folder(model: str | Path) -> Path:
    """The local folder of ``model``: a folder as it is, a hub id through huggingface_hub's cache
    (and download).

    Raises `ConfigError` when it is neither.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), allow_patterns=_HUB_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model={str(model)!r} is neither a folder nor a hub id that can be fetched: {error}. "
            "Check the path, or the id and the connection."
        ) from error


def read_hf_config(folder: Path) -> PretrainedConfig:
    """The transformers config of a checkpoint folder; raises `ConfigError` when there is none to
    read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} has no config that transformers can read: {error}. "
            "Expected the folder of a Qwen3 checkpoint with a config.json."
        ) from error


def checkpoint_dtype(folder: Path, hf_config: PretrainedConfig) -> torch.dtype:
    """The dtype that the config names, else that of the first tensor in the files."""
    if isinstance(hf_config.dtype, torch.dtype):
        return hf_config.dtype
    _, tensor = next(_tensors(folder))
    return tensor.dtype


def checkpoint_eos_token_ids(folder: Path, hf_config: PretrainedConfig) -> tuple[int, ...]:
    """All ids that end a sequence: those of generation_config.json, config.json and the tokenizer's
    files.

    Qwen3 needs all of them: its chat models end a turn and a document by different ids.
    """
    generation = _read_json(folder / "generation_config.json").get("eos_token_id")
    return merged_eos_token_ids(generation, hf_config.eos_token_id, _tokenizer_eos(folder))


def merged_eos_token_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    """Ids from several places, each an int, a list or None, without repetitions, in order; -1 means
    none.
    """
    ids: list[int] = []
    for source in sources:
        ids += [source] if isinstance(source, int) else source or []
    return tuple(token_id for token_id in dict.fromkeys(ids) if token_id >= 0)


def load_weights(folder: Path, spec: ModelSpec, *, device: torch.device) -> Qwen3Weights:
    """Read a folder's safetensors files into fused weights of ``spec.dtype`` on ``device``.

    Raises `ConfigError` naming the tensor when one is missing, left over or of another shape, and
    when the folder has no safetensors files.
    """
    weights, targets = _allocate(spec, device)
    unfilled = set(targets)
    spare_head = None
    for name, tensor in _tensors(folder):
        if name.endswith("rotary_emb.inv_freq"):
            continue  # older files store what the config says
        is_spare_head = name == LM_HEAD and spec.tie_word_embeddings
        target = targets.get(EMBEDDING if is_spare_head else name)
        _require_place(name, tensor, target, folder)
        if is_spare_head:
            spare_head = tensor
        elif target is not None:
            target.copy_(tensor)
            unfilled.discard(name)
    if spare_head is not None:
        weights = _with_spare_head(weights, spare_head, is_only_one=EMBEDDING in unfilled)
        unfilled.discard(EMBEDDING)
    _require_filled(unfilled, folder)
    return weights


def _with_spare_head(weights: Qwen3Weights, head: Tensor, *, is_only_one: bool) -> Qwen3Weights:
    """A tied checkpoint that also stores its head. As in transformers: the head stands in for a
    missing embedding, is dropped when it equals the embedding, and is kept apart when it does not.
    """
    embedding = weights.embedding
    if is_only_one:
        embedding.copy_(head)
        return weights
    own = head.to(dtype=embedding.dtype, device=embedding.device)
    return weights if torch.equal(own, embedding) else replace(weights, lm_head=Linear(own))


def _allocate(spec: ModelSpec, device: torch.device) -> tuple[Qwen3Weights, dict[str, Tensor]]:
    """Uninitialised weights, and name -> view: where each tensor of a checkpoint belongs."""
    pool = _Pool(spec.dtype, device)
    embedding = pool.linear({"model.embed_tokens": spec.vocab_size}, spec.hidden_size)
    head = embedding
    if not spec.tie_word_embeddings:
        head = pool.linear({"lm_head": spec.vocab_size}, spec.hidden_size)
    rotary = rotary_frequencies(spec)
    weights = Qwen3Weights(
        embedding=embedding.weight,
        layers=tuple(_allocate_layer(spec, pool, i) for i in range(spec.num_hidden_layers)),
        norm=pool.norm("model.norm", spec.hidden_size),
        lm_head=head,
        rotary=replace(rotary, inv_freq=rotary.inv_freq.to(device)),
    )
    return weights, pool.targets


def _allocate_layer(spec: ModelSpec, pool: _Pool, index: int) -> LayerWeights:
    attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_size, kv_size = spec.num_attention_heads * head_dim, spec.num_key_value_heads * head_dim
    qkv = {
        f"{attention}.q_proj": q_size,
        f"{attention}.k_proj": kv_size,
        f"{attention}.v_proj": kv_size,
    }
    return LayerWeights(
        input_norm=pool.norm(f"model.layers.{index}.input_layernorm", hidden),
        qkv=pool.linear(qkv, hidden, has_bias=spec.attention_bias),
        q_norm=pool.norm(f"{attention}.q_norm", head_dim),
        k_norm=pool.norm(f"{attention}.k_norm", head_dim),
        o=pool.linear({f"{attention}.o_proj": hidden}, q_size, has_bias=spec.attention_bias),
        post_norm=pool.norm(f"model.layers.{index}.post_attention_layernorm", hidden),
        gate_up=pool.linear({f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, hidden),
        down=pool.linear({f"{mlp}.down_proj": hidden}, inner),
    )


class _Pool:
    """Makes empty weights and remembers where each tensor of a checkpoint belongs."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.targets: dict[str, Tensor] = {}
        self._dtype = dtype
        self._device = device

    def norm(self, name: str, size: int) -> Tensor:
        """[size], filled by ``name.weight``."""
        weight = self._empty(size)
        self.targets[f"{name}.weight"] = weight
        return weight

    def linear(self, parts: dict[str, int], in_features: int, *, has_bias: bool = False) -> Linear:
        """One `Linear` of all parts (module name -> out_features), one below the other."""
        sizes = list(parts.values())
        weight = self._empty(sum(sizes), in_features)
        bias = self._empty(sum(sizes)) if has_bias else None
        for kind, whole in (("weight", weight), ("bias", bias)):
            if whole is not None:
                names = [f"{name}.{kind}" for name in parts]
                self.targets.update(zip(names, whole.split_with_sizes(sizes), strict=True))
        return Linear(weight, bias)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def _require_place(name: str, tensor: Tensor, target: Tensor | None, folder: Path) -> None:
    if target is None:
        raise ConfigError(
            f"{folder} holds the tensor {name}, which a model of its config.json has no place for. "
            "Expected files and config of one Qwen3 checkpoint; check that they belong together."
        )
    if target.shape != tensor.shape:
        raise ConfigError(
            f"{name} in {folder} has shape {list(tensor.shape)}: its config.json asks for "
            f"{list(target.shape)}. Check that files and config belong together."
        )


def _require_filled(unfilled: set[str], folder: Path) -> None:
    if unfilled:
        missing = sorted(unfilled)
        raise ConfigError(
            f"{folder} lacks {len(missing)} tensor(s) that its config.json asks for, first "
            f"{', '.join(missing[:3])}. Expected a whole Qwen3ForCausalLM checkpoint: fetch it."
        )


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of all that the folder's safetensors files hold, one by one, on the CPU."""
    from safetensors import SafetensorError, safe_open

    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118  no mapping: it cannot be iterated
                    yield name, tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file} cannot be read as safetensors: {error}. Fetch the checkpoint again."
            ) from error


def _weight_files(folder: Path) -> list[Path]:
    index = _read_json(folder / INDEX_FILE)
    if index:
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only pickled weights ({pickled[0]}, ...)" if pickled else "no weight files"
        raise ConfigError(
            f"{folder} has {found}: expected *.safetensors, which loads without running code. "
            "Load it with transformers and save it again with save_pretrained."
        )
    return files


def _tokenizer_eos(folder: Path) -> int | None:
    """The id of the tokenizer's end-of-sequence token, from its files alone."""
    config = _read_json(folder / "tokenizer_config.json")
    token = config.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return None
    for token_id, entry in config.get("added_tokens_decoder", {}).items():
        if entry.get("content") == token:
            return int(token_id)
    tokenizer = _read_json(folder / "tokenizer.json")
    for entry in tokenizer.get("added_tokens", []):
        if entry.get("content") == token:
            return int(entry["id"])
    vocabulary = tokenizer.get("model", {}).get("vocab") or _read_json(folder / "vocab.json")
    return vocabulary.get(token) if isinstance(vocabulary, dict) else None


def _read_json(path: Path) -> dict[str, Any]:  # Any: JSON
    """The object in a JSON file; empty when there is no such file."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
