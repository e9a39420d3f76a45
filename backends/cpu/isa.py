"""What the C kernels compute on this machine's processor."""

from __future__ import annotations

from g4ir.backends.host_cpu import cpu_flags

#: elements of a weight from which on the C kernels gain
FROM = 1 << 16


def has_gemm() -> bool:
    """Whether the C kernels compute products of many rows and attention of prompts
    (kernels/gemm.h): the CPU multiplies bf16 and has no matrix unit, with which a library is
    faster."""
    return "avx512_bf16" in cpu_flags() and "amx_bf16" not in cpu_flags()
