"""A report as text and as a plot; two reports side by side: the metrics that differ by more than
both spreads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from g4ir.ui.plots import figure
from g4ir.ui.table import aligned
from g4ir.ui.units import scale, size_text

from .measure import Stat
from .schema import BenchReport, EngineFacts, RunReport, WorkFacts

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


def text(report: BenchReport) -> str:
    """Return environment, roofline, agreement, the runs side by side, and each run's details."""
    names = {r.role: r.name or r.role for r in report.runs}
    own, *_ = names.values()
    lines = [*_head(report), "", _table(report, names)]
    for role, ratios in report.speedups().items():
        said = ", ".join(f"{phase} x{_shown(s)}" for phase, s in (ratios or {}).items())
        over = f"{own} over {names[role]}"
        lines.append(f"{over:25} {said or 'void: the outputs disagree'}")
    lines += ["", *(line for run in report.runs for line in _details(report, run))]
    return "\n".join([*lines, *(f"note: {n}" for n in report.notes)])


def _head(r: BenchReport) -> Iterator[str]:
    w = r.workload
    read, copy, matmul = r.roof.stats.values()
    yield machine(r.env)
    yield (
        f"roofline read {_rate(read, 'B/s')}, copy {_rate(copy, 'B/s')}, matmul "
        f"{r.roof.matmul_dtype} {_rate(matmul, 'FLOP/s')}, in this process"
    )
    yield (
        f"work     {r.model_id}: {w.batch} x {w.input_len} tokens in, {w.output_len} out, "
        f"{w.context} held before ({w.text or f'random tokens, seed {w.seed}'})"
    )
    yield (
        f"         in turn: {w.rounds} rounds, requests of each a round: {w.requests_per_round}, "
        f"to warm up: {w.warmup}; value ± where 95 % of rounds lie"
    )
    for a in r.agreement:
        yield f"outputs  {a.text()}"


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


def _table(report: BenchReport, names: Mapping[str, str]) -> str:
    lines = [["", *names.values()]]
    columns = [(report.metrics(run), "VOID " * run.void) for run in report.runs]
    for label, name in ROWS:
        units = {found[name][0] for found, _ in columns if name in found}
        for unit in units:
            after, factor = UNITS.get(unit, ("", 1.0))
            cells = (
                f"{void}{_shown(found[name][1], factor)}{after}" if name in found else "-"
                for found, void in columns
            )
            lines.append([label, *cells])
    return aligned(lines, indent=0).rstrip("\n")


def markdown(reports: Sequence[BenchReport]) -> str:
    """Return a Markdown table: a line for each report's first engine, prefill and decode beside
    those of every other runner, by name. A value whose spread is wide has it beside it."""
    others = [*dict.fromkeys(r.name or r.role for report in reports for r in report.runs[1:])]
    head = ["", "prefill, tokens/s", *others, "decode, ms a token", *others]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for report in reports:
        runs = {r.name or r.role: report.metrics(r) for r in report.runs if not r.void}
        own, *_ = (r.name or r.role for r in report.runs)
        lines.append([f"{report.model_id}, {own}"])
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


def _details(report: BenchReport, run: RunReport) -> Iterator[str]:
    yield f"{run.role}: {run.label}"
    if run.engine and run.work:
        yield from _engine_details(report, run, run.engine, run.work)
    setup = (f"{k.replace('_', ' ')} {v:.2f} s" for k, v in run.setup_s.items() if v is not None)
    yield f"  set-up   {', '.join(setup)} (not in any number above)"
    peak = (f"{k.removesuffix('_bytes')} {size_text(v)}" for k, v in run.peak_memory.items())
    yield f"  peak     {', '.join(peak)}"


