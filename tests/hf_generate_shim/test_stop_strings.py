"""Stop strings end rows where transformers' own criterion ends them.

Oracle: `StopStringCriteria` on token sequences, and the un-patched `generate`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.generation.stopping_criteria import StopStringCriteria

import hf_generate_shim
from hf_generate_shim.stop_strings import StopStrings, TokenTexts
from nanoserve_adapters.testing import tiny_tokenizer
from tests.hf_generate_shim.calls import EOS, PAD, Options, batch, new_model, new_tokens, prompt

if TYPE_CHECKING:
    from hf_generate_shim import Handle

TEXT = """The stopper stops, the stop stopped. Über größere Straßen ging es: naïve café.
日本語の文章です。日本は日の本。 🙂🙃🙂 ok 🙂
<|stop|> \n\n\t  end\r\n ... 123 456"""


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges within, across and around characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|end|>", "end of text 日"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama's: words after a mark, bytes for what has no token."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "▁the", "▁stop", "st", "op", "per", "ß", "▁日本", "s", "t", "o", "p", "e", "d"]
    words += ["a", "b", "c", "f"]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*bytes_, *words]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT's: no bytes at all."""
    words = ["[UNK]", "stop", "##s", "##top", "s", "the", "##p", "##per", "t", "##o", ".", "日"]
    words += [*"abcdef", *(f"##{char}" for char in "abcdef")]
    vocabulary = {token: number for number, token in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


TOKENIZERS = {
    "bytes": tiny_tokenizer,
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "word piece": word_piece,
}


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Made once."""
    return TOKENIZERS[kind]()


@st.composite
def rows_and_strings(draw: st.DrawFn, kind: str) -> tuple[list[int], list[str]]:
    """Token ids, some beyond the vocabulary, and strings of which most occur in their text."""
    size = len(tokenizer_of(kind))
    ids = draw(st.lists(st.integers(0, size + 3), min_size=1, max_size=14))
    texts = TokenTexts(tokenizer_of(kind))
    text = b"".join(texts[token_id] or b"" for token_id in ids).decode(errors="ignore")
    strings = [draw(st.text("stop日🙂 .", min_size=1, max_size=4))]
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(text)))
        strings.append(text[start : start + draw(st.integers(1, 12))] or "s")
    return ids, strings


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_row_is_completed_where_transformers_says_so(kind: str, data: st.DataObject) -> None:
    ids, strings = data.draw(rows_and_strings(kind))
    tokenizer = tokenizer_of(kind)
    ours = StopStrings(tokenizer, strings)
    try:
        theirs = StopStringCriteria(tokenizer, strings)
    except ValueError:  # no token ends any of the strings
        assert not ours.can_be_completed
        return

    found = [ours.is_completed_by(ids[:end]) for end in range(1, len(ids) + 1)]

    padded = [torch.tensor([ids[:end]]) for end in range(1, len(ids) + 1)]
    assert found == [bool(theirs(row, None)) for row in padded]
    assert found == [bool(ours(row, None)) for row in padded]


def test_criterion_answers_for_each_row_of_a_batch() -> None:
    tokenizer = tiny_tokenizer()
    criterion = StopStrings(tokenizer, ["ab", "é"])
    rows = torch.tensor([list(b"xxab"), list(b"xabx"), [120, 120, *"é".encode()]])

    done = criterion(rows, None)

    assert done.tolist() == [True, False, True]
    assert done.dtype == torch.bool


def test_vocabulary_is_never_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = new_model(), tiny_tokenizer()

    def walk() -> dict[str, int]:
        raise AssertionError("the whole vocabulary was asked for")

    monkeypatch.setattr(tokenizer, "get_vocab", walk)
    with hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle:
        output = model.generate(
            **batch(prompt(5)), max_new_tokens=6, stop_strings=["never!"], tokenizer=tokenizer
        )

    assert output.shape == (1, 11)
    assert handle.counters.fast == 1


@pytest.fixture(scope="module")
def texts() -> list[tuple[list[int], list[int]]]:
    """Prompts and what transformers generates after them, greedily."""
    model = new_model()
    rows = [prompt(length, 4) for length in (4, 7, 9)]
    options = batch(*rows)
    output = model.generate(**options, max_new_tokens=16)
    return list(zip(rows, new_tokens(output, options), strict=True))


Texts = list[tuple[list[int], list[int]]]


def ascii_run(texts: Texts, row: int) -> tuple[int, str]:
    """A late step and two characters that ``row`` generates there."""
    tokens = texts[row][1]
    for step in range(len(tokens) - 1, 0, -1):
        if tokens[step - 1] < 128 and tokens[step] < 128:
            return step, bytes(tokens[step - 1 : step + 1]).decode()
    raise AssertionError("no two ASCII tokens in a row: change the prompts' seed")


def both(model: Qwen3ForCausalLM, **options: object) -> tuple[torch.Tensor, torch.Tensor, Options]:
    """The call without and with the engine, and the calls by path."""
    call = {"tokenizer": tiny_tokenizer(), "max_new_tokens": 16, **options}
    expected = model.generate(**call)
    with hf_generate_shim.installed(model, num_kvcache_blocks=64) as handle:
        output = model.generate(**call)
        counters = vars(handle.counters)
    return expected, output, {path: counters[path] for path in ("fast", "lockstep", "fallback")}


def test_rows_of_a_batch_stop_at_their_own_steps(model: Qwen3ForCausalLM, texts: Texts) -> None:
    stops = [ascii_run(texts, row)[1] for row in (0, 1)]
    options = {**batch(*(row for row, _ in texts)), "eos_token_id": EOS, "pad_token_id": PAD}

    expected, output, counters = both(model, **options, stop_strings=stops)

    assert output.tolist() == expected.tolist()
    assert output[0, -1] == PAD
    assert counters == {"fast": 1, "lockstep": 0, "fallback": 0}


def prompt_before_ascii(model: Qwen3ForCausalLM) -> tuple[list[int], str]:
    """A prompt that ends in "xab", and the character that is generated after it."""
    for seed in range(100):
        row = [*prompt(4, seed), *b"xab"]
        first = int(model.generate(**batch(row), max_new_tokens=1)[0, -1])
        if first < 128:
            return row, chr(first)
    raise AssertionError("no such prompt: change the model's seed")


@pytest.mark.parametrize("in_prompt", ["b", "ab", "xab"])
def test_string_may_begin_in_the_prompt(model: Qwen3ForCausalLM, in_prompt: str) -> None:
    row, first = prompt_before_ascii(model)

    expected, output, counters = both(model, **batch(row), stop_strings=in_prompt + first)

    assert output.tolist() == expected.tolist()
    assert output.shape[1] == len(row) + 1
    assert counters["fast"] == 1


def test_string_that_ends_in_the_prompt_stops_nothing(model: Qwen3ForCausalLM) -> None:
    row, _ = prompt_before_ascii(model)

    expected, output, counters = both(model, **batch(row), stop_strings="xab", max_new_tokens=4)

    assert output.tolist() == expected.tolist()
    assert output.shape[1] == len(row) + 4
    assert counters["fast"] == 1


def test_streamer_and_scores_end_with_the_stopping_token(
    model: Qwen3ForCausalLM, texts: Texts
) -> None:
    step, stop = ascii_run(texts, 1)
    options = {**batch(texts[1][0]), "return_dict_in_generate": True, "output_scores": True}

    expected, output, counters = both(model, **options, stop_strings=[stop])

    assert output["sequences"].tolist() == expected["sequences"].tolist()
    assert len(output["scores"]) <= step + 1
    assert counters["fast"] == 1


def test_rows_without_an_end_of_sequence_id_run_on_until_all_have_stopped(
    model: Qwen3ForCausalLM, texts: Texts
) -> None:
    stops = [ascii_run(texts, row)[1] for row in range(3)]
    options = batch(*(row for row, _ in texts))

    expected, output, counters = both(model, **options, stop_strings=stops, max_new_tokens=60)

    assert output.tolist() == expected.tolist()
    assert output.shape[1] < options["input_ids"].shape[1] + 60
    assert counters == {"fast": 0, "lockstep": 1, "fallback": 0}


def test_stop_strings_and_a_time_limit_work_together(model: Qwen3ForCausalLM, texts: Texts) -> None:
    _, stop = ascii_run(texts, 0)

    expected, output, counters = both(
        model, **batch(texts[0][0]), stop_strings=[stop], max_time=1000.0
    )

    assert output.tolist() == expected.tolist()
    assert counters["fast"] == 1


def test_preempted_rows_stop_where_they_would_have(texts: Texts) -> None:
    model = new_model()
    stops = [ascii_run(texts, row)[1] for row in (0, 1)]
    options = {**batch(*(row for row, _ in texts)), "eos_token_id": EOS, "pad_token_id": PAD}
    call = {**options, "stop_strings": stops, "tokenizer": tiny_tokenizer(), "max_new_tokens": 16}
    expected = model.generate(**call)

    with hf_generate_shim.installed(model, num_kvcache_blocks=8, block_size=4) as handle:
        output = model.generate(**call)
        stats = handle.stats()

    assert output.tolist() == expected.tolist()
    assert stats.preemptions > 0


def test_missing_tokenizer_is_transformers_own_error(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    with pytest.raises(ValueError, match="you must pass the model's tokenizer"):
        model.generate(**batch(prompt(4)), max_new_tokens=2, stop_strings="x")

    assert handle.counters.fast == 0


def test_string_that_no_token_ends_is_transformers_own_error(
    model: Qwen3ForCausalLM, handle: Handle
) -> None:
    with pytest.raises(ValueError, match="unable to identify tokens"):
        model.generate(
            **batch([1, 2]),
            max_new_tokens=2,
            stop_strings="語",
            tokenizer=tokenizer_of("word piece"),
        )

    assert handle.counters.fast == 0


def test_criterion_of_the_user_s_own_is_kept(model: Qwen3ForCausalLM, texts: Texts) -> None:
    _, stop = ascii_run(texts, 0)
    tokenizer = tiny_tokenizer()
    options = {**batch(texts[0][0]), "max_new_tokens": 16, "tokenizer": tokenizer}
    own = {"stopping_criteria": [StopStringCriteria(tokenizer, [stop])], "stop_strings": ["never"]}
    expected = model.generate(**options, **own)

    with hf_generate_shim.installed(model, num_kvcache_blocks=64):
        explanation = hf_generate_shim.explain(model, **options, **own)

    assert [reason.option for reason in explanation.reasons] == ["stopping_criteria"]
    assert expected.shape[1] < len(texts[0][0]) + 16
