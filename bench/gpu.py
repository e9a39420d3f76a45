"""Engines on an H100 or H200: right first, then how near to the hardware's limit. One command:

    python bench/gpu.py --out DIR [--budget MIN] [--variants e2b,...] [--carry DIR]

It goes through stages (`--list`), what is most worth knowing first, until the minutes of --budget
are over: 10, 30 and 60 are good numbers, and a second run goes on where the first one stopped.
bench/stages.py says what is kept of what crashes or hangs, and where.

`preflight`: what the machine is and whether it can build, the gap between dependent kernels of a
graph, also of those that begin early, the cost of a launch, copy, read and product rates; from them
it writes the constants that `g4ir show --timeline --constants FILE` predicts with, and `predict`
does so. `kernels`: every kernel of a variant at its sizes, against the op's reference on fresh
inputs, and its time against its bytes at the measured bandwidth. `build`: engines with random
weights, several at a time. `decode`: steps over caches of noise, prompts, and agreement with the
interpreter. `sanitizer`: small engines under compute-sanitizer. `peers`: transformers, eager and
compiled, in the same process. `tune`, where --tune is given: settings are searched and written to
the table.

Compiled programs are copied to DIR/engines as soon as they are made. `--carry` takes such a folder,
of an earlier run or of `make cuda-programs`, and then only what it lacks is compiled on the card.
With --dry-run all stages run on a CPU, with tiny variants and interpreted kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from stages import (
    SAID,
    Cells,
    Kind,
    Script,
    Stage,
    common_parser,
    copy_folder,
    drive,
    parsed,
)
from steps import (
    AGREED,
    AGREED_STEPS,
    Scale,
    agreement,
    agreement_cell,
    decode_cell,
    prefill_cell,
    random_tokens,
    step_times,
    timed,
)

from g4ir.backends.torch_compile.compile import cache_dir, keep_program, toolchain
from g4ir.backends.torch_compile.cuda_driver import CudaDriver
from g4ir.backends.torch_compile.cuda_graph import recorded
from g4ir.backends.torch_compile.kernel_cases import (
    Case,
    all_cases,
    bytes_of_case,
    errors_of_case,
    launches_of_case,
)
from g4ir.backends.torch_compile.kernels.interpreter import interpreted
from g4ir.backends.torch_compile.kernels.launch import begin, ready
from g4ir.backends.torch_compile.kernels.resources import assemble
from g4ir.backends.torch_compile.segment import canonical
from g4ir.backends.torch_compile.step_model import measured_text, read_constants
from g4ir.backends.torch_compile.target import Target, find_target
from g4ir.backends.torch_compile.tunings import TABLE
from g4ir.bench.peers import HfRunner, peer_model
from g4ir.bench.roof import Meter, Rates, passes_seconds, synchronize
from g4ir.bench.runners import EngineRunner
from g4ir.bench.stats import percentile
from g4ir.bench.system import environment
from g4ir.engine.build import prepare
from g4ir.engine.engine import Engine
from g4ir.engine.load import load_engine
from g4ir.errors import G4Error, InputError, MissingError, PlanError, check_all
from g4ir.ir.graph import Program
from g4ir.ir.text import print_graph
from g4ir.model.text import build_program
from g4ir.passes import PassOptions, run_program
from g4ir.passes.latent_kv import LatentOptions
from g4ir.plan.options import BuildOptions
from g4ir.quant.recipe import find_recipe
from g4ir.quant.rewrite import quantised
from g4ir.spec.record import load_spec
from g4ir.ui.files import write_file
from g4ir.ui.memory import free_memory
from g4ir.weights.pack import split_program

#: folder of --out for compiled programs, and seconds between two looks for new ones
PROGRAMS, COPY_S = "programs", 5.0
Args = Mapping[str, Any]


CARD = Scale(
    *("cuda", "torch", "bfloat16", "", ("e2b", "26b-a4b", "31b", "e4b")),
    *((1024, 8192, 32768, 131072), (1024, 8192), 2048, 10, 64, 4096, 1024),
)
DRY = Scale(
    *("cpu", "reference", "float32", "h200", ("tiny-ple", "tiny-moe")),
    *((32,), (24,), 16, 1, 2, 48, 16),
)


def scale_of(args: argparse.Namespace) -> Scale:
    return DRY if args.dry_run else CARD


def kept_rates(cells: Cells, scale: Scale) -> Rates:
    """Measure what this card reaches now, which a stage's cells are held to."""
    rates = Meter(scale.device, torch.bfloat16).measure()
    cells.body["rates"] = asdict(rates)
    return rates


