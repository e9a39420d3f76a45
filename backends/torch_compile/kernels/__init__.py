"""Triton kernels of the decode step and of prefill, one family per file.

Each file has the kernels, a `launch_*` function that allocates results and starts them, and a
`triton_op` in the namespace `g4ir` around it, which off CUDA computes the op's reference.
"""
