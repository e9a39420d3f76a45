"""Triton's interpreter, repaired where it does not do what a GPU does.

It has no instructions of a GPU's own. It keeps bf16 as integers: its casts truncate and its
products multiply the integers. Its scalars are arrays of one element, which numpy does not take for
an index: they get one, so that loops may run to a loaded bound. And it patches the language anew
for each function that a kernel calls, which once for a kernel is enough.
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

from g4ir.errors import MissingError

from .launch import directly

_convert = interpreter._convert_float
_patch = interpreter._patch_lang
_patched: set[int] = set()


@contextmanager
def interpreted() -> Iterator[None]:
    """A context in which kernels are interpreted, on tensors of the CPU.

    Raises MissingError where TRITON_INTERPRET=1 was not set before triton was imported.
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
    """Result of an instruction that nobody reads."""

    def get_result(self, _: int) -> Any:
        return interpreter.TensorHandle(np.zeros(1, np.int32), tl.int32)


def _asm(self: Any, text: str, *operands: Any) -> Any:
    """Do nothing: kernels have instructions of their own for order and caches alone."""
    return _Nothing()


def _values(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _patch_once(fn: Any) -> Any:
    if "__index__" not in vars(tl.tensor):  # the start of a kernel
        _patched.clear()
    if id(fn.__globals__) in _patched:
        return interpreter._LangPatchScope()
    _patched.add(id(fn.__globals__))
    scope = _patch(fn)
    scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
    return scope
