"""``init_chat_model("nanoserve:path-or-hub-id")``, for those who choose models by string.

The package `langchain` has a closed table of providers and no way to add one, so this writes into a
private name, and only when asked to. Model objects work everywhere without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

from langchain_llm.results import PROVIDER

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.language_models import BaseChatModel

_MODULE, _TABLE = "langchain.chat_models.base", "_BUILTIN_PROVIDERS"


def register_init_chat_model() -> bool:
    """Add ``nanoserve`` to the providers of `langchain.chat_models.init_chat_model`; idempotent.

    True when it is among them now. False without the package `langchain`; False and a warning when
    that has no such table any more.
    """
    if importlib.util.find_spec("langchain") is None:
        return False
    providers = getattr(importlib.import_module(_MODULE), _TABLE, None)
    if not isinstance(providers, dict):
        warnings.warn(
            f"{_MODULE} has no table {_TABLE}: init_chat_model cannot learn of {PROVIDER!r} in "
            "this version of langchain. Make the model with ChatNanoserve(model=...), which works "
            "wherever a chat model does.",
            stacklevel=2,
        )
        return False
    providers[PROVIDER] = ("langchain_llm", "ChatNanoserve", _create)
    return True


def _create(
    cls: Callable[..., BaseChatModel],
    **options: Any,  # Any: the constructor checks each
) -> BaseChatModel:
    return cls(**options)
