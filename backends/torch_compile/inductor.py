"""What torch's compiler does for every program for the CPU, and need not."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from g4ir.ui.paths import claimed, search_path, variable

from .target import cpu_flags

#: the method of torch's that writes the interface, and what a program needs of it
METHOD = "_write_aoti_interface_header"
DECLARED = """
#include <torch/csrc/inductor/aoti_runtime/interface.h>
#include <torch/csrc/inductor/aoti_runtime/model.h>
"""


@contextmanager
def _replaced(owner: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def without_probes() -> Iterator[None]:
    """A context in which torch takes it that the compiler knows the instructions of this CPU, as
    those of C++20 do: it would compile programs to see, for up to 8 seconds."""
    from torch._inductor.cpu_vec_isa import VecISA

    known = "avx2" in cpu_flags()
    with _replaced(VecISA, "check_build", lambda *_: True) if known else nullcontext():
        yield


@contextmanager
def interface_apart(
    folder: Path, options: dict[str, Any], made_of: str
) -> Iterator[dict[str, Any]]:
    """A context in which torch compiles programs for the CPU without the interface by which it
    loads and calls them: two thirds of a program's compile time, and the same in all. Yields its
    `options`, and that it links them with its object file, which is kept in `folder` by a hash of
    its command and of what else its code follows from, `made_of`. A torch that writes the interface
    in another way goes without."""
    from torch._inductor import config
    from torch._inductor.codegen import cpp_wrapper_cpu

    writer = cpp_wrapper_cpu.CppWrapperCpu
    if METHOD not in vars(writer):
        yield options
        return
    text = Path(cpp_wrapper_cpu.__file__).with_name("aoti_runtime") / "interface.cpp"
    with config.patch(options):
        found = _object(text.read_text(), folder, made_of)
    path = variable("LIBRARY_PATH", search_path(folder, "LIBRARY_PATH"))
    with path, _replaced(writer, METHOD, lambda self: self.header.splice(DECLARED)):
        yield {**options, "aot_inductor.custom_op_libs": [f":{found}"]}


def _object(text: str, folder: Path, made_of: str) -> str:
    """Return the name of the object file of the interface, compiled unless it is there."""
    from torch._inductor import cpp_builder, cpu_vec_isa

    source = f"#include <torch/csrc/inductor/aoti_include/cpu.h>\n{text}"
    options = cpp_builder.CppTorchDeviceOptions(
        vec_isa=cpu_vec_isa.pick_vec_isa(),
        device_type="cpu",
        aot_mode=True,
        compile_only=True,
        min_optimize=True,
    )

    def builder(output: str) -> cpp_builder.CppBuilder:
        sources = str(Path(output) / "interface.cpp")
        return cpp_builder.CppBuilder("interface", sources, options, output)

    key = f"{made_of}\0{source}\0{builder('').get_command_line()}"
    name = f"interface-{hashlib.sha256(key.encode()).hexdigest()[:24]}.o"
    with claimed("interface", wait=True):
        if not (folder / name).is_file():
            made = folder / "interface"
            shutil.rmtree(made, ignore_errors=True)  # a killed build left it
            made.mkdir(parents=True)
            (made / "interface.cpp").write_text(source)
            builder(str(made)).build()
            (made / "interface.o").replace(folder / name)
            shutil.rmtree(made)
    return name
