"""Two reports side by side: what differs by more than both spreads explain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .stats import Stat
from .text import metrics

#: part of the workload or the machine that numbers depend on
SAME = (
    ("workload", "input_len"),
    ("workload", "output_len"),
    ("workload", "batch"),
    ("workload", "context"),
    ("workload", "seed"),
    ("workload", "text"),
    ("env", "cpu"),
    ("env", "gpu"),
    ("env", "cores"),
    ("env", "torch"),
)
#: shown, unless all are asked for
MAIN = (
    "ttft_p50",
    "itl_p50",
    "itl_p90",
    "itl_p99",
    "tpot_mean",
    "e2el_p50",
    "prefill_throughput",
    "decode_throughput",
    "mbu",
    "mfu",
    "roof_ratio_prefill",
    "roof_ratio_decode",
)


def compare_reports(a: dict[str, Any], b: dict[str, Any], every: bool = False) -> dict[str, Any]:
    """Rows {role, metric, unit, a, b, ratio, differs, void} for runs that both have, `differs`
    where the values lie further apart than the sum of their spreads; and what else is not the
    same."""
    names = {r["role"] for r in a["runs"]} & {r["role"] for r in b["runs"]}
    runs = {r["role"]: r for r in b["runs"]}
    rows = [
        row
        for r in a["runs"]
        if r["role"] in names
        for row in _rows(r, runs[r["role"]])
        if every or row["metric"] in MAIN
    ]
    return {"notes": list(_notes(a, b)), "rows": rows, "differ": sum(r["differs"] for r in rows)}


def _rows(a: dict[str, Any], b: dict[str, Any]) -> Iterator[dict[str, Any]]:
    others = {name: stat for name, _, stat in metrics(b)}
    for name, unit, mine in metrics(a):
        if name in others:
            one, two = Stat(**mine), Stat(**others[name])
            yield {
                "role": a["role"],
                "metric": name,
                "unit": unit,
                "a": mine,
                "b": others[name],
                "ratio": two.value / one.value if one.value else None,
                "differs": one.differs(two),
                "void": a["void"] or b["void"],
            }


def _notes(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    if a["model_id"] != b["model_id"]:
        yield f"A is {a['model_id']}, B is {b['model_id']}"
    for part, key in SAME:
        one, two = a[part].get(key), b[part].get(key)
        if one != two:
            yield f"{part} {key}: {one} in A, {two} in B"
    roles = {r["role"] for r in a["runs"]} ^ {r["role"] for r in b["runs"]}
    for role in sorted(roles):
        yield f"{role} is in one of them only"
    for run in a["runs"]:
        for other in b["runs"]:
            if run["role"] == other["role"] and (text := _engines_differ(run, other)):
                yield text


def _engines_differ(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    one, two = (r.get("engine", {}).get("manifest") for r in (a, b))
    return None if one == two else f"{a['role']}: another engine (manifest {one} and {two})"


def compare_text(result: dict[str, Any]) -> str:
    """A table with a mark at every difference."""
    lines = [f"note: {n}" for n in result["notes"]]
    lines.append(f"{'':10} {'':22} {'A':>22} {'B':>22} {'B / A':>8}")
    for r in result["rows"]:
        mark = "  VOID" if r["void"] else "  differs" if r["differs"] else ""
        ratio = "-" if r["ratio"] is None else f"{r['ratio']:.3f}"
        lines.append(
            f"{r['role']:10} {r['metric']:22} {_pair(r['a']):>22} {_pair(r['b']):>22} {ratio:>8}"
            f"{mark}"
        )
    count = len(result["rows"])
    lines.append(f"{result['differ']} of {count} differ by more than their spreads")
    return "\n".join(lines)


def _pair(stat: dict[str, float]) -> str:
    return f"{stat['value']:.4g} ± {stat['spread']:.2g}"
