"""Quantised weights: which tensors, in which form, and the graphs that take them."""
