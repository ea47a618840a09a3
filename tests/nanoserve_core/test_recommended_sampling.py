"""What a generation_config recommends, read from a folder or from a live model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from nanoserve_adapters.testing import tiny_model
from nanoserve_core.config import recommended_sampling

if TYPE_CHECKING:
    from pathlib import Path


def test_fields_of_the_file_come_under_our_names(tmp_path: Path) -> None:
    config = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "max_new_tokens": 7,
        "do_sample": True,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")

    found = recommended_sampling(tmp_path)

    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 7}


def test_folder_without_the_file_recommends_nothing(tmp_path: Path) -> None:
    assert recommended_sampling(tmp_path) == {}


def test_live_model_recommends_what_its_config_says() -> None:
    model = tiny_model()
    model.generation_config.repetition_penalty = 1.25

    assert recommended_sampling(model) == {"repetition_penalty": 1.25}
