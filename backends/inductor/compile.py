"""A segment's text -> an ahead-of-time Inductor package.

Packages are cached under a hash of the text, the target, the versions of torch and triton, the
instruction set, our sources and WRAPPER_LEVEL (`program_name`, program_cache.py).
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from g4ir.errors import EngineError, LowerError
from g4ir.ir.text import parse_graph
from g4ir.ops.types import torch
from g4ir.ui.files import write_file
from g4ir.ui.paths import keep_inductor_private, setting
from g4ir.weights.tensorfile import open_regular

from .device import Compiler, find_compiler
from .target import Target

#: files of this folder that compiled programs depend on, in addition to the ops
SOURCES = ("attention.py", "cache_write.py", "compile.py", "lower.py", "lowered.py")
#: messages of a full disk
FULL = ("No space left on device", "Disk quota exceeded")
#: sizes at which programs are traced; each named dim is dynamic from 1 up
_TRACE = {"B": 2, "S": 4, "M": 3, "C": 16}
#: Round where eager mode rounds; one compile thread per worker process; float scalars of kernels
#: are fp32, as in a direct launch (with fp64 no kernel compiles). Torch raises on unknown names.
INDUCTOR = {
    "emulate_precision_casts": True,
    "compile_threads": 1,
    # torch would cache precompiled headers, on which programs depend, in a folder of its choice
    "aot_inductor.precompile_headers": False,
    "_use_fp64_for_unbacked_floats": False,
}
#: torch's environment variable: optimisation level of wrappers (default: O1)
WRAPPER_LEVEL = "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"
#: options that are turned off: only external profilers and debuggers read line tables and frame
#: pointers, which make up more than half of a program's bytes
NO_TABLES = ("aot_inductor.enable_line_tables", "aot_inductor.enable_frame_pointer")


def program_name(text: str, target: Target) -> str:
    """Return the file name of a compiled program, without its suffix: 24 hex digits of the hash."""
    device = find_compiler(target.device)
    parts = [text, str(target), torch.__version__, device.machine(), _sources(device)]
    parts += [setting(WRAPPER_LEVEL), *device.versions()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _sources(device: Compiler) -> str:
    """Return a hash of the sources that compiled programs depend on: of this package, the device
    and the ops."""
    package = Path(__file__).resolve().parent
    ops = Path(__import__("g4ir.ops").ops.__file__).resolve().parent
    files = [*(package / name for name in SOURCES), *device.sources()]
    digest = hashlib.sha256()
    for path in [*files, *sorted(ops.glob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_program(text: str, target: Target, path: Path) -> None:
    """Compile one segment and write its package to `path`. LowerError if it does not compile."""
    try:
        with _compiling():
            _compile(text, target, path)
    except Exception as e:
        raise without_space(e, path) or LowerError(
            f"torch: a segment does not compile: {type(e).__name__}: {str(e)[:800]}\n"
            f"it ends with: {first_node(text)}"
        ) from None


@contextmanager
def _compiling() -> Iterator[None]:
    """Context for torch's compiler: private cache folder, no warnings, no gradients, RuntimeError
    as in `_kernels_understood`."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    keep_inductor_private(default_cache_dir())
    with _quiet_compiler(), torch.no_grad(), _kernels_understood():
        yield


def without_space(error: Exception, path: Path) -> LowerError | None:
    """Return a LowerError with advice if an error (ours or a compiler's) means that a disk is full;
    else None."""
    if not any(words in str(error) for words in FULL):
        return None
    from torch._inductor.runtime.cache_dir_utils import cache_dir as compiler_dir

    advice = {
        path.parent: "choose another --out",
        Path(compiler_dir()): "set TORCHINDUCTOR_CACHE_DIR to another folder",
        Path(tempfile.gettempdir()): "set TMPDIR to another folder",
    }
    folder = min(advice, key=lambda p: shutil.disk_usage(p).free)
    return LowerError(
        f"torch: a disk or quota is full, most likely that of {folder}; make room, or "
        f"{advice[folder]}"
    )


