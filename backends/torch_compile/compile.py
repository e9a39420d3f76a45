"""A segment's text -> an ahead-of-time Inductor package; many of them in parallel.

Compilation is a pure function of (text, device, torch, instruction set, this package's sources),
so packages are kept in the user's cache directory under the hash of all that.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.metadata
import io
import json
import logging
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

from g4ir.errors import EngineError, G4Error, LowerError, TrustError
from g4ir.ir.text import parse_graph
from g4ir.ui.files import write_file
from g4ir.ui.paths import (
    PREFIX,
    cache_root,
    check_private,
    claimed,
    keep_inductor_private,
    private,
    search_path,
    setting,
    state_root,
    variable,
)
from g4ir.ui.subprocesses import python
from g4ir.weights.checkpoint import sha256
from g4ir.weights.tensorfile import open_regular

from .cuda_toolkit import cpp_compiler, toolkit_found
from .cuda_toolkit import toolchain as toolchain
from .inductor import WRAPPER, interface_apart, precompile, without_probes
from .target import Target, cpu_flags

#: the files of this package that a program's code follows from, beside the ops
SOURCES = (
    "attention.py",
    "compile.py",
    "cuda_toolkit.py",
    "headers/regex",
    "inductor.py",
    "kernels/base.py",
    "lower.py",
    "pyops.py",
    "schedule.py",
    "target.py",
)
#: and those that it follows from on a GPU with kernels
GPU_SOURCES = ("tunings.py", "tunings.yaml", "kernels/*.py")
#: what the CPU kernels are made of, and how: the parts of every engine, and the one of a format of
#: weights, compiled with `-DFORM=` and its name there
CPU_KERNELS = Path(__file__).with_name("cpu")
KERNEL_SOURCES, FORM_SOURCE = ("kernels.c", "step.c", "calls.c", "team.c"), "form.c"
#: dtype of codes -> that name (cpu/kernels.h)
KERNEL_FORMS = {
    "i8": "INT8",
    "u8": "INT4",
    "f8e4m3": "FP8",
    "i64": "INT6",
    "i32": "UINT4",
    "i16": "UINT5",
    "u16": "INT5",
}
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
#: and what stands for what is the same in all programs for the CPU, in two parts
SHARED = "of all programs: "
SHARED_PARTS = (SHARED + WRAPPER, SHARED + "kernels")
#: lines that are shown of what a worker prints
PRINTED_LINES = 200
#: texts that wait for a process at a time, each in a thread
MOST_WAITING = 64
#: how the system and compilers word a full disk
FULL = ("No space left on device", "Disk quota exceeded")
#: sizes at which programs are traced; each named dim is dynamic from 1 up
_TRACE = {"B": 2, "S": 4, "M": 3, "C": 16}
#: Round where eager mode rounds; one thread of each worker process compiles; numbers that a kernel
#: is given are fp32, as they are where it is started by hand: with fp64 none compiles. Torch
#: refuses a name that it does not know.
INDUCTOR = {
    "emulate_precision_casts": True,
    "compile_threads": 1,
    "_use_fp64_for_unbacked_floats": False,
}
#: least elements of a loop per OpenMP thread, in programs of static shape. Loops between the
#: products of a decode step are far shorter: they run on the calling thread, and OpenMP's threads
#: do not compete for the cores with the pool of the kernels (team.c)
LEAST_OF_A_THREAD = 1 << 15
#: the dim of a chunk's length, in a segment's text
SEQUENCE_DIM = re.compile(r"[\[,]S[,\]]")
#: headers of ours for programs, and the lines of torch's by which they suit it
HEADERS = Path(__file__).with_name("headers")
MODEL_HEADER = "include/torch/csrc/inductor/aoti_runtime/model_base.h"
REGEX_USES = ["#include <regex>", "std::regex re(", "std::regex_match(device_str, sm, re)"]
#: at which level wrappers are optimised, for torch (default: O1)
WRAPPER_LEVEL = "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"
#: What a profiler of torch's reads, and more than half of a program's bytes
NO_TABLES = ("aot_inductor.enable_line_tables", "aot_inductor.enable_frame_pointer")


def program_name(text: str, target: Target) -> str:
    """Return a hash of everything that a program's code follows from."""
    import torch

    parts = [text, str(target), torch.__version__, machine(target.device), _sources(target)]
    parts.append(setting(WRAPPER_LEVEL))
    if target.gpu:
        parts.append(importlib.metadata.version("triton"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def machine(device: str) -> str:
    """Return the instruction set that compiled code needs, as text to compare and to show."""
    import torch

    if device == "cuda":
        return f"cuda sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {','.join(cpu_flags())}"


def _sources(target: Target) -> str:
    """Return a hash of the code that turns text into programs."""
    package = Path(__file__).resolve().parent
    ops = Path(__import__("g4ir.ops").ops.__file__).resolve().parent
    own = [p for name in (GPU_SOURCES if target.gpu else ()) for p in sorted(package.glob(name))]
    digest = hashlib.sha256()
    for path in [*(package / name for name in SOURCES), *own, *sorted(ops.glob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_dir() -> Path:
    """Return the folder where compiled programs are kept between builds."""
    return cache_root() / "programs"


def compile_all(
    texts: Sequence[str],
    target: Target,
    out: Path,
    jobs: int,
    progress: Callable[[str], None],
) -> dict[str, str]:
    """Compile each distinct text, which may be one of `kernel_parts`, into `out`; return text ->
    file name.

    Raises LowerError with the backend's message and the segment's first line.
    """
    files = {t: _file_of(t, target) for t in dict.fromkeys(texts)}
    out.mkdir(parents=True, exist_ok=True)
    missing = {t: out / name for t, name in files.items() if not _from_cache(name, out)}
    if missing:
        progress(f"compiling {len(missing)} of {len(files)} programs")
        with closing(_compiled(missing, target, min(jobs, len(missing)))) as done:
            for i, _ in enumerate(done):
                progress(f"compiled {i + 1}/{len(missing)}")
    return files


def _file_of(text: str, target: Target) -> str:
    return _part_file(text) if is_part(text) else f"{program_name(text, target)}.pt2"


def _make(text: str, target: Target, path: Path) -> None:
    if is_part(text):
        _compile_part(text, path)
    elif text.startswith(SHARED):
        with _compiling() as folder:
            part, given = text.removeprefix(SHARED), _inductor("", target)
            precompile(part, folder, given, program_name("", target))
    else:
        compile_program(text, target, path)


def _from_cache(name: str, out: Path) -> bool:
    """Copy a kept program that is whole. TrustError where others could have put it there."""
    kept, digest = cache_dir() / name, _digest_file(name)
    if not (kept.is_file() and digest.is_file()):
        return False
    for file in (kept, digest):
        check_private(file.parent)
    copy = out / f"{name}.kept"
    try:
        shutil.copyfile(kept, copy)
        right = sha256(copy) == digest.read_text()
        if right:
            copy.replace(out / name)
        return right
    except (OSError, UnicodeDecodeError):
        return False
    finally:
        copy.unlink(missing_ok=True)


def _digest_file(name: str) -> Path:
    """Return the file of a kept program's digest, which who writes to the cache cannot change."""
    return state_root() / "programs" / name


def keep_program(path: Path) -> None:
    """Keep a program, by best effort. One that another process kept meanwhile is equal."""
    try:
        if _from_cache(path.name, path.parent):
            return
        kept, digest = private(cache_dir()), private(_digest_file(path.name).parent)
        write_file(kept / path.name, [path.read_bytes()])
        write_file(digest / path.name, [sha256(path).encode()])
    except (TrustError, OSError):
        return


def _compiled(
    missing: Mapping[str, Path], target: Target, workers: int
) -> Generator[str, None, None]:
    """Compile each text into its file, in so many processes, and yield it."""
    if workers == 1:
        yield from _shared(missing, target)
        return
    # What takes longest comes first, so that nothing is left alone at the end.
    todo = sorted(missing, key=lambda text: (is_part(text), len(text)), reverse=True)
    early = _early.pop(target.device, None)
    with early or _Workers(workers, target.device) as started:
        if not early and target.device == "cpu":
            for text in SHARED_PARTS:
                started.submit(text, target, Path())
        futures = {started.submit(text, target, missing[text]): text for text in todo}
        for future in as_completed(futures):
            future.result()
            keep_program(missing[futures[future]])
            yield futures[future]


def _shared(missing: Mapping[str, Path], target: Target) -> Iterator[str]:
    """Compile one after the other; programs that another process is compiling come last."""
    todo, passed_over = deque(missing), 0
    while todo:
        text = todo.popleft()
        path = missing[text]
        with claimed(path.name, wait=passed_over > len(todo)) as alone:
            if not alone:
                todo.append(text)
                passed_over += 1
                continue
            if not _from_cache(path.name, path.parent):
                _make(text, target, path)
                keep_program(path)
        passed_over = 0
        yield text


#: device -> processes that were started before it was known what is to be compiled
_early: dict[str, _Workers] = {}


@contextmanager
def compilers_started(count: int, device: str) -> Iterator[None]:
    """A context in which processes import the compiler, for the next `compile_all`, and on the CPU
    compile what every engine has. What goes wrong there, that says."""
    workers = _early[device] = _Workers(count, device)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        for text in [*kernel_parts(()), *SHARED_PARTS] if device == "cpu" else ():
            workers.submit(text, Target(device), Path(folder) / _part_file(text))
        try:
            yield
        finally:
            if _early.pop(device, None):
                workers.end()


class _Workers:
    """Processes that serve one program after the other, forks of one that has imported the
    compiler, and as many for the CPU kernels, which need none of it. They are a process group of
    their own: the terminal's Ctrl-C is for the main process, and a compiler ends with the worker
    that began it, by SIGTERM, also where the main process ignores that. Their output and their
    compilers' is kept, not shown.

    Not multiprocessing: its processes import the user's main script again, which would have to
    be written for that.
    """

    def __init__(self, count: int, device: str) -> None:
        pairs = [socket.socketpair() for _ in range(2 * count)]
        theirs = [other.fileno() for _, other in pairs]
        self._pool = ThreadPoolExecutor(MOST_WAITING)
        self._idle: dict[bool, SimpleQueue[IO[str]]] = {True: SimpleQueue(), False: SimpleQueue()}
        for i, (own, _) in enumerate(pairs):
            self._idle[i < count].put(own.makefile("rw"))
        self._printed = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._server = subprocess.Popen(
            python(__name__, f"serve({os.getpid()}, {theirs}, {device!r})"),
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=theirs,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL),  # of `kill`
        )
        for pair in pairs:  # what is made of the own ends keeps them open
            for end in pair:
                end.close()

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        self.kill()  # or the pool would wait for what nobody needs any more
        self._pool.shutdown(cancel_futures=True)
        with self._printed:
            self._server.wait()

    def kill(self) -> None:
        """End them and what they started, whatever they are at; a compiler removes its file."""
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGTERM)

    def submit(self, text: str, target: Target, path: Path) -> Future[None]:
        """Return what `compile` comes to, of texts in this order."""
        return self._pool.submit(self.compile, text, target, path)

    def compile(self, text: str, target: Target, path: Path) -> None:
        """Compile a program, or what stands among their texts, in a process that is idle;
        LowerError with its message, caused by what the processes printed."""
        idle = self._idle[is_part(text)]
        channel = idle.get()
        try:
            print(json.dumps([text, asdict(target), str(path)]), file=channel, flush=True)
            answer = channel.readline()
        except OSError:  # it has ended
            answer = ""
        finally:
            idle.put(channel)
        if not answer:
            raise LowerError(_end_of_worker(self._status())) from self._output()
        if error := json.loads(answer):
            raise LowerError(error) from self._output()

    def _status(self) -> int:
        """Return how the first process ended, as subprocess has it; it stays there for `kill`."""
        found = os.waitid(os.P_PID, self._server.pid, os.WEXITED | os.WNOWAIT)
        assert found
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _output(self) -> Exception:
        size = os.fstat(self._printed.fileno()).st_size
        text = os.pread(self._printed.fileno(), size, 0).decode(errors="backslashreplace")
        lines = text.splitlines()[-PRINTED_LINES:]
        return RuntimeError("\n".join(["what the compiling processes printed:", *lines]))


def _end_of_worker(status: int) -> str:
    """Return why a worker ended without an answer."""
    if status == -signal.SIGKILL:
        why = "it was killed, most likely for memory: build again with fewer other programs running"
    else:
        why = "run again with --trace to see what it printed"
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    return f"torch: a compiling process ended {how}; {why}"


def serve(parent: int, channels: Sequence[int], device: str) -> None:
    """Fork a process for each channel, which compiles what lines there name. The first half, for
    the CPU kernels, does not wait until the compiler is imported. Ends with `parent`, and as they
    end. Those for a GPU import it themselves: it may open the GPU, which forks could not use
    then."""
    gc.disable()  # a fifth of what torch computes, for 40 MB
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    for i, channel in enumerate(channels):
        if i == len(channels) // 2:
            importlib.import_module("torch._inductor.compile_fx" if device == "cpu" else "torch")
        if not os.fork():
            for other in {*channels[i:]} - {channel}:
                os.close(other)
            _answer(channel)
            return
        os.close(channel)
    _, status = os.wait()
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)  # compilers too


def _answer(channel: int) -> None:
    """Compile what each line names; answer null or the error."""
    with socket.socket(fileno=channel) as own, own.makefile("rw") as lines:
        while line := lines.readline():
            text, target, path = json.loads(line)
            try:
                _make(text, Target(**target), Path(path))
                error = None
            except G4Error as e:
                error = str(e)
            print(json.dumps(error), file=lines, flush=True)


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
    files = {text: path.with_name(_part_file(text)) for text in texts}
    for text, file in files.items():
        if not file.is_file():
            _compile_part(text, file)
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu"]
    _compiler([*LINK_FLAGS, *map(str, files.values()), *libraries], path)
    for file in files.values():
        file.unlink()


def _part_file(text: str) -> str:
    built_for = [platform.machine(), *cpu_flags(), *KERNEL_FLAGS, text]
    digest = hashlib.sha256("\0".join(built_for).encode())
    for file in sorted(CPU_KERNELS.glob("*.[ch]")):
        digest.update(file.read_bytes())
    return f"{digest.hexdigest()[:24]}.o"


def _compile_part(text: str, path: Path) -> None:
    """Write a part of the CPU kernels as an object file: one that is kept, or compiled now."""
    with claimed(f"{path.name}.kernels", wait=True):
        if not _from_cache(path.name, path.parent):
            source, *defined = text.removeprefix(KERNELS).split()
            words = [*KERNEL_FLAGS, *defined, "-c", "-x", "c", str(CPU_KERNELS / source)]
            _compiler(words, path)
            keep_program(path)


def _compiler(words: Sequence[str], path: Path) -> None:
    """Run the C++ compiler to write a file."""
    done = subprocess.run([cpp_compiler(), *words, "-o", path], capture_output=True, text=True)
    if done.returncode:
        raise _without_space(RuntimeError(done.stderr), path) or LowerError(
            f"torch: the CPU kernels do not compile: {done.stderr[:800]}"
        )


def compile_program(text: str, target: Target, path: Path) -> None:
    """Export one segment and write its package."""
    try:
        with _compiling() as folder:
            _compile(text, target, path, folder)
    except Exception as e:
        raise _without_space(e, path) or LowerError(
            f"torch: a segment does not compile: {type(e).__name__}: {str(e)[:800]}\n"
            f"its first node: {first_node(text)}"
        ) from None


@contextmanager
def _compiling() -> Iterator[Path]:
    """A context in which torch compiles programs as this module means it; yields the folder of what
    they share."""
    import torch
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = keep_inductor_private(default_cache_dir())
    _keep_headers_in(folder)
    ours = (_quiet_compiler, torch.no_grad, _kernels_understood, _own_headers, without_probes)
    with ExitStack() as entered:
        for context in ours:
            entered.enter_context(context())
        yield folder


def _keep_headers_in(folder: Path) -> None:
    """Have torch keep precompiled headers, from which the code of programs comes, in this folder:
    it takes its default folder whatever folder it is given. A torch that does not say so in the
    same names goes without."""
    from torch._inductor import codecache, config

    headers = folder / "precompiled_headers"
    names = {"_HEADER_DIR": headers, "_HEADER_LOCK_DIR": headers / "locks"}
    if vars(codecache).keys() >= names.keys():
        vars(codecache).update({name: str(place) for name, place in names.items()})
    else:
        config.aot_inductor.precompile_headers = False


@contextmanager
def _own_headers() -> Iterator[None]:
    """A context in which compilers find HEADERS before their own, if they suit this torch."""
    import torch

    name = "CPLUS_INCLUDE_PATH"
    header = Path(torch.__file__).parent / MODEL_HEADER
    uses = [line for line in header.read_text().splitlines() if "regex" in line]
    suits = len(uses) == len(REGEX_USES) and all(map(str.__contains__, uses, REGEX_USES))
    with variable(name, search_path(HEADERS, name)) if suits else nullcontext():
        yield


def _without_space(error: Exception, path: Path) -> LowerError | None:
    """Return what to say where an error, ours or a compiler's, was that a disk is full."""
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
        f"torch: {folder}: no space left on the device; make room, or {advice[folder]}"
    )


