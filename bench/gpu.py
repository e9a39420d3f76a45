"""The kernels and the decode step on a GPU: right first, then how near to the hardware's limit.

    python bench/gpu.py preflight [--out DIR]
    python bench/gpu.py kernels [--variants e2b,...] [--minutes 9] [--tune] [--out DIR]
    python bench/gpu.py models  [--variants e2b,...] [--minutes 9] [--peers] [--out DIR]
    TRITON_INTERPRET=1 python bench/gpu.py kernels --interpret

`kernels`: every kernel that the variants use, at their sizes, against the op's reference on fresh
random inputs, and its time against its own bytes at the measured bandwidth; --tune searches
settings first and writes them to the table. `models`: engines with random weights made on the
device; decode at batch 1, 8, 32 and contexts 1K, 8K, 32K over caches filled with noise, prefill at
batch 1; with --peers transformers with a static cache, compiled, in the same process, and the
agreement of logits. `preflight`: what the machine is, and the few numbers that the others are read
by: the gap between dependent kernels of a graph, copy, read and product rates.

All write gpu-*.json into bench/results, or into --out, after every cell and go on where they
stopped, so that runs of ten minutes add up; with --out the table of settings goes there too. A cell
in which the device fails is kept as `crashed` and ends the run, one that takes longer than --limit
seconds as `hung`; neither is tried again. --interpret checks the numbers without a GPU, on the tiny
specs.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import RESULTS

import g4ir
from g4ir.backends.sampling import Sampling
from g4ir.backends.torch_compile.cuda_graph import recorded
from g4ir.backends.torch_compile.kernel_cases import (
    Case,
    all_cases,
    bytes_of_case,
    errors_of_case,
    launches_of_case,
)
from g4ir.backends.torch_compile.kernels.interpreter import interpreted
from g4ir.backends.torch_compile.segment import canonical
from g4ir.backends.torch_compile.step_model import measured_text, read_constants
from g4ir.backends.torch_compile.target import Target, find_target
from g4ir.backends.torch_compile.tunings import TABLE
from g4ir.bench.breakdown import kernels_per_step
from g4ir.bench.peers import HfRunner, peer_model
from g4ir.bench.roof import Meter, passes_seconds
from g4ir.bench.stats import percentile
from g4ir.bench.system import environment
from g4ir.engine.build import prepare
from g4ir.engine.engine import Engine
from g4ir.engine.load import load_engine
from g4ir.errors import G4Error, PlanError
from g4ir.ir.graph import Program
from g4ir.ir.text import print_graph
from g4ir.model.text import build_program
from g4ir.passes import run_program
from g4ir.plan.cost import Step, decode_costs, graph_costs, total
from g4ir.plan.options import BuildOptions
from g4ir.plan.settings import for_gpu
from g4ir.quant.recipe import find_recipe
from g4ir.quant.rewrite import quantised
from g4ir.spec.record import load_spec
from g4ir.ui.files import write_file
from g4ir.weights.pack import split_program

VARIANTS = "e2b,e4b,26b-a4b,31b"
TINY = "tiny-dense,tiny-moe,tiny-ple"
BATCHES, CONTEXTS = (1, 8, 32), (1024, 8192, 32768)
PEER_BATCHES, PEER_CONTEXTS = (1, 8), (1024, 8192)
PROMPTS = (1024, 8192)
ROWS = (1, 8, 16)
WARMUP, STEPS = 10, 64
BUILD = Path("build/gpu")


@dataclass
class Report:
    """Results by cell, written after each; a cell that is there is not measured again."""

    path: Path
    minutes: float
    #: seconds that a cell may take, and one in which much is compiled
    limit: float = 240.0
    compile_limit: float = 1800.0
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.body: dict[str, Any] = {"cells": {}}
        before = self.path if self.path.exists() else RESULTS / self.path.name
        if before.exists():
            self.body = json.loads(before.read_text())
        self.body["environment"] = environment("cuda" if torch.cuda.is_available() else "cpu")

    def cell(
        self, name: str, measure: Callable[[], dict[str, Any]], compiles: bool = False
    ) -> None:
        if name in self.body["cells"] or self.out_of_time():
            return
        begun = time.monotonic()
        with self.watched(name, compiles):
            try:
                found = measure()
            except G4Error as e:
                found = {"refused": str(e)}
            except torch.OutOfMemoryError as e:
                found = {"out_of_memory": str(e)[:300]}
            except Exception as e:  # one cell must not cost the others
                if device_is_lost(e):
                    raise
                found = {"failed": repr(e)[:500]}
        self.keep(name, {**found, "seconds": round(time.monotonic() - begun, 1)})

    @contextmanager
    def watched(self, name: str, compiles: bool = False) -> Iterator[None]:
        """A context in which a lost device is kept as a cell and then raised, since nothing works
        in this process any more; a hang is kept as a cell and ends the process."""
        limit = self.compile_limit if compiles else self.limit
        timer = threading.Timer(limit, self.give_up, (name, limit))
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as e:
            if device_is_lost(e):
                self.keep(name, {"crashed": repr(e)[:500]})
            raise
        finally:
            timer.cancel()

    def give_up(self, name: str, limit: float) -> None:
        """Keep a hang and end the process: the watching thread calls it, the main one waits."""
        faulthandler.dump_traceback()
        self.keep(name, {"hung": limit})
        os._exit(1)

    def keep(self, name: str, found: dict[str, Any]) -> None:
        self.body["cells"][name] = found
        self.write()
        print(name, json.dumps(found), flush=True)

    def out_of_time(self) -> bool:
        return time.monotonic() - self.started > self.minutes * 60

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(self.body, indent=1) + "\n")
        os.replace(draft, self.path)


def device_is_lost(e: Exception) -> bool:
    """Whether the device is lost: after an illegal access every call fails, with any error."""
    if isinstance(e, torch.OutOfMemoryError | G4Error):
        return False
    if isinstance(e, torch.AcceleratorError):
        return True
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def report_at(args: argparse.Namespace, name: str) -> Report:
    return Report((args.out or RESULTS) / f"{name}.json", args.minutes, args.limit)


# --- preflight --------------------------------------------------------------------------------

#: kernels of the graph whose gap is measured
CHAIN = 500


def preflight(args: argparse.Namespace) -> None:
    report = report_at(args, "gpu-preflight")
    report.body["cells"] = {}  # of this machine, now
    for name, measure in (("gap", gap_cell), ("rates", rates_cell)):
        report.cell(name, measure)
    write_constants(report.body["cells"], find_target("cuda", 1).gpu, report.path.parent)


def write_constants(cells: dict[str, Any], gpu: str, folder: Path) -> None:
    """Write what `g4ir show --timeline --constants FILE` predicts from, with the gap and the rate
    of this GPU; nothing where either was not measured, or the GPU has no constants."""
    gap, rates = cells.get("gap", {}), cells.get("rates", {})
    if "us_best" in gap and "read" in rates and gpu in read_constants().gpus:
        rate = max(rates["read"], rates["copy"]) / 1e6
        text = measured_text(gpu, rate, (gap["us_best"], gap["us_p50"]))
        write_file(folder / f"step_model-{gpu}.yaml", [text.encode()])


def gap_cell() -> dict[str, Any]:
    """Measure microseconds between dependent kernels of a graph, with nearly no work each."""
    t = torch.zeros(1, device="cuda")

    def chain() -> None:
        for _ in range(CHAIN):
            t.add_(1.0)

    replay = recorded(chain)
    times = sorted(passes_seconds(replay, 10) / CHAIN * 1e6 for _ in range(10))
    return {"kernels": CHAIN, "us_p50": percentile(times, 50), "us_best": times[0]}


def rates_cell() -> dict[str, Any]:
    return asdict(Meter("cuda", torch.bfloat16).measure())


# --- kernels ----------------------------------------------------------------------------------


def programs(variants: list[str], rows: int) -> Iterator[Program]:
    """Yield the programs of every variant for so many rows, with latent caches too where it has
    any; behind a + is its recipe of weights in fewer bits, as in e2b+int4."""
    for variant in variants:
        name, _, quant = variant.partition("+")
        spec = load_spec(name)
        graphs = build_program(spec, dtype="bf16")
        graphs = quantised(graphs, spec, find_recipe(quant or None), "bf16")
        latent = spec.text.full.k_eq_v and not quant
        for form in ("off", "value", "raw") if latent else ("off",):
            done = run_program(graphs, options={"latent_kv": {"form": form}, **for_gpu(rows)})
            yield split_program(done).program


def kernels(args: argparse.Namespace) -> None:
    report = report_at(args, f"gpu-kernels{'-interpreted' if args.interpret else ''}")
    device, gpu = ("cpu", "h200") if args.interpret else ("cuda", find_target("cuda", 1).gpu)
    tokens, rows = (48, (1, 3)) if args.interpret else (4096, ROWS)
    chunk = 16 if args.interpret else 1024
    cases = {
        cell_name(c): c
        for n in rows
        for c in all_cases(programs(args.variants, n), [Target(device, gpu, n)], tokens, chunk)
    }
    open_cases = {k: c for k, c in cases.items() if k not in report.body["cells"]}
    if not args.interpret:
        compile_ahead(list(open_cases.values()))
    bandwidth = 0.0 if args.interpret else Meter("cuda", torch.bfloat16).measure().bandwidth
    report.body["bandwidth"] = bandwidth
    with interpreted() if args.interpret else torch.no_grad():
        for name, case in open_cases.items():
            measure = partial(one_kernel, case, device, bandwidth, args.tune)
            report.cell(name, measure, compiles=args.tune)
            if args.tune and args.out:
                shutil.copyfile(TABLE, args.out / TABLE.name)
    wrong = [k for k, c in report.body["cells"].items() if not c.get("ok", False)]
    print(f"{len(report.body['cells'])} kernels, {len(wrong)} out of budget", *wrong, sep="\n  ")


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
    errors = errors_of_case(case, device, seed=int(time.time()))
    tunings = case.choice.tunings
    found: dict[str, Any] = {
        "use": {name: dict(t.use) for name, t in tunings.items()},
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
        found |= {"use": {t.kernel: dict(t.use) for t in best}, "before_us": best[0].before_us}
    floor = bytes_of_case(case) / bandwidth * 1e6
    try:
        found["us"] = time_case(case)
    except torch.OutOfMemoryError as e:  # what it computes is right or wrong all the same
        return {**found, "out_of_memory": str(e)[:300]}
    return {**found, "floor_us": floor, "share_of_bandwidth": floor / found["us"]}


# --- models -----------------------------------------------------------------------------------


def models(args: argparse.Namespace) -> None:
    report = report_at(args, "gpu-models")
    rates = Meter("cuda", torch.bfloat16).measure()
    report.body["rates"] = asdict(rates)
    for variant in args.variants:
        for batch in BATCHES:
            cells = [f"{variant} decode b{batch} c{c}" for c in CONTEXTS]
            if batch == 1:
                cells += [f"{variant} prefill {n}" for n in PROMPTS]
            if args.peers and batch in PEER_BATCHES:
                cells += [f"{variant} peer b{batch} c{c}" for c in PEER_CONTEXTS]
            if report.out_of_time() or all(c in report.body["cells"] for c in cells):
                continue
            name = f"{variant} build b{batch}"
            if not worth_trying(report.body["cells"].get(name, {})):
                continue
            try:
                with report.watched(name, compiles=True):
                    engine = built(variant, batch)
            except G4Error as e:
                report.keep(name, {"refused": str(e)})
                continue
            for c in CONTEXTS:
                cell = partial(decode_cell, engine, batch, c, rates)
                report.cell(f"{variant} decode b{batch} c{c}", cell)
            for n in PROMPTS if batch == 1 else ():
                report.cell(f"{variant} prefill {n}", partial(prefill_cell, engine, n, rates))
            if args.peers and batch in PEER_BATCHES:
                peers(report, variant, engine, batch)
            engine.close()
            del engine, cell
            gc.collect()
            torch.cuda.empty_cache()


def worth_trying(found: dict[str, Any]) -> bool:
    """Whether a build did not take the device, or the time, before."""
    return not {"crashed", "hung"} & found.keys()


def built(variant: str, batch: int) -> Engine:
    """Build for all contexts where they fit the device, else for the longest that do."""
    out = BUILD / f"{variant}-b{batch}-{environment()['commit']}"
    if not out.exists():
        g4ir.build(variant, out, progress=print, **longest(variant, batch)).close()
        gc.collect()
        torch.cuda.empty_cache()
    return load_engine(out)


def longest(variant: str, batch: int) -> dict[str, Any]:
    """Return the options of the build. G4Error where not even the shortest context fits."""
    options: dict[str, Any] = {
        "backend": "torch",
        "device": "cuda",
        "dtype": "bf16",
        "random_weights": 0,
        "max_batch": batch,
        "prefill_chunk": 2048,
        "media": "none",
    }
    for context in reversed(CONTEXTS):
        options["max_seq"] = context + WARMUP + 2 * STEPS
        try:
            prepare(load_spec(variant), BuildOptions(**options))
            break
        except PlanError:
            if context == CONTEXTS[0]:
                raise
    return options


def decode_cell(engine: Engine, batch: int, context: int, rates: Any) -> dict[str, Any]:
    """Measure steps at a context over caches of noise: times on the device and on the host."""
    if context + WARMUP + STEPS > engine.limits.max_seq:
        return {"refused": f"the plan has room for {engine.limits.max_seq} tokens a row"}
    torch.cuda.reset_peak_memory_stats()
    session = engine.session(batch)
    for name, t in session.state.tensors.items():
        t.normal_()
        if name.endswith(".rms"):
            t.abs_()
    lengths = torch.full((batch,), context - 1)
    loop = engine.runtime.token_loop(engine.embed, session.state, batch, Sampling(), ())
    assert loop is not None, "no kernels for this GPU"
    loop.start(torch.full((batch,), 5), lengths, torch.ones(batch, dtype=torch.bool))
    for _ in loop.run(WARMUP, None):
        pass
    loop.start(torch.full((batch,), 5), lengths, torch.ones(batch, dtype=torch.bool))
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    begun = time.perf_counter()
    for mark in marks[1:]:
        loop.advance()
        mark.record()
    host = (time.perf_counter() - begun) / STEPS * 1e3
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    cost = total(decode_costs(engine.program.graphs["decode"], context, B=batch))
    floor = cost.needed_bytes / rates.bandwidth * 1e3
    p50 = percentile(times, 50)
    return {
        "step_ms": {"p50": p50, "p90": percentile(times, 90), "p99": percentile(times, 99)},
        "host_ms": host,
        "tokens_per_second": batch / p50 * 1e3,
        "floor_ms": floor,
        "share_of_roof": floor / p50,
        **kernels_per_step(loop.advance),
        "memory_bytes": torch.cuda.max_memory_allocated(),
    }


def prefill_cell(engine: Engine, n: int, rates: Any) -> dict[str, Any]:
    tokens = torch.randint(3, 8000, (1, n), generator=torch.Generator().manual_seed(0))
    session, times = engine.session(1), []
    for _ in range(6):
        session.reset()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        session.prefill(tokens)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    chunk = engine.limits.prefill_chunk
    graph = engine.program.graphs["prefill"]
    steps = [Step(1, min(chunk, n - at), at) for at in range(0, n, chunk)]
    flops = sum(total(graph_costs(graph, B=s.B, S=s.S, C=s.C)).flops for s in steps)
    best = percentile(times[1:], 50)
    return {
        "seconds": best,
        "tokens_per_second": n / best,
        "flops": flops,
        "share_of_matmul": flops / rates.matmul / best,
    }


def peers(report: Report, variant: str, engine: Engine, batch: int) -> None:
    """Measure transformers, static cache and compiled, and its logits' distance to the engine's."""
    wanted = [
        c for c in PEER_CONTEXTS if f"{variant} peer b{batch} c{c}" not in report.body["cells"]
    ]
    if not wanted or report.out_of_time():
        return
    try:
        model = peer_model(engine)
    except torch.OutOfMemoryError as e:
        report.body["cells"][f"{variant} peer b{batch}"] = {"out_of_memory": str(e)[:300]}
        report.write()
        return
    for context in wanted:
        cell = partial(peer_cell, engine, model, batch, context)
        report.cell(f"{variant} peer b{batch} c{context}", cell)
    torch._dynamo.reset()  # what was compiled holds the model, whose room the next engine needs


def peer_cell(engine: Engine, model: Any, batch: int, context: int) -> dict[str, Any]:
    torch._dynamo.reset()  # another cache size is another program, not a dynamic one
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 8000, (batch, context), generator=random)
    runner = HfRunner(model, context + WARMUP + STEPS + 8, "hf-compile")
    theirs = [hf_prefill(runner, tokens)]
    session = engine.session(batch)
    ours = [session.prefill(tokens)]
    for _ in range(8):
        following = theirs[-1].argmax(-1)
        theirs.append(runner.step(following[:, None]).float().cpu())
        ours.append(session.decode(following))
    cosine = min(
        float(torch.nn.functional.cosine_similarity(a, b, -1).min()) for a, b in zip(ours, theirs)
    )
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(ours, theirs))
    times = []
    for _ in range(WARMUP + STEPS // 2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        runner.step(following[:, None])
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    p50 = percentile(times[WARMUP:], 50)
    return {
        "step_ms": p50,
        "tokens_per_second": batch / p50 * 1e3,
        "cosine": cosine,
        "same_tokens": same,
        "of": batch * len(ours),
    }


def hf_prefill(runner: HfRunner, tokens: torch.Tensor) -> torch.Tensor:
    for at in range(0, tokens.shape[1], 1024):
        logits = runner.step(tokens[:, at : at + 1024])
    return logits.float().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("preflight", "kernels", "models"))
    parser.add_argument("--variants", type=lambda s: s.split(","))
    parser.add_argument("--minutes", type=float, default=6.0, help="start no cell after these")
    parser.add_argument(
        "--limit", type=float, default=240.0, help="seconds after which a cell counts as hung"
    )
    parser.add_argument("--out", type=Path, help="folder of the results (bench/results)")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--interpret", action="store_true")
    args = parser.parse_args()
    if not args.interpret and not torch.cuda.is_available():
        parser.error("this torch sees no GPU; --interpret checks the kernels without one")
    args.variants = args.variants or (TINY if args.interpret else VARIANTS).split(",")
    {"preflight": preflight, "kernels": kernels, "models": models}[args.stage](args)


if __name__ == "__main__":
    main()
