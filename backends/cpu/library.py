"""The CPU kernels, in parts that are compiled and kept apart -> a shared library of an engine."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from g4ir.backends.host_cpu import cpu_flags
from g4ir.backends.inductor.compile import without_space
from g4ir.backends.inductor.program_cache import from_cache, keep_program
from g4ir.backends.inductor.toolchain import cpp_compiler
from g4ir.errors import LowerError
from g4ir.ui.paths import claimed

from .isa import KERNEL_FORMS

#: what the CPU kernels are made of, and how: the parts of every engine, and the one of a format of
#: weights, compiled with `-DFORM=` and its name there
CPU_KERNELS = Path(__file__).with_name("kernels")
KERNEL_SOURCES, FORM_SOURCE = ("kernels.c", "step.c", "calls.c", "team.c"), "form.c"
#: what links them
KERNELS_FILE = "kernels.so"
KERNEL_FLAGS = (
    "-O3",
    "-march=native",
    "-pthread",
    "-w",
    "-Werror=implicit-function-declaration",
    "-fno-strict-aliasing",  # pairs of 16 bits are read as words
    "-fno-math-errno",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fPIC",
)
LINK_FLAGS = ("-shared", "-Wl,-Bsymbolic")  # other engines' kernels may be loaded
#: begins what stands for a part of the CPU kernels among the texts of programs, arguments of g++
KERNELS = "CPU kernels: "
#: the parts of the kernel that packs 4-bit weights, whose sums keep their order
PACKING = (
    f"{KERNELS}packing.c -ffp-contract=off -fno-associative-math -fsigned-zeros",
    f"{KERNELS}team.c",
)


def kernel_parts(dtypes: Iterable[str] = KERNEL_FORMS, rounded: bool = True) -> list[str]:
    """Return the parts of the CPU kernels, as texts, that an engine calls: dtypes of its params,
    and whether its products round rows; by default those of every engine."""
    source = f"{FORM_SOURCE} -DROUNDED" if rounded else FORM_SOURCE
    forms = [f"{source} -DFORM={KERNEL_FORMS[d]}" for d in KERNEL_FORMS if d in {*dtypes}]
    return [KERNELS + part for part in (*KERNEL_SOURCES, *forms)]


def is_part(text: str) -> bool:
    return text.startswith(KERNELS)


def compile_kernels(path: Path, parts: Sequence[str] | None = None) -> None:
    """Write the CPU kernels, and what programs call them by, as a shared library for this machine:
    of parts (default: all) that lie beside it, or are kept, or are compiled now (some twenty
    seconds for all)."""
    import torch

    texts = kernel_parts() if parts is None else parts
    files = {text: path.with_name(part_file(text)) for text in texts}
    for text, file in files.items():
        if not file.is_file():
            compile_part(text, file)
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu"]
    _compiler([*LINK_FLAGS, *map(str, files.values()), *libraries], path)
    for file in files.values():
        file.unlink()


def part_file(text: str) -> str:
    built_for = [platform.machine(), *cpu_flags(), *KERNEL_FLAGS, text]
    digest = hashlib.sha256("\0".join(built_for).encode())
    for file in sorted(CPU_KERNELS.glob("*.[ch]")):
        digest.update(file.read_bytes())
    return f"{digest.hexdigest()[:24]}.o"


def compile_part(text: str, path: Path) -> None:
    """Write a part of the CPU kernels as an object file: one that is kept, or compiled now."""
    with claimed(f"{path.name}.kernels", wait=True):
        if not from_cache(path.name, path.parent):
            source, *defined = text.removeprefix(KERNELS).split()
            words = [*KERNEL_FLAGS, *defined, "-c", "-x", "c", str(CPU_KERNELS / source)]
            _compiler(words, path)
            keep_program(path)


def _compiler(words: Sequence[str], path: Path) -> None:
    """Run the C++ compiler to write a file."""
    done = subprocess.run([cpp_compiler(), *words, "-o", path], capture_output=True, text=True)
    if done.returncode:
        raise without_space(RuntimeError(done.stderr), path) or LowerError(
            f"torch: the CPU kernels do not compile: {done.stderr[:800]}"
        )