@contextmanager
def _kernels_understood() -> Iterator[None]:
    """A context that raises an error where torch cannot tell what a kernel writes: torch would
    log it and copy every operand of the kernel, caches included."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("torch._dynamo")
    before = log.level, log.propagate
    log.setLevel(logging.WARNING)
    log.propagate = False  # the user's terminal has no use for it
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before[1]
        log.setLevel(before[0])
    if any("every input is mutated" in message for message in told):
        raise RuntimeError("torch cannot tell which operands a kernel writes")


def _compile(text: str, target: Target, path: Path, folder: Path) -> None:
    """Write a program's file, which ends with what it was made of; `folder`: what programs share"""
    from torch._inductor.utils import fresh_cache

    given = _inductor(text, target)
    with (
        interface_apart(folder, given, program_name("", target))
        if target.device == "cpu"
        else nullcontext(given)
    ) as options:
        package = _packaged(text, target, options)
        if not _is_whole(package):  # a part, left in the compiler's cache by a killed compile
            with fresh_cache():
                package = _packaged(text, target, options)
    with zipfile.ZipFile(package, "a") as archive:
        archive.comment = marker(text)
    write_file(path, [package.getbuffer()])


def _packaged(text: str, target: Target, options: dict[str, Any]) -> io.BytesIO:
    """Return a package in memory: torch's own writer ends the process on a full disk."""
    import torch

    package = io.BytesIO()
    toolkit = toolkit_found() if target.device == "cuda" else nullcontext()
    with _any_size(), toolkit:
        torch._inductor.aoti_compile_and_package(
            exported(text, target),
            package_path=package,
            inductor_configs=options,
        )
    return package


