"""The resources that a started kernel needs of a Hopper GPU: compiled for it, on any machine.

Spills are what ptxas says, shared memory what the compiler reserved.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from g4ir.backends.cuda.kernels.launch import Launch

CAPABILITY = 90
#: bytes of shared memory that a block of sm_90 may use
SHARED_BYTES = 227 * 1024
#: of others
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: SHARED_BYTES, 120: 99 * 1024}
OPTIONS = ("num_warps", "num_stages")
POINTERS = {
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
    spill_bytes: int
    shared_bytes: int
    tensor_cores: bool
    wide_loads: bool  # 16 bytes at a time, or copied to shared memory by the hardware


def resources(launch: Launch, capability: int = CAPABILITY) -> Resources:
    """Compile a recorded launch. Its tensors may be fake; sizes must be numbers."""
    kernel, _, operands, meta = launch
    kinds = {name: kind(value) for name, value in operands.items()}
    types = {name: k for name, k in kinds.items() if k != "constexpr"}
    names = kernel.arg_names
    aligned = [n for n in types if is_aligned(operands[n])]
    source = ASTSource(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={n: v for n, v in (operands | meta).items() if n in {*names} - {*types}},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {k: meta[k] for k in OPTIONS if k in meta}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    return Resources(
        kernel.__name__,
        spilled_bytes(ptx, capability),
        made.metadata.shared,
        any(op in ptx for op in ("wgmma.mma_async", "mma.sync")),
        any(op in ptx for op in ("cp.async", ".v4.b32", ".v2.b64")),
    )


def is_aligned(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.element_size() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if value is None or isinstance(value, bool) or value == 1:
        return "constexpr"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def spilled_bytes(ptx: str, capability: int) -> int:
    """Bytes of registers that a thread spills."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        assembler = get_ptxas(capability).path
        arch = f"-arch=sm_{capability}{'a' * (capability >= 90)}"
        command = [assembler, "-v", arch, str(path), "-o", f"{path}.o"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    return int(spilled)
