"""A segment's text -> an ahead-of-time Inductor package; many of them in parallel.

Compilation is a pure function of (text, device, torch, instruction set, this package's sources),
so packages are kept in the user's cache directory under the hash of all that.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from g4ir.checkpoint import sha256
from g4ir.errors import G4Error, LowerError, MissingError
from g4ir.tensorfile import write_file
from g4ir.text import parse_graph

from .cuda_toolkit import find_toolkit, toolkit_found
from .target import Target, cpu_flags

#: the files of this package that a program's code follows from, beside the ops
SOURCES = (
    "attention.py", "compile.py", "cuda_toolkit.py", "lower.py", "pyops.py", "scratch.py",
    "target.py", "towers.py",
)  # fmt: skip
#: and those that it follows from on a GPU with kernels
GPU_SOURCES = ("gpu.py", "select.py", "tunings.py", "tunings.yaml", "kernels/*.py")
#: the oldest compute capability with bf16
OLDEST = (8, 0)
#: sizes at which programs are traced; each named dim is dynamic from 1 up
_TRACE = {"B": 2, "S": 4, "C": 16}
#: Round where eager mode rounds; one thread of each worker process compiles; numbers that a kernel
#: is given are fp32, as they are where it is started by hand: with fp64 none compiles. Torch
#: refuses a name that it does not know.
INDUCTOR = {
    "emulate_precision_casts": True, "compile_threads": 1, "_use_fp64_for_unbacked_floats": False,
}  # fmt: skip


def program_name(text: str, target: Target) -> str:
    """A hash of everything that a program's code follows from."""
    import torch
    from torch._inductor import config

    parts = [text, str(target), torch.__version__, machine(target.device), _sources(target)]
    parts.append(config.aot_inductor.compile_wrapper_opt_level)
    if target.gpu:
        parts.append(importlib.metadata.version("triton"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def machine(device: str) -> str:
    """The instruction set that compiled code needs, as text to compare and to show."""
    import torch

    if device == "cuda":
        return f"cuda sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
    import platform

    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {','.join(cpu_flags())}"


def _sources(target: Target) -> str:
    """Hash of the code that turns text into programs."""
    package = Path(__file__).resolve().parent
    ops = Path(__import__("g4ir.ops").ops.__file__).resolve().parent
    own = [p for name in (GPU_SOURCES if target.gpu else ()) for p in sorted(package.glob(name))]
    digest = hashlib.sha256()
    for path in [*(package / name for name in SOURCES), *own, *sorted(ops.glob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_dir() -> Path:
    """Where compiled programs are kept between builds."""
    return Path.home() / ".cache" / "g4ir" / "programs"


def check_toolchain(device: str) -> None:
    """MissingError without a C++ compiler or, on a GPU, without what programs for it need."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as e:
        raise MissingError(
            "the torch backend needs a C++ compiler (g++ 10 or newer, or clang++): "
            "install one, for example with `apt-get install g++`"
        ) from e
    if device == "cuda":
        _check_cuda()


def _check_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise MissingError(
            "--device cuda: this torch sees no CUDA device; build with --device cpu, or install "
            "a CUDA build of torch on a machine with a GPU"
        )
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        raise MissingError(
            f"--device cuda: {torch.cuda.get_device_name()} has compute capability "
            f"{capability[0]}.{capability[1]}; engines need {OLDEST[0]}.{OLDEST[1]} or newer: use "
            f"another GPU, or build with --device cpu"
        )
    if importlib.util.find_spec("triton") is None:
        raise MissingError(
            "--device cuda needs triton, which comes with CUDA builds of torch for Linux: "
            "`pip install triton`"
        )
    find_toolkit()


def compile_all(
    texts: Sequence[str], target: Target, out: Path, jobs: int,
    progress: Callable[[str], None],
) -> dict[str, str]:  # fmt: skip
    """Compile each distinct text into `out`; returns text -> file name.

    Raises LowerError with the backend's message and the segment's first line.
    """
    files = {t: f"{program_name(t, target)}.pt2" for t in dict.fromkeys(texts)}
    out.mkdir(parents=True, exist_ok=True)
    missing = [t for t, name in files.items() if not _from_cache(name, out)]
    if missing:
        progress(f"compiling {len(missing)} of {len(files)} programs")
        _compile_missing(missing, files, target, out, jobs, progress)
    return files


def _from_cache(name: str, out: Path) -> bool:
    """Copy a kept program, unless it is not what was kept: then it is compiled again."""
    kept = cache_dir() / name
    try:
        shutil.copyfile(kept, out / name)
        return sha256(out / name) == _digest_file(kept).read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _digest_file(kept: Path) -> Path:
    return kept.with_suffix(".sha256")


def _keep(path: Path) -> None:
    """Best effort: a full or read-only cache directory is no reason to fail a build."""
    kept = cache_dir() / path.name
    try:
        cache_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(kept, [path.read_bytes()])
        write_file(_digest_file(kept), [sha256(path).encode()])
    except (G4Error, OSError):
        return


def _compile_missing(
    texts: Sequence[str], files: dict[str, str], target: Target, out: Path, jobs: int,
    progress: Callable[[str], None],
) -> None:  # fmt: skip
    workers = min(jobs, len(texts))
    if workers == 1:
        for i, t in enumerate(texts):
            compile_program(t, target, out / files[t])
            _keep(out / files[t])
            progress(f"compiled {i + 1}/{len(texts)}")
        return
    # The longest programs first, so that none is left alone at the end.
    todo = sorted(texts, key=len, reverse=True)
    with _workers(workers) as compile_one, ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(compile_one, t, target, out / files[t]): t for t in todo}
        try:
            for i, future in enumerate(as_completed(futures)):
                future.result()
                _keep(out / files[futures[future]])
                progress(f"compiled {i + 1}/{len(texts)}")
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _workers(count: int) -> Iterator[Callable[[str, Target, Path], None]]:
    """`compile_program` in one of `count` processes that serve one program after the other.

    Not multiprocessing: its processes import the user's main script again, which would have to
    be written for that.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
    for process in started:
        idle.put(process)

    def compile_one(text: str, target: Target, path: Path) -> None:
        process = idle.get()
        try:
            _ask(process, text, target, path)
        finally:
            idle.put(process)

    try:
        yield compile_one
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _ask(process: subprocess.Popen[str], text: str, target: Target, path: Path) -> None:
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps([text, asdict(target), str(path)]) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # its answer is the end of its output
    answer = process.stdout.readline()
    if not answer:
        status = process.wait()
        reason = (
            "it was killed, most likely for memory: build again with fewer other programs running"
            if status < 0 else "what it printed above says why"
        )  # fmt: skip
        raise LowerError(f"torch: a compiling process ended with status {status}; {reason}")
    if error := json.loads(answer):
        raise LowerError(error)


def serve() -> None:
    """Compile what each line of stdin asks for; answer with a line: null, or the error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    for line in sys.stdin:
        text, target, path = json.loads(line)
        try:
            compile_program(text, Target(**target), Path(path))
            error = None
        except LowerError as e:
            error = str(e)
        print(json.dumps(error), file=answers, flush=True)


def compile_kernels(path: Path) -> None:
    """Compile the CPU kernels into a shared library for this machine (about a second)."""
    from torch._inductor import cpp_builder

    source = Path(__file__).resolve().parent / "kernels.c"
    command = [
        cpp_builder.get_cpp_compiler(), "-x", "c", "-O3", "-march=native", "-fopenmp", "-w",
        "-fno-math-errno", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math",
        "-shared", "-fPIC", str(source), "-o", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LowerError(f"torch: kernels.c does not compile: {done.stderr[:800]}")


def compile_program(text: str, target: Target, path: Path) -> None:
    """Export one segment and write its package."""
    import torch

    try:
        with _quiet_compiler(), torch.no_grad(), _kernels_understood():
            _compile(text, target, path)
    except Exception as e:
        raise LowerError(
            f"torch: a segment does not compile: {type(e).__name__}: {str(e)[:800]}\n"
            f"its first node: {text.splitlines()[-3].strip()}"
        ) from None


@contextmanager
def _kernels_understood() -> Iterator[None]:
    """An error where torch cannot tell what a kernel writes: it would say so to its log alone and
    copy every operand of the kernel, caches included."""
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


def _compile(text: str, target: Target, path: Path) -> None:
    import torch

    toolkit = toolkit_found() if target.device == "cuda" else nullcontext()
    with _any_size(), toolkit:
        torch._inductor.aoti_compile_and_package(
            exported(text, target), package_path=str(path), inductor_configs=INDUCTOR
        )


def _any_size() -> Any:
    """Without it the exporter assumes that a dynamic size is at least 2, at export and at
    compile."""
    from torch.fx.experimental import _config as fx_config

    return fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def exported(text: str, target: Target) -> Any:
    """A segment as an exported program; within a FakeTensorMode the device need not be there."""
    import torch
    from torch.export import Dim

    from .lower import SegmentModule, example

    g = parse_graph(text)
    args, dynamic = [], []
    for v in g.sources():
        args.append(example(v.type, target.device, _TRACE))
        named = [i for i, d in enumerate(v.type.shape) if isinstance(d, str)]
        dynamic.append({i: Dim.DYNAMIC(min=1) for i in named})
    with _any_size():
        return torch.export.export(
            SegmentModule(g, target), tuple(args), dynamic_shapes=(tuple(dynamic),), strict=False
        )


def _quiet_compiler() -> Any:
    """Keep the exporter's warnings out of the user's terminal."""
    import contextlib
    import warnings

    stack = contextlib.ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    return stack
