"""A report as JSON values: what was measured, and what follows from it.

Some keys are vLLM's (request_throughput, mean_ttft_ms, ...): they are about the first engine and
are null if its outputs disagree with those that it was compared with. `runs` holds every runner
with its raw samples: `samples_ms.ttft[round][request]`, `samples_ms.itl[round][request][step]`. A
stat is {value, spread}; see measure.py for the spread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from statistics import median
from typing import Any

from g4ir.check.reference import acting, param_bytes
from g4ir.engine.engine import Engine
from g4ir.ops.types import dtype_name
from g4ir.passes.match import OFF
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.plan.cost import Cost, floor
from g4ir.spec.reader import to_line

from .measure import LATENCIES, Stat, around, latencies, medians, ratio, speeds
from .roof import Meter, Rates, median_rates
from .runners import BenchRunner, EngineRunner, Rounds, Workload
from .system import busy_text
from .work import request_costs

#: schema version: incremented when a key changes its meaning or is removed
VERSION = 2
KIND = "g4ir bench"
#: kind of a file with the reports of several workloads
SWEEP_KIND = "g4ir bench sweep"
#: vLLM's names: of a statistic and of a throughput -> ours
VLLM_STATISTICS = {"mean": "mean", "median": "p50", "p99": "p99"}
VLLM_RATES = {"request": "request", "output": "output", "total_token": "total"}
#: rate of the machine -> its key
RATES = {"read": "read_bytes_per_s", "copy": "copy_bytes_per_s", "matmul": "matmul_flops_per_s"}
#: keys of an engine's run; null for a baseline
OF_ENGINES = (
    *("name", "engine", "work", "cache_bytes", "param_bytes"),
    *("mbu", "mfu", "roof_ratio", "bytes_per_token"),
)
#: phase -> metric whose spread is checked
SPREADS = {"prefill": "prefill_throughput", "decode": "itl_p50"}
RANDOM_WEIGHTS = (
    "random weights: routing is near uniform and text means nothing; speed of dense parts does not "
    "depend on it"
)
#: JSON values
Values = dict[str, Any]


def plain(value: Any) -> Any:
    """Return JSON values, with each text on one line."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [*map(plain, value)]
    if isinstance(value, str):
        return to_line(value)
    return plain(vars(value)) if is_dataclass(value) else value


def build_report(
    engine: Engine, w: Workload, runners: Sequence[BenchRunner], meter: Meter, measured: Values
) -> Values:
    """Return the report of measured runners, the first of them an engine's; `measured`: its parts
    `env`, `agreement`, `void` and `warmup`."""
    env, void = measured["env"], measured["void"]
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
        "agreement": measured["agreement"],
        "outputs_agree": all(a["ok"] for a in measured["agreement"]),
        "runs": runs,
        "notes": [RANDOM_WEIGHTS] if engine.facts.seed is not None else [],
        "warnings": [*_warnings(env["load_average"], runs)],
        "num_prompts": rounds * requests * w.batch,
        "max_concurrency": w.batch,
        **summary(runs),
        "speedup": {r.role: _speedup_values(runners[0], r, void) for r in runners[1:]},
    }
    return dict(plain(values))


def _speedup_values(first: BenchRunner, other: BenchRunner, void: set[str]) -> Values | None:
    if {first.role, other.role} & void:
        return None
    return {"over": other.label, **speedup(first.rounds, other.rounds)}


def _warnings(load_average: float | None, runs: Sequence[Values]) -> Iterator[str]:
    if busy := busy_text(load_average):
        yield busy
    for run in runs:
        stats = {phase: metrics(run)[name][1] for phase, name in SPREADS.items()}
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
    """Return a runner's part of the report."""
    engine = _engine_values(w, runner, rates) if isinstance(runner, EngineRunner) else {}
    return {
        "role": runner.role,
        "label": runner.label,
        "void": void,
        **sample_values(w, runner.rounds),
        "setup_s": runner.setup_s,
        "peak_memory": runner.peak_memory,
        **dict.fromkeys(OF_ENGINES),
        **engine,
    }


