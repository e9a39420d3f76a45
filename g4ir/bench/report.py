"""A whole benchmark: engines and peers over one workload, and the report of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g4ir.check.memory_check import param_bytes
from g4ir.check.rounding_baseline import asked
from g4ir.engine.engine import Engine
from g4ir.engine.speculative import NONE, find_draft
from g4ir.errors import InputError
from g4ir.ops.types import torch_dtype
from g4ir.passes.match import OFF
from g4ir.spec.reader import Line, on_one_line
from g4ir.ui.progress import Progress, no_progress

from . import schema
from .agreement import Agreement, agreements_of, void_roles
from .drafts import Writer, repeated
from .measure import (
    TAKE,
    RequestTiming,
    interleave,
    latencies,
    over,
    requests_per_round,
    shares,
    speeds,
    timed_request,
    turn,
)
from .roof import Meter, Rates, middle
from .runners import (
    BenchRunner,
    EngineRunner,
    HfRunner,
    calls_per_step,
    check_compiler,
    check_peers,
    kernels_per_step,
    peer_model,
    pieces,
)
from .schema import BenchReport, RunReport, Speedup
from .stats import Number, around, median
from .system import environment, peak_memory, reset_peak
from .work import find_work
from .workload import Workload, draw_tokens

ENGINE_ROLES = ("engine", "engine-b")
#: what a step is, for whomever is measured
SAME_WORK = (
    "every runner leaves its logits on the device that made them and takes the largest there; the "
    "chosen tokens come to the host at each step"
)
RANDOM_WEIGHTS = (
    "random weights: routing is near uniform and text means nothing; speed of dense parts does not "
    "depend on it"
)


@dataclass(frozen=True)
class Contestant:
    """A runner and what is known of it besides its requests."""

    runner: BenchRunner
    name: Line | None
    setup_s: dict[str, Number]
    peak: dict[str, int]


@dataclass(frozen=True)
class Bench:
    """What is run over which tokens, and the rounds: the machine's rates, and each runner's
    requests."""

    w: Workload
    tokens: torch.Tensor
    contestants: Sequence[Contestant]
    per_round: int
    rates: list[Rates]
    requests: dict[str, list[list[RequestTiming]]]


def run_bench(
    engines: Sequence[Engine],
    w: Workload,
    *,
    peers: Sequence[str] = (),
    rounds: int = 5,
    warmup: int = 2,
    checkpoint: str | None = None,
    load_s: Sequence[float] = (),
    progress: Progress = no_progress,
    draft: str = NONE,
    draft_tokens: int | None = None,
) -> BenchReport:
    """Measure one engine, or two of the same variant, beside peers of transformers (keys of
    runners.MODES); return the report.

    w: from `plan_workload`. rounds: at least 2, each runner takes its turn in each. warmup:
    requests of each before them, beside the one that its outputs are compared on. checkpoint:
    what peers load where the engine does not know. load_s: seconds that loading each engine took.
    draft, draft_tokens: as `Engine.generate` has them; the first engine then also writes texts with
    drafts and without (drafts.py).

    Raises InputError and MissingError for what is asked wrongly; outputs that disagree are no
    error: the report says so and marks the numbers void.
    """
    check_options(peers, rounds, warmup)
    check_specs({str(e.path): e.manifest for e in engines})
    first = engines[0]
    check_compiler(peers, first.device)
    drafts = find_draft(first, draft, draft_tokens)
    tokens = draw_tokens(w, first)
    contestants = _contestants(engines, w, tokens, peers, checkpoint, load_s, progress)
    progress("comparing outputs")
    agreements = agreements_of(w, tokens, [c.runner for c in contestants])
    writer = Writer(first, drafts, w, repeated(w, tokens)) if drafts else None
    bench = _measured(w, tokens, contestants, rounds, warmup, writer, progress)
    return _report(bench, agreements, warmup, writer)


def check_options(peers: Sequence[str], rounds: int, warmup: int) -> None:
    """Refuse what can be refused before an engine is loaded."""
    if rounds < 2:
        raise InputError(f"bench: --rounds {rounds}: expected at least 2, or there is no spread")
    if warmup < 0:
        raise InputError(f"bench: --warmup {warmup}: expected 0 or more")
    if len(set(peers)) < len(peers):
        raise InputError(f"bench: --peer {', '.join(peers)}: each of them once")
    check_peers(peers)


def check_specs(manifests: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise InputError for engines (path -> manifest) of different specs."""
    (one, first), *others = manifests.items()
    for path, other in others:
        if other["spec_digest"] != first["spec_digest"]:
            raise InputError(
                f"bench: {one} is {first['variant']} and {path} is {other['variant']}, with "
                f"another spec: their outputs cannot agree"
            )


