"""The LangChain door: chat model and LLM whose every call joins one running batch.

::

    from langchain_llm import ChatNanoserve, NanoserveLLM

    chat = ChatNanoserve(model="path-or-hub-id", temperature=0.6, max_tokens=512)
    llm = NanoserveLLM(engine=chat.engine, temperature=0)
"""

from langchain_llm.chat_model import ChatNanoserve
from langchain_llm.engine_reference import EngineReference
from langchain_llm.init_chat_model import register_init_chat_model
from langchain_llm.llm import NanoserveLLM

__all__ = ["ChatNanoserve", "EngineReference", "NanoserveLLM", "register_init_chat_model"]
