"""Functions over the C kernels, for graphs that are not step programs: matmuls, MoE, attention.

bf16 and fp32 matmuls of a few rows are GEMVs bound by memory bandwidth; of more rows, GEMMs over
packed panels (kernels/gemm.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from g4ir.errors import MissingError
from g4ir.ops.attention import attend as attend_all
from g4ir.ops.attention import attention, slot_positions, visible
from g4ir.ops.base import upcast
from g4ir.ops.codecs import (
    FORMATS,
    TILE,
    dequantize_codes,
    fake_quantize_values,
    from_tiles,
    values_per_row,
)
from g4ir.ops.kv_quant import dequantize_rows
from g4ir.ops.mlp import activate
from g4ir.ops.moe import local_expert_index
from g4ir.ops.types import torch_dtype
from g4ir.ui.progress import Progress, no_progress

from .isa import KERNEL_FORMATS
from .library import Library, kernels

Tensor = torch.Tensor

_ATTENTION: Any = attention.reference
#: elements of a weight that are dequantised at a time
DENSE_BLOCK = 1 << 22
#: name -> function of kernels/kernels.h
_kernels: dict[str, Callable[..., int]] = {}
#: dtype of x, outputs and scales, and of quantised weights -> ids in kernels/kernels.h
DTYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
FORMAT_IDS = {torch_dtype(name): number for number, name in enumerate(KERNEL_FORMATS)}
#: dtype of a KV cache -> its id there
CACHE_DTYPES = {**DTYPES, torch.int8: 3, torch.float8_e4m3fn: 4}
#: signatures of the functions there: letter -> ctypes type, function -> letters of its arguments
_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "s": ctypes.c_int64,
    "i": ctypes.c_int,
    "d": ctypes.c_double,
}
_ARGUMENTS = {
    "linear": "pppisssi",
    "linear_chunk": "pppisssi",
    "takes_codes": "iiisss",
    "linear_coded": "piipipipissssi",
    "takes_gemm": "iiissss",
    "gemm": "pipipipissssi",
    "decode": "piipipisssi",
    "attend": "ppppppiissssssssdi",
    "takes_chunk": "iis",
    "attend_chunk": "pppppppppiissssssssdi",
    "run_instructions": "ppspi",
    "run_steps": "ppsppi",
    "request_steps": "ps",
    "wait_steps": "ps",
    "takes_packing": "is",
    "pack": "ppppssssii",
    "round_columns": "pppppppssiii",
}
#: dtype of a quantised weight -> minimum group size, scales per group
_GROUPS = {
    torch_dtype(f.codes): (16 if f.block_values == 1 else max(32, f.block_values), f.scales)
    for f in FORMATS.values()
}


def load_kernels(library: Library | None = None, progress: Progress = no_progress) -> None:
    """Load a kernel library for the ops; default: that of this process's instruction set, once."""
    if _kernels and library is None:
        return
    loaded = _open_library(library or kernels(), progress)
    for name, arguments in _ARGUMENTS.items():
        kernel = loaded[f"g4ir_{name}"]
        kernel.restype, kernel.argtypes = ctypes.c_int, [_TYPES[a] for a in arguments]
        _kernels[name] = kernel


def kernel(name: str) -> Callable[..., int]:
    """Return a function of kernels/kernels.h; loads the library on first use."""
    load_kernels()
    return _kernels[name]


