"""What the user wants (`EngineConfig`) and what a checkpoint is (`ModelSpec`): both frozen.

Facts measured at start (block count, chosen dtype, backend) are returned by the function that
measures them and never written back here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve_core.errors import ConfigError
from nanoserve_core.options import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from transformers import PretrainedConfig

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_HASHES = ("xxh64", "xxh128", "sha256")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine options, in vLLM's names where vLLM has them. Wrong values raise `ConfigError` naming
    field and value.
    """

    max_num_seqs: int = 512
    """Most sequences running (holding K/V) at a time."""
    max_num_batched_tokens: int = 16384
    """Most query tokens in one step; longer prompts are computed in chunks."""
    long_prefill_token_threshold: int = 1024
    """Most tokens of one prompt in a step in which others generate: they wait for no longer chunk.
    0: no limit but ``max_num_batched_tokens``, which is the only one while nobody generates.
    """
    max_model_len: int = 4096
    """Longest prompt plus output in tokens; the model's own limit wins when it is smaller."""
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    """Absolute size of the K/V pool; overrides ``gpu_memory_utilization``."""
    num_kvcache_blocks: int = -1
    """Absolute number of K/V blocks; -1 computes it. Overrides both memory options."""
    block_size: int | None = None
    """Tokens per K/V block; None lets the attention backend choose (16 on CPU)."""
    dtype: str = "auto"
    """auto (the checkpoint's, float32 on CPU unless a live model is adopted), float32, bfloat16 or
    float16.
    """
    device: str = "auto"
    """auto (CUDA when there is one; an adopted model's own device), or a torch device string."""
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "xxh64"
    watermark: float = 0.01
    """Share of the blocks that admission leaves free for running sequences to grow into."""
    tensor_parallel_size: int = 1
    seed: int = 0
    """Start of the generator that gives seeds to requests without one."""
    attention_backend: str | None = None
    """None: our own on CUDA, plain torch on a CPU, or what a plugin brings. "torch" runs on both;
    "flash_attn", on CUDA and where that package is installed, has blocks of 256 tokens.
    """
    batch_invariant: bool = False
    """On CUDA: attention to a row's K/V is cut and summed the same way whoever shares the step, a
    few per cent slower. Then steps of the same padded number of rows give a decoding row the same
    logits, bit for bit; between other numbers of rows matrix products may still round otherwise.
    """
    switch_interval: float | None = None
    """Seconds for ``sys.setswitchinterval`` while the engine has work; None leaves the
    interpreter's setting alone.
    """
    allowed_plugins: tuple[str, ...] | None = None
    """Names of entry-point plugins that may load; None allows all installed ones, () none."""
    plugins: tuple[object, ...] = ()
    """Plugin objects of this engine, besides the installed ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugins", tuple(self.plugins))
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            _require(
                name,
                getattr(self, name),
                _is_int(getattr(self, name)) and getattr(self, name) >= 1,
                "an integer >= 1",
            )
        is_flag = isinstance(self.batch_invariant, bool)
        _require("batch_invariant", self.batch_invariant, is_flag, "True or False")
        threshold = self.long_prefill_token_threshold
        is_threshold = _is_int(threshold) and threshold >= 0
        _require("long_prefill_token_threshold", threshold, is_threshold, "an integer >= 0")
        size = self.block_size
        is_size = size is None or (_is_int(size) and size >= 1)
        _require("block_size", size, is_size, "None or an integer >= 1")
        count = self.num_kvcache_blocks
        _require(
            "num_kvcache_blocks",
            count,
            _is_int(count) and (count == -1 or count >= 1),
            "-1 (compute it) or >= 1",
        )
        nbytes = self.kv_cache_memory_bytes
        _require(
            "kv_cache_memory_bytes",
            nbytes,
            nbytes is None or (_is_int(nbytes) and nbytes > 0),
            "None or bytes > 0",
        )
        _require(
            "gpu_memory_utilization",
            self.gpu_memory_utilization,
            0 < self.gpu_memory_utilization <= 1,
            "in (0, 1]",
        )
        _require("watermark", self.watermark, 0 <= self.watermark < 1, "in [0, 1)")
        tp = self.tensor_parallel_size
        _require("tensor_parallel_size", tp, _is_int(tp) and 1 <= tp <= 8, "an integer in 1..8")
        _require("dtype", self.dtype, self.dtype in _DTYPES, f"one of {', '.join(_DTYPES)}")
        algo = self.prefix_caching_hash_algo
        _require("prefix_caching_hash_algo", algo, algo in _HASHES, f"one of {', '.join(_HASHES)}")
        interval = self.switch_interval
        _require(
            "switch_interval", interval, interval is None or interval > 0, "None or seconds > 0"
        )

    @classmethod
    def from_options(
        cls, **options: Any
    ) -> EngineConfig:  # Any: each option is checked by the constructor
        """Like the constructor, but an unknown name raises `ConfigError` with the nearest one."""
        refuse_unknown(options, (f.name for f in fields(cls)), kind="an engine")
        return cls(**options)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape facts of a dense Qwen3 checkpoint; `from_hf_config` reads them from its config."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    rope_parameters: Mapping[str, Any] = field(
        default_factory=dict
    )  # Any: transformers' own mapping
    """As transformers 5 stores them: rope_type, rope_theta and the fields of that type."""
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...] = ()
    """All ids that end a sequence, from generation_config, config and tokenizer."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, in the model's dtype."""
        return (
            2
            * self.num_hidden_layers
            * self.num_key_value_heads
            * self.head_dim
            * self.dtype.itemsize
        )

    def block_nbytes(self, block_size: int) -> int:
        """Bytes of one K/V block over all layers: 2 * layers * block_size * kv_heads * head_dim *
        itemsize.
        """
        return block_size * self.kv_bytes_per_token

    @classmethod
    def from_hf_config(
        cls,
        hf_config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        eos_token_ids: Sequence[int] = (),
    ) -> ModelSpec:
        """Read the shape facts of a transformers config; raises `ConfigError` for what we would
        compute wrongly.
        """
        _require_computable(hf_config)
        rope_parameters = _checked_rope_parameters(hf_config)
        architectures = hf_config.architectures or ["Qwen3ForCausalLM"]
        return cls(
            architecture=architectures[0],
            vocab_size=hf_config.vocab_size,
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size,
            num_hidden_layers=hf_config.num_hidden_layers,
            num_attention_heads=hf_config.num_attention_heads,
            num_key_value_heads=hf_config.num_key_value_heads,
            head_dim=hf_config.head_dim,
            rms_norm_eps=hf_config.rms_norm_eps,
            max_position_embeddings=hf_config.max_position_embeddings,
            tie_word_embeddings=hf_config.tie_word_embeddings,
            attention_bias=hf_config.attention_bias,
            rope_parameters=rope_parameters,
            dtype=dtype,
            eos_token_ids=tuple(eos_token_ids),
        )


