"""A report as text and as a plot, and read from a file; two reports side by side: the metrics that
differ by more than both spreads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from g4ir.errors import InputError
from g4ir.spec.reader import json_object
from g4ir.ui.plots import figure
from g4ir.ui.table import aligned
from g4ir.ui.units import scale, size_text

from .measure import Stat
from .schema import KIND, RATES, VERSION, Values, metrics, plain

#: label -> metric; a line that no run has is left out
ROWS = (
    ("prefill TTFT p50", "ttft_p50"),
    ("         p99", "ttft_p99"),
    ("         tokens/s", "prefill_throughput"),
    ("         MFU", "mfu"),
    ("         of the roofline", "roof_ratio_prefill"),
    ("decode  ITL p50", "itl_p50"),
    ("         p90", "itl_p90"),
    ("         p99", "itl_p99"),
    ("         mean", "itl_mean"),
    ("         tokens/s a user", "decode_per_user_throughput"),
    ("         tokens/s total", "decode_throughput"),
    ("         MBU", "mbu"),
    ("         of the roofline", "roof_ratio_decode"),
    ("request  TPOT mean", "tpot_mean"),
    ("         E2E p50", "e2el_p50"),
    ("         output tokens/s", "output_throughput"),
)
#: unit of a metric -> what follows its value, and a factor
UNITS = {"ms": (" ms", 1.0), "share": (" %", 100.0)}
#: phase -> metric that is plotted, and its title
PANELS = {"prefill": ("ttft_p50", "TTFT p50, ms"), "decode": ("itl_p50", "ITL p50, ms")}
#: part of the workload or the machine that numbers depend on
WORKLOAD = ("input_len", "output_len", "batch", "context", "seed", "text")
MACHINE = ("cpu", "gpu", "cores", "torch")


def read_report(file: str | Path) -> Values:
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
    report = plain(report)
    try:  # all that is read of it
        text(report), markdown([report])
    except KeyError as e:
        raise InputError(f"{file}: {e} is missing (is it a report of g4ir bench?)") from None
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as e:
        raise InputError(f"{file}: a damaged report of g4ir bench: {e}") from None
    return report


def text(report: Values) -> str:
    """Return environment, roofline, agreement, the runs side by side, and each run's details."""
    names = {r["role"]: r["name"] or r["role"] for r in report["runs"]}
    own, *_ = names.values()
    lines = [*_head(report), "", _table(report, names)]
    for role, ratios in report["speedup"].items():
        phases = ("prefill", "decode", "e2e") if ratios else ()
        said = ", ".join(f"{phase} x{_shown(Stat(**ratios[phase]))}" for phase in phases)
        over = f"{own} over {names[role]}"
        lines.append(f"{over:25} {said or 'void: the outputs disagree'}")
    lines += ["", *(line for run in report["runs"] for line in _details(run))]
    return "\n".join([*lines, *(f"note: {n}" for n in report["notes"])])


