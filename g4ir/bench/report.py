"""A report as JSON values: what was measured, and what follows from it.

Some keys are vLLM's (request_throughput, mean_ttft_ms, ...): they are about the first engine and
are null if its outputs disagree with those that it was compared with. `runs` holds every runner
with its raw samples: `samples_ms.ttft[round][request]`, `samples_ms.itl[round][request][step]`. A
stat is {value, spread}; see measure.py for the spread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from g4ir.check.reference import acting, param_bytes
from g4ir.engine.engine import Engine
from g4ir.ir.rewrite import drop_dead
from g4ir.ops.types import dtype_name
from g4ir.passes.match import OFF
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.plan.cost import Cost, Roof, Step, floor, step_costs

from .measure import LATENCIES, Stat, around, latencies, medians, ratio, speeds
from .roof import Meter, Rates, median_rates
from .runners import BenchRunner, Rounds, Workload
from .system import busy_text

#: schema version: incremented when a key changes its meaning or is removed
VERSION = 3
KIND = "g4ir bench"
#: kind of a file with the reports of several workloads
SWEEP_KIND = "g4ir bench sweep"
#: vLLM's names of statistics -> ours; its throughputs
VLLM_STATISTICS = {"mean": "mean", "median": "p50", "p99": "p99"}
VLLM_RATES = {"total_token_throughput": "total_throughput"} | {
    name: name for name in ("request_throughput", "output_throughput")
}
#: rate of the machine -> its key
RATES = {"read": "read_bytes_per_s", "copy": "copy_bytes_per_s", "matmul": "matmul_flops_per_s"}
#: keys of an engine's run; null for a baseline
OF_ENGINES = ("name", "engine", "work", "cache_bytes", "param_bytes", "bytes_per_token")
#: phase -> metric whose spread is checked
SPREADS = {"prefill": "prefill_throughput", "decode": "itl_p50"}
RANDOM_WEIGHTS = (
    "random weights: routing is near uniform and text is meaningless; the speed of dense parts "
    "does not depend on it"
)
#: decode steps whose cost is computed, spread evenly over a request
DECODE_STEPS = 16
#: JSON values
Values = dict[str, Any]


def plain(value: Any) -> Any:
    """Return JSON values: records as objects, tuples as lists."""
    return json.loads(json.dumps(value, default=vars))


def build_report(
    engine: Engine, w: Workload, runners: Sequence[BenchRunner], meter: Meter, measured: Values
) -> Values:
    """Return the report of measured runners, the first of them an engine's; `measured`: its parts
    `env`, `agreement` and `warmup`."""
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
        "notes": [RANDOM_WEIGHTS] if engine.facts.seed is not None else [],
        "warnings": [*_warnings(env["load_average"], runs)],
        "num_prompts": rounds * requests * w.batch,
        "max_concurrency": w.batch,
        **summary(runs),
        "speedup": {r.role: _speedup(runners[0], r, void) for r in runners[1:]},
    }
    return dict(plain(values))


def void_roles(agreements: Sequence[Values]) -> set[str]:
    """Return the roles whose outputs agree with no other's: their speeds are not comparable."""
    ok = {a[side] for a in agreements if a["ok"] for side in ("role", "base")}
    return {a[side] for a in agreements for side in ("role", "base")} - ok


def _speedup(first: BenchRunner, other: BenchRunner, void: set[str]) -> Values | None:
    speedups = {"over": other.label, **speedup(first.rounds, other.rounds)}
    return None if {first.role, other.role} & void else speedups


def _warnings(load_average: float, runs: Sequence[Values]) -> Iterator[str]:
    if busy := busy_text(load_average):
        yield busy
    for run in runs:
        stats = {phase: metrics(run)[name] for phase, name in SPREADS.items()}
        if noisy := [f"{k} ± {s.spread / s.value:.0%}" for k, s in stats.items() if s.noisy]:
            fix = "rounds differ too much to compare; give more --rounds on a quiet machine"
            yield f"{run_name(run)}: {', '.join(noisy)}: {fix}"


def run_name(run: Values) -> str:
    """Return the name of an engine, or the role of a baseline."""
    return str(run["name"] or run["role"])


def roof_values(dtype: str, rates: Sequence[Rates]) -> Values:
    """Return the machine's rates, one sample per round."""
    columns = {name: [getattr(r, key) for r in rates] for key, name in RATES.items()}
    stats = {name: around(median(column), column) for name, column in columns.items()}
    return {**stats, "matmul_dtype": dtype, "samples": rates}


