"""Combinations of arguments, each one call on a ragged batch of four rows."""

from __future__ import annotations

import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

from tests.conformance.drawn_calls import DrawnCall
from tests.conformance.fields import FEW, MANY, SYNTH_ID
from tests.hf_generate_shim.calls import Options, batch, prompt, ragged

DICT: Options = {
    "return_dict_in_generate": True, "output_scores": True, "output_logits": True
}  # fmt: skip
SAMPLE: Options = {"do_sample": True, "max_new_tokens": 12}
HOLED: Options = ragged()
HOLED["attention_mask"][1:, -3] = 0
SINGLE: Options = batch(prompt(6))
NEGATIVE: Options = {"negative_prompt_ids": ragged(seed=3)["input_ids"]}


def _call(
    inputs: Options | None = None, objects: Options | None = None, **config: object
) -> DrawnCall:
    config = {"do_sample": False, "max_new_tokens": 8, **config}
    return DrawnCall(inputs=inputs or ragged(), config=config, objects=objects or {}, seed=7)


SERVED: dict[str, DrawnCall] = {
    "greedy": _call(),
    "holes in the mask": _call(HOLED),
    "eos list": _call(eos_token_id=FEW, pad_token_id=3, max_new_tokens=20),
    "sampling": _call(**SAMPLE),
    "sampling, one row": _call(SINGLE, **SAMPLE),
    "temperature": _call(**SAMPLE, temperature=0.7),
    "top_k": _call(**SAMPLE, top_k=5),
    "top_p": _call(**SAMPLE, top_p=0.8, top_k=0),
    "min_p": _call(**SAMPLE, min_p=0.1, top_k=0),
    "top_h": _call(**SAMPLE, top_h=0.4),
    "typical_p": _call(**SAMPLE, typical_p=0.7),
    "epsilon_cutoff": _call(**SAMPLE, epsilon_cutoff=0.02),
    "eta_cutoff": _call(**SAMPLE, eta_cutoff=0.02),
    "all filters": _call(**SAMPLE, temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    "several sequences": _call(**SAMPLE, num_return_sequences=3),
    "several sequences, eos": _call(**SAMPLE, num_return_sequences=2, eos_token_id=MANY),
    "repetition_penalty": _call(repetition_penalty=1.7),
    "repetition_penalty, sampled": _call(**SAMPLE, repetition_penalty=1.7),
    "encoder_repetition_penalty": _call(encoder_repetition_penalty=1.7),
    "no_repeat_ngram_size": _call(no_repeat_ngram_size=2, max_new_tokens=20),
    "encoder_no_repeat_ngram_size": _call(encoder_no_repeat_ngram_size=1),
    "bad_words_ids": _call(bad_words_ids=[[97], [118, 61], [56, 1, 2, 3]]),
    "sequence_bias": _call(sequence_bias=[[[97], -9.0], [[20, 5], 8.0]]),
    "min_length": _call(eos_token_id=MANY, min_length=14),
    "min_new_tokens": _call(eos_token_id=MANY, min_new_tokens=5),
    "forced_bos_token_id": _call(batch([5], [9]), forced_bos_token_id=65),
    "forced_eos_token_id": _call(forced_eos_token_id=[7, 97]),
    "remove_invalid_values": _call(remove_invalid_values=True),
    "exponential decay": _call(
        eos_token_id=FEW, exponential_decay_length_penalty=(2, 1.5), max_new_tokens=20
    ),
    "suppress_tokens": _call(suppress_tokens=[*range(0, 256, 2)]),
    "begin_suppress_tokens": _call(begin_suppress_tokens=[97, 118]),
    "renormalize_logits": _call(**SAMPLE, **DICT, renormalize_logits=True),
    "guidance": _call({**ragged(), **NEGATIVE}, guidance_scale=1.5),
    "green list watermark": _call(**SAMPLE, watermarking_config=WatermarkingConfig(bias=4.0)),
    "SynthID watermark": _call(
        **SAMPLE, watermarking_config=SynthIDTextWatermarkingConfig(**SYNTH_ID)
    ),
    "stop_strings": _call(stop_strings=["a", "v", "!"], eos_token_id=97, max_new_tokens=20),
    "scores and logits": _call(**DICT, **SAMPLE, top_k=20, eos_token_id=FEW),
    "own processors": _call(objects={"logits_processor": "both"}),
    "own criteria": _call(objects={"stopping_criteria": "both"}, max_new_tokens=20),
    "prefix function": _call(objects={"prefix_allowed_tokens_fn": "by row"}, **SAMPLE),
    "streamer": _call(objects={"streamer": "recorder"}, eos_token_id=FEW, max_new_tokens=20),
}  # fmt: skip

LEFT_TO_TRANSFORMERS: dict[str, DrawnCall] = {
    "beams": _call(num_beams=2),
    "sampled beams": _call(num_beams=2, **SAMPLE),
    "prompt lookup": _call(SINGLE, prompt_lookup_num_tokens=2),
    "hidden states": _call(**DICT, output_hidden_states=True),
    "static cache in a dict": _call(**DICT, cache_implementation="static"),
    "embeddings": _call({"inputs_embeds": torch.linspace(-1, 1, 5 * 64).view(1, 5, 64)}),
}  # fmt: skip