# --- preflight --------------------------------------------------------------------------------

#: kernels of the graph whose gap is measured
CHAIN = 500


@triton.jit
def _count(x, AHEAD: tl.constexpr):
    """Add 1 to a number, as a kernel of a step does where it begins early."""
    begin(AHEAD)
    ready(AHEAD)
    tl.store(x, tl.load(x) + 1)


def preflight(cells: Cells, args: argparse.Namespace, _: Args) -> None:
    scale = scale_of(args)
    cells.cell("machine", partial(machine_cell, args.out, scale))
    cells.cell("gap", partial(gap_cell, scale, early=False))
    cells.cell("early gap", partial(gap_cell, scale, early=True))
    cells.cell("rates", lambda: asdict(Meter(scale.device, torch.bfloat16).measure()))
    gpu = scale.gpu or find_target(scale.device, 1).gpu
    write_constants(cells.found, gpu, constants_file(args.out, gpu))


def machine_cell(out: Path, scale: Scale) -> dict[str, Any]:
    """Describe the machine. MissingError where programs cannot be compiled on it."""
    check_all(*toolchain(scale.device))
    free = torch.cuda.mem_get_info()[0] if scale.device == "cuda" else free_memory()
    return {
        "processors": os.cpu_count(),
        "free_gb": free >> 30,
        "disk_gb": shutil.disk_usage(out).free >> 30,
    }


def gap_cell(scale: Scale, early: bool) -> dict[str, Any]:
    """Measure microseconds of dependent kernels of a graph with nearly no work each, and of the
    host to start one; each is to see what the one before has made."""
    counted, on_card = (
        torch.zeros(1, dtype=torch.int32, device=scale.device),
        scale.device == "cuda",
    )
    start = starter(counted, early) if on_card else partial(counted.add_, 1)

    def chain() -> None:
        for _ in range(CHAIN):
            start()

    passes = partial(passes_seconds, recorded(chain), 10) if on_card else partial(timed, chain)
    times = sorted(passes() / CHAIN * 1e6 for _ in range(10))
    host = timed(chain) / CHAIN * 1e6
    synchronize(scale.device)
    runs = round(int(counted) / CHAIN)
    return {
        "kernels": CHAIN,
        "us_p50": percentile(times, 50),
        "us_best": times[0],
        "host_us": host,
        "ok": int(counted) == runs * CHAIN,
    }


def starter(x: torch.Tensor, early: bool) -> Callable[[], None]:
    """Return what starts a kernel by the driver, as an engine's step does."""
    kernel = assemble((_count, (1,), (x,), {"AHEAD": early, "num_warps": 1}))
    driver = CudaDriver()
    function = driver.load(kernel.cubin, kernel.name, kernel.shared)
    given = [ctypes.c_uint64(x.data_ptr())]
    return partial(driver.start, function, (1, 1, 1), 32, kernel.shared, given, early)


def constants_file(out: Path, gpu: str) -> Path:
    return out / f"step_model-{gpu}.yaml"