def run_values(w: Workload, runner: BenchRunner, rates: Sequence[Rates], void: bool) -> Values:
    """Return a runner's part of the report: raw samples in milliseconds, and `metrics` of them."""
    rounds, engine, shares = runner.rounds, runner.engine, dict[str, Stat]()
    values: Values = {
        "role": runner.role,
        "label": runner.label,
        "void": void,
        "samples_ms": {
            "ttft": [[r.ttft * 1e3 for r in requests] for requests in rounds],
            "itl": [[[x * 1e3 for x in r.itl] for r in requests] for requests in rounds],
        },
        "first_request_s": runner.first_request_s,
        "peak_memory": runner.peak_memory,
        **dict.fromkeys(OF_ENGINES),
    }
    if engine:
        costs = request_costs(engine, w)
        shares = machine_shares(rounds, rates, costs)
        values |= _engine_values(engine, rates, costs)
        values |= {"name": runner.name, "cache_bytes": runner.session.nbytes()}
        values["bytes_per_token"] = costs["decode"].needed_bytes // w.batch
    return values | {"metrics": latencies(rounds) | speeds(w, rounds) | shares}


def _engine_values(engine: Engine, rates: Sequence[Rates], costs: Mapping[str, Cost]) -> Values:
    facts, config, roof = engine.facts, engine.config, median_rates(rates).roof()
    activations = acting(engine).of(ActivationOptions).to
    return {
        "engine": {
            "manifest": facts.digest,
            "dtype": engine.dtype,
            "backend": config.backend,
            "device": engine.device,
            "weights": facts.weights.kind,
            "skipped_passes": config.skip,
            "limits": engine.limits,
            "quant": config.quant and config.quant.name,
            "activations": activations if activations != OFF else None,
        },
        "param_bytes": param_bytes(engine),
        "work": {phase: _work(cost, roof) for phase, cost in costs.items()},
    }


def _work(cost: Cost, roof: Roof) -> Values:
    f = floor(cost, roof)
    return {**vars(cost), "floor_ms": f.seconds * 1e3, "bound": f.bound}


def machine_shares(
    rounds: Rounds, rates: Sequence[Rates], costs: Mapping[str, Cost]
) -> dict[str, Stat]:
    """Return an engine's shares of the machine. mbu: bytes of a decode step / p50 ITL / measured
    bandwidth, quantised weights as stored; mfu: FLOPs of a prompt / p50 TTFT / measured matmul
    rate; roof_ratio: least time at the measured roofline / p50."""
    prefill, decode = costs["prefill"], costs["decode"]
    every = [median_rates(rates), *rates]
    p50 = {key: medians(rounds, key) for key in ("ttft", "itl")}

    def share(latency: str, seconds_at: Callable[[Rates], float]) -> Stat:
        return ratio([seconds_at(r) for r in every], p50[latency], "share")

    return {
        "mbu": share("itl", lambda r: decode.needed_bytes / r.bandwidth),
        "mfu": share("ttft", lambda r: prefill.flops / r.matmul),
        "roof_ratio_prefill": share("ttft", lambda r: floor(prefill, r.roof()).seconds),
        "roof_ratio_decode": share("itl", lambda r: floor(decode, r.roof()).seconds),
    }


def speedup(rounds: Rounds, other: Rounds) -> dict[str, Stat]:
    """Return the speedup: another runner's times / the first engine's."""
    keys = {"prefill": "ttft", "decode": "itl", "e2e": "e2el"}
    return {phase: ratio(medians(other, key), medians(rounds, key)) for phase, key in keys.items()}


def summary(runs: Sequence[Values]) -> Values:
    """Return the values of the first engine, and the baseline with the fastest decode: `peer`."""
    run, baselines = runs[0], [r for r in runs if not r["engine"]]
    measured = metrics(run)
    names = VLLM_RATES | {
        f"{k}_{key}_ms": f"{key}_{ours}" for key in LATENCIES for k, ours in VLLM_STATISTICS.items()
    }
    fastest = min(baselines, key=lambda r: metrics(r)["itl_p50"].value, default=None)
    values = {k: None if run["void"] else measured[ours].value for k, ours in names.items()}
    return {**values, "peer": fastest and fastest["role"]}


def metrics(run: Values) -> dict[str, Stat]:
    """Return the metrics of a run, by name."""
    return {name: Stat(**stat) for name, stat in run["metrics"].items()}


# --- work of a request ------------------------------------------------------------------------


def request_costs(engine: Engine, w: Workload) -> dict[str, Cost]:
    """Return the costs by phase: of the prompt, and of a decode step on average. Of experts the
    expected number for uniform choices is counted (ops/moe.py).

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
