"""Check of the C++ compiler that torch's compiler runs."""

from __future__ import annotations

import shutil
import sys

from g4ir.errors import MissingError
from g4ir.ui.paths import setting


def cpp_compiler() -> str:
    """Return the C++ compiler that torch's compiler runs; MissingError if there is none, and on
    systems other than Linux."""
    if sys.platform != "linux":
        raise MissingError(
            "programs of torch's compiler are compiled on Linux alone: use Docker "
            "(docker/cuda.Dockerfile), on Windows WSL 2, or the CPU without --set programs=inductor"
        )
    if not shutil.which(compiler := setting("CXX", "g++")):
        raise MissingError(
            f"programs of torch's compiler need a C++ compiler, and there is no {compiler}: install"
            f" it (g++: 10 or newer, `apt-get install g++`), or set CXX to another, such as clang++"
        )
    return compiler
