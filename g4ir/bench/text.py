"""Reports: read from files, printed as text, Markdown or a plot, and compared: which metrics differ
by more than the sum of both spreads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from g4ir.errors import InputError
from g4ir.spec.reader import json_object
from g4ir.ui.plots import figure
from g4ir.ui.table import aligned, markdown_table
from g4ir.ui.units import scale

from .measure import Stat
from .report import KIND, RATES, SWEEP_KIND, VERSION, Values, metrics, plain, run_name

#: label -> metric; metrics that no run has are not printed
ROWS = (
    ("prefill TTFT p50, ms", "ttft_p50"),
    ("         p99, ms", "ttft_p99"),
    ("         tokens/s", "prefill_throughput"),
    ("         MFU, %", "mfu"),
    ("decode  ITL p50, ms", "itl_p50"),
    ("         p90, ms", "itl_p90"),
    ("         p99, ms", "itl_p99"),
    ("         tokens/s a user", "decode_per_user_throughput"),
    ("         tokens/s total", "decode_throughput"),
    ("         MBU, %", "mbu"),
    ("request  E2E p50, ms", "e2el_p50"),
    ("         output tokens/s", "output_throughput"),
)
#: title of a plot -> metric
PANELS = {"prefill: TTFT p50, ms": "ttft_p50", "decode: ITL p50, ms": "itl_p50"}


def read_reports(file: str | Path) -> list[Values]:
    """Read a file with one report of this version, or with those of a sweep; InputError names the
    file and the problem."""
    try:
        values = json_object(Path(file).read_bytes())
    except ValueError as e:
        raise InputError(f"{file}: {e}") from e
    several = values.get("kind") == SWEEP_KIND and isinstance(values.get("reports"), list)
    return [_checked(r, file) for r in (values["reports"] if several else [values])]


def _checked(report: Any, file: str | Path) -> Values:
    if not isinstance(report, dict) or (report.get("kind"), report.get("schema")) != (
        KIND,
        VERSION,
    ):
        expected = f"expected kind {KIND!r}, schema {VERSION}; run `g4ir bench` again"
        raise InputError(f"{file}: no report of this version of g4ir bench: {expected}")
    report = plain(report)
    try:  # these read every key that is used
        text(report), markdown([report]), _conditions(report)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise InputError(f"{file}: a damaged report of g4ir bench: {e!r}; run it again") from None
    return report


def text(report: Values) -> str:
    """Return machine, roofline, workload, agreement of outputs, the runs side by side, speed-ups,
    drafts, and each run's label."""
    names = {r["role"]: run_name(r) for r in report["runs"]}
    first, *_ = names.values()
    lines = [*_head(report), "", _table(report["runs"])]
    for role, ratios in report["speedup"].items():
        speedups = ", ".join(f"{p} x{stat_text(Stat(**s))}" for p, s in (ratios or {}).items())
        over = f"{first} over {names[role]}"
        lines.append(f"{over:25} {speedups or 'void: the outputs disagree'}")
    lines += [_draft_text(report["drafts"])] if report.get("drafts") else []
    return "\n".join([*lines, "", *(f"{r['role']}: {r['label']}" for r in report["runs"])])


def _head(r: Values) -> Iterator[str]:
    w, roof = r["workload"], r["roof"]
    read, copy, matmul = (Stat(**roof[name]) for name in RATES.values())
    yield machine(r["env"])
    yield (
        f"roofline read {_rate(read, 'B/s')}, copy {_rate(copy, 'B/s')}, matmul "
        f"{roof['matmul_dtype']} {_rate(matmul, 'FLOP/s')}, in this process"
    )
    yield f"work     {_workload_text(r)}"
    yield (
        f"         rounds: {w['rounds']}, requests of each runner per round: "
        f"{w['requests_per_round']}, warm-up: {w['warmup']}; ±: where 95 % of further rounds lie"
    )
    for a in r["agreement"]:
        # A file has null for NaN.
        cosine, relative = (math.nan if a[k] is None else a[k] for k in ("cosine", "relative"))
        yield (
            f"outputs  {a['role']} against {a['base']}: same token {a['equal']} of {a['count']}, "
            f"cosine at least {cosine:.6f}, relative error at most {relative:.1e}: "
            f"{'ok' if a['ok'] else 'DISAGREES'}"
        )


def _draft_text(drafts: Values) -> str:
    """Return a line: speed without drafts, and the speed-up of each kind of draft."""
    none, *kinds = drafts["by_kind"].items()
    parts = (f"{k} x{v['speedup']:.2f} ({v['tokens_per_round']:.2f} a step)" for k, v in kinds)
    return f"drafts   {none[1]['tokens_per_second']:.1f} tokens/s without; {'; '.join(parts)}"


def _workload_text(r: Values) -> str:
    w = r["workload"]
    size = f"{w['batch']} x {w['input_len']} tokens in, {w['output_len']} out"
    source = w["text"] or "random tokens"
    return f"{r['model_id']}: {size}, {w['context']} cached before ({source})"


def machine(env: dict[str, Any]) -> str:
    """Return the environment as one line."""
    gpu = f"{env['gpu']}, " if "gpu" in env else ""
    busy = " (busy: times are too long)" if env.get("busy") else ""
    clock = f", {env['cpu_mhz']} MHz" if env.get("cpu_mhz") else ""
    return (
        f"machine  {gpu}{env['cpu']}, {env['cores']} threads, {env['isa']}{clock}, "
        f"load {env['load_average']:.1f}{busy} | torch {env['torch']} | "
        f"g4ir {env['g4ir']} commit {env['commit']}"
    )


