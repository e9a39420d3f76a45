"""What compiling for a GPU needs, and where the C++ part of a CUDA program finds CUDA's headers and
the driver's library.

Torch takes both from one folder, which it guesses from where `nvcc` lies. On many machines there is
a GPU, but no such folder: the headers lie in the wheels that torch came with, and the driver has no
`libcuda.so` that a linker finds. Then torch is given a folder of links to what was found.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from g4ir.backends.inductor.toolchain import cpp_compiler
from g4ir.errors import MissingError
from g4ir.ui.paths import cache_root, private

#: the oldest compute capability with bf16
OLDEST = (8, 0)
#: what torch's headers include
HEADERS = ("cuda.h", "cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h")
DRIVER = "libcuda.so.1"
#: folders that may hold headers: of torch's own CUDA, beside it, then of the machine's
WHEELS = ("nvidia/cu[0-9]*/include", "triton/backends/nvidia/include")
SYSTEM = ("usr/local/cuda/include",)
#: and folders in which a driver, or a stand-in to link with, may lie
DRIVERS = (
    "usr/local/nvidia/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib64",
    "usr/local/cuda/lib64/stubs",
    "usr/local/cuda/compat",
)


def toolchain(otherwise: str = "") -> tuple[Callable[[], object], ...]:
    """Return checks of what compiling for a GPU needs: a C++ compiler, triton, CUDA's headers and
    the GPU. `otherwise` ends the advice of one without a usable GPU."""
    import torch

    # Without a GPU, CUDA's parts come with what that needs anyway.
    parts = (_check_triton, find_toolkit) if torch.cuda.is_available() else ()
    return (cpp_compiler, *parts, partial(_check_gpu, otherwise))


def _check_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise MissingError(
            "device cuda needs triton, which comes with CUDA builds of torch for Linux: "
            "`pip install triton`"
        )


def _check_gpu(otherwise: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise MissingError(
            f"device cuda: this torch sees no CUDA device; install a CUDA build of torch on a "
            f"machine with a GPU{otherwise}"
        )
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        raise MissingError(
            f"device cuda: {torch.cuda.get_device_name()} has compute capability "
            f"{capability[0]}.{capability[1]}; {OLDEST[0]}.{OLDEST[1]} or newer is needed: use "
            f"another GPU{otherwise}"
        )


@contextmanager
def toolkit_found() -> Iterator[None]:
    """A context in which torch finds the headers and the library, wherever they lie.

    Raises MissingError where they are nowhere.
    """
    from torch.utils import cpp_extension

    before = cpp_extension.CUDA_HOME
    home = find_toolkit()
    if home is not None:
        cpp_extension.CUDA_HOME = str(home)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = before


@cache
def find_toolkit() -> Path | None:
    """Return a folder for torch to look into, or None where its own will do. MissingError says what
    is missing and where it was looked for."""
    import torch

    wheels = Path(torch.__file__).resolve().parents[1]
    return toolkit(_torch_folders(), Path("/"), wheels, _loaded_and_listed())


def toolkit(
    torchs: tuple[list[Path], list[Path]], root: Path, wheels: Path, drivers: Iterable[Path]
) -> Path | None:
    """Do `find_toolkit` on a file system: torch's own (include, library) folders, the root, the
    folder that torch is installed in, and files that may be the driver."""
    includes, libraries = torchs
    if _compiles(includes) and _links(libraries):
        return None
    found = [*includes, *_below(wheels, WHEELS), *_below(root, SYSTEM)]
    headers = next((folder for folder in found if _compiles([folder])), None)
    if headers is None:
        raise MissingError(_no_headers(found))
    places = [*drivers, *(f / n for f in _below(root, DRIVERS) for n in (DRIVER, "libcuda.so"))]
    library = next((path for path in places if path.exists()), None)
    if library is None:
        raise MissingError(_no_driver([*libraries, *(p.parent for p in places)]))
    return _linked(headers, library)


def _no_headers(looked: Sequence[Path]) -> str:
    return (
        f"device cuda: no folder has all of CUDA's headers ({', '.join(HEADERS)} and what they "
        f"include). Looked into: {_listed(looked)}. Install the CUDA toolkit, or "
        f"`pip install 'nvidia-cuda-crt<14' 'nvidia-cuda-cccl<14'` of torch's CUDA version beside "
        f"it, or set CUDA_HOME to a toolkit"
    )


def _no_driver(looked: Sequence[Path]) -> str:
    return (
        f"device cuda: programs cannot be linked with the driver: no {DRIVER}. Looked at: the "
        f"list of `ldconfig -p`, the libraries that torch loaded, {_listed(looked)}. Install the "
        f"driver's library for this machine"
    )


def _listed(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, dict.fromkeys(folders))) or "nothing"


def _below(root: Path, patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(root.glob(pattern), reverse=True)]


def _torch_folders() -> tuple[list[Path], list[Path]]:
    """Return (include, library) folders of torch's own CUDA; none if it has no toolkit."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        return [], []
    folders = (cpp_extension.include_paths("cuda"), cpp_extension.library_paths("cuda"))
    includes, libraries = ([Path(f) for f in some] for some in folders)
    return includes, libraries


def _loaded_and_listed() -> list[Path]:
    """List the drivers that this process has loaded, then those that the system's loader knows."""
    maps = Path("/proc/self/maps")
    loaded = re.findall(r"/\S*/libcuda\.so\S*", maps.read_text() if maps.exists() else "")
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        said = subprocess.run([ldconfig, "-p"], capture_output=True, text=True).stdout
    except OSError:
        said = ""
    listed = re.findall(rf"{re.escape(DRIVER)} .*=> (\S+)", said)
    return [Path(path) for path in dict.fromkeys([*loaded, *listed])]


def _compiles(folders: Sequence[Path]) -> bool:
    """Whether the headers are in the folders, and all that they include."""
    if not any((folder / HEADERS[0]).is_file() for folder in folders):
        return False
    text = "".join(f"#include <{name}>\n" for name in HEADERS)
    return _accepted(text, ["-fsyntax-only", *(f"-I{folder}" for folder in folders)])


def _links(folders: Sequence[Path]) -> bool:
    with tempfile.TemporaryDirectory() as out:
        options = ["-shared", "-fPIC", "-o", f"{out}/empty.so"]
        return _accepted("", [*options, *(f"-L{folder}" for folder in folders), "-lcuda"])


def _accepted(text: str, options: Sequence[str]) -> bool:
    from torch._inductor import cpp_builder

    command = [cpp_builder.get_cpp_compiler(), "-x", "c++", "-w", "-"]
    done = subprocess.run([*command, *options], input=text, capture_output=True, text=True)
    return done.returncode == 0


def _linked(headers: Path, library: Path) -> Path:
    """Make a folder in the user's cache: `include`, and `lib64/libcuda.so`."""
    said = f"{headers}\0{library}"
    folder = cache_root() / "cuda" / hashlib.sha256(said.encode()).hexdigest()[:16]
    if (folder / "lib64" / "libcuda.so").exists() and (folder / "include").exists():
        return folder
    try:
        made = Path(tempfile.mkdtemp(dir=private(folder.parent)))
        (made / "lib64").mkdir()
        (made / "include").symlink_to(headers)
        (made / "lib64" / "libcuda.so").symlink_to(library.resolve())
        shutil.rmtree(folder, ignore_errors=True)  # links into what has gone
        made.rename(folder)
    except OSError as e:
        raise MissingError(
            f"{folder}: cannot be written ({e}); CUDA programs need it to find {headers} and "
            f"{library}: make it writable, or set CUDA_HOME to a CUDA toolkit"
        ) from e
    return folder