def write_constants(cells: Mapping[str, Any], gpu: str, path: Path) -> None:
    """Write what `g4ir show --timeline --constants FILE` predicts from, with the gaps and the rate
    of this GPU; nothing where one was not measured, or the GPU has no constants."""
    gap, early = (_pair(cells.get(name, {})) for name in ("gap", "early gap"))
    rates = cells.get("rates", {})
    if gap and early and "read" in rates and gpu in read_constants().gpus:
        text = measured_text(gpu, max(rates["read"], rates["copy"]) / 1e6, gap, early)
        write_file(path, [text.encode()])


def _pair(gap: Mapping[str, Any]) -> tuple[float, float] | None:
    return (gap["us_best"], gap["us_p50"]) if gap.get("ok") else None


def predict(cells: Cells, args: argparse.Namespace, _: Args) -> None:
    """Predict the steps that `decode` measures, by the constants of this card where there are
    any."""
    scale = scale_of(args)
    gpu = scale.gpu or find_target(scale.device, 1).gpu
    path = constants_file(args.out, gpu)
    options = ["--constants", str(path)] if path.exists() else []
    for variant in args.variants:
        for rows in ROWS:
            for c in scale.contexts[:2]:
                words = [*named(variant), "--batch", str(rows), "--context", str(c)]
                command = ["show", *words, "--timeline", "--gpu", gpu, *options, "--json"]
                cells.cell(f"{variant} b{rows} c{c}", partial(predicted_cell, command))


def named(variant: str) -> list[str]:
    """Return the options of g4ir that name a variant; behind a + is its recipe of weights in fewer
    bits, as in e2b+int4."""
    name, _, quant = variant.partition("+")
    return ["--variant", name, *(["--quant", quant] if quant else [])]


def predicted_cell(command: Sequence[str]) -> dict[str, Any]:
    said = json.loads(g4ir_said(command))
    fast, slow = said["time_us"]
    count = len(said["launches"])
    return {"us": {"fast": fast, "slow": slow}, "roof_us": said["roof_us"], "launches": count}


def g4ir_said(words: Sequence[str], front: Sequence[str] = ()) -> str:
    """Return what a command of g4ir prints; InputError with the end of its errors otherwise."""
    command = [*front, sys.executable, "-m", "g4ir", *words]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise InputError(f"{shlex.join(command)}: {done.stderr[-SAID:] or done.stdout[-SAID:]}")
    return done.stdout


# --- kernels ----------------------------------------------------------------------------------


def programs(variants: list[str], rows: int) -> Iterator[Program]:
    """Yield the programs of every variant for so many rows, with latent caches too where it has
    any."""
    for variant in variants:
        name, _, quant = variant.partition("+")
        spec = load_spec(name)
        graphs = build_program(spec, dtype="bf16")
        graphs = quantised(graphs, spec, find_recipe(quant or None), "bf16")
        latent = spec.text.full.k_eq_v and not quant
        for form in ("off", "value", "raw") if latent else ("off",):
            done = run_program(graphs, options=PassOptions((LatentOptions(form),), rows))
            yield split_program(done).program


def kernels(cells: Cells, args: argparse.Namespace, given: Args, tune: bool = False) -> None:
    """Check and time the kernels of a variant for so many rows; `tune`: search settings before."""
    scale, variant, rows = scale_of(args), given["variant"], given["rows"]
    gpu = scale.gpu or find_target(scale.device, 1).gpu
    target = Target(scale.device, gpu, rows)
    every = all_cases(programs([variant], rows), [target], scale.tokens, scale.new)
    cases = {cell_name(c): c for c in every}
    interpreting = scale.device == "cpu"
    if not interpreting:
        compile_ahead([c for name, c in cases.items() if name not in cells.found])
    rate = kept_rates(cells, scale).bandwidth
    with interpreted() if interpreting else torch.no_grad():
        for name, case in cases.items():
            cells.cell(name, partial(one_kernel, case, scale.device, rate, tune))
            if tune:
                write_file(args.out / TABLE.name, [TABLE.read_bytes()])


