"""The form of a report: records, from which its reading, its check and its JSON Schema follow.

Keys in vLLM's names (request_throughput, mean_ttft_ms, ...) are about the first engine and are
null where its outputs disagree with what it was compared with. `runs` holds every runner with its
raw samples: `samples_ms.ttft[round][request]`, `samples_ms.itl[round][request][step]`. A stat is
{value, spread}; see stats.py for what the spread is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from g4ir.errors import InputError, SpecError
from g4ir.spec.reader import (
    LEFT_OUT,
    Length,
    Line,
    OneOf,
    Range,
    Where,
    build,
    hints_of,
    json_object,
    schema_defs,
    tree_of,
)

from .agreement import Agreement
from .stats import Amount, Number, Stat

#: counts up when a key changes its meaning or goes away
VERSION = 1
KIND = "g4ir bench"
LATENCIES = ("ttft", "tpot", "itl", "e2el")
VLLM_STATISTICS = {"mean": "mean", "median": "p50", "p99": "p99"}


@dataclass(frozen=True)
class Has:
    """A mapping that may hold anything beside these keys."""

    keys: tuple[str, ...]

    def broken(self, value: dict[str, Any]) -> str | None:
        """Return the key that is missing, or None."""
        missing = [key for key in self.keys if key not in value]
        return f"must have the key {missing[0]}" if missing else None

    def schema(self) -> dict[str, Any]:
        return {"required": list(self.keys)}


T = TypeVar("T")
#: what only engines know of themselves
Own = Annotated[T | None, LEFT_OUT]
Stats = dict[str, Stat]
Samples = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Asked:
    """input_len: tokens of a prompt; output_len: choices per row, exactly; batch: rows; context:
    tokens held before the prompt; seed: of the tokens; text: the file that they come from; warmup:
    requests of each runner before the rounds."""

    input_len: Annotated[int, Range(1)]
    output_len: Annotated[int, Range(2)]
    batch: Annotated[int, Range(1)]
    context: Amount
    seed: Amount
    text: Line | None
    rounds: Annotated[int, Range(2)]
    requests_per_round: Annotated[int, Range(1)]
    warmup: Amount


@dataclass(frozen=True)
class RoofStats:
    """The rates of this machine in the process that measured; one sample for each round."""

    read_bytes_per_s: Stat
    copy_bytes_per_s: Stat
    matmul_flops_per_s: Stat
    matmul_dtype: str
    samples: tuple[dict[str, float], ...]


@dataclass(frozen=True)
class EngineFacts:
    """The engine that ran; `manifest` is the digest of its manifest, `quant` the name of the recipe
    of a quantised one, `activations` the form that its rows are rounded to."""

    manifest: str
    dtype: str
    backend: str
    device: str
    weights: str
    skipped_passes: tuple[str, ...]
    limits: dict[str, Any]
    quant: Own[Line] = None
    activations: Own[Line] = None


@dataclass(frozen=True)
class PhaseWork:
    """FLOPs and bytes of a prompt or a step, and the least time at the measured roof."""

    flops: Amount
    weight_bytes: Amount
    state_bytes: Amount
    other_bytes: Amount
    floor_ms: float
    bound: Annotated[str, OneOf(("memory", "compute"))]


@dataclass(frozen=True)
class WorkFacts:
    """A prompt, a step on average, and how many experts were touched."""

    prefill: PhaseWork
    decode: PhaseWork
    experts: dict[str, Any] | None


@dataclass(frozen=True)
class Phases:
    """A share of the roof by phase."""

    prefill: Stat
    decode: Stat


@dataclass(frozen=True)
class Breakdown:
    """A decode step taken apart; `kinds` says whether they are measured."""

    parts_ms: dict[str, float]
    kinds_ms: dict[str, float]
    kinds: str
    whole_ms: float


@dataclass(frozen=True)
class RawSamples:
    """Milliseconds by round and request, `itl` by step too."""

    ttft: Samples
    itl: Samples


@dataclass(frozen=True)
class Latencies:
    """Every statistic of each latency."""

    ttft_ms: Stats
    itl_ms: Stats
    tpot_ms: Stats
    e2el_ms: Stats


@dataclass(frozen=True)
class Run:
    """A runner: an engine, or a peer, which has no keys from `name` on. name: its folder;
    void: its outputs agree with nobody's; mbu: bytes of a decode step / p50 ITL / measured
    bandwidth, weights in codes as codes and scales; mfu: FLOPs of a prompt / p50 TTFT / measured
    matmul rate."""

    role: str
    label: Line
    void: bool
    samples_ms: RawSamples
    stats: Latencies
    tokens_per_s: Stats
    setup_s: dict[str, Number]
    peak_memory: dict[str, int]
    name: Own[Line] = None
    engine: Own[EngineFacts] = None
    work: Own[WorkFacts] = None
    mbu: Own[Stat] = None
    mfu: Own[Stat] = None
    roof_ratio: Own[Phases] = None
    calls_per_step: Own[dict[str, float]] = None
    breakdown: Own[Breakdown] = None
    cache_bytes: Own[Amount] = None
    param_bytes: Own[Amount] = None
    bytes_per_token: Own[Amount] = None


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
    tokens: Annotated[int, Range(1)]
    prompt: Line
    tokens_per_round: Annotated[float, Range(1)]
    accepted: tuple[float, ...]
    same_tokens: Amount
    all_tokens: Amount
    decode_per_s: Stats
    speedup: Stat
    speedup_e2e: Stat


@dataclass(frozen=True)
class Report:
    """A run of g4ir bench. peer: the fastest one in decode; speedup: of the first engine over each
    other runner, null where void."""

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
    workload: Asked
    env: Annotated[dict[str, Any], Has(("torch", "g4ir", "commit", "cores"))]
    roof: RoofStats
    mbu: Number
    mfu: Number
    roof_ratio: dict[str, Number]
    outputs_agree: bool
    agreement: Annotated[tuple[Agreement, ...], Length(1)]
    peer: str | None
    speedup: dict[str, Speedup | None]
    runs: Annotated[tuple[Run, ...], Length(1)]
    notes: tuple[Line, ...]
    drafts: Own[DraftFacts] = None


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a report, generated from the records."""
    defs: dict[str, Any] = {}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "report of g4ir bench",
        "$ref": f"#/$defs/{schema_defs(Report, False, defs)}",
        "$defs": defs,
    }


def plain(value: Any) -> Any:
    """Return a record as JSON values."""
    if is_dataclass(value):
        hints = hints_of(type(value))  # type: ignore[arg-type]
        pairs = ((f.name, getattr(value, f.name)) for f in fields(value))
        return {
            k: plain(v) for k, v in pairs if v is not None or LEFT_OUT not in get_args(hints[k])
        }
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def read_report(file: str | Path) -> Report:
    """Return a report of this version; InputError names the file, what was found and what is
    expected."""
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


def report_of(values: Any, file: str = "report") -> Report:
    """Return the report that JSON values are; InputError names the key where they are none."""
    where = Where(file, 0)
    try:
        made: Report = build(Report, tree_of(values, where, exact=True))
    except SpecError as e:
        raise InputError(f"{e} (is it a report of g4ir bench?)") from None
    return made