def _engine_details(
    report: BenchReport, run: RunReport, e: EngineFacts, work: WorkFacts
) -> Iterator[str]:
    skipped = f", without {', '.join(e.skipped_passes)}" if e.skipped_passes else ""
    yield (
        f"  engine   {e.dtype}, {e.weights} weights, manifest {e.manifest[:12]}{skipped}; "
        f"params {size_text(run.param_bytes or 0)}, KV cache {size_text(run.cache_bytes or 0)}"
    )
    for phase, (least, bound) in report.floors(run).items():
        c = getattr(work, phase)
        yield (
            f"  {phase:8} {c.flops / 1e9:.4g} GFLOP, weights {size_text(c.weight_bytes)}, "
            f"KV cache {size_text(c.state_bytes)}: at least {_short(least)} ms ({bound})"
        )
    what = f", weights quantised to {e.quant}" if e.quant else ""
    what += f", activations quantised to {e.activations}" if e.activations else ""
    size = size_text(report.derived[run.role]["bytes_per_token"])
    yield f"  token    {size} of weights and KV cache are read{what}"


def plot_bench(path: str | Path, reports: Mapping[str, BenchReport]) -> None:
    """Plot p50 of TTFT and ITL of every run, with the least time at the measured roofline. Keys of
    `reports` tell their runs apart; void runs are hatched."""
    titles = {
        f"{r.model_id}, {w.batch} x {w.input_len} in, {w.output_len} out, {w.context} in the KV "
        f"cache"
        for r in reports.values()
        for w in [r.workload]
    }
    with figure(path, 9, 4.2, columns=2) as axes:
        for panel, (phase, (metric, title)) in zip(axes, PANELS.items(), strict=True):
            _bars(panel, reports, phase, metric)
            panel.set_title(f"{phase}: {title}")
        axes[0].figure.suptitle("; ".join(sorted(titles)), fontsize="medium")


def _bars(axes: Any, reports: Mapping[str, BenchReport], phase: str, metric: str) -> None:
    ticks = list[str]()
    for label, report in reports.items():
        for run in report.runs:
            i, (_, stat) = len(ticks), report.metrics(run)[metric]
            hatch = "//" if run.void else None
            axes.bar(i, stat.value, yerr=stat.spread, color=f"C{i}", capsize=4, hatch=hatch)
            if run.work:
                least, _ = report.floors(run)[phase]
                axes.plot([i - 0.4, i + 0.4], [least, least], "k--", label="roofline")
            ticks.append(f"{label} {run.name or run.role}".strip() + "\nVOID" * run.void)
    axes.set_xticks(range(len(ticks)), ticks, fontsize="small")
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:1], labels[:1], fontsize="small")


def compare_reports(a: BenchReport, b: BenchReport, every: bool = False) -> dict[str, Any]:
    """Compare the runs that are in both reports, by `every` metric or those of the text. Return
    `notes`, differences of workload and machine; `rows`, a metric in both, which `differs` if the
    distance exceeds the sum of the spreads; and how many `differ`."""
    others = {r.role: r for r in b.runs}
    pairs = [(r, others[r.role]) for r in a.runs if r.role in others]
    shown = {metric for _, metric in ROWS}
    rows = []
    for one, two in pairs:
        named = {"role": one.role, "void": one.void or two.void}
        found = b.metrics(two)
        for name, (unit, x) in a.metrics(one).items():
            if name in found and (every or name in shown):
                y = found[name][1]
                ratio = y.value / x.value if x.value else None
                row = {"metric": name, "unit": unit, "a": x, "b": y, "ratio": ratio}
                rows.append({**named, **row, "differs": x.differs(y)})
    differ = sum(bool(r["differs"]) for r in rows)
    return {"notes": [*_differences(a, b, pairs)], "rows": rows, "differ": differ}


def _differences(
    a: BenchReport, b: BenchReport, pairs: list[tuple[RunReport, RunReport]]
) -> Iterator[str]:
    if a.model_id != b.model_id:
        yield f"A is {a.model_id}, B is {b.model_id}"
    sides = [
        {f"workload {k}": getattr(r.workload, k) for k in WORKLOAD}
        | {f"env {k}": r.env.get(k) for k in MACHINE}
        for r in (a, b)
    ]
    for key, one in sides[0].items():
        if one != sides[1][key]:
            yield f"{key}: {one} in A, {sides[1][key]} in B"
    for role in sorted({r.role for r in a.runs} ^ {r.role for r in b.runs}):
        yield f"{role} is in one of them only"
    for pair in pairs:
        one, two = (r.engine and r.engine.manifest for r in pair)
        if one != two:
            yield f"{pair[0].role}: another engine (manifest {one} and {two})"


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