def cell_name(case: Case) -> str:
    """Return a name that says what the case is, the same with other variants beside it."""
    text = f"{case.target} {case.tokens}\n{print_graph(canonical(case.graph))}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{case.name} B={case.target.rows} {digest}"


def compile_ahead(cases: list[Case]) -> None:
    """Fill Triton's cache by as many processes as there are cores: a kernel takes seconds."""
    jobs = min(os.cpu_count() or 1, 16, len(cases))
    if jobs < 2:
        return
    begun = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        failed = sum(pool.map(compile_launches, cases))
    took = time.monotonic() - begun
    print(f"compiled ahead in {took:.0f} s, {failed} kernels refused", flush=True)


def compile_launches(case: Case) -> int:
    """Compile, not run, what a case starts; return how many kernels were refused (see cells)."""
    refused = 0
    for kernel, grid, args, meta in launches_of_case(case):
        try:
            kernel.warmup(*args, grid=grid, **meta)
        except Exception:
            refused += 1
    return refused


def one_kernel(case: Case, device: str, bandwidth: float, tune: bool) -> dict[str, Any]:
    seed = 0 if device == "cpu" else int(time.time())
    errors = errors_of_case(case, device, seed)
    tunings = case.choice.tunings
    found: dict[str, Any] = {
        "seed": seed,
        "use": " ".join(f"{name} {dict(t.use)}" for name, t in tunings.items()),
        "measured_tuning": all(t.measured for t in tunings.values()),
        **asdict(errors),
        "ok": errors.ok,
    }
    if device == "cpu":
        return found
    from g4ir.backends.torch_compile.tune import keep_in_table, time_case, tune_case

    if tune:
        best = [tune_case(case, name, bandwidth) for name in tunings]
        for t in best:
            keep_in_table(t)
        found["use"] = " ".join(f"{t.kernel} {dict(t.use)}" for t in best)
        found["before_us"] = best[0].before_us
    floor = bytes_of_case(case) / bandwidth * 1e6
    try:
        found["us"] = time_case(case)
    except torch.OutOfMemoryError as e:  # what it computes is right or wrong all the same
        return {**found, "out_of_memory": str(e)[:300]}
    return {**found, "floor_us": floor, "share_of_bandwidth": floor / found["us"]}


# --- engines ----------------------------------------------------------------------------------


def engine_path(out: Path, variant: str, rows: int) -> Path:
    return out / "engines" / f"{variant}-b{rows}"


def build(cells: Cells, args: argparse.Namespace, given: Args) -> None:
    """Build the engines of several variants at a time, each by a command of its own; what is
    compiled is copied to --out while they are at it."""
    scale, rows, out = scale_of(args), given["rows"], args.out
    take_carried(args.carry)
    names = {v: f"{v} b{rows}" for v in given["variants"].split(",")}
    todo = [v for v, n in names.items() if n not in cells.found]
    if not todo or not cells.begin("builds"):
        return
    with ThreadPoolExecutor(len(todo)) as pool:
        begun = {pool.submit(built, scale, v, rows, engine_path(out, v, rows)): v for v in todo}
        open_ = set(begun)
        while open_:
            ended, open_ = wait(open_, COPY_S)
            copy_folder(cache_dir(), out / PROGRAMS)
            for future in ended:
                cells.keep(names[begun[future]], future.result())
    cells.keep("builds", {"count": len(todo)})


def take_carried(folder: Path | None) -> None:
    """Take programs that were compiled elsewhere: a build compiles what is missing, by names that
    say what each was compiled of, with, and for."""
    for path in sorted(folder.rglob("*.pt2")) if folder else ():
        keep_program(path)


def built(scale: Scale, variant: str, rows: int, out: Path) -> dict[str, Any]:
    """Build for all contexts where they fit the device, else for the longest that do."""
    begun = time.monotonic()
    if not out.exists():
        try:
            options = longest(scale, variant, rows)
            words = [f"--{k.replace('_', '-')}={v}" for k, v in options.items()]
            g4ir_said(["build", *named(variant), *words, "--out", str(out)])
        except G4Error as e:
            return {"refused": str(e)}
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    return {"build_s": round(time.monotonic() - begun, 1), "megabytes": size >> 20}


