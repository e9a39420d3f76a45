"""A whole benchmark: engines and peers over one workload, and the report of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g4ir.check.logits import find_anchor, rounding_error
from g4ir.check.memory_check import float64_refusal
from g4ir.check.peers import EnginePeer, HfPeer
from g4ir.check.reference import reference_engine
from g4ir.check.rounding_baseline import asked
from g4ir.engine.engine import Engine
from g4ir.engine.speculative import NONE, find_draft
from g4ir.errors import InputError
from g4ir.ir.distance import ROUNDED, widened
from g4ir.ops.types import torch_dtype
from g4ir.passes.match import OFF
from g4ir.spec.reader import Line, on_one_line
from g4ir.ui.progress import Progress, no_progress

from . import schema
from .agreement import Agreement, anchored, compare_runners, pair_budget, void_roles
from .calls import calls_per_step, kernels_per_step
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
from .peers import HfRunner, check_compiler, check_peers, peer_model
from .roof import Meter, Rates, middle
from .runners import BenchRunner, EngineRunner, pieces, prepare, reference_runner
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


@dataclass(frozen=True)
class Bench:
    """The things that are run, and who is told of it."""

    w: Workload
    tokens: torch.Tensor
    progress: Progress
    #: role -> name of an engine
    names: dict[str, Line] = field(default_factory=dict)


@dataclass(frozen=True)
class Contestant:
    """A runner and what is known of it besides its requests."""

    runner: BenchRunner
    engine: Engine | None
    setup_s: dict[str, Number]
    peak: dict[str, int]


@dataclass(frozen=True)
class Timings:
    """The rounds: the machine's rates, and each runner's requests."""

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
    peers.MODES); return the report.

    w: from `plan_workload`. rounds: at least 2, each runner takes its turn in each. warmup:
    requests of each before them, beside the one that its outputs are compared on. checkpoint:
    what peers load where the engine does not know. load_s: seconds that loading each engine took.
    draft, draft_tokens: as `Engine.generate` has them; the first engine then also writes texts with
    drafts and without (drafts.py).

    Raises InputError and MissingError for what is asked wrongly; outputs that disagree are no
    error: the report says so and marks the numbers void.
    """
    check_options(peers, rounds, warmup)
    check_engines(engines, peers)
    first = engines[0]
    drafts = find_draft(first, draft, draft_tokens)
    names = dict(zip(ENGINE_ROLES, folder_names([e.path for e in engines])))
    job = Bench(w, draw_tokens(w, first), progress, names)
    loads = [*load_s, *[None] * len(engines)]
    contestants = [
        _contestant(job, role, partial(EngineRunner, e, w.batch, role), e.device, load, e)
        for role, e, load in zip(ENGINE_ROLES, engines, loads)
    ]
    contestants += _peer_contestants(job, first, peers, checkpoint)
    progress("comparing outputs")
    agreements = _agreements(job, contestants)
    prompt = repeated(w, job.tokens)
    writer = Writer(first, drafts, w, prompt) if drafts else None
    measured = _measure(job, contestants, rounds, warmup, writer)
    void = void_roles(agreements)
    runs = [_run(job, c, measured, c.runner.role in void) for c in contestants]
    report = _report(job, first, measured, agreements, runs, warmup)
    return replace(report, drafts=writer.facts(measured.requests)) if writer else report


def check_options(peers: Sequence[str], rounds: int, warmup: int) -> None:
    """Refuse what can be refused before an engine is loaded."""
    if rounds < 2:
        raise InputError(f"bench: --rounds {rounds}: expected at least 2, or there is no spread")
    if warmup < 0:
        raise InputError(f"bench: --warmup {warmup}: expected 0 or more")
    if len(set(peers)) < len(peers):
        raise InputError(f"bench: --peer {', '.join(peers)}: each of them once")
    check_peers(peers)


def check_engines(engines: Sequence[Engine], peers: Sequence[str]) -> None:
    """Refuse what can be refused before anything is measured."""
    check_specs({str(e.path): e.manifest for e in engines})
    check_compiler(peers, engines[0].device)


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


# ---- getting ready ----------------------------------------------------------------------------


def _contestant(
    job: Bench,
    role: str,
    make: Callable[[], BenchRunner],
    device: str,
    load_s: Number,
    engine: Engine | None = None,
) -> Contestant:
    """Return a contestant with the seconds of bringing the rows to their depth, and of the first
    request of all, in which a peer compiles and CUDA graphs are captured."""
    job.progress(f"first request of {role}")
    reset_peak(device)
    runner = make()
    start = time.perf_counter()
    prepare(runner, job.w, job.tokens)
    found: dict[str, Number] = {"fill_context": time.perf_counter() - start}
    found["first_request"] = timed_request(runner, job.w, job.tokens).e2e
    return Contestant(runner, engine, {**found, "load": load_s}, peak_memory(device))


