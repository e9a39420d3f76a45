"""CPU instruction sets: detects this process's, and restricts libraries to it.

`G4IR_ISA=NAME` restricts a process to an instruction set below its CPU's best, in the kernels and
in libraries.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from g4ir.errors import InputError, MissingError

#: environment variable that restricts a process to an instruction set
ISA = "G4IR_ISA"
#: other names of an architecture -> ours
MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}
#: environment variables that restrict torch, oneDNN, MKL and torch's compiler to an instruction set
CAPS = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"),
    *("MKL_ENABLE_INSTRUCTIONS", "TORCHINDUCTOR_CPP_MARCH"),
)


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set for which the CPU kernels are compiled. `march` and `options`: flags of
    the C compiler; `flags`: required CPU extensions by their names in /proc/cpuinfo; `caps`: values
    of CAPS except the last, which is `march`."""

    name: str
    machine: str
    march: str
    options: tuple[str, ...]
    flags: frozenset[str]
    caps: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        return (f"-march={self.march}", *self.options)


_V2 = frozenset({"ssse3", "sse4_2"})
_V3 = _V2 | {"avx2", "fma", "f16c", "bmi2"}
_AVX_VNNI = _V3 | {"avx_vnni"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16", "avx512vbmi"}
_AMX = _BF16 | {"amx_tile", "amx_int8", "amx_bf16"}
_DOTPROD = frozenset({"asimd", "asimddp"})
_BF16_OPTIONS = ("-mavx512vnni", "-mavx512bf16", "-mavx512vbmi")
_AMX_OPTIONS = (*_BF16_OPTIONS, "-mamx-tile", "-mamx-int8", "-mamx-bf16")
_Set, _X86, _ARM = InstructionSet, "x86_64", "aarch64"


def _avx512(
    name: str, flags: frozenset[str], options: tuple[str, ...], of_onednn: str
) -> InstructionSet:
    caps = ("avx512", f"AVX512_CORE{of_onednn}", "AVX512")
    return _Set(name, _X86, "x86-64-v4", options, flags, caps)


#: per architecture, best first
SETS = (
    _avx512("amx", _AMX, _AMX_OPTIONS, "_AMX"),
    _avx512("avx512_bf16", _BF16, _BF16_OPTIONS, "_BF16"),
    _avx512("avx512_vnni", _VNNI, ("-mavx512vnni",), "_VNNI"),
    _avx512("avx512", _V4, (), ""),
    _Set("avx_vnni", _X86, "x86-64-v3", ("-mavxvnni",), _AVX_VNNI, ("avx2", "AVX2_VNNI", "AVX2")),
    _Set("avx2", _X86, "x86-64-v3", (), _V3, ("avx2", "AVX2", "AVX2")),
    _Set("v2", _X86, "x86-64-v2", (), _V2, ("default", "SSE41", "SSE4_2")),
    _Set("i8mm", _ARM, "armv8.2-a+dotprod+i8mm+bf16", (), _DOTPROD | {"i8mm", "bf16"}),
    _Set("dotprod", _ARM, "armv8.2-a+dotprod", (), _DOTPROD),
    _Set("neon", _ARM, "armv8-a", (), frozenset({"asimd"})),
)


def instruction_set() -> InstructionSet:
    """Return the instruction set of this process. InputError if `G4IR_ISA` names none that this CPU
    has; MissingError if there is none for this CPU."""
    return select_set(architecture(), _all_flags(), os.environ.get(ISA, ""))


def architecture() -> str:
    return MACHINES.get(platform.machine(), platform.machine())


@cache
def select_set(machine: str, flags: Collection[str], name: str = "") -> InstructionSet:
    """Return the best instruction set of a CPU with these flags, or the one with this name. Raises
    as `instruction_set`."""
    usable = [s for s in SETS if s.machine == machine and s.flags <= {*flags}]
    if not usable:
        raise MissingError(
            f"the CPU kernels are compiled for {', '.join(s.name for s in SETS)}, none of which "
            f"was detected on this {machine} CPU: use --backend reference"
        )
    for s in usable:
        if s.name == (name or s.name):
            return s
    lacking = next((s.flags - {*flags} for s in SETS if s.name == name), None)
    why = (
        f"this CPU lacks {', '.join(sorted(lacking))}" if lacking else "there is none of this name"
    )
    choices = ", ".join(s.name for s in usable)
    raise InputError(f"{ISA}={name[:40]}: {why}; instruction sets of this CPU: {choices}")


def cpu_flags() -> tuple[str, ...]:
    """Return the vector extensions that this process uses, by their names in /proc/cpuinfo, sorted:
    those of the CPU, limited to the instruction set of `G4IR_ISA` if that is set."""
    flags = _all_flags()
    if not os.environ.get(ISA):
        return flags
    return tuple(f for f in flags if f in instruction_set().flags)


@cache
def _all_flags() -> tuple[str, ...]:
    systems = {"linux": _flags_of_linux, "darwin": _flags_of_macos, "win32": _flags_of_windows}
    kinds = ("avx", "amx", "fma", "f16c", "bmi", "ssse3", "sse4_2", "sve", "asimd", "bf16", "fp16")
    flags = systems[sys.platform]() if sys.platform in systems else ()
    return tuple(sorted(f for f in flags if f.startswith((*kinds, "i8mm"))))


def _flags_of_linux() -> Iterable[str]:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    line = next((x for x in text.splitlines() if x.startswith(("flags", "Features"))), "")
    flags = line.partition(":")[2].split()
    if "amx_tile" in flags and not _permits_amx():
        return [f for f in flags if not f.startswith("amx")]
    return flags


def _permits_amx() -> bool:
    """Request permission from Linux to use AMX registers; return whether it was granted."""
    arch_prctl, request, registers = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    return ctypes.CDLL(None).syscall(arch_prctl, request, registers) == 0


def _flags_of_macos() -> Iterable[str]:
    """CPU flags of Apple's processors, by Linux names; empty if the system does not report them."""
    try:
        output = subprocess.check_output(["/usr/sbin/sysctl", "hw.optional"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    lines = re.findall(r"^hw\.optional\.arm\.(\w+): 1$", output, re.MULTILINE)
    names = {"FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16"}
    return ("asimd", *(names[n] for n in lines if n in names))


def _flags_of_windows() -> Iterable[str]:
    """CPU flags from torch, by Linux names; without AMX, which needs a request to Windows."""
    import torch

    # torch 2.11 may lack get_capabilities
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    flags = (n for n, has in capabilities.items() if has is True and not n.startswith("amx"))
    flags = (re.sub("^avx512_(?=(f|bw|cd|dq|vl|vbmi)$)", "avx512", n) for n in flags)
    return (re.sub("^fma3$", "fma", n) for n in flags)


def hold_libraries(environ: MutableMapping[str, str]) -> None:
    """Set the variables CAPS for the x86 instruction set that `G4IR_ISA` names, before torch is
    loaded. Variables that the user has set stay."""
    for s in SETS:
        if s.name == environ.get(ISA):
            for variable, value in zip(CAPS, (*s.caps, s.march) if s.caps else ()):
                environ.setdefault(variable, value)
