"""What torch's compiler does for every program for the CPU, and need not."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from g4ir.backends.inductor.compile import compiling, options_of, program_name, replaced
from g4ir.backends.inductor.target import Target
from g4ir.ui.paths import claimed, search_path, variable

from . import pyops

#: least elements of a loop per OpenMP thread, in programs of static shape. Loops between the
#: products of a decode step are far shorter: they run on the calling thread, and OpenMP's threads
#: do not compete for the cores with the pool of the kernels (team.c)
LEAST_OF_A_THREAD = 1 << 15
#: the dim of a chunk's length, in a segment's text
SEQUENCE_DIM = re.compile(r"[\[,]S[,\]]")
#: the part of `precompile` that wrappers need
WRAPPER = "wrapper"
#: stands among the texts of programs for what all programs for the CPU share, in two parts
SHARED = "of all programs: "
SHARED_PARTS = (SHARED + WRAPPER, SHARED + "kernels")
#: the method of torch's that writes the interface, and what a program needs of it
METHOD = "_write_aoti_interface_header"
DECLARED = """
#include <torch/csrc/inductor/aoti_runtime/interface.h>
#include <torch/csrc/inductor/aoti_runtime/model.h>
"""


def program_options(text: str) -> dict[str, Any]:
    """Return options of torch's compiler for a program for the CPU."""
    options: dict[str, Any] = {"aot_inductor.custom_ops_to_c_shims": pyops.CALLS}
    if not SEQUENCE_DIM.search(text):
        options["cpp.min_chunk_size"] = LEAST_OF_A_THREAD
    return options


def compile_shared(part: str, target: Target) -> None:
    """Precompile one of SHARED_PARTS into the compiler's cache."""
    with compiling() as folder:
        options = options_of("", target)
        precompile(part.removeprefix(SHARED), folder, options, program_name("", target))


@contextmanager
def interface_apart(
    folder: Path, options: dict[str, Any], made_of: str
) -> Iterator[dict[str, Any]]:
    """A context in which torch compiles programs for the CPU without the interface by which it
    loads and calls them: two thirds of a program's compile time, and the same in all. Yields its
    `options`, and that it links them with its object file, which is kept in `folder` by a hash of
    its command and of what else its code follows from, `made_of`. A torch that writes the interface
    in another way goes without."""
    from torch._inductor.codegen import cpp_wrapper_cpu

    writer = cpp_wrapper_cpu.CppWrapperCpu
    if METHOD not in vars(writer):
        yield options
        return
    interface = _Interface(folder, options, made_of)

    def declared(self: Any) -> None:
        interface.compile()  # not before: another process may be at it
        self.header.splice(DECLARED)

    path = variable("LIBRARY_PATH", search_path(folder, "LIBRARY_PATH"))
    with path, replaced(writer, METHOD, declared):
        yield interface.options


def precompile(part: str, folder: Path, options: dict[str, Any], made_of: str) -> None:
    """Do what is the same for every program for the CPU, as its compilation does otherwise, one
    after the other: precompile torch's header of its kernels, or that of its WRAPPER, with which
    the interface is compiled. A torch that does it in another way goes without."""
    from torch._inductor import config

    interface = _Interface(folder, options, made_of)
    if part == WRAPPER:
        interface.compile()
        return
    with config.patch(interface.options):
        _precompiled(wrapper=False)


def _precompiled(wrapper: bool) -> str | None:
    """Return torch's precompiled header of wrappers, or of kernels, made unless it is there: as
    AotCodeCompiler does, so that it finds it. None from a torch that does it in another way."""
    from torch._inductor import codecache, config, cpp_builder, cpu_vec_isa

    names = {"_precompile_header", "_get_cpp_wrapper_header", "_get_cpp_prefix_header"}
    if not (config.aot_inductor.precompile_headers and names <= vars(codecache).keys()):
        return None

    same: dict[str, Any] = {"aot_mode": True, "device_type": "cpu"}
    same["vec_isa"] = cpu_vec_isa.pick_vec_isa()
    command = cpp_builder.CppBuilder("o", "i", cpp_builder.CppTorchDeviceOptions(**same))
    more = ("use_mmap_weights", "use_mmap_weights_external", "use_relative_path")
    same |= dict.fromkeys(more, False) | ({"min_optimize": True} if wrapper else {})
    header = (
        codecache._get_cpp_wrapper_header("cpu", aot_mode=True)
        if wrapper
        else codecache._get_cpp_prefix_header("cpu")
    )
    made = codecache._precompile_header(header, repr(command.get_command_line()), **same)
    return str(made)


class _Interface:
    """The object file of the interface in a folder; `options`: those of programs that are linked
    with it."""

    def __init__(self, folder: Path, options: dict[str, Any], made_of: str) -> None:
        from torch._inductor import config
        from torch._inductor.codegen import cpp_wrapper_cpu

        text = Path(cpp_wrapper_cpu.__file__).with_name("aoti_runtime") / "interface.cpp"
        source = f"#include <torch/csrc/inductor/aoti_include/cpu.h>\n{text.read_text()}"
        with config.patch(options):
            command = self._builder("").get_command_line()
        key = hashlib.sha256(f"{made_of}\0{source}\0{command}".encode()).hexdigest()[:24]
        self._source, self._path = source, folder / f"interface-{key}.o"
        self.options = {**options, "aot_inductor.custom_op_libs": [f":{self._path.name}"]}

    @staticmethod
    def _builder(output: str, header: str | None = None) -> Any:
        from torch._inductor import cpp_builder, cpu_vec_isa

        options = cpp_builder.CppTorchDeviceOptions(
            vec_isa=cpu_vec_isa.pick_vec_isa(),
            device_type="cpu",
            aot_mode=True,
            compile_only=True,
            min_optimize=True,
        )
        options.precompiled_header = header
        sources = str(Path(output) / "interface.cpp")
        return cpp_builder.CppBuilder("interface", sources, options, output)

    def compile(self) -> None:
        """Compile it unless it is there."""
        from torch._inductor import config

        with claimed("interface", wait=True), config.patch(self.options):
            if self._path.is_file():
                return
            made = self._path.parent / "interface"
            shutil.rmtree(made, ignore_errors=True)  # a killed build left it
            made.mkdir(parents=True)
            (made / "interface.cpp").write_text(self._source)
            self._builder(str(made), _precompiled(wrapper=True)).build()
            (made / "interface.o").replace(self._path)
            shutil.rmtree(made)
