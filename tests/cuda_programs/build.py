"""Build the CUDA programs of engines on a machine without a GPU: `make cuda-programs`.

The code that builds an engine runs unchanged: export, Inductor, triton, g++ and the linker, in an
environment with the CUDA build of torch. What it takes for a GPU is idle_gpu.c, loaded before
everything else. So a program that does not compile for Hopper, a kernel that spills registers or is
given a number as fp64 is found before a machine with a GPU is at hand. What the programs compute is
not looked at: no kernel runs.

One line is printed for each program, and the exit status is 1 where one of them is not as it should
be. Programs and what the compilers keep lie below build/cuda-programs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "cuda-programs"
IDLE = Path(__file__).with_name("idle_gpu.c")
VARIANTS = ("e2b", "e4b", "12b", "26b-a4b", "31b")
PHASES = ("decode", "prefill", "choose")
GPUS = ("h200", "h100")


@dataclass(frozen=True)
class Program:
    """What an engine calls: its text, and a name of it in words."""

    variant: str
    phase: str
    rows: int
    name: str
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        return self.variant, self.phase, str(self.rows), self.name


@dataclass(frozen=True)
class Kernel:
    """One of a program's kernels, as it was assembled."""

    name: str
    registers: int
    spill_bytes: int
    wide_numbers: int  # operands in fp64


@dataclass(frozen=True)
class Built:
    """A program with its kernels, or the reason why there is none."""

    program: Program
    kernels: tuple[Kernel, ...]
    error: str
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.error and all(
            k.spill_bytes == 0 and k.wide_numbers == 0 for k in self.kernels
        )


# --- the machine ------------------------------------------------------------------------------


def on_the_idle_gpu(out: Path, to_carry: bool) -> dict[str, str]:
    """The environment of a process that sees one H200. Programs that are carried to a real one are
    optimised as usual."""
    library = idle_gpu(out)
    quick = {} if to_carry else {"AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0"}
    return {
        **os.environ,
        **quick,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor"),
        "TRITON_CACHE_DIR": str(out / "triton"),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # instead of several processes that try it
    }


def idle_gpu(out: Path) -> Path:
    """Compile idle_gpu.c with the headers of torch's own CUDA, whose structures it fills."""
    import torch

    wheels = Path(torch.__file__).parents[1]
    (headers,) = wheels.glob("nvidia/cu[0-9]*/include")
    library = out / "gpu" / "libcuda.so.1"
    if library.exists() and library.stat().st_mtime > IDLE.stat().st_mtime:
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            "-w",
            "-O1",
            f"-Wl,-soname,{library.name}",
            f"-I{headers}",
            str(IDLE),
            "-o",
            str(library),
        ],
        check=True,
    )
    return library


# --- programs ---------------------------------------------------------------------------------


def programs(
    variant: str,
    rows: int,
    phases: Sequence[str],
    form: str,
    quant: str | None,
    activations: str | None,
) -> Iterator[Program]:
    """The different programs of an engine in bf16, in the order of their first call."""
    from g4ir.backends.cuda.choices import choice_texts
    from g4ir.backends.inductor.programs import phase_steps
    from g4ir.backends.inductor.segment import Segment
    from g4ir.model.text import build_program
    from g4ir.passes import run_program
    from g4ir.plan.engine_limits import Limits
    from g4ir.plan.resolve import pass_options
    from g4ir.quant.recipe import find_recipe
    from g4ir.quant.rewrite import quantised
    from g4ir.spec.record import load_spec
    from g4ir.weights.pack import split_program

    spec = load_spec(variant)
    plain = quantised(build_program(spec, dtype="bf16"), spec, find_recipe(quant), "bf16")
    options = pass_options(form, "off", activations)
    program = split_program(run_program(plain, options=options)).program
    limits = Limits(max_batch=rows)
    seen: set[str] = set()
    for phase, steps in phase_steps(program, limits, "cuda").items():
        texts = [s.text for s in steps if isinstance(s, Segment)] if phase in phases else []
        for i, text in enumerate(dict.fromkeys(texts)):
            if text not in seen:
                seen.add(text)
                yield Program(variant, phase, rows, f"{i} {_ops(text)}", text)
    if "choose" in phases:
        for op, text in choice_texts(program, limits).items():
            yield Program(variant, "choose", rows, op, text)


def _ops(text: str) -> str:
    """What tells a program from the others: its attention, or its first op."""
    from g4ir.ir.text import parse_graph

    g = parse_graph(text)
    found = [n for n in g.nodes if n.op.startswith("attention")]
    if not found:
        return g.nodes[0].op
    n = found[0]
    return f"{n.op} d={n.inputs[0].type.shape[-1]} window={n.attrs['window']}"


