"""Shared by all kernels: launching, recording launches, arithmetic, activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

#: (kernel, grid, operands by name, constexprs and compiler options)
Launch = tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]


def _traced(kernel: Any, grid: Any, operands: dict[str, Any], meta: dict[str, Any]) -> None:
    wrap_triton(kernel)[grid](**operands, **meta)


def _direct(kernel: Any, grid: Any, operands: dict[str, Any], meta: dict[str, Any]) -> None:
    kernel[grid](**operands, **meta)


_START: ContextVar[Callable[..., None]] = ContextVar("start", default=_traced)


def start(kernel: Any, grid: tuple[Any, ...], operands: Iterable[Any], **meta: Any) -> None:
    """Launch a kernel so that torch's tracers record it (but see `directly` and `recorded`).
    `operands`: its parameters that are no constexprs, in order; `meta`: constexprs, num_warps and
    num_stages. ValueError for another number of operands."""
    names = [name for name in kernel.arg_names if name not in meta]
    _START.get()(kernel, grid, dict(zip(names, operands, strict=True)), meta)


def takes(x: torch.Tensor) -> bool:
    """Whether to launch a kernel for x, not the reference: x is on a GPU, or kernels are
    interpreted or recorded."""
    return x.is_cuda or _START.get() is not _traced


@contextmanager
def _starting(how: Callable[..., None]) -> Iterator[None]:
    token = _START.set(how)
    try:
        yield
    finally:
        _START.reset(token)


def directly() -> Any:
    """Return a context in which kernels are launched without tracing: for the interpreter, and for
    timing."""
    return _starting(_direct)


def by_default() -> Any:
    """Return a context that restores traced launches within `directly` or `recorded`."""
    return _starting(_traced)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Context with a list in which launches are recorded instead of run."""
    seen: list[Launch] = []
    with _starting(lambda *launch: seen.append(launch)):
        yield seen


def tile(block_n: int, block_k: int, warps: int, stages: int, block_m: int = 0) -> dict[str, int]:
    """Return the launch settings of a matmul kernel as constexprs and compiler options; BLOCK_M
    only if `block_m` is not 0."""
    rows = {"BLOCK_M": block_m} if block_m else {}
    sizes = {"BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages}
    return rows | sizes | {"num_warps": warps, "num_stages": stages}


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def blocks(n: Any, size: int) -> Any:
    """Return ceil(n / size); n may be symbolic."""
    return (n + size - 1) // size


@triton.jit
def tanh(x):
    """fp32 tanh with an absolute error of at most 1.2e-7; no overflow."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def activate(x, ACT: tl.constexpr):
    """The activation of the op `glu`, in fp32."""
    if ACT == "gelu_pytorch_tanh":
        y = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACT == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACT == "silu":
        y = x * tl.sigmoid(x)
    else:
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def rounded(x, like):
    """Round fp32 x to the element type of the pointer `like`, as the reference does there; return
    fp32."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def is_last(word, size):
    """Count an arrival in the counter at `word`; return whether this program is the last of `size`,
    which then sees the others' stores: the barrier orders all threads' stores before the atomic."""
    tl.debug_barrier()
    one = tl.full([], 1, tl.int64)
    return tl.atomic_add(word, one, sem="acq_rel", scope="gpu") == size - 1
