"""A report for people, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from g4ir.ui.units import size_text

from .agreement import Agreement

Report = dict[str, Any]
#: label, path in a run, format, factor; a line is left out where no run has it
ROWS = (
    ("prefill TTFT p50", ("stats", "ttft_ms", "p50"), "ms", 1.0),
    ("         p99", ("stats", "ttft_ms", "p99"), "ms", 1.0),
    ("         tokens/s", ("tokens_per_s", "prefill"), "", 1.0),
    ("         MFU", ("mfu",), "%", 100.0),
    ("         of the roof", ("roof_ratio", "prefill"), "%", 100.0),
    ("decode  ITL p50", ("stats", "itl_ms", "p50"), "ms", 1.0),
    ("         p90", ("stats", "itl_ms", "p90"), "ms", 1.0),
    ("         p99", ("stats", "itl_ms", "p99"), "ms", 1.0),
    ("         mean", ("stats", "itl_ms", "mean"), "ms", 1.0),
    ("         tokens/s a user", ("tokens_per_s", "decode_per_user"), "", 1.0),
    ("         tokens/s total", ("tokens_per_s", "decode"), "", 1.0),
    ("         MBU", ("mbu",), "%", 100.0),
    ("         of the roof", ("roof_ratio", "decode"), "%", 100.0),
    ("request  TPOT mean", ("stats", "tpot_ms", "mean"), "ms", 1.0),
    ("         E2E p50", ("stats", "e2el_ms", "p50"), "ms", 1.0),
    ("         output tokens/s", ("tokens_per_s", "output"), "", 1.0),
)
CELL = 24


def text(report: Report) -> str:
    """Environment, roof, agreement, a table of the runs side by side, and what engines say of
    themselves."""
    lines = [*_head(report), ""]
    lines += [_line("", [r["role"] for r in report["runs"]])]
    lines += [x for row in ROWS if (x := _table_row(report["runs"], *row))]
    for role, s in report["speedup"].items():
        lines.append(f"{'engine over ' + role:26}{_speedup(s)}")
    lines.append("")
    for run in report["runs"]:
        lines += _details(run)
    return "\n".join([*lines, *(f"note: {n}" for n in report["notes"])])


def _head(r: Report) -> Iterator[str]:
    env, w, roof = r["env"], r["workload"], r["roof"]
    machine = f"{env['gpu']}, " if "gpu" in env else ""
    clock = f", {env['cpu_mhz']} MHz" if env.get("cpu_mhz") else ""
    yield (
        f"machine  {machine}{env['cpu']}, {env['cores']} threads, {env['isa']}{clock} | "
        f"torch {env['torch']} | g4ir {env['g4ir']} commit {env['commit']}"
    )
    yield (
        f"roof     read {_rate(roof['read_bytes_per_s'], 'B/s')}, copy "
        f"{_rate(roof['copy_bytes_per_s'], 'B/s')}, matmul {roof['matmul_dtype']} "
        f"{_rate(roof['matmul_flops_per_s'], 'FLOP/s')}, in this process"
    )
    source = w["text"] or f"random tokens, seed {w['seed']}"
    yield (
        f"work     {r['model_id']}: {w['batch']} x {w['input_len']} tokens in, {w['output_len']} "
        f"out, {w['context']} held before ({source})"
    )
    yield (
        f"         in turn: {w['rounds']} rounds, requests of each a round: "
        f"{w['requests_per_round']}, to warm up: {w['warmup']}; value ± where 95 % of rounds lie"
    )
    for a in r["agreement"]:
        yield f"outputs  {Agreement(**_numbers(a)).text()}"


def _numbers(a: dict[str, Any]) -> dict[str, Any]:
    """Values that were no numbers are null in JSON."""
    return {k: float("nan") if v is None else v for k, v in a.items()}


def _rate(stat: dict[str, float], unit: str) -> str:
    size, prefix = (1e12, "T") if stat["value"] >= 1e12 else (1e9, "G")
    return f"{stat['value'] / size:.1f} ± {stat['spread'] / size:.1f} {prefix}{unit}"


def _line(label: str, cells: Sequence[str]) -> str:
    return f"{label:26}{''.join(f'{c:>{CELL}}' for c in cells)}".rstrip()


def _table_row(
    runs: Sequence[dict[str, Any]], label: str, path: Sequence[str], unit: str, factor: float
) -> str | None:
    found = [_at(run, path) for run in runs]
    if not any(found):
        return None
    return _line(label, [_cell(run, s, unit, factor) for run, s in zip(runs, found, strict=True)])


def _at(run: dict[str, Any], path: Sequence[str]) -> dict[str, float] | None:
    value: Any = run
    for key in path:
        value = value.get(key, {})
    return value or None


def _cell(run: dict[str, Any], stat: dict[str, float] | None, unit: str, factor: float) -> str:
    if stat is None:
        return "-"
    return f"{'VOID ' if run['void'] else ''}{_shown(stat, factor)} {unit}".rstrip()


def _shown(stat: dict[str, float], factor: float = 1.0) -> str:
    spread = stat["spread"] * factor
    digits = f"{spread:.0f}" if spread >= 10 else f"{spread:.2g}"
    return f"{_short(stat['value'] * factor)} ± {digits}"


def _short(x: float) -> str:
    """About three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.3g}"


