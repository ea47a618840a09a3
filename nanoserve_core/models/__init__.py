"""Models and their weights: one file per architecture."""
