"""The HuggingFace door: `model.generate` served by a nanoserve engine over the same weights."""