def _peer_contestants(
    job: Bench, engine: Engine, peers: Sequence[str], checkpoint: str | None
) -> list[Contestant]:
    if not peers:
        return []
    job.progress("loading the peer")
    start = time.perf_counter()
    model = peer_model(engine, checkpoint)
    loaded = time.perf_counter() - start
    makers = {name: partial(HfRunner, model, job.w.fed, name) for name in peers}
    return [_contestant(job, name, make, engine.device, loaded) for name, make in makers.items()]


def _agreements(job: Bench, contestants: Sequence[Contestant]) -> list[Agreement]:
    """Compare everybody with the first peer, or with the interpreter where there is none."""
    w, tokens = job.w, job.tokens
    engines = [c.engine for c in contestants if c.engine]
    peers = [c.runner for c in contestants if isinstance(c.runner, HfRunner)]
    base: BenchRunner = peers[0] if peers else reference_runner(engines[0], w.batch)
    if not peers:
        prepare(base, w, tokens)
    against, dtype = "hf" if peers else "reference", engines[0].dtype
    rivals = [c for c in contestants if c.runner is not base]
    budgets = [pair_budget([dtype, (c.engine or engines[0]).dtype], against) for c in rivals]
    anchor = None
    if dtype in ROUNDED:
        own = reference_engine(engines[0], held=True)
        peer = HfPeer(peers[0].model) if peers else EnginePeer(own)
        refusal = float64_refusal(own, w.fed, w.batch * w.output_len, own.device)
        anchor = find_anchor(peer, list(tokens), _turns(w), False, refusal)
    if anchor:
        anchor, measured = anchored(w, tokens, base, anchor, dtype)
        same = [(c.engine or engines[0]).dtype == dtype for c in rivals]
        budgets = [measured if s else b for s, b in zip(same, budgets, strict=True)]
    others = [(c.runner, b) for c, b in zip(rivals, budgets, strict=True)]
    found = compare_runners(w, tokens, base, others, anchor)
    if all(a.ok or b.relative is None for a, (_, b) in zip(found, others, strict=True)):
        return found
    # As verify does: random weights can make a model in which rounding grows.
    rounding = rounding_error(engines[0], tokens[0], _turns(w), False)
    wide = [(r, b if b.relative is None else widened(b, rounding)) for r, b in others]
    return compare_runners(w, tokens, base, wide, anchor)


def _turns(w: Workload) -> list[int]:
    return [w.context + w.input_len, *[1] * (w.output_len - 1)]


# ---- measuring --------------------------------------------------------------------------------


def _measure(
    job: Bench,
    contestants: Sequence[Contestant],
    rounds: int,
    warmup: int,
    writer: Writer | None = None,
) -> Timings:
    w, tokens, first = job.w, job.tokens, contestants[0]
    assert first.engine
    meter = Meter(first.engine.device, torch_dtype(first.engine.dtype))
    job.progress("warming up")
    for c in contestants:
        for _ in range(warmup):
            timed_request(c.runner, w, tokens)
    count = requests_per_round(timed_request(first.runner, w, tokens).e2e)
    numbers = iter(range(1, rounds + 1))

    def before() -> Rates:
        job.progress(f"round {next(numbers)} of {rounds}")
        return meter.measure()

    turns: dict[str, Callable[[], list[RequestTiming]]] = {
        c.runner.role: partial(turn, c.runner, w, tokens, count) for c in contestants
    }
    if writer:
        for write in (extra := writer.turns(count)).values():
            write()  # what is compiled or recorded at first is not timed
        turns |= extra
    rates, requests = interleave(rounds, before, turns)
    return Timings(count, rates, requests)


# ---- the report -------------------------------------------------------------------------------


def _run(job: Bench, c: Contestant, measured: Timings, void: bool) -> RunReport:
    rounds = measured.requests[c.runner.role]
    run = RunReport(
        c.runner.role,
        on_one_line(c.runner.label),
        void,
        schema.RawSamples(
            tuple(tuple(r.ttft * 1e3 for r in many) for many in rounds),
            tuple(tuple([x * 1e3 for x in r.itl] for r in many) for many in rounds),
        ),
        latencies(rounds),
        speeds(job.w, rounds),
        c.setup_s,
        c.peak,
    )
    if c.engine is None:
        return run
    assert isinstance(c.runner, EngineRunner)
    return replace(run, **_engine_part(job, c.engine, c.runner, measured))


