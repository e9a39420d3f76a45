"""Kernels compiled ahead of time to PTX whose parameters are a plugin's, and no others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from g4ir.errors import LowerError, MissingError

#: the settings of a build that needs no plugin
WITHOUT = "--set experts=all --set attention=explicit --set norms=layers"
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
    the first parameters; all others are `constants`.

    Tensors are taken to lie at multiples of 16 bytes, as TensorRT's do (of 256). MissingError
    without triton.
    """
    triton = require_triton()
    names = kernel.arg_names
    signature = dict(zip(names, kinds)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(kinds) if k.startswith("*")}
    source = triton.compiler.ASTSource(
        fn=kernel, signature=signature, constexprs=dict(constants), attrs=aligned
    )
    made = triton.compile(
        source,
        target=triton.backends.compiler.GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    return Kernel(
        made.metadata.name,
        trimmed(made.asm["ptx"], len(kinds)),
        made.metadata.num_warps,
        made.metadata.shared,
    )


def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    try:
        require_triton()
    except MissingError:
        return False
    return True


def require_triton() -> Any:
    """Return triton; MissingError where it is not installed."""
    try:
        import triton
        import triton.backends.compiler
    except ImportError as e:
        raise MissingError(
            f"plugins are compiled by triton, which cannot be imported ({e}): `pip install triton`,"
            f" or build without plugins: {WITHOUT}"
        ) from e
    return triton


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
            f"passes {count}: this version of triton is not supported, use the one of the extra "
            f"`test`"
        )
    rest = ptx[entry.end() :]
    used = [n for n in names[count:] if re.search(rf"\b{re.escape(n)}\b", rest)]
    if used:
        raise LowerError(
            f"kernel {entry['name']} needs memory of its own ({', '.join(used)}), which a plugin "
            f"does not get: choose other settings for it, or build without plugins"
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
