"""The size of a run on a GPU, and of a dry run; engines, and commands of g4ir."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from g4ir.errors import InputError

from .steps import Scale

CARD = Scale(
    device="cuda",
    backend="torch",
    dtype="bfloat16",
    gpu="",
    variants=("e2b", "26b-a4b", "31b", "e4b"),
    contexts=(1024, 8192, 32768, 131072),
    prompts=(1024, 8192),
    chunk=2048,
    warmup=10,
    steps=64,
    tokens=4096,
    new=1024,
    choices=("plain", "fused", "early"),
)
DRY = Scale(
    device="cpu",
    backend="reference",
    dtype="float32",
    gpu="h200",
    variants=("tiny-ple", "tiny-moe"),
    contexts=(32,),
    prompts=(24,),
    chunk=16,
    warmup=1,
    steps=2,
    tokens=48,
    new=16,
)
#: batch sizes that are measured
ROWS = (1, 8, 32)


def engine_path(out: Path, variant: str, rows: int, step: str = "plain") -> Path:
    return out / "engines" / f"{variant}-b{rows}-{step}"


def named(variant: str) -> list[str]:
    """Return the options of g4ir that name a variant; after a + is its quantisation, as in
    e2b+int4."""
    name, _, quant = variant.partition("+")
    return ["--variant", name, *(["--quant", quant] if quant else [])]


def g4ir_said(words: Sequence[str], front: Sequence[str] = ()) -> str:
    """Return what a command of g4ir prints; InputError with the end of its errors otherwise."""
    command = [*front, sys.executable, "-m", "g4ir", *words]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise InputError(f"{shlex.join(command)}: {done.stderr[-1000:] or done.stdout[-1000:]}")
    return done.stdout