@contextmanager
def _kernels_understood() -> Iterator[None]:
    """Context that raises RuntimeError at its end if torch could not determine which operands a
    kernel writes: torch logs that and copies all operands, caches included."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("torch._dynamo")
    before = log.level, log.propagate
    log.setLevel(logging.WARNING)
    log.propagate = False  # not on the user's terminal
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before[1]
        log.setLevel(before[0])
    if any("every input is mutated" in message for message in messages):
        raise RuntimeError("torch cannot tell which operands a kernel writes")


def _compile(text: str, target: Target, path: Path) -> None:
    """Compile and write a program's file, with its segment's hash as the zip comment."""
    from torch._inductor.utils import fresh_cache

    options = options_of(target)
    package = _packaged(text, target, options)
    if not _is_complete(package):  # incomplete: left in the compiler's cache by a killed process
        with fresh_cache():
            package = _packaged(text, target, options)
    with zipfile.ZipFile(package, "a") as archive:
        archive.comment = marker(text)
    write_file(path, [package.getbuffer()])


def _packaged(text: str, target: Target, options: dict[str, Any]) -> io.BytesIO:
    """Compile a segment to a package in memory: torch's writer of files aborts the process on a
    full disk."""
    package = io.BytesIO()
    with _any_size():
        torch._inductor.aoti_compile_and_package(
            exported(text, target), package_path=package, inductor_configs=options
        )
    return package


def options_of(target: Target) -> dict[str, Any]:
    """Return the options of a program's compilation."""
    from torch._inductor import config

    config_names = config.get_config_copy()
    tables = {name: False for name in NO_TABLES if name in config_names}
    return INDUCTOR | find_compiler(target.device).options() | tables


def _is_complete(package: io.BytesIO) -> bool:
    """Whether no metadata file in a package is empty."""
    with zipfile.ZipFile(package) as archive:
        return all(f.file_size for f in archive.infolist() if f.filename.endswith(".json"))


def marker(text: str) -> bytes:
    """Return the zip comment of a program's file: the hash of its segment."""
    return b"g4ir " + hashlib.sha256(text.encode()).hexdigest().encode()


def check_program(path: Path, text: str) -> None:
    """Raise EngineError unless a program was compiled from this segment: programs do not check the
    sizes of their inputs. Executes no code of the program."""
    expected = marker(text)
    with open_regular(path) as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - len(expected)))
        comment = file.read()
    if comment != expected:
        raise EngineError(
            f"{path} is not the program of the segment that ends with {first_node(text)}; "
            f"build the engine again"
        )


def first_node(text: str) -> str:
    """Return a line near the end of a segment's text (its last node, or an output), which
    identifies it in messages."""
    return (text.splitlines()[-3:] or [text])[0].strip()


def _any_size() -> Any:
    """Context in which the exporter supports a dynamic size of 1."""
    from torch.fx.experimental import _config as fx_config

    return fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def exported(text: str, target: Target) -> Any:
    """Return a segment as a program of torch.export; in a FakeTensorMode the device need not
    exist."""
    from torch.export import Dim

    from .lower import SegmentModule, example

    g, device = parse_graph(text), find_compiler(target.device)
    args, dynamic, byte_params = [], [], device.byte_params(g)
    for v in g.sources():
        t = example(v.type, target.device, _TRACE)
        args.append(t.view(torch.uint8) if v.name in byte_params else t)
        named = [i for i, d in enumerate(v.type.shape) if isinstance(d, str)]
        dynamic.append({i: Dim.DYNAMIC(min=1) for i in named})
    with _any_size():
        return torch.export.export(
            SegmentModule(device.lowered(g, target)),
            tuple(args),
            dynamic_shapes=(tuple(dynamic),),
            strict=False,
        )


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    """Context that hides warnings of the exporter and compiler. Torch's log level stays raised."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