def _engine_part(
    job: Bench, engine: Engine, runner: EngineRunner, measured: Timings
) -> dict[str, Any]:
    """Return the keys that only an engine knows of itself: its work, share of the roof, parts."""
    rates, rounds = measured.rates, measured.requests[runner.role]
    roof = middle(rates).roof()
    work = find_work(engine, job.w, job.tokens)
    nbytes, flops = work.decode_cost().needed_bytes, work.prefill_cost().flops
    first_token, steps = (partial(shares, rounds, rates, TAKE[k]) for k in ("ttft", "itl"))
    return {
        "name": job.names.get(runner.role),
        "engine": _engine_facts(engine),
        "work": work.facts(roof),
        "mbu": steps(lambda r: nbytes / r.bandwidth),
        "mfu": first_token(lambda r: flops / r.matmul),
        "roof_ratio": {
            "prefill": first_token(lambda r: work.prefill_floor(r.roof())),
            "decode": steps(lambda r: work.decode_floor(r.roof())),
        },
        "calls_per_step": {**calls_per_step(engine), **_kernels(job, engine, runner)},
        "cache_bytes": runner.session.nbytes(),
        "bytes_per_token": nbytes // job.w.batch,
        "param_bytes": sum(v.type.nbytes() for v in engine.program.params().values()),
    }


def _kernels(job: Bench, engine: Engine, runner: EngineRunner) -> dict[str, float]:
    if engine.device != "cuda":
        return {}
    runner.rewind()
    prompt, step, *_ = pieces(job.w, job.tokens)
    runner.step(prompt)
    session = runner.session
    held = session.snapshot()

    def once() -> None:
        session.restore(held)
        runner.step(step)

    return kernels_per_step(once)


def _engine_facts(engine: Engine) -> schema.EngineFacts:
    m = engine.facts
    return schema.EngineFacts(
        m.digest,
        engine.dtype,
        m.backend,
        engine.device,
        m.weights.kind,
        m.skipped_passes,
        asdict(engine.limits),
        Line(engine.recipe.name) if engine.recipe else None,
        Line(form) if (form := asked(engine, "quantize_activations")) != OFF else None,
    )


def _report(
    job: Bench,
    engine: Engine,
    measured: Timings,
    agreements: Sequence[Agreement],
    runs: Sequence[RunReport],
    warmup: int,
) -> BenchReport:
    own, w, rounds = runs[0], job.w, len(measured.rates)
    assert own.mbu and own.mfu and own.roof_ratio
    peers = [r for r in runs if not r.engine]
    asked = {**asdict(w), "text": w.text and on_one_line(w.text)}
    return BenchReport(
        schema.KIND,
        schema.VERSION,
        date=time.strftime("%Y%m%d-%H%M%S"),
        backend=f"g4ir-{engine.facts.backend}",
        model_id=engine.spec.name,
        num_prompts=rounds * measured.per_round * w.batch,
        max_concurrency=w.batch,
        **_vllm_keys(own),
        workload=schema.WorkloadFacts(
            **asked, rounds=rounds, requests_per_round=measured.per_round, warmup=warmup
        ),
        env=environment(engine.device),
        roof=_roof_stats(measured.rates, engine.dtype),
        mbu=own.mbu.value,
        mfu=own.mfu.value,
        roof_ratio={k: s.value for k, s in own.roof_ratio.items()},
        outputs_agree=all(a.ok for a in agreements),
        agreement=tuple(agreements),
        peer=min(peers, key=lambda r: r.stats["itl_ms"]["p50"].value).role if peers else None,
        speedup={r.role: _speedup(own, r, measured) for r in runs[1:]},
        runs=tuple(runs),
        notes=tuple(map(on_one_line, _notes(engine, w))),
        drafts=None,
    )


def _vllm_keys(run: RunReport) -> dict[str, Number]:
    """Return keys as vLLM's benchmark names them; nothing where the outputs disagree."""
    speed = run.tokens_per_s
    found = {
        "request_throughput": speed["request"].value,
        "output_throughput": speed["output"].value,
        "total_token_throughput": speed["total"].value,
    }
    for key in schema.LATENCIES:
        stats = run.stats[f"{key}_ms"]
        for name, statistic in schema.VLLM_STATISTICS.items():
            found[f"{name}_{key}_ms"] = stats[statistic].value
    return {k: None if run.void else v for k, v in found.items()}


def _roof_stats(rates: Sequence[Rates], dtype: str) -> schema.RoofStats:
    samples = tuple(asdict(r) for r in rates)
    read, copy, matmul = (
        around(median(v), v) for v in ([s[k] for s in samples] for k in ("read", "copy", "matmul"))
    )
    return schema.RoofStats(read, copy, matmul, dtype, samples)


def _speedup(own: RunReport, other: RunReport, measured: Timings) -> Speedup | None:
    """Return the median time of the other over our own, by round and over all; null where either is
    void."""
    if own.void or other.void:
        return None
    a, b = (measured.requests[r.role] for r in (own, other))
    return Speedup(other.label, *(over(b, a, TAKE[k]) for k in ("ttft", "itl", "e2el")))


def _notes(engine: Engine, w: Workload) -> list[str]:
    notes = [SAME_WORK]
    if engine.facts.seed is not None:
        notes.append(
            "random weights: routing is near uniform and text means nothing; speed of dense parts "
            "does not depend on it"
        )
    if w.text is None:
        notes.append(f"prompts are random tokens (seed {w.seed})")
    if engine.device == "cpu":
        notes.append("peak memory is that of the process, other engines and peers included")
    return notes
