"""Kernels compiled ahead of time to PTX whose parameters are a plugin's, and no others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from g4ir.errors import LowerError

from ...torch_compile.kernels.assembly import compile_for

#: the settings of a build that needs no plugin
WITHOUT = "--set experts=all --set attention=explicit --set norms=layers"
#: of the PTX, times ten. The driver of a GPU compiles it: CUDA 12.8 and newer read this version,
#: while triton by itself writes the newest that its own assembler reads (9.4 in triton 3.9)
PTX_VERSION = 87
_ENTRY = re.compile(r"\.visible \.entry (?P<name>[\w$]+)\(\n(?P<params>.*?)\n\)", re.DOTALL)
_PARAM = re.compile(r"\.param \.(?P<type>\w+)(?P<pointer> \.ptr[ .\w]*?)? (?P<name>[\w$]+)$")
#: where the source lies and which line made an instruction: nothing that a plan should hold
_DEBUG = re.compile(
    r"^\t\.(?:loc|file)\t.*\n|^\t\.section\t\.debug_\w+\n\t\{\n(?:.*\n)*?\t\}\n"
    r"|^\t\.section\t\.debug_\w+\t\{\t\}\n",
    re.M,
)


@dataclass(frozen=True)
class Kernel:
    """A kernel as a plan keeps it; shared: bytes that a block of `warps` needs."""

    name: str
    ptx: str
    warps: int
    shared: int


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel's entry: `u64` and the like, and whether it was declared a
    pointer."""

    name: str
    type: str
    pointer: bool


def compile_kernel(
    kernel: Any,
    kinds: Sequence[str],
    constants: Mapping[str, Any],
    warps: int,
    stages: int,
    capability: int,
) -> Kernel:
    """Compile a kernel for a GPU that need not be there. `kinds` are Triton's names of the types of
    the first parameters; others are `constants` or have defaults.

    Tensors are taken to lie at multiples of 16 bytes, as TensorRT's do (of 256). Errors are those
    of `compile_for`.
    """
    types = dict(zip(kernel.arg_names, kinds))
    aligned = [name for name, kind in types.items() if kind.startswith("*")]
    options = {"num_warps": warps, "num_stages": stages, "ptx_version": PTX_VERSION}
    made = compile_for(kernel, types, constants, aligned, capability, options)
    return Kernel(
        made.metadata.name,
        trimmed(made.asm["ptx"], len(kinds)),
        made.metadata.num_warps,
        made.metadata.shared,
    )


def trimmed(ptx: str, count: int) -> str:
    """Return PTX whose entry has its first `count` parameters only, and without debug information.

    Triton adds pointers to scratch memory at the end, which TensorRT knows nothing of. LowerError
    where the kernel uses them, or where it has too few parameters.
    """
    entry = _entry(ptx)
    lines = entry["params"].split(",\n")
    names = [p.name for p in parameters(ptx)]
    if len(names) < count:
        raise LowerError(
            f"kernel {entry['name']} was compiled to {len(names)} parameters, of which a plugin "
            f"passes {count}: this version of triton is not supported"
        )
    rest = ptx[entry.end() :]
    used = [n for n in names[count:] if re.search(rf"\b{re.escape(n)}\b", rest)]
    if used:
        raise LowerError(
            f"kernel {entry['name']} needs memory of its own ({', '.join(used)}), which a plugin "
            f"does not get"
        )
    head = f".visible .entry {entry['name']}(\n{','.join(lines[:count])}\n)"
    head = head.replace(",\t", ",\n\t")
    return _DEBUG.sub("", ptx[: entry.start()] + head + rest)


def parameters(ptx: str) -> list[Parameter]:
    """Return the parameters of the only entry, in order."""
    found = []
    for line in _entry(ptx)["params"].split(",\n"):
        match = _PARAM.match(line.strip())
        if match is None:
            raise LowerError(f"PTX with a parameter of a form that is not known: {line.strip()!r}")
        found.append(Parameter(match["name"], match["type"], bool(match["pointer"])))
    return found


def _entry(ptx: str) -> re.Match[str]:
    entries = list(_ENTRY.finditer(ptx))
    if len(entries) != 1:
        raise LowerError(f"PTX with {len(entries)} entries, where one kernel was compiled")
    return entries[0]
