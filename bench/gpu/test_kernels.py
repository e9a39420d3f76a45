"""Is each Triton kernel right on this GPU, and what share of the bandwidth does it reach?"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch

from bench.gpu.engines import CARD, DRY, Scale
from bench.gpu.kernel_cases import (
    Case,
    all_cases,
    bytes_of_case,
    errors_of_case,
    launches_of_case,
    operands,
    run_case,
)
from g4ir.backends.cuda.graph import recorded
from g4ir.backends.cuda.kernels.launch import directly
from g4ir.backends.inductor.device import find_compiler
from g4ir.backends.inductor.segment import canonical
from g4ir.backends.inductor.target import Target
from g4ir.bench.roof import Meter, passes_seconds
from g4ir.ir.graph import Program
from g4ir.ir.text import print_graph
from g4ir.model.text import build_program
from g4ir.passes import PassOptions, run_program
from g4ir.passes.latent_kv import LatentOptions
from g4ir.quant.recipe import find_quant_config
from g4ir.quant.rewrite import quantise
from g4ir.spec.record import load_spec
from g4ir.weights.pack import split_program

__all__ = ["CARD", "DRY"]
#: bytes of operands that timed launches cycle through: several times the L2 cache
SPREAD = 512 << 20
#: maximum copies of the operands, and minimum launches that are timed together
COPIES, LAUNCHES = 1024, 64
#: maximum bytes of all copies of the operands
CAPACITY = 8 << 30
TRIES = 5


@pytest.mark.limit(300)
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_kernels(measure: Any, scale: Scale, variant: str, rows: int) -> None:
    target = Target(scale.device, scale.gpu or find_compiler(scale.device).target(1).gpu, rows)
    every = all_cases(programs([variant]), [target], scale.tokens, scale.new)
    cases = {case_name(c): c for c in every}
    from tests.interpreted.language import interpreted

    interpreting = scale.device == "cpu"
    if not interpreting:
        compile_ahead([c for name, c in cases.items() if name not in measure.found])
    rate = Meter(scale.device, torch.bfloat16).measure().bandwidth
    with interpreted() if interpreting else torch.no_grad():
        for name, case in cases.items():
            measure(name, partial(one_kernel, case, scale.device, rate))


def programs(variants: list[str]) -> Iterator[Program]:
    """Yield the programs of every variant, with latent caches too if it has any."""
    for variant in variants:
        name, _, quant = variant.partition("+")
        spec = load_spec(name)
        graphs = build_program(spec, dtype="bf16")
        graphs = quantise(graphs, spec, find_quant_config(quant or None), "bf16")
        latent = spec.text.full.k_eq_v and not quant
        for form in ("off", "value") if latent else ("off",):
            done = run_program(graphs, options=PassOptions((LatentOptions(form),)))
            yield split_program(done).program


def case_name(case: Case) -> str:
    """Return a name of the case that does not depend on the other measured variants."""
    text = f"{case.target} {case.tokens}\n{print_graph(canonical(case.graph))}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{case.name} B={case.target.rows} {digest}"


def compile_ahead(cases: list[Case]) -> None:
    """Compile kernels into Triton's cache, in one process per core: a kernel takes seconds."""
    jobs = min(os.cpu_count() or 1, 16, len(cases))
    if jobs < 2:
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        failed = sum(pool.map(compile_launches, cases))
    print(f"{failed} kernels refused", flush=True)


def compile_launches(case: Case) -> int:
    """Compile, not run, the kernels of a case; return how many were refused."""
    refused = 0
    for kernel, grid, given, meta in launches_of_case(case):
        try:
            kernel.warmup(**given, grid=grid, **meta)
        except Exception:
            refused += 1
    return refused


def one_kernel(case: Case, device: str, bandwidth: float) -> dict[str, Any]:
    """Compare a kernel with the op's reference, and its time with that of its bytes at
    `bandwidth`."""
    seed = 0 if device == "cpu" else int(time.time())
    errors = errors_of_case(case, device, seed)
    found: dict[str, Any] = {
        "seed": seed,
        "use": " ".join(f"{name} {dict(use)}" for name, use in case.choice.uses.items()),
        **asdict(errors),
        "ok": errors.ok,
    }
    if device == "cpu":
        return found
    floor = bytes_of_case(case) / bandwidth * 1e6
    try:
        found["us"] = time_case(case)
    except torch.OutOfMemoryError as e:  # reported without a time
        return {**found, "out_of_memory": str(e)[:300]}
    return {**found, "floor_us": floor, "share_of_bandwidth": floor / found["us"]}


def time_case(case: Case) -> float:
    """Measure the microseconds of one run in a CUDA graph of many, operands not in the cache."""
    first = operands(case, "cuda")
    count = copies(bytes_of_case(case), sum(t.nbytes for t in first.values()))
    given = [first, *(operands(case, "cuda", seed) for seed in range(1, count))]
    turns = [given[i % len(given)] for i in range(max(LAUNCHES, len(given)))]

    def work() -> None:
        for one in turns:
            run_case(case, one)

    with directly():
        replay = recorded(work)
    return median(passes_seconds(replay, 1) for _ in range(TRIES)) / len(turns) * 1e6


def copies(touched: int, held: int) -> int:
    """Return how many copies of the operands exceed the L2 cache together (SPREAD), at least 2, at
    most COPIES and CAPACITY bytes. `touched`: bytes that a run accesses of a copy, `held`: bytes of
    a copy (a KV cache is allocated whole and written at one slot)."""
    return max(2, min(COPIES, SPREAD // max(touched, 1), CAPACITY // max(held, 1)))
