"""GGUF files as checkpoints: a strict reader of the container, its metadata, names and blocks."""