def _head(r: Values) -> Iterator[str]:
    w, roof = r["workload"], r["roof"]
    read, copy, matmul = (Stat(**roof[name]) for name in RATES.values())
    yield machine(r["env"])
    yield (
        f"roofline read {_rate(read, 'B/s')}, copy {_rate(copy, 'B/s')}, matmul "
        f"{roof['matmul_dtype']} {_rate(matmul, 'FLOP/s')}, in this process"
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
        yield f"outputs  {agreement_text(a)}"


def agreement_text(a: Values) -> str:
    """Return what is compared, how far it lies apart, and the verdict."""
    # A file has null for what is not a number.
    n = {k: math.nan if v is None else v for k, v in a.items()}
    close = f", {a['close']} close calls" if a["close"] else ""
    return (
        f"{a['role']} against {a['base']}: same token {a['equal']} of {a['count']}{close}, "
        f"cosine at least {n['cosine']:.6f}, relative error at most {n['relative']:.1e}"
        f": {'ok' if a['ok'] else 'DISAGREES'} ({a['budget']})"
    )


def machine(env: dict[str, Any]) -> str:
    """Return the environment as one line."""
    gpu = f"{env['gpu']}, " if "gpu" in env else ""
    clock = f", {env['cpu_mhz']} MHz" if env.get("cpu_mhz") else ""
    return (
        f"machine  {gpu}{env['cpu']}, {env['cores']} threads, {env['isa']}{clock} | "
        f"torch {env['torch']} | g4ir {env['g4ir']} commit {env['commit']}"
    )


def _rate(stat: Stat, unit: str) -> str:
    size, prefix = scale(stat.value)
    return f"{stat.value / size:.1f} ± {stat.spread / size:.1f} {prefix}{unit}"


def _table(report: Values, names: Mapping[str, str]) -> str:
    lines = [["", *names.values()]]
    columns = [(metrics(run), "VOID " * run["void"]) for run in report["runs"]]
    for label, name in ROWS:
        if not any(name in found for found, _ in columns):
            continue
        cells = [label]
        for found, void in columns:
            unit, stat = found.get(name, ("", None))
            after, factor = UNITS.get(unit, ("", 1.0))
            cells.append(f"{void}{_shown(stat, factor)}{after}" if stat else "-")
        lines.append(cells)
    return aligned(lines, indent=0).rstrip("\n")


def markdown(reports: Sequence[Values]) -> str:
    """Return a Markdown table: a line for each report's first engine, prefill and decode beside
    those of every other runner, by name. A value whose spread is wide has it beside it."""
    others = [*dict.fromkeys(r["name"] or r["role"] for b in reports for r in b["runs"][1:])]
    head = ["", "prefill, tokens/s", *others, "decode, ms a token", *others]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for report in reports:
        runs = {r["name"] or r["role"]: metrics(r) for r in report["runs"] if not r["void"]}
        own, *_ = (r["name"] or r["role"] for r in report["runs"])
        lines.append([f"{report['model_id']}, {own}"])
        for metric in ("prefill_throughput", "itl_p50"):
            found = (runs.get(name, {}).get(metric) for name in (own, *others))
            lines[-1] += [_cell(stat[1]) if stat else "-" for stat in found]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(stat: Stat) -> str:
    """Return the value, with its spread where that is wide."""
    return _shown(stat) if stat.wide else _short(stat.value)


def _shown(stat: Stat, factor: float = 1.0) -> str:
    spread = stat.spread * factor
    digits = f"{spread:.0f}" if spread >= 10 else f"{spread:.2g}"
    return f"{_short(stat.value * factor)} ± {digits}"


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.3g}"


def _details(run: Values) -> Iterator[str]:
    yield f"{run['role']}: {run['label']}"
    if e := run["engine"]:
        sizes = {k: size_text(run[f"{k}_bytes"]) for k in ("param", "cache")}
        quant = f", weights quantised to {e['quant']}" if e["quant"] else ""
        quant += f", activations to {e['activations']}" if e["activations"] else ""
        yield f"  engine   {e['dtype']}{quant}: params {sizes['param']}, KV cache {sizes['cache']}"
        for phase in PANELS:
            c = run["work"][phase]
            weights, cache = (size_text(c[f"{k}_bytes"]) for k in ("weight", "state"))
            least = f"at least {_short(c['floor_ms'])} ms ({c['bound']})"
            work = f"{c['flops'] / 1e9:.4g} GFLOP, weights {weights}, KV cache {cache}"
            yield f"  {phase:8} {work}: {least}"
    peak = (f"{k.removesuffix('_bytes')} {size_text(v)}" for k, v in run["peak_memory"].items())
    yield f"  peak     {', '.join(peak)} of the process"


