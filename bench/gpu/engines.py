"""Engines of variants with random weights, built by commands of g4ir."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from g4ir.backends.torch_compile.compile import cache_dir, keep_program
from g4ir.engine.build import prepare
from g4ir.engine.engine import Engine
from g4ir.engine.load import load_engine
from g4ir.errors import InputError, PlanError
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import load_spec
from g4ir.ui.files import write_file

from .steps import Scale

#: folder of --out for compiled programs, and seconds between two looks for new ones
PROGRAMS, COPY_S = "programs", 5.0


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


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files that `target` lacks or has an older version of; not those that are being
    written, whose names begin with a dot."""
    for file in sorted(p for p in source.rglob("[!.]*") if p.is_file()):
        copy = target / file.relative_to(source)
        if not copy.exists() or copy.stat().st_mtime < file.stat().st_mtime:
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_file(copy, [file.read_bytes()])


def take_carried(folder: Path | None) -> None:
    """Take programs that were compiled elsewhere: a build compiles only what is missing, by names
    that say what each was compiled from, with, and for."""
    for path in sorted(folder.rglob("*.pt2")) if folder else ():
        keep_program(path)


def build_all(
    measure: Any, scale: Scale, variants: list[str], rows: int, step: str, out: Path
) -> None:
    """Build several engines at a time; compiled programs are copied to --out meanwhile."""
    with ThreadPoolExecutor(len(variants)) as pool:
        begun = {v: pool.submit(build, scale, v, rows, step, out) for v in variants}
        while wait(begun.values(), COPY_S).not_done:
            copy_folder(cache_dir(), out / PROGRAMS)
        copy_folder(cache_dir(), out / PROGRAMS)
    for variant, future in begun.items():
        measure(variant, future.result)


def build(scale: Scale, variant: str, rows: int, step: str, out: Path) -> dict[str, Any]:
    """Build for all contexts if they fit the device, else for the longest that does."""
    begun, path = time.monotonic(), engine_path(out, variant, rows, step)
    if not path.exists():
        options = longest(scale, variant, rows)
        words = [f"--{k.replace('_', '-')}={v}" for k, v in options.items()]
        words += [f"--set=decode_step={step}"] if scale.backend == "torch" else []
        g4ir_said(["build", *named(variant), *words, "--out", str(path)])
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return {"build_s": round(time.monotonic() - begun, 1), "megabytes": size >> 20}


def longest(scale: Scale, variant: str, rows: int) -> dict[str, Any]:
    """Return the options of the build. PlanError if not even the shortest context fits."""
    name, _, quant = variant.partition("+")
    options: dict[str, Any] = {"backend": scale.backend, "device": scale.device}
    options |= {"dtype": scale.dtype, "random_weights": 0, "max_batch": rows, "media": "none"}
    options["prefill_chunk"] = scale.chunk
    for context in reversed(scale.contexts):
        options["max_seq"] = context + scale.warmup + 2 * scale.steps
        try:
            prepare(load_spec(name), BuildOptions(**options, quant=quant or None))
            break
        except PlanError:
            if context == scale.contexts[0]:
                raise
    return options


def open_engine(out: Path, variant: str, rows: int, step: str = "plain") -> Engine:
    """Load an engine that `build` made. InputError if there is none."""
    path = engine_path(out, variant, rows, step)
    if not path.exists():
        raise InputError(f"{path} is missing: run test_engines_are_built of test_decode.py")
    return load_engine(path)