def sample_values(w: Workload, rounds: Rounds) -> Values:
    """Return the raw samples in milliseconds, and their statistics."""
    samples = {
        "ttft": [[r.ttft * 1e3 for r in requests] for requests in rounds],
        "itl": [[[x * 1e3 for x in r.itl] for r in requests] for requests in rounds],
    }
    return {"samples_ms": samples, "stats": latencies(rounds), "tokens_per_s": speeds(w, rounds)}


def _engine_values(w: Workload, runner: EngineRunner, rates: Sequence[Rates]) -> Values:
    engine, facts, config = runner.engine, runner.engine.facts, runner.engine.config
    activations = acting(engine).of(ActivationOptions).to
    return {
        "name": runner.name,
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
        "cache_bytes": runner.session.nbytes(),
        "param_bytes": param_bytes(engine),
        **work_values(w, runner.rounds, rates, request_costs(engine, w)),
    }


def work_values(
    w: Workload, rounds: Rounds, rates: Sequence[Rates], costs: Mapping[str, Cost]
) -> Values:
    """Return an engine's work by phase, and its shares of the machine. mbu: bytes of a decode step
    / p50 ITL / measured bandwidth, quantised weights as stored; mfu: FLOPs of a prompt / p50 TTFT
    / measured matmul rate; roof_ratio: least time at the measured roofline / p50."""
    prefill, decode = costs["prefill"], costs["decode"]
    typical, p50 = median_rates(rates), {key: medians(rounds, key) for key in ("ttft", "itl")}
    floors = {phase: floor(cost, typical.roof()) for phase, cost in costs.items()}

    def share(latency: str, seconds_at: Callable[[Rates], float]) -> Stat:
        return ratio([seconds_at(r) for r in (typical, *rates)], p50[latency])

    return {
        "work": {
            phase: {**vars(cost), "floor_ms": f.seconds * 1e3, "bound": f.bound}
            for (phase, cost), f in zip(costs.items(), floors.values(), strict=True)
        },
        "mbu": share("itl", lambda r: decode.needed_bytes / r.bandwidth),
        "mfu": share("ttft", lambda r: prefill.flops / r.matmul),
        "roof_ratio": {
            "prefill": share("ttft", lambda r: floor(prefill, r.roof()).seconds),
            "decode": share("itl", lambda r: floor(decode, r.roof()).seconds),
        },
        "bytes_per_token": decode.needed_bytes // w.batch,
    }


def speedup(rounds: Rounds, other: Rounds) -> dict[str, Stat]:
    """Return the speedup: another runner's times / the first engine's."""
    keys = {"prefill": "ttft", "decode": "itl", "e2e": "e2el"}
    return {phase: ratio(medians(other, key), medians(rounds, key)) for phase, key in keys.items()}


def summary(runs: Sequence[Values]) -> Values:
    """Return the values of the first engine, and the baseline with the fastest decode: `peer`."""
    run, baselines = runs[0], [r for r in runs if not r["engine"]]
    measured = metrics(run)
    names = {f"{k}_throughput": f"{ours}_throughput" for k, ours in VLLM_RATES.items()} | {
        f"{k}_{key}_ms": f"{key}_{ours}" for key in LATENCIES for k, ours in VLLM_STATISTICS.items()
    }
    fastest = min(baselines, key=lambda r: metrics(r)["itl_p50"][1].value, default=None)
    return {
        **{k: None if run["void"] else measured[ours][1].value for k, ours in names.items()},
        **{k: run[k]["value"] for k in ("mbu", "mfu")},
        "roof_ratio": {phase: stat["value"] for phase, stat in run["roof_ratio"].items()},
        "peer": fastest and fastest["role"],
    }


def metrics(run: Values) -> dict[str, tuple[str, Stat]]:
    """Return name -> unit and value."""
    stats = {
        f"{key.removesuffix('_ms')}_{name}": ("ms", stat)
        for key, statistics in run["stats"].items()
        for name, stat in statistics.items()
    }
    for name, stat in run["tokens_per_s"].items():
        stats[f"{name}_throughput"] = ("requests/s" if name == "request" else "tokens/s"), stat
    shares = {f"roof_ratio_{phase}": stat for phase, stat in (run["roof_ratio"] or {}).items()}
    shares |= {name: run[name] for name in ("mbu", "mfu") if run[name]}
    stats |= {name: ("share", stat) for name, stat in shares.items()}
    return {name: (unit, Stat(**stat)) for name, (unit, stat) in stats.items()}