def _require_computable(hf_config: PretrainedConfig) -> None:
    """Refuse what the shape facts cannot express: the result would be wrong, not only slow."""
    kind = hf_config.model_type
    _require("model_type", kind, kind == "qwen3", "'qwen3' (dense)")
    _require("hidden_act", hf_config.hidden_act, hf_config.hidden_act == "silu", "'silu'")
    layer_types = sorted(set(hf_config.layer_types))
    full_only = layer_types == ["full_attention"]
    _require("layer_types", layer_types, full_only, "full attention in every layer")
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    expected = f"a multiple of num_key_value_heads={kv_heads}"
    _require("num_attention_heads", heads, heads % kv_heads == 0, expected)
    quantization = getattr(hf_config, "quantization_config", None)
    _require("quantization_config", quantization, quantization is None, "unquantised weights")


def _checked_rope_parameters(hf_config: PretrainedConfig) -> dict[str, Any]:  # Any: see ModelSpec
    """The config's rope parameters, refused when type or values do not fit."""
    from nanoserve_core.layers.norm_rope import REQUIRED_ROPE_PARAMETERS

    parameters = dict(hf_config.rope_parameters)
    kind = parameters.get("rope_type")
    known = ", ".join(REQUIRED_ROPE_PARAMETERS)
    _require("rope_type", kind, kind in REQUIRED_ROPE_PARAMETERS, f"one of {known}")
    missing = [name for name in REQUIRED_ROPE_PARAMETERS[str(kind)] if parameters.get(name) is None]
    _require("rope_parameters", parameters, not missing, f"{', '.join(missing)} for {kind!r}")
    share = parameters.get("partial_rotary_factor") or 1.0
    _require("partial_rotary_factor", share, share == 1.0, "1 (whole heads are rotated)")
    return parameters


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value!r} is not valid: expected {expected}.")


_RECOMMENDED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""transformers' name of what a checkpoint may recommend -> ours."""


def recommended_sampling(source: object) -> dict[str, Any]:  # Any: numbers
    """Fields of `SamplingParams` for the checkpoint at `source` (folder or hub id) or for the live
    module `source`; without those that its generation_config leaves out.
    """
    config = _generation_config(source)
    found = {ours: getattr(config, theirs, None) for theirs, ours in _RECOMMENDED.items()}
    return {name: value for name, value in found.items() if value is not None}


def _generation_config(
    source: object,
) -> Any:  # noqa: ANN401 - transformers is only imported when a checkpoint is read
    if not isinstance(source, str | Path):
        return getattr(source, "generation_config", None)
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(str(source))
    except OSError:  # the checkpoint has none
        return None
