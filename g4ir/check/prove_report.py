"""A proof as text, and as an HTML page with inline SVG plots that needs nothing from a network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from g4ir.ui.table import aligned

from .prove import Part, Proof

MARKS = {True: "ok", False: "FAILED", None: "-"}
STYLE = """
:root{color-scheme:light dark;--line:#8886;--bad:#c22;--good:#284}
@media(prefers-color-scheme:dark){:root{--bad:#f77;--good:#7c9}}
body{font:15px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.3em .6em;border-bottom:1px solid var(--line)}
td:not(:last-child){white-space:nowrap}
.True{color:var(--good)}.False{color:var(--bad);font-weight:bold}
figure{margin:1.5em 0}svg{width:100%;height:auto;font-size:12px}text{fill:currentColor}
.axis{stroke:var(--line)}.lost{fill:var(--bad)}.found{fill:var(--good)}
"""
COLOURS = ("#2a6fdb", "#d9662b", "#3a9d5d", "#9055c4", "#b08d1e", "#c4418c")
#: pixels of a plot, and of its margins: left, right, top, bottom
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 240, 72, 170, 12, 34
Line = tuple[str, Sequence[float], Sequence[float]]


def report_text(proof: Proof) -> str:
    """Return a line per part, and the result."""
    rows = [["cache", "part", "", "s", "result"]]
    for p in proof.parts:
        time = "cached" if p.cached else f"{p.seconds:.0f}"
        rows.append([p.engine, p.name, MARKS[p.ok], time, p.summary])
    return f"{proof.model}\n\n{aligned(rows, left=5)}\n{'ok' if proof.ok else 'FAILED'}\n"


def report_html(proof: Proof) -> str:
    """Return the page: a table of all parts, then plots."""
    rows = "".join(map(_row, proof.parts))
    verdict = "no part failed" if proof.ok else "FAILED"
    title = f"g4ir prove: {escape(Path(proof.model).name)}"
    figures = "".join(_figures(proof.parts))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style><h1>{title}</h1><p class={proof.ok}>{verdict}</p><table>"
        f"<tr><th>cache<th>part<th><th>s<th>result</tr>{rows}</table>{figures}</html>\n"
    )


def _row(p: Part) -> str:
    cells = (p.engine, p.name, "cached" if p.cached else f"{p.seconds:.0f}", p.summary)
    engine, name, time, summary = map(escape, cells)
    mark = f"<td class={p.ok}>{MARKS[p.ok]}"
    return f"<tr><td>{engine}<td>{name}{mark}<td>{time}<td>{summary}</tr>"


def _figures(parts: Sequence[Part]) -> Iterable[str]:
    errors = [
        (p.engine, p.data["at"], [max(e, 1e-9) for e in p.data["relative"]])
        for p in parts
        if "relative" in p.data
    ]
    yield _plot("error of logits, relative to their RMS, by position", errors, log=True)
    read = [p for p in parts if "buckets" in p.data]
    for key, title in (
        ("nll", "perplexity by position"),
        ("kl", "KL divergence from the interpreter by position, nats"),
    ):
        lines = [
            (
                _legend(p),
                [b["end"] for b in buckets],
                [_plotted(key, b) for b in buckets],
            )
            for p in read
            if (buckets := [b for b in p.data["buckets"] if key in b])
        ]
        yield _plot(title, lines, log=True)
    if read:
        yield _needles(read)


def _legend(p: Part) -> str:
    return f"{p.engine}, {p.name.removeprefix('context ')}"


def _plotted(key: str, bucket: dict[str, float]) -> float:
    return math.exp(min(bucket["nll"], 700)) if key == "nll" else max(bucket["kl"], 1e-12)


def _plot(title: str, lines: Sequence[Line], log: bool) -> str:
    """Return a figure of lines (label, x, y); empty without any."""
    lines = [x for x in lines if x[1] and all(map(math.isfinite, x[2]))]
    if not lines:
        return ""
    scale = math.log10 if log else float
    ys = [scale(y) for _, _, values in lines for y in values]
    low, high = min(ys), max(ys)
    low, high = (low - 0.5, high + 0.5) if high - low < 0.05 else (low, high)
    right = max(x for _, xs, _ in lines for x in xs)

    def at(x: float, y: float) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / right
        return f"{across:.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low):.1f}"

    ticks = [low + (high - low) * i / 3 for i in range(4)]
    parts = []
    for y in ticks:
        x1, y1 = at(0, y).split(",")
        parts.append(f'<path class="axis" d="M{x1},{y1}H{WIDTH - RIGHT}"/>')
        label = f"{10**y if log else y:.3g}"
        parts.append(f'<text x="{LEFT - 6}" y="{y1}" text-anchor="end">{label}</text>')
    for x in (0, right / 2, right):
        across = at(x, low).split(",")[0]
        parts.append(f'<text x="{across}" y="{HEIGHT - 12}" text-anchor="middle">{x:.0f}</text>')
    for i, (name, xs, values) in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(at(x, scale(y)) for x, y in zip(xs, values))
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{points}"/>'
        )
        y = TOP + 12 + 16 * i
        parts.append(
            f'<text x="{WIDTH - RIGHT + 10}" y="{y}" style="fill:{colour}">{escape(name)}</text>'
        )
    return _figure(title, HEIGHT, parts)


def _needles(parts: Sequence[Part]) -> str:
    """Return a figure with a row per document and a square per needle."""
    drawn = []
    for row, p in enumerate(parts):
        y = TOP + 26 * row
        drawn.append(f'<text x="0" y="{y + 15}">{escape(_legend(p))}</text>')
        for i, n in enumerate(p.data["needles"]):
            kind, mark = ("found", "found") if n["found"] else ("lost", "not found")
            hint = f"depth {n['depth']:.0%}: {mark}, NLL {n['nll']:.3f}"
            drawn.append(
                f'<rect class="{kind}" x="{230 + 48 * i}" y="{y}" width="44" height="22">'
                f"<title>{hint}</title></rect>"
            )
    bottom = TOP + 26 * len(parts) + 16
    for i, n in enumerate(parts[0].data["needles"]):
        drawn.append(
            f'<text x="{252 + 48 * i}" y="{bottom}" text-anchor="middle">{n["depth"]:.0%}</text>'
        )
    return _figure("needles by depth: green found, red not found", bottom + 8, drawn)


def _figure(title: str, height: int, parts: Iterable[str]) -> str:
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{''.join(parts)}</svg></figure>"
