"""The CPU kernels as shared libraries, one per instruction set: prebuilt in the package (`make
wheels`), or compiled at first use into the user's cache."""

from __future__ import annotations

import hashlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from g4ir.backends.inductor.compile import without_space
from g4ir.backends.inductor.program_cache import cache_dir, from_cache, keep_program
from g4ir.errors import LowerError, MissingError
from g4ir.ui.paths import PREFIX, claimed, setting, unpacking
from g4ir.ui.processor import InstructionSet, instruction_set
from g4ir.ui.progress import Progress, no_progress
from g4ir.ui.threads import usable_cores

from .isa import KERNEL_FORMATS

SOURCES = Path(__file__).with_name("kernels")
#: folder of the prebuilt libraries of a wheel
READY = Path(__file__).with_name("ready")
KERNEL_FLAGS = (
    "-O3",
    "-D_GNU_SOURCE",
    "-pthread",
    "-w",
    "-Werror=implicit-function-declaration",
    "-fno-strict-aliasing",  # pairs of 16-bit values are read as 32-bit words
    "-fno-math-errno",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fPIC",
)
#: sys.platform -> suffix of a shared library, linker flags, libraries
LINKING: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    # several libraries may be loaded: -Bsymbolic binds symbols within each
    "linux": (".so", ("-shared", "-s", "-pthread", "-Wl,-Bsymbolic"), ("-lm",)),
    "darwin": (".dylib", ("-dynamiclib",), ()),
    "win32": (".dll", ("-shared", "-s"), ("-lapi-ms-win-core-synch-l1-2-0",)),
}
_FORMAT_FLAGS = [f"-DFORM={flag}" for flag in KERNEL_FORMATS.values()]
#: source and options of each object file, slowest to compile first
OBJECTS = (
    ("kernels.c",),
    ("step.c",),
    ("panels.c",),
    *(("form.c", flag) for flag in _FORMAT_FLAGS),
    *(("panels.c", flag) for flag in _FORMAT_FLAGS),
    # packing must keep the order of its sums: no fast-math
    ("packing.c", "-ffp-contract=off", "-fno-associative-math", "-fsigned-zeros"),
    ("team.c",),
)
#: additional objects for instruction sets with AVX512-BF16
OF_BF16 = tuple((*o, "-DPANELS_BF16") for o in OBJECTS if o[0] == "panels.c")
#: compilers in order of preference, unless CC or CXX names one
COMPILERS = ("gcc", "cc", "clang", "g++")


@dataclass(frozen=True)
class Library:
    """A shared library of C sources: (source, options) of each object, and options for all.
    `system`: `sys.platform` of the target; if LINKING lacks it, it is linked as on Linux."""

    name: str
    objects: tuple[tuple[str, ...], ...]
    options: tuple[str, ...] = ()
    system: str = sys.platform

    @property
    def linking(self) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        return LINKING.get(self.system, LINKING["linux"])

    @cached_property
    def file(self) -> str:
        """File name, with a hash of sources, flags and options."""
        digest = hashlib.sha256(repr((self, KERNEL_FLAGS, self.linking)).encode())
        for file in sorted(SOURCES.glob("*.[ch]")):
            digest.update(file.read_bytes())
        return f"{self.name}-{digest.hexdigest()[:16]}{self.linking[0]}"

    def check(self) -> None:
        """Raise MissingError if the library is neither prebuilt nor cached and there is no
        compiler."""
        if not any((folder / self.file).is_file() for folder in (READY, cache_dir())):
            self.compiler()

    def compiler(self) -> list[str]:
        """Return the command of the C compiler; MissingError if there is none."""
        named = setting("CC") or setting("CXX")
        for command in map(shlex.split, [named] if named else COMPILERS):
            if command and shutil.which(command[0]):
                return command
        raise MissingError(
            f"the CPU kernels need a C compiler: {READY} has no {self.file}, and no compiler is "
            f"found ({named or ', '.join(COMPILERS)}): install a wheel of g4ir for this machine or "
            f"a compiler, for example with `apt-get install g++`; CC or CXX, if set, must name it"
        )

    @contextmanager
    def opened(self, progress: Progress = no_progress) -> Iterator[Path]:
        """Context with the path of the library: prebuilt, cached, or compiled now (MissingError
        without a compiler, LowerError if it fails)."""
        if (ready := READY / self.file).is_file():
            yield ready
            return
        with unpacking() as folder, folder:
            path = Path(folder.name, self.file)
            if not from_cache(self.file, path.parent):
                with claimed(self.file, wait=True):
                    if not from_cache(self.file, path.parent):
                        progress("compiling the CPU kernels, which takes about a minute")
                        self.compile(path)
                        keep_program(path)
            yield path

    def compile(self, path: Path) -> None:
        """Compile the objects in parallel and link the library at `path`."""
        compiler = self.compiler()
        command = [*compiler, *KERNEL_FLAGS, *self.options]
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            # A precompiled header saves a tenth of the time; a compiler that rejects it parses the
            # header.
            header = [*command, "-x", "c-header", str(SOURCES / "common.h")]
            subprocess.run([*header, "-o", Path(folder, "common.h.gch")], capture_output=True)
            common = ("-I", folder, "-I", str(SOURCES), "-include", "common.h")

            def compiled(i: int) -> str:
                source, *options = self.objects[i]
                options += common if source in ("form.c", "panels.c") else ()
                words = [*command, *options, "-c", "-x", "c", str(SOURCES / source)]
                return _run(words, Path(folder, f"{i}.o"))

            with ThreadPoolExecutor(usable_cores()) as pool:
                objects = list(pool.map(compiled, range(len(self.objects))))
            _, flags, libraries = self.linking
            _run([*compiler, *flags, *objects, *libraries], path)


def kernels(isa: InstructionSet | None = None, system: str = sys.platform) -> Library:
    """Return the kernel library of an instruction set; default: that of this process."""
    isa = isa or instruction_set()
    objects = OBJECTS + OF_BF16 if "avx512_bf16" in isa.flags else OBJECTS
    return Library(f"kernels-{isa.name}", objects, isa.words, system=system)


def _run(words: Sequence[str], path: Path) -> str:
    """Run the compiler command `words` to write the file `path`; return the path. LowerError if it
    fails, with advice if a disk is full."""
    done = subprocess.run([*words, "-o", path], capture_output=True, text=True)
    if done.returncode:
        within = Path(tempfile.gettempdir(), path.name)
        raise without_space(RuntimeError(done.stderr), within) or LowerError(
            f"torch: the CPU kernels do not compile: {done.stderr[:800]}"
        )
    return str(path)