def _speedup(s: dict[str, Any] | None) -> str:
    if s is None:
        return "void: the outputs disagree"
    return ", ".join(f"{k} x{_shown(s[k])}" for k in ("prefill", "decode", "e2e"))


def _details(run: dict[str, Any]) -> Iterator[str]:
    """What stands below the table for one run."""
    yield f"{run['role']}: {run['label']}"
    if "engine" in run:
        yield from _engine_details(run)
    setup = ", ".join(
        f"{k.replace('_', ' ')} {v:.2f} s" for k, v in run["setup_s"].items() if v is not None
    )
    peak = run["peak_memory"].items()
    memory = ", ".join(f"{k.removesuffix('_bytes')} {size_text(v)}" for k, v in peak)
    yield f"  set-up   {setup} (not in any number above)"
    yield f"  peak     {memory}"


def _engine_details(run: dict[str, Any]) -> Iterator[str]:
    e, work = run["engine"], run["work"]
    skipped = f", without {', '.join(e['skipped_passes'])}" if e["skipped_passes"] else ""
    yield (
        f"  engine   {e['dtype']}, {e['weights']} weights, manifest {e['manifest'][:12]}{skipped}; "
        f"params {size_text(run['param_bytes'])}, caches {size_text(run['cache_bytes'])}"
    )
    for phase in ("prefill", "decode"):
        c = work[phase]
        yield (
            f"  {phase:8} {c['flops'] / 1e9:.4g} GFLOP, weights {size_text(c['weight_bytes'])}, "
            f"caches {size_text(c['state_bytes'])}: at least {_short(c['floor_ms'])} ms "
            f"({c['bound']})"
        )
    if x := work["experts"]:
        yield (
            f"  experts  {x['decode_distinct']:.1f} of {x['experts']} a layer in a decode step, "
            f"{x['prefill_distinct']:.1f} in a chunk of the prompt ({x['source']})"
        )
    calls = ", ".join(f"{v:g} {k.replace('_', ' ')}" for k, v in run["calls_per_step"].items())
    yield f"  calls    {calls} in a decode step"
    b = run["breakdown"]
    yield f"  parts    {_split(b['parts_ms'])}"
    yield f"  kinds    {_split(b['kinds_ms'])} ({b['kinds']})"


def _split(parts: dict[str, float]) -> str:
    whole = sum(parts.values()) or 1.0
    return ", ".join(f"{name} {100 * ms / whole:.0f} %" for name, ms in parts.items())


# ---- CSV --------------------------------------------------------------------------------------

COLUMNS = (
    "date",
    "model_id",
    "role",
    "metric",
    "value",
    "spread",
    "unit",
    "void",
    "batch",
    "input_len",
    "output_len",
    "context",
)


def csv_text(report: Report) -> str:
    """One row for each measured thing."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    w = report["workload"]
    where = [w[k] for k in ("batch", "input_len", "output_len", "context")]
    for run in report["runs"]:
        for name, unit, stat in metrics(run):
            writer.writerow(
                [
                    report["date"],
                    report["model_id"],
                    run["role"],
                    name,
                    stat["value"],
                    stat["spread"],
                    unit,
                    str(run["void"]).lower(),
                    *where,
                ]
            )
    for name in ("read_bytes_per_s", "copy_bytes_per_s", "matmul_flops_per_s"):
        stat = report["roof"][name]
        writer.writerow(
            [
                report["date"],
                report["model_id"],
                "roof",
                name,
                stat["value"],
                stat["spread"],
                name.split("_", 1)[1],
                "false",
                *where,
            ]
        )
    return out.getvalue()


def metrics(run: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(name, unit, stat) of every measured thing of a run."""
    for key, stats in run["stats"].items():
        for name, stat in stats.items():
            yield f"{key.removesuffix('_ms')}_{name}", "ms", stat
    for name, stat in run["tokens_per_s"].items():
        yield f"{name}_throughput", "requests/s" if name == "request" else "tokens/s", stat
    for name in ("mbu", "mfu"):
        if name in run:
            yield name, "share", run[name]
    for phase, stat in run.get("roof_ratio", {}).items():
        yield f"roof_ratio_{phase}", "share", stat
