"""NVIDIA GPUs: Triton kernels, CUDA graphs of steps, and decode loops that sample on the device."""
