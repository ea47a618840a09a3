"""Builds the tokenizer: byte-level BPE, with text cut and special tokens named as in Qwen3."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from examples.tiny_qwen3.corpus import TEMPLATE_FILE, ChatText, ExampleSource, random_thinking
from examples.tiny_qwen3.words import listed

if TYPE_CHECKING:
    from pathlib import Path

    from examples.tiny_qwen3.prose import Prose

VOCAB_SIZE = 4096
MAX_LENGTH = 2048

# Qwen3's added tokens in Qwen3's order. `skip_special_tokens` drops the control tokens only.
CONTROL_TOKENS = listed("""
    <|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
    <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|>
    <|image_pad|> <|video_pad|>
""")
VISIBLE_TOKENS = listed("""
    <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|>
    <|file_sep|> <tool_response> </tool_response> <think> </think>
""")

# How Qwen2 and Qwen3 cut text before merging (huggingface/transformers,
# models/qwen2/tokenization_qwen2.py): digits stand alone, a word takes one leading space or sign
# with it, line breaks stay together.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NUM_DIALOGUES = 12_000


def train_tokenizer(prose: Prose, *, seed: int) -> Tokenizer:
    """A tokenizer of `VOCAB_SIZE` entries for the prose and the dialogues."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(_CUT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    added = len(CONTROL_TOKENS) + len(VISIBLE_TOKENS)
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*prose.chapters, *_dialogues(prose, seed)], trainer)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in VISIBLE_TOKENS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus has merges enough"
    return tokenizer


def _dialogues(prose: Prose, seed: int) -> list[str]:
    """Training dialogues without their special tokens, which no merge may reach into."""
    rng, source, text = Random(seed), ExampleSource(prose, held_out=False), ChatText()
    dialogues = []
    for number in range(_NUM_DIALOGUES):
        example = source.draw_tool(rng) if number % 4 == 0 else source.draw_chat(rng)
        thinking = random_thinking(rng, example)
        dialogue = text.prompt(example, thinking) + text.completion(example, thinking)
        for token in (*CONTROL_TOKENS, *VISIBLE_TOKENS):
            dialogue = dialogue.replace(token, "\n")
        dialogues.append(dialogue)
    return dialogues


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files `AutoTokenizer.from_pretrained` reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": MAX_LENGTH,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": list(CONTROL_TOKENS[1:]),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "split_special_tokens": False,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    template = TEMPLATE_FILE.read_text(encoding="utf-8")
    (folder / TEMPLATE_FILE.name).write_text(template, encoding="utf-8")