def plot_bench(path: str | Path, reports: Mapping[str, Values]) -> None:
    """Plot p50 of TTFT and ITL of every run, with the least time at the measured roofline. Keys of
    `reports` tell their runs apart; void runs are hatched."""
    titles = {
        f"{r['model_id']}, {w['batch']} x {w['input_len']} in, {w['output_len']} out, "
        f"{w['context']} in the KV cache"
        for r in reports.values()
        for w in [r["workload"]]
    }
    with figure(path, 9, 4.2, columns=2) as axes:
        for panel, (phase, (metric, title)) in zip(axes, PANELS.items(), strict=True):
            _bars(panel, reports, phase, metric)
            panel.set_title(f"{phase}: {title}")
        axes[0].figure.suptitle("; ".join(sorted(titles)), fontsize="medium")


def _bars(axes: Any, reports: Mapping[str, Values], phase: str, metric: str) -> None:
    ticks = list[str]()
    for label, report in reports.items():
        for run in report["runs"]:
            i, (_, stat) = len(ticks), metrics(run)[metric]
            hatch = "//" if run["void"] else None
            axes.bar(i, stat.value, yerr=stat.spread, color=f"C{i}", capsize=4, hatch=hatch)
            if run["work"]:
                least = run["work"][phase]["floor_ms"]
                axes.plot([i - 0.4, i + 0.4], [least, least], "k--", label="roofline")
            name = run["name"] or run["role"]
            ticks.append(f"{label} {name}".strip() + "\nVOID" * run["void"])
    axes.set_xticks(range(len(ticks)), ticks, fontsize="small")
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:1], labels[:1], fontsize="small")


def compare_reports(a: Values, b: Values, every: bool = False) -> dict[str, Any]:
    """Compare the runs that are in both reports, by `every` metric or those of the text. Return
    `notes`, differences of workload and machine; `rows`, a metric in both, which `differs` if the
    distance exceeds the sum of the spreads; and how many `differ`."""
    others = {r["role"]: r for r in b["runs"]}
    pairs = [(r, others[r["role"]]) for r in a["runs"] if r["role"] in others]
    shown = {metric for _, metric in ROWS}
    rows = []
    for one, two in pairs:
        named = {"role": one["role"], "void": one["void"] or two["void"]}
        found = metrics(two)
        for name, (unit, x) in metrics(one).items():
            if name in found and (every or name in shown):
                y = found[name][1]
                ratio = y.value / x.value if x.value else None
                row = {"metric": name, "unit": unit, "a": x, "b": y, "ratio": ratio}
                rows.append({**named, **row, "differs": x.differs(y)})
    differ = sum(bool(r["differs"]) for r in rows)
    return {"notes": [*_differences(a, b)], "rows": rows, "differ": differ}


def _differences(a: Values, b: Values) -> Iterator[str]:
    one, two = (_compared(r) for r in (a, b))
    for key in dict.fromkeys((*one, *two)):
        if one.get(key) != two.get(key):
            yield f"{key}: {one.get(key)} in A, {two.get(key)} in B"


def _compared(r: Values) -> Values:
    """Return what numbers depend on: the model, the workload, the machine, and the engines."""
    return {
        "model": r["model_id"],
        **{f"workload {k}": r["workload"][k] for k in WORKLOAD},
        **{f"env {k}": r["env"].get(k) for k in MACHINE},
        **{
            f"run {run['role']}": run["engine"]["manifest"] if run["engine"] else run["label"]
            for run in r["runs"]
        },
    }


def compare_text(found: Mapping[str, Any]) -> str:
    """Return a table with a mark at every difference."""
    lines = [["", "A", "B", "B / A", ""]]
    for r in found["rows"]:
        mark = "VOID" if r["void"] else "differs" if r["differs"] else ""
        ratio = "-" if r["ratio"] is None else f"{r['ratio']:.3f}"
        a, b = (f"{r[side].value:.4g} ± {r[side].spread:.2g}" for side in "ab")
        lines.append([f"{r['role']:10} {r['metric']}", a, b, ratio, mark])
    notes = "".join(f"note: {n}\n" for n in found["notes"])
    count = f"{found['differ']} of {len(found['rows'])} differ by more than their spreads"
    return notes + aligned(lines, indent=0) + count
