"""Builds a report as JSON values: measurements, and metrics derived from them.

Some keys are vLLM's (request_throughput, mean_ttft_ms, ...): their values are the first engine's,
or null if it is void (`void_roles`). `runs` has the metrics of every runner. A stat is {value,
spread}; see measure.py for the spread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from g4ir.engine.engine import Engine
from g4ir.ir.rewrite import drop_dead
from g4ir.ops.types import dtype_name
from g4ir.plan.cost import Cost, Step, step_costs

from .measure import LATENCIES, Stat, around, latencies, medians, ratio, speeds
from .roof import Meter, Rates, median_rates
from .runners import BenchRunner, Rounds, Workload

#: schema version: incremented when a key changes its meaning or is removed
VERSION = 4
KIND = "g4ir bench"
#: kind of a file with the reports of several workloads
SWEEP_KIND = "g4ir bench sweep"
#: vLLM's name of a statistic -> ours; vLLM's name of a throughput -> ours
VLLM_STATISTICS = {"mean": "mean", "median": "p50", "p99": "p99"}
VLLM_RATES = {"total_token_throughput": "total_throughput"} | {
    name: name for name in ("request_throughput", "output_throughput")
}
#: field of roof.Rates -> its key in a report
RATES = {"read": "read_bytes_per_s", "copy": "copy_bytes_per_s", "matmul": "matmul_flops_per_s"}
#: maximum decode steps, spread evenly over a request, over which the cost of a step is averaged
DECODE_STEPS = 16
#: JSON values
Values = dict[str, Any]


def plain(value: Any) -> Any:
    """Return JSON values: records as objects, tuples as lists."""
    return json.loads(json.dumps(value, default=vars))


def build_report(
    engine: Engine, w: Workload, runners: Sequence[BenchRunner], meter: Meter, measured: Values
) -> Values:
    """Return the report of measured runners, the first of which is `engine`'s; `measured`: the
    report's `env` and `agreement`, and `warmup` (requests)."""
    env, agreements = measured["env"], measured["agreement"]
    void = void_roles(agreements)
    runs = plain([run_values(w, r, meter.rates, r.role in void) for r in runners])
    rounds, requests = len(meter.rates), len(runners[0].rounds[0])
    counts = {"rounds": rounds, "requests_per_round": requests, "warmup": measured["warmup"]}
    values = {
        "kind": KIND,
        "schema": VERSION,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": f"g4ir-{engine.config.backend}",
        "model_id": engine.spec.name,
        "workload": {**vars(w), **counts},
        "env": env,
        "roof": roof_values(dtype_name(meter.matrix.dtype), meter.rates),
        "agreement": agreements,
        "outputs_agree": all(a["ok"] for a in agreements),
        "runs": runs,
        "num_prompts": rounds * requests * w.batch,
        "max_concurrency": w.batch,
        **summary(runs),
        "speedup": {r.role: speedup(runners[0], r, void) for r in runners[1:]},
    }
    return dict(plain(values))


def void_roles(agreements: Sequence[Values]) -> set[str]:
    """Return the roles that were compared, and whose outputs agree with no other's: their speeds
    are not comparable."""
    ok = {a[side] for a in agreements if a["ok"] for side in ("role", "base")}
    return {a[side] for a in agreements for side in ("role", "base")} - ok


def run_name(run: Values) -> str:
    """Return the name of an engine, or the role of a baseline."""
    return str(run["name"] or run["role"])


def roof_values(dtype: str, rates: Sequence[Rates]) -> Values:
    """Return each of the machine's rates as a stat; the matmul's dtype; and `samples`, one per
    round."""
    columns = {name: [getattr(r, key) for r in rates] for key, name in RATES.items()}
    stats = {name: around(median(column), column) for name, column in columns.items()}
    return {**stats, "matmul_dtype": dtype, "samples": rates}


def run_values(w: Workload, runner: BenchRunner, rates: Sequence[Rates], void: bool) -> Values:
    """Return a runner's part of the report."""
    rounds, engine, shares, facts = runner.rounds, runner.engine, dict[str, Stat](), None
    if engine:
        shares = machine_shares(rounds, rates, request_costs(engine, w))
        facts = {"manifest": engine.facts.digest, "random_weights": engine.facts.seed}
        facts |= engine.config.as_options()
    return {
        "role": runner.role,
        "name": runner.name,
        "label": runner.label,
        "void": void,
        "first_request_s": runner.first_request_s,
        "peak_memory": runner.peak_memory,
        "engine": facts,
        "metrics": latencies(rounds) | speeds(w, rounds) | shares,
    }


def machine_shares(
    rounds: Rounds, rates: Sequence[Rates], costs: Mapping[str, Cost]
) -> dict[str, Stat]:
    """Return an engine's utilisation of the machine. mbu: bytes of a decode step / p50 ITL /
    measured bandwidth, quantised weights as stored; mfu: FLOPs of a prompt / p50 TTFT / measured
    matmul rate."""
    every = [median_rates(rates), *rates]
    min_seconds = {
        "mbu": ("itl", [costs["decode"].needed_bytes / r.bandwidth for r in every]),
        "mfu": ("ttft", [costs["prefill"].flops / r.matmul for r in every]),
    }
    return {k: ratio(s, medians(rounds, latency)) for k, (latency, s) in min_seconds.items()}


def speedup(first: BenchRunner, other: BenchRunner, void: Collection[str]) -> Values | None:
    """Return another runner's median times / the first engine's, by phase; None if either is
    void."""
    if {first.role, other.role} & {*void}:
        return None
    sides = other.rounds, first.rounds
    keys = {"prefill": "ttft", "decode": "itl", "e2e": "e2el"}
    return {p: ratio(*(medians(rounds, key) for rounds in sides)) for p, key in keys.items()}


def summary(runs: Sequence[Values]) -> Values:
    """Return the first engine's metrics by vLLM's names; each is None if the engine is void."""
    run, measured = runs[0], metrics(runs[0])
    names = VLLM_RATES | {
        f"{k}_{key}_ms": f"{key}_{ours}" for key in LATENCIES for k, ours in VLLM_STATISTICS.items()
    }
    return {k: None if run["void"] else measured[ours].value for k, ours in names.items()}


def metrics(run: Values) -> dict[str, Stat]:
    """Return the metrics of a run, by name."""
    return {name: Stat(**stat) for name, stat in run["metrics"].items()}


# --- work of a request ------------------------------------------------------------------------


def request_costs(engine: Engine, w: Workload) -> dict[str, Cost]:
    """Return the costs by phase: of the prompt, and of a decode step on average. The number of
    experts that a step reads is the expected one for uniform routing (ops/moe.py).

    Chunks before the last one compute what the KV cache depends on, and no logits; a last chunk of
    one token is a decode step."""
    prefill, decode = (engine.program.graphs[phase] for phase in ("prefill", "decode"))
    end, chunk, steps = w.context + w.input_len, engine.limits.prefill_chunk, w.output_len - 1
    *early, last = range(w.context, end, chunk)
    cost, step = step_costs(drop_dead(replace(prefill, outputs=()))), step_costs(decode)
    prompt = sum((cost(Step(w.batch, chunk, at)) for at in early), Cost())
    cost = step_costs(prefill) if end - last > 1 else step
    count = min(DECODE_STEPS, steps)
    some = (step(Step(w.batch, 1, end + i * steps // count)) for i in range(count))
    mean = (total // count for total in vars(sum(some, Cost())).values())
    return {"prefill": prompt + cost(Step(w.batch, end - last, last)), "decode": Cost(*mean)}
