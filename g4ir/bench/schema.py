"""Records of a report; `plain` writes one as JSON values, `read_report` reads and checks it.

Beside the fields of BenchReport a file has keys that follow from them (`summary`), some in vLLM's
names (request_throughput, mean_ttft_ms, ...): they are about the first engine and are null where
its outputs disagree with what it was compared with. `runs` holds every runner with its raw samples:
`samples_ms.ttft[round][request]`, `samples_ms.itl[round][request][step]`. A stat is {value,
spread}; see measure.py for what the spread is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from g4ir.errors import InputError, SpecError
from g4ir.spec.reader import Length, Line, OneOf, Range, Where, build, json_object, tree_of

from .agreement import Agreement
from .measure import Amount, Number, Stat
from .runners import Workload

#: counts up when a key changes its meaning or goes away
VERSION = 2
KIND = "g4ir bench"
#: vLLM's names: of a statistic and of a throughput -> ours, and of times
VLLM_STATISTICS = {"mean": "mean", "median": "p50", "p99": "p99"}
VLLM_RATES = {"request": "request", "output": "output", "total_token": "total"}
VLLM_TIMES = ("ttft", "tpot", "itl", "e2el")
Some = Annotated[int, Range(1)]
Stats = dict[str, Stat]
Samples = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts(Workload):
    """warmup: requests of each runner before the rounds."""

    text: Line | None = None
    rounds: Annotated[int, Range(2)]
    requests_per_round: Some
    warmup: Amount


@dataclass(frozen=True)
class RoofStats:
    """This machine's rates in the measuring process; one sample per round."""

    read_bytes_per_s: Stat
    copy_bytes_per_s: Stat
    matmul_flops_per_s: Stat
    matmul_dtype: str
    samples: tuple[dict[str, float], ...]


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
class PhaseWork:
    """FLOPs and bytes of a prompt or a step, and the least time at the measured roofline."""

    flops: Amount
    weight_bytes: Amount
    state_bytes: Amount
    other_bytes: Amount
    floor_ms: float
    bound: Annotated[str, OneOf(("memory", "compute"))]


@dataclass(frozen=True)
class WorkFacts:
    """A prompt, an average decode step, and the number of experts used."""

    prefill: PhaseWork
    decode: PhaseWork
    experts: dict[str, Any] | None


@dataclass(frozen=True)
class RawSamples:
    """Milliseconds by round and request, `itl` by step too."""

    ttft: Samples
    itl: Samples


@dataclass(frozen=True)
class RunReport:
    """One runner. stats: latency -> statistic; void: its outputs agree with no other runner. Null
    for a baseline from `name` on. name: the engine's folder; mbu: bytes of a decode step / p50 ITL
    / measured bandwidth, quantised weights as stored; mfu: FLOPs of a prompt / p50 TTFT / measured
    matmul rate; roof_ratio: by phase, least time at the measured roofline / p50."""

    role: str
    label: Line
    void: bool
    samples_ms: RawSamples
    stats: dict[str, Stats]
    tokens_per_s: Stats
    setup_s: dict[str, Number]
    peak_memory: dict[str, int]
    name: Line | None = None
    engine: EngineFacts | None = None
    work: WorkFacts | None = None
    mbu: Stat | None = None
    mfu: Stat | None = None
    roof_ratio: Stats | None = None
    calls_per_step: dict[str, float] | None = None
    cache_bytes: Amount | None = None
    param_bytes: Amount | None = None
    bytes_per_token: Amount | None = None

    def metrics(self) -> dict[str, tuple[str, Stat]]:
        """Return name -> unit and value."""
        found = {
            f"{key.removesuffix('_ms')}_{name}": ("ms", stat)
            for key, stats in self.stats.items()
            for name, stat in stats.items()
        }
        for name, stat in self.tokens_per_s.items():
            unit = "requests/s" if name == "request" else "tokens/s"
            found[f"{name}_throughput"] = unit, stat
        ratios = {f"roof_ratio_{phase}": stat for phase, stat in (self.roof_ratio or {}).items()}
        shares = {"mbu": self.mbu, "mfu": self.mfu, **ratios}
        return found | {name: ("share", stat) for name, stat in shares.items() if stat}


