"""Engines of variants with random weights, built by commands of g4ir: times of decode steps and
prompts, logits compared with the interpreter's; and the sizes of a run on a GPU and of a dry
run."""

from __future__ import annotations

import gc
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import fill_with_noise, seconds
from g4ir.backends.base import DeviceChoice
from g4ir.backends.sampling import GREEDY
from g4ir.bench.roof import Rates, synchronize
from g4ir.bench.runners import EngineRunner, reference_runner
from g4ir.builder.build import prepare
from g4ir.builder.load import load_engine
from g4ir.check.tokens import random_ids
from g4ir.engine.engine import Engine
from g4ir.errors import InputError, PlanError
from g4ir.plan.cost import Step, graph_costs, step_costs, total
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import load_spec


@dataclass(frozen=True)
class Scale:
    """Sizes of a run: engines of `variants`; decode steps after `contexts` tokens in the KV cache,
    prompts of `prompts` tokens; for kernels, `tokens` in a sequence's KV cache, `new` of them in a
    prefill."""

    device: str = "cuda"
    backend: str = "torch"
    dtype: str = "bfloat16"
    gpu: str = ""
    variants: tuple[str, ...] = ("e2b", "26b-a4b", "31b", "e4b")
    contexts: tuple[int, ...] = (1024, 8192, 32768, 131072)
    prompts: tuple[int, ...] = (1024, 8192)
    chunk: int = 2048
    warmup: int = 10
    steps: int = 64
    tokens: int = 4096
    new: int = 1024


CARD = Scale()
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


def engine_path(out: Path, variant: str, rows: int) -> Path:
    return out / "engines" / f"{variant}-b{rows}"


def named(variant: str) -> list[str]:
    """Return the options of g4ir that name a variant; after a + is its quantisation, as in
    e2b+int4."""
    name, _, quant = variant.partition("+")
    return ["--variant", name, *(["--quant", quant] if quant else [])]


def g4ir_said(words: Sequence[str], front: Sequence[str] = ()) -> str:
    """Run a g4ir command, after the words of `front`; return its output. InputError with the end of
    its stderr if it fails."""
    command = [*front, sys.executable, "-m", "g4ir", *words]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise InputError(f"{shlex.join(command)}: {done.stderr[-1000:] or done.stdout[-1000:]}")
    return done.stdout


def build_all(measure: Any, scale: Scale, variants: list[str], rows: int, out: Path) -> None:
    """Build several engines at a time."""
    with ThreadPoolExecutor(len(variants)) as pool:
        begun = {v: pool.submit(build, scale, v, rows, out) for v in variants}
    for variant, future in begun.items():
        measure(variant, future.result)


def build(scale: Scale, variant: str, rows: int, out: Path) -> dict[str, Any]:
    """Build an engine for the longest context that fits the device; return its build time and
    size."""
    begun, path = time.monotonic(), engine_path(out, variant, rows)
    if not path.exists():
        options = longest(scale, variant, rows)
        words = [f"--{k.replace('_', '-')}={v}" for k, v in options.items()]
        g4ir_said(["build", *named(variant), *words, "--out", str(path)])
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return {"build_s": round(time.monotonic() - begun, 1), "megabytes": size >> 20}


def longest(scale: Scale, variant: str, rows: int) -> dict[str, Any]:
    """Return build options for the longest context that fits. PlanError if not even the shortest
    does."""
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


def open_engine(out: Path, variant: str, rows: int) -> Engine:
    """Load an engine that `build` created. InputError if there is none."""
    path = engine_path(out, variant, rows)
    if not path.exists():
        raise InputError(f"{path} is missing: run test_engines_are_built of test_decode.py")
    return load_engine(path)


