"""The checkpoint's README, written from what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from examples.tiny_qwen3.evaluate import Evaluation

_CARD = """# tiny_qwen3

A trained `Qwen3ForCausalLM` of 5.2 million parameters, small enough to live in this repository:
for examples and for tests in which the tokens of a real model must agree. It writes prose in the
manner of Jane Austen, stops by itself in chat, and does the simple tasks it was trained on. It
knows nothing else.

- 6 layers, hidden size 256, 4 query and 2 key/value heads of 64, tied embeddings, bfloat16.
- Byte-level BPE of 4,096 tokens, cut as in Qwen3, with Qwen3's special tokens and a chat template
  in Qwen3's form: tools, `<think>`, `enable_thinking`. Without `enable_thinking=False` it thinks.
- Trained on Jane Austen's novels (public domain) and on generated dialogues, nothing else, with
  contexts of up to 2,048 tokens of prose and 1,024 of dialogue.

## Measured

On what training never saw (`evaluate.py`: plain transformers, greedy, the bfloat16 weights as
shipped): prose {loss:.3f} nats a token, {bits:.3f} bits a byte; **{simple:.1%}** of the simple
tasks and **{tools:.1%}** of the tasks with tools answered exactly. Where more than one answer is
right, only the end is counted.

{table}

## Made by

```
apt-get download r-cran-janeaustenr
python -m examples.tiny_qwen3.prose r-cran-janeaustenr_*.deb .corpus
python -m examples.tiny_qwen3.train --prose .corpus --output out/tiny_qwen3 --steps {steps}
```

{steps:,} steps, {tokens:.0f} million tokens, {minutes:.1f} minutes on {device}.
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run took."""

    num_steps: int
    num_tokens: int
    seconds: float


def model_card(run: Run, evaluation: Evaluation, device: str) -> str:
    """The README in Markdown."""
    return _CARD.format(
        loss=evaluation.prose_loss,
        bits=evaluation.prose_bits_per_byte,
        simple=evaluation.exact_rate(tools=False),
        tools=evaluation.exact_rate(tools=True),
        table=evaluation.table(),
        steps=run.num_steps,
        tokens=run.num_tokens / 1e6,
        minutes=run.seconds / 60,
        device=torch.cuda.get_device_name() if device == "cuda" else "a CPU",
    )
