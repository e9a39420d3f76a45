"""The machine and its TensorRT library; the only module with differences between versions.

Supported are TensorRT 11, the first whose ONNX parser has NVIDIA's attention, and TensorRT-RTX 1
from 1.7 on (target.py).
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from g4ir.backends.cuda.graph import Record, recorded
from g4ir.errors import EngineError, LowerError, MissingError
from g4ir.parallel.group import Group
from g4ir.ui.memory import device_memory
from g4ir.ui.paths import cache_root
from g4ir.ui.progress import Progress

from .target import ANYWHERE, HOPPER, RTX, TENSORRT, Library, Target

#: dtype of the IR -> TensorRT's DataType
DTYPES = {
    "f32": "FLOAT",
    "f16": "HALF",
    "bf16": "BF16",
    "i32": "INT32",
    "i64": "INT64",
    "bool": "BOOL",
}
INSTEAD = (
    "instead, --backend onnx builds a network for onnxruntime, and --dry-run checks a build up to "
    "TensorRT's builder"
)


@dataclass(frozen=True)
class Api:
    """A TensorRT module, or a fake in tests."""

    trt: Any
    version: str
    library: Library = TENSORRT

    @property
    def short(self) -> str:
        """Major and minor version, for the identity of a plan (`Host.machine`)."""
        return ".".join(self.version.split(".")[:2])


def probe(trt: Any, library: Library = TENSORRT) -> Api:
    """Return the API; MissingError for a version that is not supported."""
    version, (oldest, beyond) = str(trt.__version__), library.supported
    parsed = tuple(int(n) for n in version.split(".")[:3] if n.isdigit())
    if not oldest <= parsed < beyond:
        raise MissingError(
            f"{library.name} {version} is not supported: `{library.install}`; {INSTEAD}"
        )
    return Api(trt, version, library)


def require_library(
    library: Library = TENSORRT, load: Callable[[str], Any] = importlib.import_module
) -> Api:
    """Import the library; MissingError if it is not installed or the version is not supported."""
    try:
        trt = load(library.module)
    except (ImportError, OSError) as e:
        driver = "" if library.ahead_of_time else ", on Linux with an NVIDIA driver"
        raise MissingError(
            f"--backend trt needs {library.name}, which cannot be imported ({e}): "
            f"`{library.install}`, with its libraries and builder, not the bindings alone"
            f"{driver}; {INSTEAD}"
        ) from e
    return probe(trt, library)


def require_gpu(target: Target = HOPPER) -> None:
    """Raise MissingError if engines for a target cannot be built on this machine: the library times
    kernels on its GPU, unless it builds ahead of time."""
    if target.ahead_of_time:
        return
    if not torch.cuda.is_available():
        raise MissingError(
            "--backend trt: this torch sees no CUDA device, and TensorRT times its kernels on the "
            f"GPU that it builds for; build on an H100 or H200, or for other GPUs on any machine "
            f"({elsewhere()}); {INSTEAD}"
        )
    capability, name = gpu_capability(), torch.cuda.get_device_name()
    if not target.runs_on(capability) or target.gpu not in name:
        raise MissingError(
            f"--backend trt builds for {target.gpus} ({target.gpu or 'H100, H200'}); the current "
            f"GPU, {name}, has {capability[0]}.{capability[1]}; choose another GPU with "
            f"CUDA_VISIBLE_DEVICES, another --target of g4ir build, or --backend torch"
        )


def elsewhere() -> str:
    """Return a hint on how to build engines without a GPU."""
    return f"--target {', '.join(ANYWHERE)}, by {RTX.name}: `{RTX.install}`"


def installed(library: Library) -> str:
    """Return the version of a library; "" if it is not installed, or not supported."""
    with suppress(MissingError):
        return require_library(library).version
    return ""


def require_target(version: str) -> None:
    """Raise MissingError with the targets for which TensorRT-RTX `version` builds on this machine,
    which has no GPU."""
    raise MissingError(
        f"--backend trt: this torch sees no CUDA device; name the GPUs of the engine by --target, "
        f"one of {', '.join(ANYWHERE)}, for which {RTX.name} {version} builds without a GPU (rtx: "
        f"one engine for compute capability 8.0, 8.6, 8.9, and 12.0 or later)"
    )


def gpu_capability() -> tuple[int, ...]:
    """Return the compute capability of the current GPU, such as (9, 0); () if there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else ()


# --- TensorRT callbacks ------------------------------------------------------------------


