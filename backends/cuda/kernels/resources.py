"""The resources that a started kernel needs of a Hopper GPU: compiled for it, on any machine.

Registers and spills are what ptxas says, shared memory what the compiler reserved.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.backends.nvidia.compiler import get_ptxas

from .assembly import compile_for
from .launch import Launch

#: bytes of shared memory that a block of sm_90 may use
SHARED_BYTES = 227 * 1024
_OPTIONS = ("num_warps", "num_stages")
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True)
class Resources:
    """The resources of one block of a kernel."""

    kernel: str
    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_cores: bool
    wide_loads: bool  # 16 bytes at a time, or copied to shared memory by the hardware


def resources(launch: Launch, capability: int = 90) -> Resources:
    """Compile a recorded launch. Its tensors may be fake; sizes must be numbers."""
    made = _compiled(launch, capability)
    ptx = made.asm["ptx"]
    registers, spills = assembled(ptx, capability)
    return Resources(
        launch[0].__name__,
        made.metadata.num_warps,
        registers,
        spills,
        made.metadata.shared,
        any(op in ptx for op in ("wgmma.mma_async", "mma.sync")),
        any(op in ptx for op in ("cp.async", ".v4.b32", ".v2.b64")),
    )


def _is_aligned(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.element_size() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _compiled(launch: Launch, capability: int) -> Any:
    kernel, _, args, meta = launch
    options = {k: meta[k] for k in _OPTIONS if k in meta}
    operands = dict(zip(kernel.arg_names, args))
    kinds = {name: _kind(value) for name, value in operands.items()}
    types = {name: kind for name, kind in kinds.items() if kind != "constexpr"}
    constants = {name: value for name, value in operands.items() if name not in types}
    return compile_for(
        kernel,
        types,
        constants | {k: v for k, v in meta.items() if k not in options},
        [name for name in types if _is_aligned(operands[name])],
        capability,
        options,
    )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if value is None or isinstance(value, bool) or value == 1:
        return "constexpr"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def assembled(ptx: str, capability: int, ptxas: Path | None = None) -> tuple[int, int]:
    """Return (registers of a thread, spilled bytes), by triton's assembler or another."""
    ptxas = ptxas or Path(get_ptxas(capability).path)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(ptxas), "-v", f"-arch=sm_{capability}a", str(path), "-o", f"{path}.o"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = next(line for line in said.splitlines() if "Used" in line)
    spilled = next(line for line in said.splitlines() if "spill stores" in line)
    return _before(used, " registers"), _before(spilled, " bytes spill stores")


def _before(line: str, what: str) -> int:
    return int(line.partition(what)[0].split()[-1])
