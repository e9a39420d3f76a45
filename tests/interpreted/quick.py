"""Triton's interpreter in a quarter of its time: without what it works out again and again, or for
nothing.

Of shapes and types it makes new objects at each step of a program; here equal ones share their
parts, which nobody changes, and operands of one shape are seen to be so in one step. It computes
sums of integers a second time to see whether they overflow, and drops what it sees. And tl.topk
exchanges by sums of XOR, which it adds one element at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.language import core, standard
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_block, _numpy = core.block_type.__init__, interpreter._get_np_dtype
_reduce = interpreter.ReduceOps.apply_impl
_unwrap, _broadcast = core._unwrap_if_constexpr, TritonSemantic.broadcast_impl_value
_WRAPS = (core.constexpr, core.tuple, list, tuple)
_dtypes: dict[str, Any] = {}
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}


@contextmanager
def quick() -> Iterator[None]:
    """A context in which kernels compute the same sooner."""
    builder = interpreter.interpreter_builder
    changes = (
        patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)),
        patch.object(interpreter, "_get_np_dtype", _known_dtype),
        patch.object(core.block_type, "__init__", _shared_block),
        patch.object(core.tensor, "__init__", _shared_tensor),
        patch.object(interpreter.ReduceOps, "apply_impl", _whole_xor),
        patch.object(core, "_unwrap_if_constexpr", _unwrapped),
        patch.object(TritonSemantic, "broadcast_impl_value", _of_one_shape),
    )
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


def _known_dtype(of: Any) -> Any:
    scalar = of.element_ty if isinstance(of, tl.block_type) else of
    if (found := _dtypes.get(scalar.name)) is None:
        found = _dtypes[scalar.name] = _numpy(of)
    return found


def _shared_block(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(d.value if isinstance(d, tl.constexpr) else d for d in shape)
    key = (*sizes, element_ty.name)
    if key not in _blocks:
        _block(self, element_ty, shape)
        _blocks[key] = {k: v for k, v in vars(self).items() if k != "element_ty"}
    vars(self).update(_blocks[key], element_ty=element_ty)


def _shared_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    sizes = tuple(type.shape.values) if type.is_block() else ()
    self.numel, self.shape = _room(sizes)


@cache
def _room(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(sizes)), core.tuple([tl.constexpr(d) for d in sizes])


def _unwrapped(o: Any) -> Any:
    return _unwrap(o) if isinstance(o, _WRAPS) else o


def _of_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
    left, right = lhs.type, rhs.type
    if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def _whole_xor(self: Any, input: Any) -> Any:
    if self.combine_fn == standard._xor_combine:
        data = input[0].handle.data
        whole = np.bitwise_xor.reduce(data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(whole, input[0].dtype)
    return _reduce(self, input)
