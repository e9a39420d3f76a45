"""Runs command lines of g4ir, given as JSON, in a Python that lacks what Windows lacks: modules,
functions and constants that Linux alone has, or Linux and macOS. Prints whether a lock is taken
twice, and the exit code of each line. What Windows has instead is played by what Linux has."""

from __future__ import annotations

import ast
import ctypes
import fcntl
import importlib
import json
import mmap
import os
import shutil
import signal
import sys
import types
from contextlib import suppress
from pathlib import Path

from tests.sources import MODULES as SOURCES

MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "pty", "readline")
OS_NAMES = (
    *("geteuid", "getuid", "fork", "killpg", "sched_getaffinity", "sysconf", "pread", "pwrite"),
    *("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "setpriority", "PRIO_PROCESS", "uname"),
)
MMAP_NAMES = [name for name in dir(mmap) if name.startswith(("MAP_", "PROT_", "MADV_"))]
LOCK_VIOLATION = 33
COMPILERS = ("gcc", "cc", "clang", "g++")
#: what is not imported: g4ir's modules, and packages that take seconds
SLOW = ("g4ir", "tensorrt", "transformers", "vllm", "matplotlib")


def import_others(files: list[Path]) -> None:
    """Import what g4ir's modules import of others', which know which system this is."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(str(node.module))
            for name in {*names} - {*MODULES}:
                if not name.startswith(SLOW):
                    with suppress(ImportError):
                        importlib.import_module(name)


class Kernel32:
    """LockFileEx by flock(2)."""

    def __init__(self, name: str, use_last_error: bool) -> None:
        self.error, self.flock = 0, fcntl.flock

    def LockFileEx(self, handle: ctypes.c_void_p, flags: int, *rest: object) -> int:
        try:
            self.flock(handle.value - 1, (2 if flags & 2 else 1) | (4 if flags & 1 else 0))
        except BlockingIOError:
            self.error = LOCK_VIOLATION
            return 0
        return 1


def take_away() -> None:
    """Leave this Python with what Windows has."""
    kernel = Kernel32("kernel32", True)
    msvcrt = types.ModuleType("msvcrt")
    msvcrt.get_osfhandle = lambda file: file + 1  # type: ignore[attr-defined]
    sys.modules.update({**dict.fromkeys(MODULES), "msvcrt": msvcrt})
    ctypes.WinDLL = lambda *_, **__: kernel  # type: ignore[assignment]
    ctypes.get_last_error = lambda: kernel.error  # type: ignore[assignment]
    mapped = mmap.mmap

    def mmap_of_windows(file: int, size: int, tagname: str = "", access: int = 0) -> mmap.mmap:
        return mapped(file, size, access=access)

    mmap.mmap = mmap_of_windows  # type: ignore[assignment, misc]
    for place, names in ((os, OS_NAMES), (mmap, MMAP_NAMES), (signal, ("SIGHUP", "SIGKILL"))):
        for name in names:
            delattr(place, name)
    sys.platform = "win32"


def main() -> None:
    modules = {name: file for name, file in SOURCES.items() if not name.endswith("__main__")}
    import_others([*modules.values()])
    compilers = {name: shutil.which(name) for name in COMPILERS}
    take_away()
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as e:  # an optional package, never one that Windows lacks
            if str(e.name).partition(".")[0] in (*MODULES, "g4ir"):
                raise

    from g4ir.backends.cpu.library import LINKING
    from g4ir.cli import main
    from g4ir.serve.server import open_files
    from g4ir.ui.memory import free_memory
    from g4ir.ui.paths import claimed

    with claimed("a", wait=False) as first, claimed("a", wait=False) as again:
        print("json", json.dumps([first, again]))
    # The kernels that this machine runs.
    LINKING["win32"], shutil.which = LINKING["linux"], compilers.get
    assert free_memory() > 0 and open_files() > 0
    for words in json.loads(sys.argv[1]):
        print("json", json.dumps(main(words)), flush=True)


if __name__ == "__main__":
    main()
