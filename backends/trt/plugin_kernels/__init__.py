"""Triton kernels whose parameters are in the order of a TensorRT plugin: inputs, whole numbers,
outputs."""