def longest(scale: Scale, variant: str, rows: int) -> dict[str, Any]:
    """Return the options of the build. PlanError where not even the shortest context fits."""
    options: dict[str, Any] = {
        "backend": scale.backend,
        "device": scale.device,
        "dtype": scale.dtype,
        "random_weights": 0,
        "max_batch": rows,
        "prefill_chunk": scale.chunk,
        "media": "none",
    }
    name, _, quant = variant.partition("+")
    for context in reversed(scale.contexts):
        options["max_seq"] = context + scale.warmup + 2 * scale.steps
        try:
            prepare(load_spec(name), BuildOptions(**options, quant=quant or None))
            break
        except PlanError:
            if context == scale.contexts[0]:
                raise
    return options


def decode(cells: Cells, args: argparse.Namespace, given: Args) -> None:
    """Measure an engine's steps and prompts, and how far it agrees with the interpreter."""
    scale, rows = scale_of(args), given["rows"]
    engine = cells.made("load", partial(loaded, args.out, given["variant"], rows))
    if engine is None:
        return
    rates = kept_rates(cells, scale)
    for c in scale.contexts:
        cells.cell(f"decode c{c}", partial(decode_cell, engine, scale, rows, c, rates))
    cells.cell("agreement", partial(agreement_cell, engine, rows))
    for n in scale.prompts if rows == 1 else ():
        cells.cell(f"prefill {n}", partial(prefill_cell, engine, n, rates))


def loaded(out: Path, variant: str, rows: int) -> Engine:
    path = engine_path(out, variant, rows)
    if not path.exists():
        raise InputError(f"{path} is not there: run the stage that builds it")
    return load_engine(path)


def peers(cells: Cells, args: argparse.Namespace, given: Args) -> None:
    """Measure transformers with a static cache beside the engine, and the agreement of logits."""
    scale, rows = scale_of(args), given["rows"]
    engine = cells.made("load", partial(loaded, args.out, given["variant"], rows))
    model = cells.made("transformers", partial(peer_model, engine)) if engine else None
    if engine is None or model is None:
        return
    for mode in ("hf-static", "hf-compile") if scale.device == "cuda" else ("hf-static",):
        for c in scale.contexts[:2]:
            cell = partial(peer_cell, engine, model, scale, rows, c, mode)
            cells.cell(f"{mode} c{c}", cell, limit=600)


def peer_cell(
    engine: Engine, model: Any, scale: Scale, batch: int, context: int, mode: str
) -> dict[str, Any]:
    torch._dynamo.reset()  # another cache size is another program, not a dynamic one
    room = context + AGREED_STEPS + scale.warmup + scale.steps + 8
    runner = HfRunner(model, room, mode)
    found = agreement(EngineRunner(engine, batch), runner, random_tokens(engine, batch, AGREED))
    for at in range(AGREED + AGREED_STEPS, context, scale.chunk):
        runner.step(random_tokens(engine, batch, min(scale.chunk, context - at)))
    step = partial(runner.step, torch.full((batch, 1), 5))
    for _ in range(scale.warmup):
        step()
    times, host = step_times(step, scale)
    p50 = percentile(times, 50)
    return {"step_ms": p50, "host_ms": host, "tokens_per_second": batch / p50 * 1e3, **found}


# --- compute-sanitizer ------------------------------------------------------------------------

SANITIZER, TOOLS = "compute-sanitizer", ("memcheck", "racecheck")


