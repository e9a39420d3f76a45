"""Triton kernels as TensorRT plugins: routed experts, attention over full-length caches, and the
norms between two blocks."""

from .plugins import ATTENTION, BLOCK_ENDS, experts
from .reference import meaning
from .trial import shared_memory

__all__ = ["ATTENTION", "BLOCK_ENDS", "experts", "meaning", "shared_memory"]
