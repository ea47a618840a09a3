"""What an adapter needs to be tested without weights, network or sleeping. Public.

FakeEngine          an engine without a model: scripted or hashed tokens; can hold, fail, die
tiny_model          a random Qwen3 of two layers, the same for the same seed
tiny_tokenizer      bytes as tokens, ChatML, made in memory
DelayedRunner       hands a model runner's results over one or two steps late
AdmissionGate       holds an engine until so many requests were submitted
settle, leak_check  nothing runs any more; nothing was left behind
AdapterContract     the tests every adapter has to pass
"""

from nanoserve_adapters.testing.adapter_contract import AdapterContract, AdapterUnderTest
from nanoserve_adapters.testing.delayed_runner import DelayedRunner
from nanoserve_adapters.testing.engine_checks import (
    AdmissionGate,
    StepGate,
    leak_check,
    settle,
)
from nanoserve_adapters.testing.fake_engine import FakeEngine, hashed_token, scripted
from nanoserve_adapters.testing.tiny_models import tiny_model, tiny_tokenizer

__all__ = [
    "AdapterContract",
    "AdapterUnderTest",
    "AdmissionGate",
    "DelayedRunner",
    "FakeEngine",
    "StepGate",
    "hashed_token",
    "leak_check",
    "scripted",
    "settle",
    "tiny_model",
    "tiny_tokenizer",
]