@dataclass(frozen=True)
class Speedup:
    """Times of another runner over those of the first engine."""

    over: Line
    prefill: Stat
    decode: Stat
    e2e: Stat


@dataclass(frozen=True)
class DraftFacts:
    """Texts that the first engine wrote with drafts and without, in turn. source: where drafts come
    from; tokens: drafted at a time at most; prompt: what was written on; accepted: share of drafted
    tokens by place; same_tokens of all_tokens are those of single steps; decode_per_s: tokens a
    second of all rows; speedup: time without over time with, of decode and of whole requests."""

    source: Line
    tokens: Some
    prompt: Line
    tokens_per_round: Annotated[float, Range(1)]
    accepted: tuple[float, ...]
    same_tokens: Amount
    all_tokens: Amount
    decode_per_s: Stats
    speedup: Stat
    speedup_e2e: Stat


@dataclass(frozen=True)
class BenchReport:
    """One run of g4ir bench. speedup: of the first engine over each other runner, null if void.
    warnings: why the times may be wrong: a busy machine, rounds that differ."""

    kind: Annotated[str, OneOf((KIND,))]
    schema: Annotated[int, Range(VERSION, VERSION)]
    date: str
    backend: str
    model_id: str
    workload: WorkloadFacts
    env: dict[str, Any]
    roof: RoofStats
    agreement: Annotated[tuple[Agreement, ...], Length(1)]
    speedup: dict[str, Speedup | None]
    runs: Annotated[tuple[RunReport, ...], Length(1)]
    notes: tuple[Line, ...]
    drafts: DraftFacts | None = None
    warnings: tuple[Line, ...] = ()

    @property
    def outputs_agree(self) -> bool:
        return all(a.ok for a in self.agreement)

    def summary(self) -> dict[str, Any]:
        """Return the keys of a file that follow from the others: numbers of the first engine, and
        the baseline with the fastest decode as `peer`."""
        own, w, metrics = self.runs[0], self.workload, self.runs[0].metrics()
        named = {f"{k}_throughput": f"{ours}_throughput" for k, ours in VLLM_RATES.items()}
        named |= {
            f"{k}_{time}_ms": f"{time}_{ours}"
            for time in VLLM_TIMES
            for k, ours in VLLM_STATISTICS.items()
        }
        found = {k: metrics[ours][1].value for k, ours in named.items() if ours in metrics}
        peers = [r for r in self.runs if not r.engine and "itl_p50" in r.metrics()]
        fastest = min(peers, key=lambda r: r.metrics()["itl_p50"][1].value, default=None)
        return {
            "num_prompts": w.rounds * w.requests_per_round * w.batch,
            "max_concurrency": w.batch,
            **{k: None if own.void else v for k, v in found.items()},
            "mbu": own.mbu and own.mbu.value,
            "mfu": own.mfu and own.mfu.value,
            "roof_ratio": {k: s.value for k, s in (own.roof_ratio or {}).items()},
            "outputs_agree": self.outputs_agree,
            "peer": fastest and fastest.role,
        }


def plain(value: Any) -> Any:
    """Return a record as JSON values."""
    more = value.summary() if isinstance(value, BenchReport) else {}
    return json.loads(json.dumps({**asdict(value), **more}))


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


def report_of(values: Any, file: str = "report") -> BenchReport:
    """Convert JSON values to a report; InputError names the key that is missing or wrong."""
    own = {f.name for f in fields(BenchReport)}
    given = {k: v for k, v in values.items() if k in own}
    try:
        made: BenchReport = build(BenchReport, tree_of(given, Where(file, 0), exact=True))
    except SpecError as e:
        raise InputError(f"{e} (is it a report of g4ir bench?)") from None
    return made
