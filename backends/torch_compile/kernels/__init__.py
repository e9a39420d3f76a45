"""The kernels of the decode step and of prefill; `base.py` says what a kernel is."""

from __future__ import annotations

from . import decode_attention, head, linear, moe, norms, prefill_attention, qkv
from .base import Kernel

#: in this order: a node becomes the first whose rule takes it
KERNELS: tuple[Kernel, ...] = (
    *linear.KERNELS,
    *norms.KERNELS,
    *qkv.KERNELS,
    *decode_attention.KERNELS,
    *prefill_attention.KERNELS,
    *moe.KERNELS,
    *head.KERNELS,
)
