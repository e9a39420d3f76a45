"""Records of a report; `plain` writes one as JSON values, `read_report` reads and checks it.

Keys in vLLM's names (request_throughput, mean_ttft_ms, ...) are about the first engine and are
null where its outputs disagree with what it was compared with. `runs` holds every runner with its
raw samples: `samples_ms.ttft[round][request]`, `samples_ms.itl[round][request][step]`. A stat is
{value, spread}; see stats.py for what the spread is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from g4ir.errors import InputError, SpecError
from g4ir.spec.reader import Length, Line, OneOf, Range, Where, build, json_object, tree_of

from .agreement import Agreement
from .stats import Amount, Number, Stat
from .workload import Workload

#: counts up when a key changes its meaning or goes away
VERSION = 2
KIND = "g4ir bench"
VLLM_STATISTICS = {"mean": "mean", "median": "p50", "p99": "p99"}
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
    """One run of g4ir bench. peer: the baseline with the fastest decode; speedup: of the first
    engine over each other runner, null if void."""

    kind: Annotated[str, OneOf((KIND,))]
    schema: Annotated[int, Range(VERSION, VERSION)]
    date: str
    backend: str
    model_id: str
    num_prompts: Amount
    max_concurrency: Amount
    request_throughput: Number
    output_throughput: Number
    total_token_throughput: Number
    mean_ttft_ms: Number
    median_ttft_ms: Number
    p99_ttft_ms: Number
    mean_tpot_ms: Number
    median_tpot_ms: Number
    p99_tpot_ms: Number
    mean_itl_ms: Number
    median_itl_ms: Number
    p99_itl_ms: Number
    mean_e2el_ms: Number
    median_e2el_ms: Number
    p99_e2el_ms: Number
    workload: WorkloadFacts
    env: dict[str, Any]
    roof: RoofStats
    mbu: Number
    mfu: Number
    roof_ratio: dict[str, Number]
    outputs_agree: bool
    agreement: Annotated[tuple[Agreement, ...], Length(1)]
    peer: str | None
    speedup: dict[str, Speedup | None]
    runs: Annotated[tuple[RunReport, ...], Length(1)]
    notes: tuple[Line, ...]
    drafts: DraftFacts | None = None


def plain(value: Any) -> Any:
    """Return a record as JSON values."""
    return json.loads(json.dumps(asdict(value)))


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
    try:
        made: BenchReport = build(BenchReport, tree_of(values, Where(file, 0), exact=True))
    except SpecError as e:
        raise InputError(f"{e} (is it a report of g4ir bench?)") from None
    return made
