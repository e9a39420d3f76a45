"""Checks of the tools that compiling for a GPU needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

from g4ir.backends.inductor.toolchain import cpp_compiler
from g4ir.errors import MissingError
from g4ir.ops.types import torch

#: the oldest compute capability with bf16
OLDEST = (8, 0)


def toolchain(otherwise: str = "") -> tuple[Callable[[], object], ...]:
    """Return checks for compiling: a C++ compiler, a GPU, and, if there is one, triton and CUDA's
    headers. Each raises MissingError; `otherwise` is appended to the error of a missing or
    unsupported GPU."""
    # Without a GPU, errors of these two would not help.
    parts = (_check_triton, check_toolkit) if torch.cuda.is_available() else ()
    return (cpp_compiler, *parts, partial(_check_gpu, otherwise))


def _check_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise MissingError(
            "device cuda needs triton, which comes with CUDA builds of torch for Linux: "
            "`pip install triton`"
        )


def _check_gpu(otherwise: str) -> None:
    if not torch.cuda.is_available():
        fix = f"install a CUDA build of torch on a machine with a GPU{otherwise}"
        raise MissingError(f"device cuda: this torch sees no CUDA device; {fix}")
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        raise MissingError(
            f"device cuda: {torch.cuda.get_device_name()} has compute capability "
            f"{capability[0]}.{capability[1]}; {OLDEST[0]}.{OLDEST[1]} or newer is needed: use "
            f"another GPU{otherwise}"
        )


def check_toolkit() -> None:
    """Raise MissingError if torch finds no CUDA headers for the C++ wrapper of programs."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    if home is None or not (Path(home) / "include" / "cuda.h").is_file():
        raise MissingError(
            f"device cuda: torch finds no CUDA toolkit with headers (CUDA_HOME is {home}); install "
            f"the toolkit of torch's CUDA version, or set CUDA_HOME to one; docker/cuda.Dockerfile "
            f"has all that is needed"
        )