def folder_names(paths: Sequence[Path]) -> list[Line]:
    """Return the last parts of the paths, as many as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for n in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-n:]) for p in parts]
        if len({*names}) == len(names):
            return [on_one_line(name) for name in names]
    return [on_one_line(f"{path.name} ({role})") for path, role in zip(paths, ENGINE_ROLES)]


def _contestants(
    engines: Sequence[Engine],
    w: Workload,
    tokens: torch.Tensor,
    peers: Sequence[str],
    checkpoint: str | None,
    load_s: Sequence[float],
    progress: Progress,
) -> list[Contestant]:
    """Return the runners of the engines and the peers, with the seconds of loading each, of
    bringing its rows to their depth and of the first request of all, in which a peer compiles and
    CUDA graphs are captured; and the peak memory of that."""
    device = engines[0].device

    def started(
        role: str, make: Callable[[], BenchRunner], load: Number, name: Line | None = None
    ) -> Contestant:
        progress(f"first request of {role}")
        reset_peak(device)
        runner = make()
        start = time.perf_counter()
        runner.hold(tokens[:, : w.context])
        filled = time.perf_counter() - start
        first = timed_request(runner, w, tokens).e2e
        setup = {"fill_context": filled, "first_request": first, "load": load}
        return Contestant(runner, name, setup, peak_memory(device))

    names, loads = folder_names([e.path for e in engines]), [*load_s, *[None] * len(engines)]
    found = [
        started(role, partial(EngineRunner, engine, w.batch, role), load, name)
        for engine, role, name, load in zip(engines, ENGINE_ROLES, names, loads)
    ]
    if peers:
        progress("loading the peer")
        start = time.perf_counter()
        model = peer_model(engines[0], checkpoint)
        loaded = time.perf_counter() - start
        found += [started(m, partial(HfRunner, model, w.fed, m), loaded) for m in peers]
    return found


def _measured(
    w: Workload,
    tokens: torch.Tensor,
    contestants: Sequence[Contestant],
    rounds: int,
    warmup: int,
    writer: Writer | None,
    progress: Progress,
) -> Bench:
    engine = contestants[0].runner.engine
    assert engine
    meter = Meter(engine.device, torch_dtype(engine.dtype))
    progress("warming up")
    for c in contestants:
        for _ in range(warmup):
            timed_request(c.runner, w, tokens)
    count = requests_per_round(timed_request(contestants[0].runner, w, tokens).e2e)
    numbers = iter(range(1, rounds + 1))

    def before() -> Rates:
        progress(f"round {next(numbers)} of {rounds}")
        return meter.measure()

    turns: dict[str, Callable[[], list[RequestTiming]]] = {
        c.runner.role: partial(turn, c.runner, w, tokens, count) for c in contestants
    }
    if writer:
        drafted = writer.turns(count)
        for write in drafted.values():
            write()  # what is compiled or recorded at first is not timed
        turns |= drafted
    rates, requests = interleave(rounds, before, turns)
    return Bench(w, tokens, contestants, count, rates, requests)


def _run(bench: Bench, c: Contestant, void: bool) -> RunReport:
    rounds = bench.requests[c.runner.role]
    return RunReport(
        c.runner.role,
        on_one_line(c.runner.label),
        void,
        schema.RawSamples(
            tuple(tuple(r.ttft * 1e3 for r in many) for many in rounds),
            tuple(tuple([x * 1e3 for x in r.itl] for r in many) for many in rounds),
        ),
        latencies(rounds),
        speeds(bench.w, rounds),
        c.setup_s,
        c.peak,
        c.name,
        **(_engine_part(bench, c.runner) if isinstance(c.runner, EngineRunner) else {}),
    )


def _engine_part(bench: Bench, runner: EngineRunner) -> dict[str, Any]:
    """Return the keys that only an engine knows of itself: its work, share of the roof, parts."""
    engine, rounds = runner.engine, bench.requests[runner.role]
    work, facts = find_work(engine, bench.w, bench.tokens), engine.facts
    nbytes, flops = work.decode.cost().needed_bytes, work.prefill.cost().flops
    first_token, steps = (partial(shares, rounds, bench.rates, TAKE[k]) for k in ("ttft", "itl"))
    form = asked(engine, "quantize_activations")
    return {
        "engine": schema.EngineFacts(
            facts.digest,
            engine.dtype,
            facts.backend,
            engine.device,
            facts.weights.kind,
            facts.skipped_passes,
            asdict(engine.limits),
            Line(engine.recipe.name) if engine.recipe else None,
            Line(form) if form != OFF else None,
        ),
        "work": work.facts(middle(bench.rates).roof()),
        "mbu": steps(lambda r: nbytes / r.bandwidth),
        "mfu": first_token(lambda r: flops / r.matmul),
        "roof_ratio": {
            "prefill": first_token(lambda r: work.prefill.floor(r.roof())),
            "decode": steps(lambda r: work.decode.floor(r.roof())),
        },
        "calls_per_step": {**calls_per_step(engine), **_kernels(bench, runner)},
        "cache_bytes": runner.session.nbytes(),
        "bytes_per_token": nbytes // bench.w.batch,
        "param_bytes": param_bytes(engine),
    }


def _kernels(bench: Bench, runner: EngineRunner) -> dict[str, float]:
    if runner.engine.device != "cuda":
        return {}
    runner.rewind()
    prompt, step, *_ = pieces(bench.w, bench.tokens)
    runner.step(prompt)
    held = runner.session.snapshot()

    def once() -> None:
        runner.session.restore(held)
        runner.step(step)

    return kernels_per_step(once)


def _report(
    bench: Bench, agreements: Sequence[Agreement], warmup: int, writer: Writer | None
) -> BenchReport:
    void = void_roles(agreements)
    runs = [_run(bench, c, c.runner.role in void) for c in bench.contestants]
    w, engine = bench.w, bench.contestants[0].runner.engine
    assert engine
    return BenchReport(
        schema.KIND,
        schema.VERSION,
        date=time.strftime("%Y%m%d-%H%M%S"),
        backend=f"g4ir-{engine.facts.backend}",
        model_id=engine.spec.name,
        workload=schema.WorkloadFacts(
            **{**asdict(w), "text": w.text and on_one_line(w.text)},
            rounds=len(bench.rates),
            requests_per_round=bench.per_round,
            warmup=warmup,
        ),
        env=environment(engine.device),
        roof=_roof_stats(bench.rates, engine.dtype),
        agreement=tuple(agreements),
        speedup={r.role: _speedup(runs[0], r, bench) for r in runs[1:]},
        runs=tuple(runs),
        notes=tuple(map(on_one_line, _notes(engine, w))),
        drafts=writer.facts(bench.requests) if writer else None,
    )


def _roof_stats(rates: Sequence[Rates], dtype: str) -> schema.RoofStats:
    samples = tuple(asdict(r) for r in rates)
    read, copy, matmul = (around(median(v), v) for v in zip(*(s.values() for s in samples)))
    return schema.RoofStats(read, copy, matmul, dtype, samples)


def _speedup(own: RunReport, other: RunReport, bench: Bench) -> Speedup | None:
    """Return the median time of the other over our own, by round and over all; null where either is
    void."""
    if own.void or other.void:
        return None
    a, b = (bench.requests[r.role] for r in (own, other))
    return Speedup(other.label, *(over(b, a, TAKE[k]) for k in ("ttft", "itl", "e2el")))


def _notes(engine: Engine, w: Workload) -> Iterator[str]:
    yield SAME_WORK
    if engine.facts.seed is not None:
        yield RANDOM_WEIGHTS
    if w.text is None:
        yield f"prompts are random tokens (seed {w.seed})"
    if engine.device == "cpu":
        yield "peak memory is that of the process, other engines and peers included"