def _open_library(library: Library, progress: Progress) -> ctypes.CDLL:
    with library.opened(progress) as path:
        try:
            return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as e:
            fix = "set TMPDIR to a folder from which programs may run"
            raise MissingError(f"the CPU kernels cannot be loaded: {e}; {fix}") from None


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Return x [..., k] @ w[n, k]^T; sums are fp32, rounded once."""
    (n, k), dtype = w.shape, DTYPES.get(x.dtype, -1)
    rows = x.numel() // k
    if not (_kernels and rows and x.dtype in (torch.bfloat16, torch.float32)):
        return functional.linear(x, w)
    out, x = x.new_empty((*x.shape[:-1], n)), x.contiguous()
    failed = _kernels["linear"](
        *(w.data_ptr(), x.data_ptr(), out.data_ptr(), dtype), *(rows, n, k, torch.get_num_threads())
    )
    return _with_memory(failed, out, "the rows of a product {} in another form")


def linear_coded(x: Tensor, codes: Tensor, scales: Tensor, tiles: bool = False) -> Tensor:
    """Return x [..., k] @ w[n, k]^T for w = codes * scales; accumulates in fp32, rounds once.

    A few rows are multiplied with the exact weight: bf16 rows by integer dot products if the weight
    is tiled and the CPU has the instructions (kernels/digits.h). More rows use w rounded to x's
    dtype."""
    if not _has_kernel(x.dtype, codes, scales, x.numel() // x.shape[-1], x.shape[-1]):
        many = tiles and _takes_gemm(x, codes, scales, False)
        return _gemm(x, codes, scales, False) if many else _decoded_linear(x, codes, scales, tiles)
    return _coded(x, codes, scales, tiles, False)


def linear_rounded(x: Tensor, codes: Tensor, scales: Tensor, tiles: bool = False) -> Tensor:
    """Return `linear_coded` of fake_quantize(x, form=int8). If the weight is tiled and the CPU has
    the instructions, bf16 rows are multiplied as int8 (many rows: kernels/gemm_int8.h); otherwise
    the quantised rows are rounded to x's dtype first."""
    rows, k = x.numel() // x.shape[-1], x.shape[-1]
    if tiles and _has_kernel(x.dtype, codes, scales, rows, k, True):
        return _coded(x, codes, scales, tiles, True)
    if tiles and _takes_gemm(x, codes, scales, True):
        return _gemm(x, codes, scales, True)
    return linear_coded(fake_quantize_values(x, "int8"), codes, scales, tiles)


