"""Values of every field of `GenerationConfig` that a drawn call may carry.

`test_fields` fails when transformers has a field that is not listed here.
"""

from __future__ import annotations

from typing import Any

from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

Values = dict[str, list[Any]]  # Any: whatever transformers takes for the field

FEW = list(range(40))
"""Ids of which a row of the tiny model meets one after some six tokens."""
MANY = list(range(120))

SYNTH_ID = {"ngram_len": 3, "keys": [5, 11, 29, 47], "context_history_size": 16}

# The order is that in which a shrunk example keeps them: plain ones first.
DRAWN: Values = {
    "eos_token_id": [FEW, MANY, 97, [97, 5000], -1],
    "pad_token_id": [3, 200],
    "max_length": [14, 18, 25],
    "min_length": [4, 12],
    "min_new_tokens": [0, 1, 5, 30],
    "max_time": [1000.0, 0.0],
    "stop_strings": ["a", ["a", "v", "!"], ["av", "xyz", "\u00e4"]],
    "repetition_penalty": [1.0, 1.3, 5.0, 0.7],
    "no_repeat_ngram_size": [1, 2, 3],
    "bad_words_ids": [[[97], [118]], [[97, 97], [118, 61], [56]], [[97, 1, 2, 3, 4, 5, 6]]],
    "sequence_bias": [[[[97], -9.0], [[20], 4.0]], [[[97, 97], -3.0], [[20, 5], 8.0]]],
    "suppress_tokens": [[*range(0, 256, 2)], [97, 118, -1]],
    "begin_suppress_tokens": [[97, 118], [*range(100)]],
    "forced_bos_token_id": [5],
    "forced_eos_token_id": [7, [7, 97]],
    "exponential_decay_length_penalty": [(2, 1.5), (0, 3.0)],
    "remove_invalid_values": [True],
    "renormalize_logits": [True],
    "encoder_repetition_penalty": [1.0, 1.5, 0.7],
    "encoder_no_repeat_ngram_size": [1, 2],
    "guidance_scale": [1.0, 1.5],
    "watermarking_config": [
        WatermarkingConfig(bias=4.0, seeding_scheme="selfhash"),
        {"bias": 4.0, "seeding_scheme": "lefthash"},
        SynthIDTextWatermarkingConfig(**SYNTH_ID),
    ],
    "token_healing": [True],
    "temperature": [0.3, 0.8, 1.0, 1.7],
    "top_k": [0, 1, 5, 50, 1000],
    "top_p": [1e-6, 0.3, 0.9, 1.0],
    "min_p": [0.05, 0.5, 1.0],
    "top_h": [0.2, 0.8],
    "typical_p": [0.2, 0.9],
    "epsilon_cutoff": [1e-3, 0.05],
    "eta_cutoff": [1e-3, 0.05],
    "num_return_sequences": [2, 3],
    "return_dict_in_generate": [True],
    "output_scores": [True],
    "output_logits": [True],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "use_cache": [False, True],
    "cache_implementation": ["static", "dynamic", "offloaded"],
    "prefill_chunk_size": [2],
    "disable_compile": [True],
    "num_beams": [1, 2],
    "early_stopping": [True, "never"],
    "length_penalty": [2.0],
    "prompt_lookup_num_tokens": [2],
    "is_assistant": [True],
    "num_assistant_tokens": [3],
    "bos_token_id": [11],
    "decoder_start_token_id": [12],
    "low_memory": [False],
}

NEEDS: dict[str, dict[str, Any]] = {  # Any: as above
    "exponential_decay_length_penalty": {"eos_token_id": FEW},
    "token_healing": {"bos_token_id": 11, "pad_token_id": 11},
    "output_scores": {"return_dict_in_generate": True},
    "output_logits": {"return_dict_in_generate": True},
    "is_assistant": {"return_dict_in_generate": True, "output_scores": True},
}
"""What must be said beside a field so that transformers does not raise, or that it has effect."""

SAMPLED = {
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "num_return_sequences",
}  # fmt: skip
"""Fields that say something only when tokens are sampled."""

NOT_DRAWN: dict[str, str] = {
    "max_new_tokens": "every drawn call has it, so that it ends soon",
    "do_sample": "every drawn call says it",
    "cache_config": "belongs to quantised caches, whose libraries are optional",
    "max_cache_len": "only sets the size of a static cache",
    "assistant_confidence_threshold": "read with an assistant model only",
    "assistant_early_exit": "needs a model trained for it; the mode is tested in test_modes",
    "assistant_ensemble_weight": "read with an assistant model only",
    "assistant_lookbehind": "read with an assistant model only",
    "compile_config": "read with a compiled static cache only, which needs a GPU",
    "constraints": "moved to a repository of the hub: ValueError without trust_remote_code",
    "continuous_batching_config": "read by generate_batch only",
    "diversity_penalty": "moved to a repository of the hub",
    "dola_layers": "moved to a repository of the hub",
    "force_words_ids": "moved to a repository of the hub",
    "max_matching_ngram_size": "read with prompt_lookup_num_tokens only",
    "num_assistant_tokens_schedule": "read with an assistant model only",
    "num_beam_groups": "moved to a repository of the hub",
    "penalty_alpha": "moved to a repository of the hub",
    "speculation_type": "read with an assistant model only",
    "target_lookbehind": "read with an assistant model only",
    "transformers_version": "a note in the file",
    "use_mtp": "needs weights that the Qwen3 of this door does not have",
    "_from_model_config": "a note about where the config came from",
}
