"""Reports as a bar plot: time to first token and between tokens, with spreads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from g4ir.ui.plots import figure

from .schema import BenchReport, RunReport, WorkloadFacts

#: phase -> statistic of a run, and its title
PANELS = {"prefill": ("ttft_ms", "TTFT p50, ms"), "decode": ("itl_ms", "ITL p50, ms")}


def plot_bench(path: str | Path, reports: Mapping[str, BenchReport]) -> None:
    """Plot p50 of TTFT and ITL of every run, with the least time at the measured roofline. Keys of
    `reports` tell their runs apart; void runs are hatched."""
    runs = [
        (f"{label} {run.name or run.role}".strip(), run)
        for label, report in reports.items()
        for run in report.runs
    ]
    titles = {f"{r.model_id}, {_workload_text(r.workload)}" for r in reports.values()}
    with figure(path, 9, 4.2, columns=2) as axes:
        for panel, (phase, (key, title)) in zip(axes, PANELS.items(), strict=True):
            _bars(panel, runs, phase, key)
            panel.set_title(f"{phase}: {title}")
        axes[0].figure.suptitle("; ".join(sorted(titles)), fontsize="medium")


def _workload_text(w: WorkloadFacts) -> str:
    return f"{w.batch} x {w.input_len} in, {w.output_len} out, {w.context} in the KV cache"


def _bars(axes: Any, runs: Sequence[tuple[str, RunReport]], phase: str, key: str) -> None:
    for i, (_, run) in enumerate(runs):
        stat = run.stats[key]["p50"]
        axes.bar(
            i,
            stat.value,
            yerr=stat.spread,
            color=f"C{i}",
            capsize=4,
            hatch="//" if run.void else None,
        )
        if run.work:
            least = getattr(run.work, phase).floor_ms
            axes.plot([i - 0.4, i + 0.4], [least, least], "k--", label="roofline")
    ticks = [f"{name}\nVOID" if run.void else name for name, run in runs]
    axes.set_xticks(range(len(runs)), ticks, fontsize="small")
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:1], labels[:1], fontsize="small")
