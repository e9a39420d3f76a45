"""Builds the graphs of a spec, and the names and shapes of its tensors."""
