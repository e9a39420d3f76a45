"""The functions of the C kernels (kernels/kernels.h), by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from g4ir.errors import MissingError
from g4ir.ops.codecs import FORMATS, values_per_row
from g4ir.ops.types import torch_dtype
from g4ir.ui.progress import Progress, no_progress

from .isa import KERNEL_FORMATS
from .library import Library, kernels

Tensor = torch.Tensor

#: name -> function of kernels/kernels.h
_kernels: dict[str, Callable[..., int]] = {}
#: dtype of x and outputs (bf16 or fp32), or of scales -> its id in kernels/kernels.h
DTYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
#: dtype of a quantised weight -> id of its format in kernels/kernels.h
FORMAT_IDS = {torch_dtype(name): number for number, name in enumerate(KERNEL_FORMATS)}
#: dtype of a KV cache -> its id in kernels/kernels.h
CACHE_DTYPES = {**DTYPES, torch.int8: 3, torch.float8_e4m3fn: 4}
#: letter of an argument -> its ctypes type
_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "s": ctypes.c_int64,
    "i": ctypes.c_int,
    "d": ctypes.c_double,
}
#: C function, without its prefix `g4ir_` -> letters of its arguments; all return an int, except
#: `wait_steps`, which returns nothing
_ARGUMENTS = {
    "add_products": "ppisssi",
    "decode": "piipipisssi",
    "screened_rows": "i",
    "run_instructions": "ppspi",
    "run_steps": "ppsppi",
    "request_steps": "ps",
    "wait_steps": "ps",
    "takes_packing": "is",
    "pack": "ppppssssii",
    "fit_groups": "pppppssiii",
    "round_columns": "ppppppssiii",
}
#: dtype of a quantised weight -> minimum group size, scales per group
_GROUPS = {
    torch_dtype(f.codes): (16 if f.block_values == 1 else max(32, f.block_values), f.scales)
    for f in FORMATS.values()
}


def load_kernels(library: Library | None = None, progress: Progress = no_progress) -> None:
    """Load the kernel library of this process's instruction set, once; or `library`, which then
    replaces it."""
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
            fix = "if the file system of that file is mounted noexec, set TMPDIR to another"
            raise MissingError(f"the CPU kernels cannot be loaded: {e}; {fix}") from None


def takes_width(codes: Tensor, scales: int) -> bool:
    """Whether the kernels support a weight: rows of a multiple of 32 values, in groups that are a
    multiple of the format's minimum. `scales`: number of scales per row, minima included."""
    (min_group, per_group), k = _GROUPS[codes.dtype], values_per_row(codes)
    groups = scales // per_group
    return (
        scales % per_group == 0 and k % 32 == 0 and k % groups == 0 and k // groups % min_group == 0
    )


def run_instructions(
    instructions: Any, operands: Any, scratch: Tensor, threads: int, pace: Tensor | None = None
) -> None:
    """Run instructions of a step program (step_program.py) once; or with `pace` i64[3], run steps
    until as many are done (pace[1]) as are requested (pace[0]). MemoryError if memory runs out,
    RuntimeError for an unknown instruction or weight format."""
    arguments = [instructions.ctypes.data, operands.ctypes.data, len(instructions)]
    run = "run_instructions" if pace is None else "run_steps"
    arguments += [] if pace is None else [pace.data_ptr()]
    if failed := _kernels[run](*arguments, scratch.data_ptr(), threads):
        reason = "out of memory" if failed == 1 else "unknown instruction or weight format"
        raise (MemoryError if failed == 1 else RuntimeError)(f"a step program failed: {reason}")


def request_steps(pace: Tensor, more: int) -> bool:
    """Request `more` steps of a running program; False if it has ended and takes none."""
    return bool(_kernels["request_steps"](pace.data_ptr(), more))


def wait_steps(pace: Tensor, steps: int) -> None:
    """Block until `steps` steps are done in total, or one failed."""
    _kernels["wait_steps"](pace.data_ptr(), steps)
