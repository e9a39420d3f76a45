"""Quantised weights: which tensors, in which format, and the graphs that read them."""
