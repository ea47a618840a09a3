"""The LangChain door: chat model and LLM whose every call joins one running batch."""