def _rate(stat: Stat, unit: str) -> str:
    size, prefix = scale(stat.value)
    return f"{stat.value / size:.1f} ± {stat.spread / size:.1f} {prefix}{unit}"


def _table(runs: Sequence[Values]) -> str:
    columns = zip(*(_cells(run, [name for _, name in ROWS]) for run in runs))
    rows = ([label, *row] for (label, _), row in zip(ROWS, columns) if {*row} != {"-"})
    return aligned([["", *map(run_name, runs)], *rows], indent=0).rstrip("\n")


def _cells(run: Values, names: Iterable[str]) -> list[str]:
    """Return metrics of a run with their spreads, mbu and mfu in %, marked if the run is void; `-`
    for one that it lacks."""
    stats, void = metrics(run), "VOID " * run["void"]
    factors = {name: 100.0 if name in ("mbu", "mfu") else 1.0 for name in names}
    return [f"{void}{stat_text(stats[k], f)}" if k in stats else "-" for k, f in factors.items()]


#: heading of a column of the Markdown table -> metric
COLUMNS = {
    "TTFT, ms": "ttft_p50",
    "prompt, tokens/s": "prefill_throughput",
    "ITL, ms": "itl_p50",
    "decode, tokens/s": "decode_throughput",
    "MBU, %": "mbu",
    "MFU, %": "mfu",
}


def markdown(reports: Sequence[Values]) -> str:
    """Return a Markdown table: a line for each run of each report."""
    lines = [["", "input", "batch", *COLUMNS]]
    for report in reports:
        w = report["workload"]
        for run in report["runs"]:
            size = str(w["input_len"]), str(w["batch"])
            lines.append([run_name(run), *size, *_cells(run, COLUMNS.values())])
    return markdown_table(lines)


def stat_text(stat: Stat, factor: float = 1.0) -> str:
    spread = stat.spread * factor
    digits = f"{spread:.0f}" if spread >= 10 else f"{spread:.2g}"
    return f"{_short(stat.value * factor)} ± {digits}"


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.3g}"


def plot_bars(panel: Any, title: str, values: Mapping[str, Stat]) -> None:
    """Plot each value as a bar with an error bar (its spread)."""
    for i, (name, stat) in enumerate(values.items()):
        panel.bar(name, stat.value, yerr=stat.spread, color=f"C{i}")
    panel.set(title=title, ylim=(0, None))


def plot_bench(path: str | Path, reports: Sequence[Values]) -> None:
    """Plot p50 of TTFT and ITL of every run."""
    runs: dict[str, Values] = {}
    for report in reports:
        w = report["workload"]
        size = f"{w['batch']} x {w['input_len']} " * (len(reports) > 1)
        runs |= {f"{size}{run_name(r)}": r for r in report["runs"]}
    with figure(path, 9, 4.2, columns=2) as axes:
        for panel, (title, metric) in zip(axes, PANELS.items(), strict=True):
            values = {
                f"{name}\n{cell}": metrics(run)[metric]
                for name, run in runs.items()
                for cell in _cells(run, [metric])
            }
            plot_bars(panel, title, values)
        axes[0].figure.suptitle("; ".join(map(_workload_text, reports)), fontsize="small")


def compare_reports(a: Values, b: Values) -> dict[str, Any]:
    """Compare the runs whose role is in both reports, by the metrics of ROWS. Return `notes`, the
    `_conditions` that differ; `rows`, one per run and metric that both have, with `differs`:
    whether the metric differs by more than the sum of the spreads; and `differ`, how many do."""
    runs, rows = {r["role"]: r for r in b["runs"]}, []
    for one, two in ((r, runs[r["role"]]) for r in a["runs"] if r["role"] in runs):
        stats, others = metrics(one), metrics(two)
        for name in (m for _, m in ROWS if m in stats and m in others):
            x, y = stats[name], others[name]
            row = {"role": one["role"], "void": one["void"] or two["void"], "metric": name}
            row |= {"a": x, "b": y, "differs": x.differs(y)}
            rows.append(row | {"ratio": y.value / x.value if x.value else math.inf})
    one, two = _conditions(a), _conditions(b)
    pairs = {key: (one.get(key), two.get(key)) for key in one | two}
    notes = [f"{key}: {x} in A, {y} in B" for key, (x, y) in pairs.items() if x != y]
    return {"notes": notes, "rows": rows, "differ": sum(r["differs"] for r in rows)}


def _conditions(r: Values) -> Values:
    """Return the conditions of a report: model, workload, machine, torch version and engines."""
    runs = {f"run {x['role']}": (x["engine"] or {}).get("manifest", x["label"]) for x in r["runs"]}
    env = {k: r["env"].get(k) for k in ("cpu", "gpu", "cores", "torch")}
    return {"model": r["model_id"], **r["workload"], **env, **runs}


def compare_text(comparison: Mapping[str, Any]) -> str:
    """Return the notes, a table in which void metrics and those that differ are marked, and how
    many differ."""
    lines, rows = [["", "A", "B", "B / A", ""]], comparison["rows"]
    for r in rows:
        mark = "VOID" if r["void"] else "differs" * r["differs"]
        sides = (stat_text(r[side]) for side in "ab")
        lines.append([f"{r['role']:10} {r['metric']}", *sides, f"{r['ratio']:.3f}", mark])
    notes = "".join(f"note: {n}\n" for n in comparison["notes"])
    count = f"{comparison['differ']} of {len(rows)} differ by more than the sum of their spreads"
    return f"{notes}{aligned(lines, indent=0)}{count}"
