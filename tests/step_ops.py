"""One op as a step program runs it: the CPU's kernels."""

from __future__ import annotations

from typing import Any

import torch

from g4ir.backends.cpu import pyops
from g4ir.backends.cpu.arena import Arena
from g4ir.backends.cpu.step_program import record_step
from g4ir.ir.graph import Builder
from g4ir.ops.types import Type, dtype_name

Tensor = torch.Tensor
#: functions that tests alone call, and their arguments (backends/cpu/pyops.py)
ASKED = {"takes_codes": "iiisss", "takes_gemm": "iiissss", "linear_chunk": "pppisssi"}
ASKED["linear"] = ASKED["linear_chunk"]
pyops._ARGUMENTS.update(ASKED)


def by_steps(
    op: str, *operands: Any, phase: str = "decode", rounded: str = "", **attrs: Any
) -> Tensor:
    """Return an op's only result; a weight is (codes, scales, tiled). `rounded`: format that rows
    are rounded to. Fails if torch runs a part of it, except this rounding."""
    b, tensors = Builder(phase), dict[str, Tensor]()
    dtype = dtype_name(operands[0].dtype)

    def added(name: str, t: Tensor) -> Any:
        tensors[name] = t.contiguous()
        declare = b.param if len(tensors) > 1 else b.input
        return declare(name, Type(dtype_name(t.dtype), tuple(t.shape)))

    values = []
    for i, x in enumerate(operands):
        if isinstance(x, tuple):
            parts = [added(f"x{i}.{j}", t) for j, t in enumerate(x[:2])]
            values.append(b.emit("dequantize_tiles" if x[2] else "dequantize", *parts, to=dtype))
        else:
            values.append(added(f"x{i}", x))
    if rounded:
        values[0] = b.emit("fake_quantize", values[0], form=rounded)
    y = b.emit(op, *values, **attrs)
    feeds = {"x0": tensors.pop("x0")}
    program = record_step(b.graph(y), tensors, {}, feeds, Arena("cpu"))
    assert all(part.call is tuple for part in program.code.torch_ops)
    return program.run(feeds)[y.name]


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Return x [..., k] @ w[n, k]^T by the C function alone, without a step program."""
    (n, k), x = w.shape, x.contiguous()
    out = x.new_empty((*x.shape[:-1], n))
    operands, dtype = [t.data_ptr() for t in (w, x, out)], pyops.DTYPES[x.dtype]
    sizes = x.numel() // k, n, k
    assert not pyops.kernel("linear")(*operands, dtype, *sizes, torch.get_num_threads())
    return out


def linear_coded(x: Tensor, codes: Tensor, scales: Tensor, tiled: bool = False) -> Tensor:
    return _product(x, (codes, scales, tiled))


def linear_rounded(x: Tensor, codes: Tensor, scales: Tensor, tiled: bool = True) -> Tensor:
    return _product(x, (codes, scales, tiled), rounded="int8")


def _product(x: Tensor, weight: Any, **how: str) -> Tensor:
    rows = x.reshape(1, -1, x.shape[-1])
    return by_steps("linear", rows, weight, **how).view(*x.shape[:-1], -1)


def takes_gemm(x: Tensor, codes: Tensor, scales: Tensor, rounded: bool) -> bool:
    """Whether kernels/gemm.h has a product of many rows for this tiled weight."""
    form, dtype = pyops.FORMAT_IDS[codes.dtype], pyops.DTYPES[x.dtype]
    sizes = x.numel() // x.shape[-1], len(codes), x.shape[-1], scales.shape[-1]
    return bool(pyops.kernel("takes_gemm")(form, rounded, dtype, *sizes))
