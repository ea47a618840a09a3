"""A progress bar counts the rows of a batch as they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import hf_generate_shim
from hf_generate_shim import progress
from tests.hf_generate_shim.calls import batch, prompt, ragged

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

FEW = list(range(40))


class Bar:
    """Stands in for tqdm's."""

    def __init__(self, *, total: int, desc: str, unit: str) -> None:
        self.total, self.desc, self.unit = total, desc, unit
        self.n = 0
        self.seen: list[int] = []
        self.is_closed = False

    def update(self, num: int) -> None:
        """Remember how far it is."""
        self.n += num
        self.seen.append(self.n)

    def close(self) -> None:
        """Done."""
        self.is_closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """The bars that were made."""
    made: list[Bar] = []

    def make(**options: object) -> Bar:
        made.append(Bar(**options))  # type: ignore[arg-type]  # checked by its signature
        return made[-1]

    monkeypatch.setattr(progress, "tqdm", make)
    return made


def test_bar_counts_rows_as_they_end(model: Qwen3ForCausalLM, bars: list[Bar]) -> None:
    with hf_generate_shim.installed(model, progress_bar=True, num_kvcache_blocks=64):
        model.generate(**ragged(), max_new_tokens=30, eos_token_id=FEW, pad_token_id=9)

    (bar,) = bars
    assert (bar.total, bar.n, bar.is_closed) == (4, 4, True)
    assert bar.seen == sorted(bar.seen)
    assert len(bar.seen) > 1


def test_bar_is_closed_when_a_call_fails(model: Qwen3ForCausalLM, bars: list[Bar]) -> None:
    with (
        hf_generate_shim.installed(model, progress_bar=True, num_kvcache_blocks=64),
        pytest.raises(RuntimeError),
    ):
        model.generate(
            **ragged(), max_new_tokens=3, do_sample=True, suppress_tokens=list(range(263))
        )

    assert [bar.is_closed for bar in bars] == [True]


@pytest.mark.parametrize("progress_bar", [True, False])
def test_single_row_has_no_bar(
    model: Qwen3ForCausalLM, bars: list[Bar], progress_bar: bool
) -> None:
    with hf_generate_shim.installed(model, progress_bar=progress_bar, num_kvcache_blocks=64):
        model.generate(**batch(prompt(4)), max_new_tokens=3)

    assert bars == []


def test_batch_has_no_bar_by_default(model: Qwen3ForCausalLM, bars: list[Bar]) -> None:
    with hf_generate_shim.installed(model, num_kvcache_blocks=64):
        model.generate(**ragged(), max_new_tokens=3)

    assert bars == []
