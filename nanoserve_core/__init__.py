"""The engine: token ids in, token ids out. It knows no framework and no text."""