def _inductor(text: str, target: Target) -> dict[str, Any]:
    """Return the options of a program's compilation."""
    from torch._inductor import config

    from . import pyops

    on_cpu: dict[str, Any] = {}
    if target.device == "cpu":
        on_cpu["aot_inductor.custom_ops_to_c_shims"] = pyops.CALLS
        if not SEQUENCE_DIM.search(text):
            on_cpu["cpp.min_chunk_size"] = LEAST_OF_A_THREAD
    known = config.get_config_copy()
    return INDUCTOR | on_cpu | {name: False for name in NO_TABLES if name in known}


def _is_whole(package: io.BytesIO) -> bool:
    """Whether no file in a package is empty that says something of the others."""
    with zipfile.ZipFile(package) as archive:
        return all(f.file_size for f in archive.infolist() if f.filename.endswith(".json"))


def marker(text: str) -> bytes:
    """Return the end of a program's file, the comment of a zip: the segment it was made of."""
    return b"g4ir " + hashlib.sha256(text.encode()).hexdigest().encode()


def check_program(path: Path, text: str) -> None:
    """Raise EngineError unless a program's file says that it was made of this segment: a program
    does not look at the sizes of what it is given. Runs nothing of it."""
    wanted = marker(text)
    with open_regular(path) as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - len(wanted)))
        found = file.read()
    if found != wanted:
        raise EngineError(
            f"{path} was made for another segment than {first_node(text)}; build the engine again"
        )


def first_node(text: str) -> str:
    """Return the node that names a segment in a message."""
    return (text.splitlines()[-3:] or [text])[0].strip()


def _any_size() -> Any:
    """Return a context in which the exporter takes a dynamic size of 1 as well."""
    from torch.fx.experimental import _config as fx_config

    return fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def exported(text: str, target: Target) -> Any:
    """Return a segment as an exported program; in a FakeTensorMode the device need not exist."""
    import torch
    from torch.export import Dim

    from .lower import SegmentModule, example
    from .schedule import schedule

    g = parse_graph(text)
    args, dynamic = [], []
    for v in g.sources():
        args.append(example(v.type, target.device, _TRACE))
        named = [i for i, d in enumerate(v.type.shape) if isinstance(d, str)]
        dynamic.append({i: Dim.DYNAMIC(min=1) for i in named})
    with _any_size():
        return torch.export.export(
            SegmentModule(schedule(g, target)),
            tuple(args),
            dynamic_shapes=(tuple(dynamic),),
            strict=False,
        )


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    """A context that keeps the exporter's warnings out of the user's terminal."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
