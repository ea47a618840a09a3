"""Models and tokenizers small enough for every test, made in memory: no file, no network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

END_OF_TEXT, IM_START, IM_END = 256, 257, 258
"""Ids of the special tokens of `tiny_tokenizer`; ids below are bytes."""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB_SIZE = 256 + len(_SPECIAL) + len(_MARKS)

_CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false -%}
<think>

</think>

{% endif -%}
{%- endif -%}
"""


def tiny_model(*, seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:  # Any: Qwen3Config's fields
    """A random float32 Qwen3 on the CPU, in eval mode: 2 layers, hidden size 64, 4 query and 2
    key/value heads, the vocabulary of `tiny_tokenizer`.

    The same `seed` gives the same weights; the global random state is left alone. `overrides` are
    fields of ``Qwen3Config``.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    options: dict[str, Any] = {  # Any: as above
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        # Ten times the usual: greedy text varies and its margins are far above float32 noise.
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
    }
    config = Qwen3Config(**{**options, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)
    return model.to(torch.float32).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte ``b`` is token ``b``; then ChatML's special tokens, then the think and tool-call marks,
    which are not special. Its template is ChatML and knows ``enable_thinking``, but no tools.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in _MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=_CHATML,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def _byte_vocabulary() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2, src/encoder.py) -> the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(byte) for byte in printable}
    stand_ins |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return {stand_ins[byte]: byte for byte in range(256)}
