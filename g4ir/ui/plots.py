"""Plots as files, by matplotlib without a display.

    with figure(path, width, height) as axes:
        axes.plot(...)

writes PNG or SVG by the file's suffix. Raises InputError for another suffix and MissingError
where matplotlib is not installed, both before anything is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import InputError, MissingError

from .files import write_file
from .units import count_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {".png": "png", ".svg": "svg"}
GIB = 1 << 30


def check_plot(path: str | Path) -> None:
    """Raise an error for what can be wrong with a plot before there is anything to draw."""
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(f"--plot {path}: expected a name that ends in {' or '.join(FORMATS)}")
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"--plot {path}: no such directory")
    _figure_class()


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingError("plots need matplotlib: pip install 'g4ir[plot]'") from e
    return Figure


@contextmanager
def figure(
    path: str | Path, width: float = 8, height: float = 5, columns: int = 1
) -> Iterator[Any]:
    """A context that gives axes to draw on (an array of them for several columns); the file appears
    whole at the end. Sizes in inches."""
    check_plot(path)
    # A figure made without pyplot has the file's own canvas and never asks for a display.
    made = _figure_class()(figsize=(width, height), layout="constrained")
    yield made.subplots(1, columns)
    buffer = io.BytesIO()
    made.savefig(buffer, format=FORMATS[Path(path).suffix.lower()], dpi=150)
    write_file(Path(path), [buffer.getvalue()])


@dataclass(frozen=True)
class CacheLines:
    """Bytes of one variant's caches by context: total -> one value a context."""

    name: str
    contexts: Sequence[int]
    totals: Mapping[str, Sequence[int]]


#: how each of the three totals is drawn
STYLES = {"naive": "--", "planned": "-", "built": ":"}


def plot_caches(path: str | Path, lines: Sequence[CacheLines], title: str) -> None:
    """Plot bytes of K and V against context; one colour a variant, naive dashed, planned solid, and
    dotted as built where that is less."""
    with figure(path) as axes:
        for i, line in enumerate(lines):
            for total, sizes in line.totals.items():
                axes.plot(
                    line.contexts,
                    [n / GIB for n in sizes],
                    STYLES[total],
                    color=f"C{i}",
                    label=f"{line.name} {total}",
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("K and V, GiB")
        ticks = sorted({c for line in lines for c in line.contexts})
        axes.set_xticks(ticks, [count_text(c) for c in ticks])
        axes.grid(True, which="major", alpha=0.3)
        axes.set_title(title)
        axes.legend(fontsize="small", ncols=2)


# ---- reports of `g4ir bench` --------------------------------------------------------------------

#: phase -> statistic of a run, and what it is called
PANELS = {"prefill": ("ttft_ms", "TTFT p50, ms"), "decode": ("itl_ms", "ITL p50, ms")}


def plot_bench(path: str | Path, reports: Mapping[str, Mapping[str, Any]]) -> None:
    """Plot the time to the first token and between tokens of every run, with spreads and the least
    time at the measured roof, and where an engine's step goes. Keys of `reports` tell their
    runs apart; void runs are hatched."""
    runs = [
        (f"{label} {run.get('name') or run['role']}".strip(), run)
        for label, report in reports.items()
        for run in report["runs"]
    ]
    titles = {f"{r['model_id']}, {_workload_text(r['workload'])}" for r in reports.values()}
    with figure(path, 13, 4.2, columns=3) as axes:
        for place, (phase, (key, title)) in zip(axes, PANELS.items(), strict=False):
            _bars(place, runs, phase, key)
            place.set_title(f"{phase}: {title}")
        _parts(axes[2], [(name, run) for name, run in runs if "breakdown" in run])
        axes[0].figure.suptitle("; ".join(sorted(titles)), fontsize="medium")


def _workload_text(w: Mapping[str, Any]) -> str:
    return f"{w['batch']} x {w['input_len']} in, {w['output_len']} out, {w['context']} held"


def _bars(axes: Any, runs: Sequence[tuple[str, Any]], phase: str, key: str) -> None:
    for i, (_, run) in enumerate(runs):
        stat = run["stats"][key]["p50"]
        axes.bar(
            i,
            stat["value"],
            yerr=stat["spread"],
            color=f"C{i}",
            capsize=4,
            hatch="//" if run["void"] else None,
        )
        if "work" in run:
            least = run["work"][phase]["floor_ms"]
            axes.plot([i - 0.4, i + 0.4], [least, least], "k--", label="least at the roof")
    axes.set_xticks(range(len(runs)), [_tick(name, run) for name, run in runs], fontsize="small")
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:1], labels[:1], fontsize="small")


def _tick(name: str, run: Mapping[str, Any]) -> str:
    return f"{name}\nVOID" if run["void"] else name


def _parts(axes: Any, runs: Sequence[tuple[str, Any]]) -> None:
    """Draw one stacked bar an engine, the largest part below."""
    names = list(dict.fromkeys(p for _, run in runs for p in run["breakdown"]["parts_ms"]))
    below = [0.0] * len(runs)
    for name in names:
        sizes = [run["breakdown"]["parts_ms"].get(name, 0.0) for _, run in runs]
        axes.bar(range(len(runs)), sizes, bottom=below, label=name)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    axes.set_xticks(range(len(runs)), [name for name, _ in runs], fontsize="small")
    axes.set_xlim(-0.6, len(runs) + 0.2)  # room for the legend
    axes.set_title("decode step taken apart, ms")
    axes.legend(fontsize="x-small", loc="upper right")


def plot_launches(
    path: str | Path, launches: Sequence[tuple[str, float]], roof: float, title: str
) -> None:
    """Plot a step as bars of microseconds on one line, a colour a kind of kernel, those that take
    longest first in the legend; a line where the roof is."""
    times: dict[str, float] = {}
    for kind, us in launches:
        times[kind] = times.get(kind, 0.0) + us
    kinds = sorted(times, key=lambda kind: -times[kind])
    with figure(path, 11, 3.2) as axes:
        begun: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        now = 0.0
        for kind, us in launches:
            begun[kind].append((now, us))
            now += us
        for i, kind in enumerate(kinds):
            label = f"{kind}: {times[kind]:.0f} us"
            axes.broken_barh(
                begun[kind], (0, 1), color=f"C{i % 10}", alpha=1 - i // 10 / 2, label=label
            )
        axes.axvline(roof, color="black", linestyle="--", label=f"roof: {roof:.0f} us")
        axes.set(title=title, xlabel="microseconds, predicted", yticks=[], xlim=(0, now))
        axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.25))