def _coded(x: Tensor, codes: Tensor, scales: Tensor, tiles: bool, rounded: bool) -> Tensor:
    (n, groups), k = scales.shape, x.shape[-1]
    out, x = x.new_empty((*x.shape[:-1], n)), x.contiguous()
    failed = _kernels["linear_coded"](
        *(
            codes.data_ptr(),
            FORMAT_IDS[codes.dtype],
            tiles,
            scales.data_ptr(),
            DTYPES[scales.dtype],
        ),
        *(x.data_ptr(), rounded, out.data_ptr(), DTYPES[x.dtype]),
        *(x.numel() // k, n, k, groups, torch.get_num_threads()),
    )
    return _with_memory(failed, out, "the rows of a product {} in another form")


def _takes_gemm(x: Tensor, codes: Tensor, scales: Tensor, rounded: bool) -> bool:
    """Whether kernels/gemm.h has a GEMM for this tiled weight."""
    if not _kernels or scales.dtype not in DTYPES:
        return False
    if not (codes.is_contiguous() and scales.is_contiguous()):
        return False
    k, format_id, dtype = x.shape[-1], FORMAT_IDS.get(codes.dtype, -1), DTYPES.get(x.dtype, -1)
    sizes = (x.numel() // k, *codes.shape[:1], k, scales.shape[-1])
    return bool(_kernels["takes_gemm"](format_id, rounded, dtype, *sizes))


def _gemm(x: Tensor, codes: Tensor, scales: Tensor, rounded: bool) -> Tensor:
    (n, groups), k = scales.shape, x.shape[-1]
    out, x = x.new_empty((*x.shape[:-1], n)), x.contiguous()
    failed = _kernels["gemm"](
        *(codes.data_ptr(), FORMAT_IDS[codes.dtype], scales.data_ptr(), DTYPES[scales.dtype]),
        *(x.data_ptr(), rounded, out.data_ptr(), DTYPES[x.dtype]),
        *(x.numel() // k, n, k, groups, torch.get_num_threads()),
    )
    return _with_memory(failed, out, "the rows of a product {} in another form")


def _with_memory(failed: int, out: Tensor, use: str) -> Tensor:
    """Return a kernel's output; MemoryError if it could not allocate scratch memory."""
    if failed:
        raise MemoryError(f"no memory for {use.format(list(out.shape))}")
    return out


def takes_width(codes: Tensor, scales: int) -> bool:
    """Whether the kernels take codes [.., k] with `scales` scales per row."""
    (min_group, per_group), k = _GROUPS[codes.dtype], values_per_row(codes)
    groups = scales // per_group
    return (
        scales % per_group == 0 and k % 32 == 0 and k % groups == 0 and k // groups % min_group == 0
    )


def run_instructions(
    instructions: Any, operands: Any, scratch: Tensor, threads: int, pace: Tensor | None = None
) -> None:
    """Run instructions of a step program (step_program.py) once; or with `pace` i64[3], run steps
    until those done (pace[1]) equal those requested (pace[0])."""
    arguments = [instructions.ctypes.data, operands.ctypes.data, len(instructions)]
    run = "run_instructions" if pace is None else "run_steps"
    arguments += [] if pace is None else [pace.data_ptr()]
    if failed := _kernels[run](*arguments, scratch.data_ptr(), threads):
        reason = "no memory for its products" if failed == 1 else "an instruction is unknown"
        raise (MemoryError if failed == 1 else RuntimeError)(f"a decode step ended: {reason}")


def request_steps(pace: Tensor, more: int) -> bool:
    """Request more steps of a running program; False if it has ended."""
    return bool(_kernels["request_steps"](pace.data_ptr(), more))


def wait_steps(pace: Tensor, steps: int) -> None:
    """Block until `steps` steps are done, or one failed."""
    _kernels["wait_steps"](pace.data_ptr(), steps)


def attend(
    q: Tensor,
    positions: Tensor,
    written: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """Compute the op `attention` for a few queries over the KV cache, without softcap; bf16 or
    fp32."""
    has_kernel = _kernels and keys.dtype in CACHE_DTYPES
    if not has_kernel or q.dtype not in (torch.bfloat16, torch.float32):
        inputs = (q, positions, written, keys, values)
        return _ATTENTION(*inputs, window=window, scale=scale, softcap=0.0)
    operands = [t.contiguous() for t in (q, positions, written, keys, values)]
    (b, s, heads, d), (slots, _, kv_heads, width) = q.shape, keys.shape
    out = torch.empty_like(operands[0])
    failed = _kernels["attend"](
        *(t.data_ptr() for t in (*operands, out)),
        *(DTYPES[q.dtype], CACHE_DTYPES[keys.dtype], b, s, heads, kv_heads, d, slots, width),
        *(window, scale, torch.get_num_threads()),
    )
    return _with_memory(failed, out, "the sums of an attention {}")


def attend_chunk(
    q: Tensor,
    positions: Tensor,
    last: Tensor,
    written: Tensor,
    rows: Sequence[Tensor],
    window: int,
    scale: float,
) -> Tensor:
    """Compute the op `attention` for a prefill chunk; queries attend up to position `last`. rows: K
    and V of the cache, then of the chunk."""
    keys, values, *fresh = rows
    pairs = (keys, values), fresh
    ids = DTYPES.get(q.dtype, -1), CACHE_DTYPES.get(keys.dtype, -1)
    if not _kernels or -1 in ids or not _kernels["takes_chunk"](*ids, q.shape[-1]):
        at = torch.cat((slot_positions(written, len(keys)), positions.t()))
        mask = visible(at, positions, window, last)[:, None, None]
        k, v = (
            dequantize_rows(torch.cat((old.transpose(0, 1), new), 1), q.dtype)
            for old, new in zip(*pairs, strict=True)
        )
        return attend_all(q, k, v, mask, scale)
    operands = [t.contiguous() for t in (q, positions, last, written, *pairs[0], *pairs[1])]
    (b, s, heads, d), (slots, _, kv_heads, width) = q.shape, keys.shape
    out = torch.empty_like(operands[0])
    failed = _kernels["attend_chunk"](
        *(t.data_ptr() for t in (*operands, out)),
        *(*ids, b, s, heads, kv_heads, d, slots, width, window, scale, torch.get_num_threads()),
    )
    return _with_memory(failed, out, "the packed keys of an attention {}")


def _has_kernel(
    dtype: torch.dtype, codes: Tensor, scales: Tensor, rows: int, k: int, rounded: bool = False
) -> bool:
    if not _kernels or scales.dtype not in DTYPES:
        return False
    if not (codes.is_contiguous() and scales.is_contiguous()):
        return False
    format_id, dtype_id = FORMAT_IDS.get(codes.dtype, -1), DTYPES.get(dtype, -1)
    return bool(_kernels["takes_codes"](format_id, rounded, dtype_id, rows, k, scales.shape[-1]))


def decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype, tiles: bool = False) -> Tensor:
    """Dequantise a weight to `dtype`."""
    n, groups = scales.shape
    k = values_per_row(codes)
    if not _has_kernel(dtype, codes, scales, 1, k):
        if tiles:
            codes, scales = from_tiles(codes), from_tiles(scales)
        return dequantize_codes(codes, scales, dtype)
    w = scales.new_empty((n, k), dtype=dtype)
    failed = _kernels["decode"](
        *(
            codes.data_ptr(),
            FORMAT_IDS[codes.dtype],
            tiles,
            scales.data_ptr(),
            DTYPES[scales.dtype],
        ),
        *(w.data_ptr(), DTYPES[dtype], n, k, groups, torch.get_num_threads()),
    )
    return _with_memory(failed, w, "the rows of a weight {}")


def _decoded_linear(x: Tensor, codes: Tensor, scales: Tensor, tiles: bool) -> Tensor:
    """Multiply with the weight dequantised block by block; a block is a number of tiles."""
    out = x.new_empty((*x.shape[:-1], codes.shape[0]))
    step = max(1, DENSE_BLOCK // x.shape[-1] // TILE) * TILE
    for at in range(0, codes.shape[0], step):
        part = slice(at, at + step)
        out[..., part] = linear(x, decoded(codes[part], scales[part], x.dtype, tiles))
    return out


def experts(
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    gate_up: Tensor,
    down: Tensor,
    act: str,
    first: Tensor | None = None,
) -> Tensor:
    """Compute the op `experts`: each routed expert once; weighted sum in fp32, in rank order."""

    def one(rows: Tensor, e: int) -> Tensor:
        gate, up = linear(rows, gate_up[e]).chunk(2, -1)
        return linear(activate(gate, act) * up, down[e])

    return _each_expert(x, weights, index, first, gate_up.shape[0], one)


def experts_coded(
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    act: str,
    gate_up_tiles: bool = False,
    down_tiles: bool = False,
    first: Tensor | None = None,
) -> Tensor:
    """Compute the op `experts` on quantised weights by `linear_coded`."""

    def one(rows: Tensor, e: int) -> Tensor:
        gate, up = linear_coded(rows, gate_up[e], gate_up_scales[e], gate_up_tiles).chunk(2, -1)
        return linear_coded(activate(gate, act) * up, down[e], down_scales[e], down_tiles)

    return _each_expert(x, weights, index, first, gate_up.shape[0], one)


def _each_expert(
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    first: Tensor | None,
    experts: int,
    one: Callable[[Tensor, int], Tensor],
) -> Tensor:
    # index `experts` marks experts of other ranks
    local = index if first is None else local_expert_index(index, first, experts)
    tokens, slots, scale = (t.flatten(0, -2) for t in (x, local, weights))
    out = upcast(tokens).new_zeros((*slots.shape, x.shape[-1]))
    for e in slots[slots < experts].unique().tolist():
        token, slot = torch.where(slots == e)
        out[token, slot] = upcast(one(tokens[token], e))
    return (out * scale[..., None]).sum(1).to(x.dtype).view_as(x)