def decode_cell(
    engine: Engine, scale: Scale, batch: int, context: int, rates: Rates
) -> dict[str, Any]:
    """Measure decode steps after `context` tokens of random KV cache: times on the device and on
    the host."""
    gc.collect()  # frees earlier sessions before the peak is reset
    if scale.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if context + scale.warmup + scale.steps > engine.limits.max_seq:
        return {"refused": f"the plan has room for {engine.limits.max_seq} tokens per sequence"}
    step = stepper(engine, batch, context)
    for _ in range(scale.warmup):
        step()
    times, host = step_times(step, scale)
    cost = total(graph_costs(engine.program.graphs["decode"], C=context - 1, B=batch))
    floor = cost.needed_bytes / rates.bandwidth * 1e3
    p50 = np.percentile(times, 50)
    found = {
        "step_ms": {"p50": p50, "p90": np.percentile(times, 90), "p99": np.percentile(times, 99)},
        "host_ms": host,
        "tokens_per_second": batch / p50 * 1e3,
        "floor_ms": floor,
        "share_of_roof": floor / p50,
    }
    if scale.device == "cpu":
        return found
    return {**found, **kernels_per_step(step), "memory_bytes": torch.cuda.max_memory_allocated()}


def kernels_per_step(step: Callable[[], Any]) -> dict[str, float]:
    """Return the number of CUDA kernels of a step, and the sum of their milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    kernels = [
        e for e in profiler.events() if e.device_type == cuda and not e.name.startswith("Mem")
    ]
    return {"kernels": len(kernels), "device_ms": sum(e.device_time for e in kernels) / 1e3}


def stepper(engine: Engine, batch: int, context: int) -> Callable[[], Any]:
    """Return a function that runs a step of sequences with `context` tokens of noise: by the device
    loop if the engine has one, else by the host."""
    session = engine.session(batch)
    fill_with_noise(session)
    first, lengths = torch.full((batch,), 5), torch.full((batch,), context - 1)
    where = engine.embed_tokens, session.state, batch, DeviceChoice((GREEDY,)), engine.tables
    loop = engine.runtime.token_loop(*where) if engine.device == "cuda" else None
    if loop is None:
        session.length.copy_(lengths)
        return partial(session.decode, first)
    loop.start(first, lengths, torch.ones(batch, dtype=torch.bool))
    return loop.advance


def step_times(step: Callable[[], Any], scale: Scale) -> tuple[list[float], float]:
    """Return milliseconds of each step by the device's clock, and the host's milliseconds per
    step."""
    if scale.device == "cpu":
        times = [seconds(step) * 1e3 for _ in range(scale.steps)]
        return times, sum(times) / len(times)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(scale.steps + 1)]
    marks[0].record()
    begun = time.perf_counter()
    for mark in marks[1:]:
        step()
        mark.record()
    host = (time.perf_counter() - begun) / scale.steps * 1e3
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)], host


def prefill_cell(engine: Engine, n: int, rates: Rates) -> dict[str, Any]:
    tokens = random_ids(engine, (1, n))
    session, times = engine.session(1), []
    for _ in range(6):
        session.reset()
        synchronize(engine.device)
        begun = time.perf_counter()
        session.prefill(tokens)
        synchronize(engine.device)
        times.append(time.perf_counter() - begun)
    cost, chunk = step_costs(engine.program.graphs["prefill"]), engine.limits.prefill_chunk
    flops = sum(cost(Step(1, min(chunk, n - at), at)).flops for at in range(0, n, chunk))
    best = np.percentile(times[1:], 50)
    return {
        "prefill_s": best,
        "tokens_per_second": n / best,
        "flops": flops,
        "share_of_matmul": flops / rates.matmul / best,
    }


#: minimum cosine of logits to the interpreter's, by device: in bf16 nearly tied experts may be
#: chosen differently; a wrong kernel is much further off
LEAST = {"cpu": 0.9999, "cuda": 0.95}
#: prompt tokens, and decode steps after them, of the comparison
AGREED, AGREED_STEPS = 20, 8


def agreement_cell(engine: Engine, batch: int) -> dict[str, Any]:
    """Compare logits after a prompt and after decode steps with the interpreter's, whose greedy
    tokens both get."""
    ours, theirs = EngineRunner(engine, batch), reference_runner(engine, batch)
    tokens, cosine, same = random_ids(engine, (batch, AGREED)), 1.0, 0
    for _ in range(AGREED_STEPS + 1):
        a, b = (r.step(tokens).float().cpu() for r in (ours, theirs))
        cosine = min(cosine, float(torch.nn.functional.cosine_similarity(a, b, -1).min()))
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        tokens = b.argmax(-1)[:, None]
    ok = cosine > LEAST[engine.device]
    return {"cosine": cosine, "same_tokens": same, "of": batch * (AGREED_STEPS + 1), "ok": ok}
