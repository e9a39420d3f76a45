"""NVIDIA GPUs: our Triton kernels, recorded steps, loops on the device."""
