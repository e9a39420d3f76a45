"""The record of a measurement. `plain` writes it as JSON values, `read_report` reads and checks it.

A report holds what was measured. What follows from that (statistics, rates, shares, speedups) is
worked out when it is asked for; a file has it too, by the names of DERIVED and `summary`, for
others to read. Some of these are vLLM's (request_throughput, mean_ttft_ms, ...): they are about the
first engine and are null where its outputs disagree with what it was compared with. `runs` holds
every runner with its raw samples: `samples_ms.ttft[round][request]`,
`samples_ms.itl[round][request][step]`. A stat is {value, spread}; see measure.py for what the
spread is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from g4ir.errors import InputError, SpecError
from g4ir.plan.cost import Cost, floor
from g4ir.spec.reader import Length, Line, OneOf, Range, Where, build, json_object, tree_of

from .agreement import Agreement
from .measure import (
    TAKE,
    Amount,
    Number,
    RequestTiming,
    Stat,
    around,
    latencies,
    over,
    shares,
    speeds,
)
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
#: of a run, null for a baseline
SHARES = ("mbu", "mfu", "roof_ratio", "bytes_per_token")
#: keys inside a file that follow from others; and two of older files that are no more
DERIVED = {"stats", "tokens_per_s", *SHARES, *RATES.values(), "floor_ms", "bound"}
DERIVED |= {"experts", "calls_per_step"}
Some = Annotated[int, Range(1)]


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts(Workload):
    """warmup: requests of each runner before the rounds."""

    text: Line | None = None
    rounds: Annotated[int, Range(2)]
    requests_per_round: Some
    warmup: Amount


@dataclass(frozen=True)
class RoofFacts:
    """This machine's rates in the measuring process; one sample per round."""

    matmul_dtype: str
    samples: Annotated[tuple[Rates, ...], Length(1)]

    @property
    def stats(self) -> dict[str, Stat]:
        """Each rate by its name in a file."""
        columns = {name: [getattr(r, key) for r in self.samples] for key, name in RATES.items()}
        return {name: around(median(rates), rates) for name, rates in columns.items()}


@dataclass(frozen=True)
class EngineFacts:
    """The engine that ran. manifest: digest of its manifest; quant: name of its quantisation
    config; activations: format to which activations are quantised."""

    manifest: str
    dtype: str
    backend: str
    device: str
    weights: str
    skipped_passes: tuple[str, ...]
    limits: dict[str, Any]
    quant: Line | None = None
    activations: Line | None = None


@dataclass(frozen=True)
class WorkFacts:
    """FLOPs and bytes of a prompt and of an average decode step."""

    prefill: Cost
    decode: Cost


@dataclass(frozen=True)
class RawSamples:
    """Milliseconds by round and request, `itl` by step too."""

    ttft: tuple[tuple[float, ...], ...]
    itl: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def rounds(self) -> list[list[RequestTiming]]:
        return [
            [
                RequestTiming(first / 1e3, tuple(x / 1e3 for x in rest))
                for first, rest in zip(*many, strict=True)
            ]
            for many in zip(self.ttft, self.itl, strict=True)
        ]


@dataclass(frozen=True)
class RunReport:
    """One runner. void: its outputs agree with no other runner. Null for a baseline from `name` on.
    name: the engine's folder."""

    role: str
    label: Line
    void: bool
    samples_ms: RawSamples
    setup_s: dict[str, Number]
    peak_memory: dict[str, int]
    name: Line | None = None
    engine: EngineFacts | None = None
    work: WorkFacts | None = None
    cache_bytes: Amount | None = None
    param_bytes: Amount | None = None


