"""A proof as text, and as an HTML page with inline SVG plots that needs nothing from a network."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from g4ir.ui.plots import new_figure
from g4ir.ui.table import aligned

from .prove import Part, Proof

MARKS = {True: "ok", False: "FAILED", None: "-"}
HEAD = ("cache", "part", "", "s", "result")
STYLE = Path(__file__).with_name("prove.css")
#: key of a bucket -> title of its plot, and the function from its value to the plotted one
PLOTS = {
    "nll": ("perplexity by position", lambda x: math.exp(min(x, 700))),
    "kl": ("KL divergence from the interpreter by position, nats", lambda x: max(x, 1e-12)),
}


def _rows(proof: Proof) -> list[tuple[str, ...]]:
    """Return the cells of each part."""
    times = ("cached" if p.cached else f"{p.seconds:.0f}" for p in proof.parts)
    parts = zip(proof.parts, times)
    return [(p.engine, p.name, MARKS[p.ok], time, p.summary) for p, time in parts]


def report_text(proof: Proof) -> str:
    """Return a line per part, and the result."""
    table = aligned([HEAD, *_rows(proof)], left=5)
    return f"{proof.model}\n\n{table}\n{'ok' if proof.ok else 'FAILED'}\n"


def report_html(proof: Proof) -> str:
    """Return the HTML report: a table of all parts, then plots."""
    lines = [HEAD, *_rows(proof)]
    rows = "".join(f"<tr><td>{'<td>'.join(map(escape, line))}</tr>" for line in lines)
    verdict = "no part failed" if proof.ok else "FAILED"
    title = f"g4ir prove: {escape(Path(proof.model).name)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE.read_text()}</style><h1>{title}</h1><p>{verdict}</p><table>{rows}</table>"
        f"{_figures(proof.parts)}</html>\n"
    )


def _figures(parts: Sequence[Part]) -> str:
    """Return the plots as one SVG: errors, perplexity, divergence, and needles by depth."""
    errors, read = ([p for p in parts if key in p.data] for key in ("relative", "buckets"))
    figure = new_figure(9, 11)
    axes = figure.subplots(4)
    for p in errors:
        values = [max(e, 1e-9) for e in p.data["relative"]]
        axes[0].semilogy(p.data["at"], values, label=p.engine)
    axes[0].set_title("error of logits, relative to their RMS, by position")
    for panel, (key, (title, value_of)) in zip(axes[1:], PLOTS.items()):
        for p in read:
            buckets = [b for b in p.data["buckets"] if key in b]
            values = [value_of(b[key]) for b in buckets]
            panel.semilogy([b["end"] for b in buckets], values, label=_label(p))
        panel.set_title(title)
    for panel in axes[:3]:
        if panel.lines:
            panel.legend(fontsize="small")
    _needles(axes[3], read)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


def _label(p: Part) -> str:
    return f"{p.engine}, {p.name.removeprefix('context ')}"


def _needles(panel: Any, read: Sequence[Part]) -> None:
    """Plot a row per document and a mark per needle."""
    for row, p in enumerate(read):
        for needle in p.data["needles"]:
            color = "tab:green" if needle["found"] else "tab:red"
            panel.plot(100 * needle["depth"], row, "s", color=color, markersize=14)
    panel.set_yticks(range(len(read)), map(_label, read))
    panel.set(title="needles by depth: green found, red not found", xlabel="%", xlim=(0, 100))
