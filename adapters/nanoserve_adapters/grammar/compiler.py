"""`compile_grammar`: the one door from a `GrammarSpec` to a `Grammar`.

Call it where the request is made: an unsupported schema then fails there, and a grammar compiled
before is found again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from nanoserve_adapters.grammar.document import DocumentGrammar
from nanoserve_adapters.grammar.jumps import jump_of, letters_of
from nanoserve_adapters.grammar.lark_text import lark_text
from nanoserve_adapters.grammar.specs import AfterThinking, ToolCalls, spec_key
from nanoserve_adapters.grammar.triggers import AfterThinkingGrammar, AutoCallsGrammar
from nanoserve_adapters.grammar.vocabulary import Vocabulary, import_backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanoserve_adapters.grammar.specs import GrammarSpec
    from nanoserve_core.grammar import Grammar

MAX_CACHED = 256
"""Grammars kept per tokenizer; the one made longest ago goes first."""

_compiled: WeakKeyDictionary[Any, dict[str, Grammar]] = WeakKeyDictionary()  # Any: a Vocabulary
_lock = threading.Lock()


def compile_grammar(tokenizer: PreTrainedTokenizerBase, spec: GrammarSpec) -> Grammar:
    """The grammar of ``spec`` for ``tokenizer``; the same object for equal arguments. Any thread.

    Raises `UnsupportedSchema` for what cannot be honoured, and `UnsupportedOption` without
    llguidance or for a tokenizer that is not a fast one.
    """
    vocabulary = Vocabulary.of(tokenizer)
    key = spec_key(spec)
    with _lock:
        found = _compiled.setdefault(vocabulary, {}).get(key)
    if found is not None:
        return found
    made = _compile(vocabulary, spec)
    with _lock:
        grammars = _compiled[vocabulary]
        if len(grammars) >= MAX_CACHED:
            del grammars[next(iter(grammars))]
        return grammars.setdefault(key, made)


def grammar_backend_version() -> str:
    """What compiles grammars here; raises `UnsupportedOption` when it is not installed."""
    return f"llguidance {import_backend().__version__}"


def _compile(vocabulary: Vocabulary, spec: GrammarSpec) -> Grammar:
    if isinstance(spec, AfterThinking):
        return AfterThinkingGrammar(vocabulary, _compile(vocabulary, spec.inner))
    if isinstance(spec, ToolCalls) and not spec.required:
        return AutoCallsGrammar(vocabulary, spec)
    text = lark_text(spec, vocabulary.has_token)
    return DocumentGrammar(vocabulary, text, letters=letters_of(spec), jump=jump_of(spec))