@dataclass(frozen=True)
class BenchReport:
    """One run of g4ir bench. warnings: why the times may be wrong: a busy machine, rounds that
    differ."""

    kind: Annotated[str, OneOf((KIND,))]
    schema: Annotated[int, Range(VERSION, VERSION)]
    date: str
    backend: str
    model_id: str
    workload: WorkloadFacts
    env: dict[str, Any]
    roof: RoofFacts
    agreement: Annotated[tuple[Agreement, ...], Length(1)]
    runs: Annotated[tuple[RunReport, ...], Length(1)]
    notes: tuple[Line, ...]
    warnings: tuple[Line, ...] = ()

    @property
    def outputs_agree(self) -> bool:
        return all(a.ok for a in self.agreement)

    @cached_property
    def derived(self) -> dict[str, dict[str, Any]]:
        """By role what follows from its samples. stats: latency -> statistic; mbu: bytes of a
        decode step / p50 ITL / measured bandwidth, quantised weights as stored; mfu: FLOPs of a
        prompt / p50 TTFT / measured matmul rate; roof_ratio: by phase, least time at the measured
        roofline / p50."""
        return {run.role: self._derived(run) for run in self.runs}

    def _derived(self, run: RunReport) -> dict[str, Any]:
        rounds, work = run.samples_ms.rounds, run.work
        found: dict[str, Any] = {
            "stats": latencies(rounds),
            "tokens_per_s": speeds(self.workload, rounds),
        }
        if work is None:
            return found
        take = {"prefill": TAKE["ttft"], "decode": TAKE["itl"]}
        prompt, step = (partial(shares, rounds, self.roof.samples, t) for t in take.values())
        return found | {
            "mbu": step(lambda r: work.decode.needed_bytes / r.bandwidth),
            "mfu": prompt(lambda r: work.prefill.flops / r.matmul),
            "roof_ratio": {
                "prefill": prompt(lambda r: floor(work.prefill, r.roof()).seconds),
                "decode": step(lambda r: floor(work.decode, r.roof()).seconds),
            },
            "bytes_per_token": work.decode.needed_bytes // self.workload.batch,
        }

    def floors(self, run: RunReport) -> dict[str, tuple[float, str]]:
        """By phase the least milliseconds at the measured roofline, and what bounds them."""
        costs, roof = vars(run.work) if run.work else {}, middle(self.roof.samples).roof()
        least = {phase: floor(cost, roof) for phase, cost in costs.items()}
        return {phase: (f.seconds * 1e3, f.bound) for phase, f in least.items()}

    def metrics(self, run: RunReport) -> dict[str, tuple[str, Stat]]:
        """Return name -> unit and value."""
        d = self.derived[run.role]
        found = {
            f"{key.removesuffix('_ms')}_{name}": ("ms", stat)
            for key, stats in d["stats"].items()
            for name, stat in stats.items()
        }
        for name, stat in d["tokens_per_s"].items():
            unit = "requests/s" if name == "request" else "tokens/s"
            found[f"{name}_throughput"] = unit, stat
        parts = {f"roof_ratio_{phase}": stat for phase, stat in d.get("roof_ratio", {}).items()}
        parts |= {name: d[name] for name in ("mbu", "mfu") if name in d}
        return found | {name: ("share", stat) for name, stat in parts.items()}

    def speedups(self) -> dict[str, dict[str, Stat] | None]:
        """Return by role the times of every other runner over those of the first engine; None where
        either is void."""
        own, *others = self.runs
        keys, out = {"prefill": "ttft", "decode": "itl", "e2e": "e2el"}, {}
        for r in others:
            a, b = (x.samples_ms.rounds for x in (r, own))
            ratios = {phase: over(a, b, TAKE[key]) for phase, key in keys.items()}
            out[r.role] = None if own.void or r.void else ratios
        return out

    def summary(self) -> dict[str, Any]:
        """Return the keys of a file beside those of `runs`: numbers of the first engine, and the
        baseline with the fastest decode as `peer`."""
        own, w, metrics = self.runs[0], self.workload, self.metrics(self.runs[0])
        named = {f"{k}_throughput": f"{ours}_throughput" for k, ours in VLLM_RATES.items()}
        named |= {
            f"{k}_{time}_ms": f"{time}_{ours}"
            for time in TAKE
            for k, ours in VLLM_STATISTICS.items()
        }
        peers = {r.role: self.metrics(r)["itl_p50"][1].value for r in self.runs if not r.engine}
        shown = self.derived[own.role]
        return {
            "num_prompts": w.rounds * w.requests_per_round * w.batch,
            "max_concurrency": w.batch,
            **{k: None if own.void else metrics[ours][1].value for k, ours in named.items()},
            **{k: shown[k].value if k in shown else None for k in ("mbu", "mfu")},
            "roof_ratio": {k: s.value for k, s in shown.get("roof_ratio", {}).items()},
            "outputs_agree": self.outputs_agree,
            "peer": min(peers, key=peers.__getitem__, default=None),
            "speedup": {
                r.role: ratios and {"over": r.label, **ratios}
                for r, ratios in zip(self.runs[1:], self.speedups().values(), strict=True)
            },
        }

    def plain(self) -> dict[str, Any]:
        """Return the values of a file."""
        out = {**asdict(self), **self.summary()}
        out["roof"] |= self.roof.stats
        for values, run in zip(out["runs"], self.runs, strict=True):
            values |= dict.fromkeys(SHARES) | self.derived[run.role]
            for phase, (least, bound) in self.floors(run).items():
                values["work"][phase] |= {"floor_ms": least, "bound": bound}
        values = json.loads(json.dumps(out, default=vars))
        return dict(values)


def read_report(file: str | Path) -> BenchReport:
    """Read a report of this version; InputError names the file and what was found and expected."""
    try:
        report = json_object(Path(file).read_bytes())
    except ValueError as e:
        raise InputError(f"{file}: {e}") from e
    if report.get("kind") != KIND:
        raise InputError(f'{file}: no report of g4ir bench (key "kind" is not {KIND!r})')
    if report.get("schema") != VERSION:
        raise InputError(
            f"{file}: report of schema version {report.get('schema')!r}, expected {VERSION}; "
            f"run `g4ir bench` again with this g4ir"
        )
    return report_of(report, str(file))


def report_of(values: Mapping[str, Any], file: str = "report") -> BenchReport:
    """Convert JSON values to a report; InputError names the key that is missing or wrong."""
    own = {f.name for f in fields(BenchReport)}
    given = {k: _measured(v) for k, v in values.items() if k in own}
    try:
        made: BenchReport = build(BenchReport, tree_of(given, Where(file, 0), exact=True))
        made.summary()
    except SpecError as e:
        raise InputError(f"{e} (is it a report of g4ir bench?)") from None
    except (ArithmeticError, ValueError) as e:
        raise InputError(f"{file}: its samples do not fit each other: {e}") from None
    return made


def _measured(value: Any) -> Any:
    """Return values without those that follow from others."""
    if isinstance(value, dict):
        return {k: _measured(v) for k, v in value.items() if k not in DERIVED}
    return [*map(_measured, value)] if isinstance(value, list) else value