def sanitizer(cells: Cells, args: argparse.Namespace, _: Args) -> None:
    """Run small engines, kernel by kernel, under the tool that sees illegal and racing accesses."""
    scale = replace(scale_of(args), contexts=(128,), chunk=16)
    for variant in DRY.variants:
        path = engine_path(args.out, variant, 2)
        cells.cell(f"{variant} build", partial(built, scale, variant, 2, path), 600)
        for tool in TOOLS:
            cells.cell(f"{variant} {tool}", partial(sanitizer_cell, path, tool, scale))


def sanitizer_cell(path: Path, tool: str, scale: Scale) -> dict[str, Any]:
    words = ["run", str(path), "--tokens", "2,5,7", "--max-new-tokens", "4"]
    if scale.device == "cpu":
        return {"ok": bool(g4ir_said(words))}
    if shutil.which(SANITIZER) is None:
        raise MissingError(f"no {SANITIZER} here: it comes with the CUDA toolkit")
    front = [SANITIZER, "--tool", tool, "--error-exitcode", "9"]
    return {"ok": bool(g4ir_said([*words, "--no-cuda-graph"], front))}


# --- the stages -------------------------------------------------------------------------------

#: kind of stage -> its function, seconds of a cell and, if it may not take all, of the stage
KINDS = {
    "preflight": Kind(preflight, 60),
    "predict": Kind(predict, 60, 180),
    "kernels": Kind(kernels, 300, 240),
    "build": Kind(build, 1500),
    "decode": Kind(decode, 240),
    "sanitizer": Kind(sanitizer, 180),
    "peers": Kind(peers, 300),
    "tune": Kind(partial(kernels, tune=True), 1800),
}
ROWS = (1, 8, 32)
#: a stage for each variant, for all of them, for none
EACH, ALL, ONCE = "each", "all", "once"
#: what is run in this order: kind, rows, for what of the first so many variants
ORDER = (
    ("preflight", 0, ONCE, 0),
    ("kernels", 1, EACH, 1),
    ("build", 1, ALL, 3),
    ("decode", 1, EACH, 3),
    ("sanitizer", 0, ONCE, 0),
    ("kernels", 1, EACH, 3),
    ("build", 8, ALL, 3),
    ("decode", 8, EACH, 3),
    ("peers", 1, EACH, 2),
    ("predict", 0, ONCE, 0),
    ("build", 32, ALL, 3),
    ("decode", 32, EACH, 3),
    ("kernels", 8, EACH, 3),
    ("build", 1, ALL, 9),
    ("decode", 1, EACH, 9),
    ("kernels", 1, EACH, 9),
    ("peers", 8, EACH, 2),
    ("build", 8, ALL, 9),
    ("decode", 8, EACH, 9),
    ("kernels", 16, EACH, 9),
)


def stages(args: argparse.Namespace) -> list[Stage]:
    """Return the stages of a run, in order; the same ones again are the same."""
    tune = [("tune", rows, EACH, 9) for rows in (1, 8)] if args.tune else []
    made = [Stage(k, a) for k, *how in (*ORDER, *tune) for a in _stage_args(args.variants, *how)]
    return list({s.name: s for s in made}.values())


def _stage_args(variants: Sequence[str], rows: int, how: str, first: int) -> list[dict[str, Any]]:
    if how == ONCE:
        return [{}]
    if how == ALL:
        return [{"variants": ",".join(variants[:first]), "rows": rows}]
    return [{"variant": v, "rows": rows} for v in variants[:first]]


def about(args: argparse.Namespace) -> dict[str, Any]:
    return environment("cuda" if torch.cuda.is_available() else "cpu")


def main() -> int:
    parser = common_parser(__doc__)
    parser.add_argument("--tune", action="store_true", help="search settings in the end")
    args = parsed(parser, CARD.variants, DRY.variants)
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # in the stages' processes
    elif not (args.list or torch.cuda.is_available()):
        parser.error("this torch sees no GPU; --dry-run goes through the stages without one")
    return drive(Script(Path(__file__), KINDS, stages, about), args)


if __name__ == "__main__":
    sys.exit(main())
