"""A report as JSON values: what was measured, and what follows from it.

Some keys are vLLM's (request_throughput, mean_ttft_ms, ...): they are about the first engine and
are null where its outputs disagree with what it was compared with. `runs` holds every runner with
its raw samples: `samples_ms.ttft[round][request]`, `samples_ms.itl[round][request][step]`. A stat
is {value, spread}; see measure.py for what the spread is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from statistics import median
from typing import Any

from g4ir.plan.cost import Cost, floor
from g4ir.spec.reader import to_line

from .measure import TAKE, Rounds, Stat, around, latencies, over, shares, speeds
from .roof import Rates, middle
from .runners import Workload

#: counts up when a key changes its meaning or goes away
VERSION = 2
KIND = "g4ir bench"
#: vLLM's names: of a statistic and of a throughput -> ours
VLLM_STATISTICS = {"mean": "mean", "median": "p50", "p99": "p99"}
VLLM_RATES = {"request": "request", "output": "output", "total_token": "total"}
#: rate of the machine -> its name in a file
RATES = {
    "read": "read_bytes_per_s",
    "copy": "copy_bytes_per_s",
    "matmul": "matmul_flops_per_s",
}
#: of an engine; null for a baseline
OF_ENGINES = (
    *("name", "engine", "work", "cache_bytes", "param_bytes"),
    *("mbu", "mfu", "roof_ratio", "bytes_per_token"),
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


def roof_values(dtype: str, rates: Sequence[Rates]) -> Values:
    """Return the machine's rates, one sample per round."""
    columns = {name: [getattr(r, key) for r in rates] for key, name in RATES.items()}
    stats = {name: around(median(column), column) for name, column in columns.items()}
    return {**stats, "matmul_dtype": dtype, "samples": rates}


def sample_values(w: Workload, rounds: Rounds) -> Values:
    """Return the raw samples in milliseconds, and their statistics."""
    samples = {
        "ttft": [[r.ttft * 1e3 for r in many] for many in rounds],
        "itl": [[[x * 1e3 for x in r.itl] for r in many] for many in rounds],
    }
    return {
        "samples_ms": samples,
        "stats": latencies(rounds),
        "tokens_per_s": speeds(w, rounds),
    }


def work_values(
    w: Workload, rounds: Rounds, rates: Sequence[Rates], costs: Mapping[str, Cost]
) -> Values:
    """Return an engine's work by phase, and its shares of the machine. mbu: bytes of a decode step
    / p50 ITL / measured bandwidth, quantised weights as stored; mfu: FLOPs of a prompt / p50 TTFT
    / measured matmul rate; roof_ratio: least time at the measured roofline / p50."""
    prompt, step = (partial(shares, rounds, rates, TAKE[key]) for key in ("ttft", "itl"))
    prefill, decode = costs["prefill"], costs["decode"]
    least = {phase: floor(cost, middle(rates).roof()) for phase, cost in costs.items()}
    return {
        "work": {
            phase: {**vars(cost), "floor_ms": f.seconds * 1e3, "bound": f.bound}
            for (phase, cost), f in zip(costs.items(), least.values(), strict=True)
        },
        "mbu": step(lambda r: decode.needed_bytes / r.bandwidth),
        "mfu": prompt(lambda r: prefill.flops / r.matmul),
        "roof_ratio": {
            "prefill": prompt(lambda r: floor(prefill, r.roof()).seconds),
            "decode": step(lambda r: floor(decode, r.roof()).seconds),
        },
        "bytes_per_token": decode.needed_bytes // w.batch,
    }


def speedup(own: Rounds, other: Rounds) -> dict[str, Stat]:
    """Return the times of another runner over those of the first engine."""
    keys = {"prefill": "ttft", "decode": "itl", "e2e": "e2el"}
    return {phase: over(other, own, TAKE[key]) for phase, key in keys.items()}


def summary(runs: Sequence[Values]) -> Values:
    """Return the numbers of the first engine, and the baseline with the fastest decode: `peer`."""
    own, peers = runs[0], [r for r in runs if not r["engine"]]
    measured = metrics(own)
    named = {f"{k}_throughput": f"{ours}_throughput" for k, ours in VLLM_RATES.items()}
    named |= {
        f"{k}_{time}_ms": f"{time}_{ours}" for time in TAKE for k, ours in VLLM_STATISTICS.items()
    }
    fastest = min(peers, key=lambda r: metrics(r)["itl_p50"][1].value, default=None)
    return {
        **{k: None if own["void"] else measured[ours][1].value for k, ours in named.items()},
        **{k: own[k].value for k in ("mbu", "mfu")},
        "roof_ratio": {phase: s.value for phase, s in own["roof_ratio"].items()},
        "peer": fastest and fastest["role"],
    }


def metrics(run: Values) -> dict[str, tuple[str, Stat]]:
    """Return name -> unit and value."""
    found: dict[str, tuple[str, Any]] = {
        f"{key.removesuffix('_ms')}_{name}": ("ms", stat)
        for key, stats in run["stats"].items()
        for name, stat in stats.items()
    }
    for name, stat in run["tokens_per_s"].items():
        found[f"{name}_throughput"] = ("requests/s" if name == "request" else "tokens/s"), stat
    parts = {f"roof_ratio_{phase}": stat for phase, stat in (run["roof_ratio"] or {}).items()}
    parts |= {name: run[name] for name in ("mbu", "mfu") if run[name]}
    found |= {name: ("share", stat) for name, stat in parts.items()}
    return {
        name: (unit, stat if isinstance(stat, Stat) else Stat(**stat))
        for name, (unit, stat) in found.items()
    }