def logger(trt: Any, file: Path | None = None) -> Any:
    """Return an ILogger that keeps errors and writes every message to `file` as it comes. TensorRT
    keeps the first logger of a process, so all networks of a build share one."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.file = file.open("a", buffering=1, errors="replace") if file else None

        def log(self, severity: Any, msg: str) -> None:
            levels = trt.ILogger.Severity
            if severity in (levels.INTERNAL_ERROR, levels.ERROR):
                self.errors.append(" ".join(msg.split()))
            if self.file:
                with suppress(OSError):  # exceptions must not reach TensorRT
                    self.file.write(f"[{severity.name}] {msg}\n")

        def close(self) -> None:
            if self.file:
                with suppress(OSError):
                    self.file.close()
                self.file = None

        def reason(self) -> str:
            """Return the last errors, as a suffix of a message."""
            return joined(self.errors[-3:]) or "TensorRT gave no reason"

    return Log()


def joined(errors: Sequence[str]) -> str:
    """Return all errors on one line, equal ones once; at most 2000 characters."""
    return " | ".join(dict.fromkeys(errors))[:2000]


@contextmanager
def raise_refusals(log: Any, part: str) -> Iterator[None]:
    """A context that raises LowerError if TensorRT logs an error: calls that set an attribute only
    log a refusal, and the network is built without it."""
    start = len(log.errors)
    yield
    if refused := log.errors[start:]:
        raise LowerError(f"TensorRT refused a part of {part}: {joined(refused)}")


def progress_monitor(trt: Any, progress: Progress) -> Any:
    """Return an IProgressMonitor that reports running phases at most once a second, and cancels the
    build once its `stopped` is true."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped, self.reported_at = False, 0.0
            #: name -> (steps done, total)
            self.phases: dict[str, tuple[int, int]] = {}

        def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None:
            self.phases[phase_name] = 0, num_steps

        def phase_finish(self, phase_name: str) -> None:
            self.phases.pop(phase_name, None)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.phases:
                self.phases[phase_name] = step, self.phases[phase_name][1]
            if time.monotonic() - self.reported_at >= 1:
                self.reported_at = time.monotonic()
                progress("; ".join(f"{n} {done}/{of}" for n, (done, of) in self.phases.items()))
            return not self.stopped

    return Monitor()


def stream_writer(trt: Any, file: IO[bytes]) -> Any:
    """Return an IStreamWriter to a file; it must not raise, so `error` holds its exception."""

    class Writer(trt.IStreamWriter):
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                return file.write(data)
            except OSError as e:
                self.error = e
                return 0

    return Writer()


# --- communicator, capture, stream, host ------------------------------------------------------

#: type name of the PyCapsule; must outlive the capsule
HANDLE = b"ncclComm_t"


def capsule(address: int) -> Any:
    """Wrap the address of an NCCL communicator in a PyCapsule, as the Python binding of TensorRT
    takes it."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, HANDLE, None)


def communicator_of(group: Group) -> Any:
    """Return the NCCL communicator of all ranks, for execution contexts; a collective call."""
    return capsule(group.communicator())


def recorded_by_all(record: Record, agree: Callable[[bool], list[Any]]) -> Record:
    """Return a recorder that captures a step only if every rank can. A rank that fell back alone
    would run later steps once, while the others also warm them up, and their collectives would
    deadlock. `agree`: all-gather of a bool."""

    def record_all(work: Callable[[], None]) -> Callable[[], None]:
        error = EngineError("another rank could not record the step")
        replay = None
        try:
            replay = record(work)
        except EngineError as e:
            error = e
        if not all(agree(replay is not None)) or replay is None:
            raise error
        return replay

    return record_all


def cache_dir() -> Path:
    return cache_root() / "tensorrt"


class Stream:
    """The CUDA stream of TensorRT, ordered with torch's: the current stream, or, if that is the
    default stream, on which TensorRT would synchronise at every step, a side stream."""

    #: alignment of tensor addresses that TensorRT requires, in bytes
    alignment = 256

    def __init__(self) -> None:
        self.side = torch.cuda.Stream()

    def recording(self) -> bool:
        """Whether the current stream is capturing a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def handle(self) -> Iterator[int]:
        """Yield the stream's handle; later torch work waits for it."""
        current = torch.cuda.current_stream()
        if current != torch.cuda.default_stream():
            yield current.cuda_stream
            return
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            yield self.side.cuda_stream
        current.wait_stream(self.side)


@dataclass(frozen=True)
class Host:
    """Capabilities of the machine; tests pass others."""

    #: target GPUs of the build or of the loaded engine
    target: Target = HOPPER
    tensorrt: Callable[[], Api] = require_library
    check_gpu: Callable[[], None] = require_gpu
    gpu: Callable[[], str] = lambda: torch.cuda.get_device_name()
    capability: Callable[[], tuple[int, ...]] = gpu_capability
    memory: Callable[[str], int] = device_memory
    #: process group -> communicator for this rank's execution contexts
    communicator: Callable[[Group], Any] = communicator_of
    #: folder of timing caches
    timings: Callable[[], Path] = cache_dir
    #: creates an engine's stream
    stream: Callable[[], Any] = Stream
    #: captures a step as a CUDA graph; None: steps are launched kernel by kernel
    record: Record | None = recorded

    def aimed(self, target: Target) -> Host:
        """Return a copy of this host for a target."""
        return replace(
            self,
            target=target,
            tensorrt=partial(require_library, target.library),
            check_gpu=partial(require_gpu, target),
        )

    def architecture(self) -> str:
        """Return the current GPU's architecture, such as `sm_90`; "" if there is none."""
        capability = self.capability()
        return f"sm_{capability[0]}{capability[1]}" if capability else ""

    def has_gpu(self) -> bool:
        """Whether this machine's GPU belongs to the target."""
        return self.target.runs_on(self.capability())

    def machine(self, device: str) -> str:
        """Return an identity for plans: device, the GPU's architecture if the library times
        kernels, and the library's version."""
        library = f"{self.target.library.name.lower()}-{self.tensorrt().short}"
        gpu = [] if self.target.ahead_of_time else [self.architecture()]
        return " ".join([device, *gpu, library])
