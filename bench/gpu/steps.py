"""The size of a run on a GPU, and of a dry run; an engine's steps and prompts, timed, and its
logits beside another's. All runs on a CPU too."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from bench.common import fill_with_noise, seconds
from g4ir.backends.base import DeviceChoice
from g4ir.backends.sampling import GREEDY
from g4ir.bench.measure import percentile
from g4ir.bench.roof import Rates, synchronize
from g4ir.bench.runners import EngineRunner, kernels_per_step, reference_runner
from g4ir.engine.engine import Engine
from g4ir.plan.cost import Step, decode_costs, graph_costs, total

#: ids of random tokens lie below
FEW, MANY = 200, 8000


@dataclass(frozen=True)
class Scale:
    """How large a run is: engines of `variants` with `choices` of the setting decode_step; steps
    over rows that hold `contexts` tokens, and `prompts`; for kernels, `tokens` of a row and `new`
    ones."""

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
    choices: tuple[str, ...] = ("plain",)


CARD = Scale(choices=("plain", "fused", "early"))
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


def decode_cell(
    engine: Engine, scale: Scale, batch: int, context: int, rates: Rates
) -> dict[str, Any]:
    """Measure steps at a context over caches of noise: times on the device and on the host."""
    gc.collect()  # what earlier sessions held, and memory is counted anew
    if scale.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if context + scale.warmup + scale.steps > engine.limits.max_seq:
        return {"refused": f"the plan has room for {engine.limits.max_seq} tokens a row"}
    step = stepper(engine, batch, context)
    for _ in range(scale.warmup):
        step()
    times, host = step_times(step, scale)
    cost = total(decode_costs(engine.program.graphs["decode"], context, B=batch))
    floor = cost.needed_bytes / rates.bandwidth * 1e3
    p50 = percentile(times, 50)
    found = {
        "step_ms": {"p50": p50, "p90": percentile(times, 90), "p99": percentile(times, 99)},
        "host_ms": host,
        "tokens_per_second": batch / p50 * 1e3,
        "floor_ms": floor,
        "share_of_roof": floor / p50,
    }
    if scale.device == "cpu":
        return found
    return {**found, **kernels_per_step(step), "memory_bytes": torch.cuda.max_memory_allocated()}


def stepper(engine: Engine, batch: int, context: int) -> Callable[[], Any]:
    """Return what makes a step of rows that hold `context` tokens of noise: on the device alone
    where the engine can, else by the host."""
    session = engine.session(batch)
    fill_with_noise(session)
    first, lengths = torch.full((batch,), 5), torch.full((batch,), context - 1)
    loop = engine.runtime.token_loop(engine.embed, session.state, batch, DeviceChoice((GREEDY,)))
    if loop is None:
        session.length.copy_(lengths)
        return partial(session.decode, first)
    loop.start(first, lengths, torch.ones(batch, dtype=torch.bool))
    return loop.advance


def step_times(step: Callable[[], Any], scale: Scale) -> tuple[list[float], float]:
    """Return milliseconds of each step, by the device's clock, and those of the host a step."""
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
    tokens = random_tokens(engine, 1, n)
    session, times = engine.session(1), []
    for _ in range(6):
        session.reset()
        synchronize(engine.device)
        begun = time.perf_counter()
        session.prefill(tokens)
        synchronize(engine.device)
        times.append(time.perf_counter() - begun)
    chunk = engine.limits.prefill_chunk
    graph = engine.program.graphs["prefill"]
    steps = [Step(1, min(chunk, n - at), at) for at in range(0, n, chunk)]
    flops = sum(total(graph_costs(graph, B=s.B, S=s.S, C=s.C)).flops for s in steps)
    best = percentile(times[1:], 50)
    return {
        "prefill_s": best,
        "tokens_per_second": n / best,
        "flops": flops,
        "share_of_matmul": flops / rates.matmul / best,
    }


def random_tokens(engine: Engine, batch: int, n: int) -> torch.Tensor:
    """Return i64[batch, n], none of them a placeholder, of many where there are many."""
    many = engine.spec.text.vocab_size > MANY
    random = torch.Generator().manual_seed(1)
    return torch.randint(3, MANY if many else FEW, (batch, n), generator=random)


#: least cosine of logits to those of the interpreter, by device: experts that lie close together
#: may be chosen differently in bf16, which a wrong kernel does not look like
LEAST = {"cpu": 0.9999, "cuda": 0.95}
#: tokens of the prompt, and steps behind it, whose logits are compared
AGREED, AGREED_STEPS = 20, 8


def agreement_cell(engine: Engine, batch: int) -> dict[str, Any]:
    """Compare logits behind a prompt and of steps behind it, which follow the other's choice."""
    ours, theirs = EngineRunner(engine, batch), reference_runner(engine, batch)
    tokens, cosine, same = random_tokens(engine, batch, AGREED), 1.0, 0
    for _ in range(AGREED_STEPS + 1):
        a, b = (r.step(tokens).float().cpu() for r in (ours, theirs))
        cosine = min(cosine, float(torch.nn.functional.cosine_similarity(a, b, -1).min()))
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        tokens = b.argmax(-1)[:, None]
    ok = cosine > LEAST[engine.device]
    return {"cosine": cosine, "same_tokens": same, "of": batch * (AGREED_STEPS + 1), "ok": ok}