def build(
    found: Sequence[Program], out: Path, jobs: int, gpu: str, to_carry: bool
) -> Iterator[Built]:
    """Compile the programs as a build does, in its worker processes; those to be carried under the
    names that a build looks for."""
    from g4ir.backends.cuda.toolkit import toolchain
    from g4ir.backends.inductor.compile import program_name
    from g4ir.backends.inductor.target import Target
    from g4ir.backends.inductor.workers import Workers
    from g4ir.errors import LowerError, check_all

    check_all(*toolchain())
    (out / "programs").mkdir(parents=True, exist_ok=True)

    def one(p: Program) -> Built:
        target, digest = Target("cuda", gpu, p.rows), hashlib.sha256(p.text.encode()).hexdigest()
        name = program_name(p.text, target) if to_carry else f"{digest[:16]}-{p.rows}"
        path = out / "programs" / f"{name}.pt2"
        begin = time.monotonic()
        try:
            workers.compile(p.text, target, path)
        except LowerError as e:
            return Built(p, (), str(e), time.monotonic() - begin)
        return Built(p, tuple(kernels_of(path, out)), "", time.monotonic() - begin)

    with Workers(jobs, "cuda") as workers, ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(one, found)


# --- kernels ----------------------------------------------------------------------------------


def kernels_of(path: Path, out: Path) -> Iterator[Kernel]:
    """The kernels of a package: each has its assembly beside it in what triton kept. Inductor has
    them assembled by the program that torch came with (2.11), or else by triton's own."""
    import torch

    from g4ir.backends.cuda.kernels.resources import assembled

    ptxas = Path(torch.__file__).parent / "bin" / "ptxas"
    sources = {
        hashlib.sha256(cubin.read_bytes()).hexdigest(): cubin.with_suffix(".ptx")
        for folder in ("triton", "inductor")
        for cubin in (out / folder).rglob("*.cubin")
        if cubin.with_suffix(".ptx").exists()
    }
    with zipfile.ZipFile(path) as package:
        for name in package.namelist():
            if name.endswith(".cubin"):
                ptx = sources[hashlib.sha256(package.read(name)).hexdigest()].read_text()
                registers, spills = assembled(ptx, 90, ptxas if ptxas.exists() else None)
                yield Kernel(entry_name(ptx), registers, spills, wide_numbers(ptx))


def entry_name(ptx: str) -> str:
    """The name of the one kernel in an assembly text."""
    match = re.search(r"\.entry (\w+)\(", ptx)
    assert match
    return match[1]


def wide_numbers(ptx: str) -> int:
    """How many of the kernel's operands are fp64."""
    operands = ptx[ptx.index(".entry") :].partition(")")[0]
    return len(re.findall(r"\.param\s+\.f64", operands))


# --- the command ------------------------------------------------------------------------------

HEAD = ("model", "phase", "rows", "program", "kernels", "registers", "spills", "fp64", "seconds")
LINE = "{:8} {:8} {:>4} {:46} {:>7} {:>9} {:>6} {:>4} {:>7}  {}"


def line(b: Built) -> str:
    """A program's line of the table, and below it the error, if there is one."""
    most = max((k.registers for k in b.kernels), default=0)
    sums = (sum(k.spill_bytes for k in b.kernels), sum(k.wide_numbers for k in b.kernels))
    counts = (len(b.kernels), most, *sums, f"{b.seconds:.0f}")
    bad = [k.name for k in b.kernels if k.spill_bytes or k.wide_numbers]
    text = LINE.format(*b.program.words, *counts, " ".join(("ok" if b.ok else "FAILED", *bad)))
    return f"{text}\n    {b.error}" if b.error else text


def main(args: Sequence[str] | None = None) -> int:
    """Build and report; 1 where a program is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--variants", nargs="+", default=VARIANTS, metavar="V")
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 8, 32), metavar="N")
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--latent-kv", default="off", choices=("off", "value"))
    parser.add_argument("--quant", metavar="Q", help="int8, int4, fp8 or a recipe")
    parser.add_argument("--quant-activations", metavar="Q", help="int8 or fp8")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    parser.add_argument("--gpu", choices=GPUS, default=GPUS[0])
    parser.add_argument("--to-carry", action="store_true", help="for --carry of bench/gpu")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(args)
    environment = on_the_idle_gpu(given.out, given.to_carry)
    if os.environ.get("LD_PRELOAD") != environment["LD_PRELOAD"]:
        command = [sys.executable, "-m", "tests.cuda_programs.build", *(args or sys.argv[1:])]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode
    found = [
        p
        for variant in given.variants
        for rows in given.rows
        for p in programs(
            variant, rows, given.phases, given.latent_kv, given.quant, given.quant_activations
        )
    ]
    print(LINE.format(*HEAD, "").rstrip(), flush=True)
    failed = 0
    for b in build(found, given.out, given.jobs, given.gpu, given.to_carry):
        print(line(b), flush=True)
        failed += not b.ok
    print(f"{len(found)} programs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
