"""A report as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from g4ir.ui.table import aligned
from g4ir.ui.units import scale, size_text

from .schema import BenchReport, DraftFacts, RunReport, Speedup
from .stats import Stat

ENGINE = "engine"
#: label, path in a run, unit, factor; a line that no run has is left out
ROWS = (
    ("prefill TTFT p50", "stats.ttft_ms.p50", " ms", 1.0),
    ("         p99", "stats.ttft_ms.p99", " ms", 1.0),
    ("         tokens/s", "tokens_per_s.prefill", "", 1.0),
    ("         MFU", "mfu", " %", 100.0),
    ("         of the roofline", "roof_ratio.prefill", " %", 100.0),
    ("decode  ITL p50", "stats.itl_ms.p50", " ms", 1.0),
    ("         p90", "stats.itl_ms.p90", " ms", 1.0),
    ("         p99", "stats.itl_ms.p99", " ms", 1.0),
    ("         mean", "stats.itl_ms.mean", " ms", 1.0),
    ("         tokens/s a user", "tokens_per_s.decode_per_user", "", 1.0),
    ("         tokens/s total", "tokens_per_s.decode", "", 1.0),
    ("         MBU", "mbu", " %", 100.0),
    ("         of the roofline", "roof_ratio.decode", " %", 100.0),
    ("request  TPOT mean", "stats.tpot_ms.mean", " ms", 1.0),
    ("         E2E p50", "stats.e2el_ms.p50", " ms", 1.0),
    ("         output tokens/s", "tokens_per_s.output", "", 1.0),
)


def text(report: BenchReport) -> str:
    """Return environment, roofline, agreement, the runs side by side, and each run's details."""
    lines = [*_head(report), "", _table(report.runs)]
    names = {r.role: r.name or r.role for r in report.runs}
    for role, s in report.speedup.items():
        lines.append(f"{f'{names[ENGINE]} over {names[role]}':26}{_speedup(s)}")
    lines += _drafts(report.drafts) if report.drafts else []
    lines.append("")
    for run in report.runs:
        lines += _details(run)
    return "\n".join([*lines, *(f"note: {n}" for n in report.notes)])


def _drafts(d: DraftFacts) -> Iterator[str]:
    """Yield the gain of speculative decoding over the same engine without."""
    plain, drafted = d.decode_per_s.values()
    right = " ".join(f"{100 * share:.0f}" for share in d.accepted)
    yield (
        f"{'drafts of ' + d.source:26}decode x{_shown(d.speedup)}, e2e x{_shown(d.speedup_e2e)}; "
        f"tokens/s {_shown(drafted)}, without {_shown(plain)}"
    )
    yield (
        f"{'':26}{d.tokens_per_round:.2f} tokens a round of {d.tokens} drafted at most"
        + (f", {right} % accepted by place" if right else "")
    )
    yield f"{'':26}prompt: {d.prompt}; {d.same_tokens} of {d.all_tokens} tokens are the same"


def _head(r: BenchReport) -> Iterator[str]:
    w, roof = r.workload, r.roof
    yield machine(r.env)
    yield (
        f"roofline read {_rate(roof.read_bytes_per_s, 'B/s')}, copy "
        f"{_rate(roof.copy_bytes_per_s, 'B/s')}, matmul {roof.matmul_dtype} "
        f"{_rate(roof.matmul_flops_per_s, 'FLOP/s')}, in this process"
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


def _table(runs: Sequence[RunReport]) -> str:
    lines = [["", *(r.name or r.role for r in runs)]]
    for label, path, unit, factor in ROWS:
        found = [_at(run, path) for run in runs]
        if any(found):
            cells = (_cell(r, s, unit, factor) for r, s in zip(runs, found, strict=True))
            lines.append([label, *cells])
    return aligned(lines, indent=0).rstrip("\n")


def _at(run: RunReport, path: str) -> Stat | None:
    value: Any = run
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
    return value if isinstance(value, Stat) else None


def _cell(run: RunReport, stat: Stat | None, unit: str, factor: float) -> str:
    if stat is None:
        return "-"
    return f"{'VOID ' if run.void else ''}{_shown(stat, factor)}{unit}"


def _shown(stat: Stat, factor: float = 1.0) -> str:
    spread = stat.spread * factor
    digits = f"{spread:.0f}" if spread >= 10 else f"{spread:.2g}"
    return f"{_short(stat.value * factor)} ± {digits}"


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.3g}"


def _speedup(s: Speedup | None) -> str:
    if s is None:
        return "void: the outputs disagree"
    return f"prefill x{_shown(s.prefill)}, decode x{_shown(s.decode)}, e2e x{_shown(s.e2e)}"


def _details(run: RunReport) -> Iterator[str]:
    yield f"{run.role}: {run.label}"
    if run.engine:
        yield from _engine_details(run)
    seconds = {k.replace("_", " "): v for k, v in run.setup_s.items() if v is not None}
    setup = ", ".join(f"{k} {v:.2f} s" for k, v in seconds.items())
    peak = run.peak_memory.items()
    memory = ", ".join(f"{k.removesuffix('_bytes')} {size_text(v)}" for k, v in peak)
    yield f"  set-up   {setup} (not in any number above)"
    yield f"  peak     {memory}"


def _engine_details(run: RunReport) -> Iterator[str]:
    e, work = run.engine, run.work
    assert e and work and run.calls_per_step
    skipped = f", without {', '.join(e.skipped_passes)}" if e.skipped_passes else ""
    yield (
        f"  engine   {e.dtype}, {e.weights} weights, manifest {e.manifest[:12]}{skipped}; "
        f"params {size_text(run.param_bytes or 0)}, KV cache {size_text(run.cache_bytes or 0)}"
    )
    for phase, c in (("prefill", work.prefill), ("decode", work.decode)):
        yield (
            f"  {phase:8} {c.flops / 1e9:.4g} GFLOP, weights {size_text(c.weight_bytes)}, "
            f"KV cache {size_text(c.state_bytes)}: at least {_short(c.floor_ms)} ms ({c.bound})"
        )
    held = f", weights quantised to {e.quant}" if e.quant else ""
    held += f", activations quantised to {e.activations}" if e.activations else ""
    yield f"  token    {size_text(run.bytes_per_token or 0)} of weights and KV cache are read{held}"
    if x := work.experts:
        yield (
            f"  experts  {x['decode_distinct']:.1f} of {x['experts']} a layer in a decode step, "
            f"{x['prefill_distinct']:.1f} in a chunk of the prompt ({x['source']})"
        )
    calls = ", ".join(f"{v:g} {k.replace('_', ' ')}" for k, v in run.calls_per_step.items())
    yield f"  calls    {calls} in a decode step"
