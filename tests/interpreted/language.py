"""Fixes for Triton's interpreter, where it differs from a GPU.

Inline PTX is ignored. bf16 is stored as integers, so casts truncate and dot products multiply the
integers: both are replaced. Scalars are one-element arrays, which numpy refuses as an index: they
get `__index__`, so that loops may have a loaded bound. The language is patched once per kernel, not
for each function that a kernel calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

from g4ir.backends.cuda.kernels.launch import directly
from g4ir.errors import MissingError

_convert = interpreter._convert_float
_patch = interpreter._patch_lang
_patched: set[int] = set()


@contextmanager
def interpreted() -> Iterator[None]:
    """Interpret kernels, on CPU tensors, for the duration of a context. MissingError if
    TRITON_INTERPRET=1 was not set before triton was imported.
    """
    if not knobs.runtime.interpret:
        raise MissingError("interpreting kernels needs TRITON_INTERPRET=1 in the environment")
    repairs = (
        patch.object(interpreter, "_convert_float", _converted),
        patch.object(interpreter, "_patch_lang", _patch_once),
        patch.object(interpreter.InterpreterBuilder, "create_dot", _dot),
        patch.object(interpreter.InterpreterBuilder, "create_inline_asm", _asm),
    )
    with repairs[0], repairs[1], repairs[2], repairs[3], directly():
        yield


def _converted(x: Any, source: Any, target: Any, mode: Any) -> Any:
    if source == tl.float32 and target == tl.bfloat16:
        values = torch.from_numpy(np.ascontiguousarray(x)).view(torch.float32)
        return values.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(x.shape)
    return _convert(x, source, target, mode)


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    product = np.matmul(_values(a), _values(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


class _Nothing:
    """Placeholder for the unused result of inline PTX."""

    def get_result(self, _: int) -> Any:
        return interpreter.TensorHandle(np.zeros(1, np.int32), tl.int32)


def _asm(self: Any, text: str, *operands: Any) -> Any:
    """Ignore inline PTX: kernels use it only for memory ordering and cache hints."""
    return _Nothing()


def _values(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _patch_once(fn: Any) -> Any:
    if "__index__" not in vars(tl.tensor):  # not yet patched: a kernel starts
        _patched.clear()
    if id(fn.__globals__) in _patched:
        return interpreter._LangPatchScope()
    _patched.add(id(fn.__globals__))
    scope = _patch(fn)
    scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
    return scope
