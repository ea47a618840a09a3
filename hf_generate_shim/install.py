"""`install`, `uninstall`, `installed` and `explain`: the public functions of this door."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import Qwen3ForCausalLM

from hf_generate_shim.explanation import Explanation
from hf_generate_shim.handle import Handle, Settings
from hf_generate_shim.route import Path
from hf_generate_shim.seam import QWEN3
from nanoserve_adapters.unsupported import Unsupported
from nanoserve_core.config import EngineConfig
from nanoserve_core.errors import ConfigError, UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from hf_generate_shim.call import HFObject

_NOT_INSTALLED = Unsupported(
    option="install",
    value=False,
    because="serves installed models only",
    way_out="Call hf_generate_shim.install(model).",
)


def install(
    model: nn.Module,
    tokenizer: HFObject = None,
    strict: bool = False,
    rng: str = "row",
    progress_bar: bool = False,
    plugins: Sequence[object] = (),
    **engine_options: Any,  # Any: each option is checked by EngineConfig
) -> Handle:
    """Serve ``model.generate`` by an engine over the model's own weights; returns the handle.

    ``model``: a loaded ``Qwen3ForCausalLM``; copies of it are not served. ``tokenizer``: for
    `Handle.stream`, and for plugins that work on text. ``strict``: raise `UnsupportedOption` where
    a call would otherwise fall back to transformers' own loop, with one `NanoserveFallbackWarning`
    per reason. ``rng="row"``: a call draws one number from torch's default generator, and each row
    has a stream of its own. ``rng="hf"``: a sampled call draws as transformers does, so that it
    gives the same tokens under `torch.manual_seed`; its rows then run in lockstep.
    ``progress_bar``: count the rows of a batch as they end. ``engine_options``: the fields of
    `EngineConfig`; ``max_model_len`` is the model's own limit by default.

    Cheap: weights are shared and K/V memory is taken at the first call that the engine serves.
    Installing a model again with the same arguments returns its handle; with others it raises
    `ConfigError`, as does a wrong option. Any thread.
    """
    _require_qwen3(model)
    _require_rng(rng)
    options = {**engine_options, **({"plugins": tuple(plugins)} if plugins else {})}
    EngineConfig.from_options(**options)
    settings = Settings(
        tokenizer=tokenizer, strict=strict, rng=rng, options=options, progress_bar=progress_bar
    )
    handle = QWEN3.attach(model, Handle(model, settings))
    if handle.settings != settings:
        raise ConfigError(
            f"this model is installed with {handle.settings}, not with {settings}: expected the "
            "same arguments. Call uninstall(model) first."
        )
    return handle


def uninstall(model: nn.Module) -> None:
    """Give ``model.generate`` back to transformers and the engine's memory to the device.

    Waiting calls get `EngineClosed`. A model that is not installed is left as it is. Any thread.
    """
    handle = QWEN3.handle_of(model)
    if handle is not None:
        handle.close()


@contextmanager
def installed(
    model: nn.Module,
    tokenizer: HFObject = None,
    **options: Any,  # Any: see install
) -> Iterator[Handle]:
    """`install` for the block, same arguments. A model that was installed before stays so."""
    was_installed = QWEN3.handle_of(model) is not None
    handle = install(model, tokenizer, **options)
    try:
        yield handle
    finally:
        if not was_installed:
            handle.close()


def explain(model: nn.Module, **generate_kwargs: HFObject) -> Explanation:
    """Which path ``model.generate(**generate_kwargs)`` takes, and why; generates nothing.

    transformers prepares the call, with its warnings and errors, and is stopped at the seam.
    """
    handle = QWEN3.handle_of(model)
    if handle is None:
        return Explanation(path=Path.FALLBACK, reasons=(_NOT_INSTALLED,))
    return handle.explain(model, generate_kwargs)


def _require_qwen3(model: object) -> None:
    if isinstance(model, Qwen3ForCausalLM):
        return
    raise UnsupportedOption(
        f"model is a {type(model).__name__}: expected a loaded Qwen3ForCausalLM. Of a wrapper, "
        "install the model inside it."
    )


def _require_rng(rng: str) -> None:
    if rng not in ("row", "hf"):
        raise ConfigError(f"rng={rng!r} is unknown: expected 'row' or 'hf'. Leave it out.")
