"""What `for_device` gives a GPU has every op of `KernelOps`, under the names the model calls."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch

from nanoserve_core.kernels import KernelOps, for_device, reference
from tests.house.source_tree import run_python

NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no triton here, so no GPU to serve"
)
OPS = [name for name in vars(KernelOps) if not name.startswith("_")]


@NEEDS_TRITON
@pytest.mark.parametrize("name", OPS)
def test_the_ops_of_a_gpu_take_what_the_model_passes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    expected = inspect.signature(getattr(KernelOps, name)).parameters
    keyword_only = inspect.Parameter.KEYWORD_ONLY

    op = getattr(for_device(torch.device("cuda")), name)

    parameters = inspect.signature(op).parameters
    given = [key for key, value in parameters.items() if value.default is value.empty]
    assert given == [key for key in expected if key != "self"]
    assert all(
        parameters[key].kind is keyword_only for key in given if expected[key].kind is keyword_only
    )


def test_devices_without_cuda_get_the_torch_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)

    ops = [for_device(torch.device(name)) for name in ("cpu", "mps", "cuda")]

    assert all(found is reference for found in ops)


def test_a_cpu_never_loads_the_kernels() -> None:
    code = (
        "import sys, torch\n"
        "from nanoserve_core.kernels import for_device\n"
        "for_device(torch.device('cpu'))\n"
        "print([name for name in sys.modules if name.startswith('nanoserve_core.kernels.')])"
    )

    result = run_python(code)

    assert result.stdout.strip() == "['nanoserve_core.kernels.reference']", result.stderr
