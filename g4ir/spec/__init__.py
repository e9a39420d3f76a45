"""Reads a variant: a YAML file or a Hugging Face config as one frozen record."""
