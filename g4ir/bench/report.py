"""A whole benchmark: engines and peers over one workload, and the report of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g4ir.backends.inductor.device import find_device
from g4ir.check.hf import need_transformers
from g4ir.check.reference import acting, param_bytes
from g4ir.engine.engine import Engine
from g4ir.engine.speculative import NONE, find_draft
from g4ir.errors import InputError, check_all
from g4ir.ops.types import torch_dtype
from g4ir.passes.match import OFF
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.spec.reader import Line, on_one_line
from g4ir.spec.record import Spec
from g4ir.ui.progress import Progress, no_progress

from . import schema
from .agreement import Agreement, agreements_of, void_roles
from .drafts import Writer, repeated
from .llama import LLAMA, LlamaRunner, binding, gguf_file
from .measure import (
    TAKE,
    Number,
    RequestTiming,
    around,
    interleave,
    latencies,
    median,
    over,
    requests_per_round,
    shares,
    speeds,
    timed_request,
    turn,
)
from .roof import Meter, Rates, middle
from .runners import (
    MODES,
    BenchRunner,
    EngineRunner,
    HfRunner,
    Workload,
    calls_per_step,
    draw_tokens,
    kernels_per_step,
    peer_model,
    pieces,
)
from .schema import BenchReport, RunReport, Speedup
from .system import OtherLoad, busy_text, environment, load_average, peak_memory, reset_peak
from .work import find_work

#: what is looked at for its spread -> metric
SPREADS = {"prefill": "prefill_throughput", "decode": "itl_p50"}
ENGINE_ROLES = ("engine", "engine-b")


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
    """Measure one engine, or two of the same variant, beside peers: transformers (keys of
    runners.MODES), llama.cpp; return the report.

    w: from `plan_workload`. rounds: at least 2, each runner takes its turn in each. warmup:
    requests of each before them, beside the one that its outputs are compared on. checkpoint:
    what peers load where the engine does not know. load_s: seconds that loading each engine took.
    draft, draft_tokens: as `Engine.generate` has them; the first engine then also writes texts with
    drafts and without (drafts.py).

    Raises InputError and MissingError for what is asked wrongly; outputs that disagree are no
    error: the report says so and marks the numbers void.
    """
    check_options(peers, rounds, warmup)
    check_specs({str(e.path): e.spec for e in engines})
    if any(MODES[name][2] for name in {*peers} & {*MODES}):
        check_all(*find_device(engines[0].device).needs())
    drafts = find_draft(engines[0], draft, draft_tokens)
    bench = Bench(engines, w, draw_tokens(w, engines[0]), rounds, warmup, progress)
    bench.start(peers, checkpoint, load_s)
    progress("comparing outputs")
    agreements = agreements_of(w, bench.tokens, bench.runners)
    writer = Writer(engines[0], drafts, w, repeated(w, bench.tokens)) if drafts else None
    bench.measure(writer)
    return bench.report(agreements, writer)


def check_options(peers: Sequence[str], rounds: int, warmup: int) -> None:
    """Refuse what can be refused before an engine is loaded."""
    if rounds < 2:
        raise InputError(f"bench: --rounds {rounds}: expected at least 2, or there is no spread")
    if warmup < 0:
        raise InputError(f"bench: --warmup {warmup}: expected 0 or more")
    if len(set(peers)) < len(peers):
        raise InputError(f"bench: --peer {', '.join(peers)}: each of them once")
    for name in peers:
        if name not in (*MODES, LLAMA):
            raise InputError(f"--peer {name!r}: expected one of {', '.join([*MODES, LLAMA])}")
        binding() if name == LLAMA else need_transformers(f"--peer {name}")


def check_specs(specs: Mapping[str, Spec]) -> None:
    """Raise InputError for models of different specs; files of one model may have other names."""
    (one, first), *others = specs.items()
    for path, other in others:
        if replace(other, name=first.name, hub=first.hub).digest() != first.digest():
            raise InputError(
                f"bench: {one} is {first.name} and {path} is {other.name}, with "
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


@dataclass
class Bench:
    """What is run over which tokens, and the rounds: the machine's rates, and each runner's
    requests."""

    engines: Sequence[Engine]
    w: Workload
    tokens: torch.Tensor
    rounds: int
    warmup: int
    progress: Progress
    runners: list[BenchRunner] = field(default_factory=list)
    per_round: int = 1
    rates: list[Rates] = field(default_factory=list)
    requests: dict[str, list[list[RequestTiming]]] = field(default_factory=dict)
    load_average: Number = field(default_factory=load_average)
    other_cores: Number = None

    def start(self, peers: Sequence[str], checkpoint: str | None, load_s: Sequence[float]) -> None:
        """Make the runners of the engines and the peers."""
        names = folder_names([e.path for e in self.engines])
        loads: list[Number] = [*load_s, *[None] * len(self.engines)]
        for engine, role, name, load in zip(self.engines, ENGINE_ROLES, names, loads):
            self._add(role, partial(EngineRunner, engine, self.w.batch, role, name), load)
        engine, modes = self.engines[0], [name for name in peers if name in MODES]
        if modes:
            self.progress("loading the peer")
            start = time.perf_counter()
            model = peer_model(engine, checkpoint)
            loaded = time.perf_counter() - start
            for mode in modes:
                self._add(mode, partial(HfRunner, model, self.w.fed, mode), loaded)
        if LLAMA in peers:
            file, w = gguf_file(engine, checkpoint), self.w
            self._add(LLAMA, partial(LlamaRunner, file, w.batch, w.fed, engine.device), None)

    def _add(self, role: str, make: Callable[[], BenchRunner], load: Number) -> None:
        """Make a runner; keep the seconds of loading it, of bringing its rows to their depth and of
        the first request of all, in which a peer compiles and CUDA graphs are captured; and the
        peak memory of that."""
        self.progress(f"first request of {role}")
        device = self.engines[0].device
        reset_peak(device)
        runner = make()
        start = time.perf_counter()
        runner.hold(self.tokens[:, : self.w.context])
        filled = time.perf_counter() - start
        first = timed_request(runner, self.w, self.tokens).e2e
        runner.setup_s = {"fill_context": filled, "first_request": first, "load": load}
        runner.peak_memory = peak_memory(device)
        self.runners.append(runner)

    def measure(self, writer: Writer | None) -> None:
        """Warm up, then take the rounds."""
        engine, runners = self.engines[0], self.runners
        meter = Meter(engine.device, torch_dtype(engine.dtype))
        self.progress("warming up")
        for runner in runners:
            for _ in range(self.warmup):
                timed_request(runner, self.w, self.tokens)
        self.per_round = requests_per_round(timed_request(runners[0], self.w, self.tokens).e2e)
        turns: dict[str, Callable[[], list[RequestTiming]]] = {
            r.role: partial(turn, r, self.w, self.tokens, self.per_round) for r in runners
        }
        if writer:
            drafted = writer.turns(self.per_round)
            for write in drafted.values():
                write()  # what is compiled or recorded at first is not timed
            turns |= drafted
        numbers = iter(range(1, self.rounds + 1))
        load = OtherLoad()

        def before() -> Rates:
            self.progress(f"round {next(numbers)} of {self.rounds}")
            return meter.measure()

        self.rates, self.requests = interleave(self.rounds, before, turns)
        self.other_cores = load.cores()

    def report(self, agreements: Sequence[Agreement], writer: Writer | None) -> BenchReport:
        """Return the report of the rounds."""
        void = void_roles(agreements)
        runs = [self._run(r, r.role in void) for r in self.runners]
        w, engine = self.w, self.engines[0]
        samples = tuple(asdict(r) for r in self.rates)
        read, copy, matmul = (around(median(v), v) for v in zip(*(s.values() for s in samples)))
        return BenchReport(
            schema.KIND,
            schema.VERSION,
            date=time.strftime("%Y%m%d-%H%M%S"),
            backend=f"g4ir-{engine.config.backend}",
            model_id=engine.spec.name,
            workload=schema.WorkloadFacts(
                **{**asdict(w), "text": w.text and on_one_line(w.text)},
                rounds=self.rounds,
                requests_per_round=self.per_round,
                warmup=self.warmup,
            ),
            env={
                **environment(engine.device),
                "load_average": self.load_average,
                "other_cores": self.other_cores,
            },
            roof=schema.RoofStats(read, copy, matmul, engine.dtype, samples),
            agreement=tuple(agreements),
            speedup={r.role: self._speedup(runs[0], r) for r in runs[1:]},
            runs=tuple(runs),
            notes=tuple(map(on_one_line, _notes(engine, w))),
            drafts=writer.facts(self.requests) if writer else None,
            warnings=tuple(map(on_one_line, self._warnings(runs))),
        )

    def _warnings(self, runs: Sequence[RunReport]) -> Iterator[str]:
        threads = 1 if self.engines[0].device == "cuda" else torch.get_num_threads()
        if busy := busy_text(threads, self.other_cores, self.load_average):
            yield busy
        for run in runs:
            found = {key: run.metrics()[name][1] for key, name in SPREADS.items()}
            if wide := [f"{k} ± {s.spread / s.value:.0%}" for k, s in found.items() if s.wide]:
                what = "rounds differ too much to compare; give more --rounds on a quiet machine"
                yield f"{run.name or run.role}: {', '.join(wide)}: {what}"

    def _run(self, runner: BenchRunner, void: bool) -> RunReport:
        rounds = self.requests[runner.role]
        samples = schema.RawSamples(
            tuple(tuple(r.ttft * 1e3 for r in many) for many in rounds),
            tuple(tuple([x * 1e3 for x in r.itl] for r in many) for many in rounds),
        )
        return RunReport(
            runner.role,
            on_one_line(runner.label),
            void,
            samples,
            latencies(rounds),
            speeds(self.w, rounds),
            runner.setup_s,
            runner.peak_memory,
            runner.name,
            **(self._engine_part(runner) if isinstance(runner, EngineRunner) else {}),
        )

    def _engine_part(self, runner: EngineRunner) -> dict[str, Any]:
        """Return what only an engine knows of itself: its work, share of the roofline, parts."""
        engine, facts, rounds = runner.engine, runner.engine.facts, self.requests[runner.role]
        work = find_work(engine, self.w, self.tokens)
        nbytes, flops = work.decode.cost().needed_bytes, work.prefill.cost().flops
        first_token, steps = (partial(shares, rounds, self.rates, TAKE[k]) for k in ("ttft", "itl"))
        form = acting(engine).of(ActivationOptions).to
        return {
            "engine": schema.EngineFacts(
                facts.digest,
                engine.dtype,
                engine.config.backend,
                engine.device,
                facts.weights.kind,
                engine.config.skip,
                asdict(engine.limits),
                Line(engine.config.quant.name) if engine.config.quant else None,
                Line(form) if form != OFF else None,
            ),
            "work": work.facts(middle(self.rates).roof()),
            "mbu": steps(lambda r: nbytes / r.bandwidth),
            "mfu": first_token(lambda r: flops / r.matmul),
            "roof_ratio": {
                "prefill": first_token(lambda r: work.prefill.floor(r.roof())),
                "decode": steps(lambda r: work.decode.floor(r.roof())),
            },
            "calls_per_step": {**calls_per_step(engine), **self._kernels(runner)},
            "cache_bytes": runner.session.nbytes(),
            "bytes_per_token": nbytes // self.w.batch,
            "param_bytes": param_bytes(engine),
        }

    def _kernels(self, runner: EngineRunner) -> dict[str, float]:
        if runner.engine.device != "cuda":
            return {}
        runner.rewind()
        prompt, step, *_ = pieces(self.w, self.tokens)
        runner.step(prompt)
        held = runner.session.snapshot()

        def once() -> None:
            runner.session.restore(held)
            runner.step(step)

        return kernels_per_step(once)

    def _speedup(self, own: RunReport, other: RunReport) -> Speedup | None:
        """Return the median time of the other over our own, by round and over all; null where
        either is void."""
        if own.void or other.void:
            return None
        a, b = (self.requests[r.role] for r in (own, other))
        return Speedup(other.label, *(over(b, a, TAKE[k]) for k in ("ttft", "itl", "e2el")))


def _notes(engine: Engine, w: Workload) -> Iterator[str]:
    yield (
        "every runner leaves its logits on the device that made them and takes the largest there; "
        "the chosen tokens come to the host at each step"
    )
    if engine.facts.seed is not None:
        yield (
            "random weights: routing is near uniform and text means nothing; speed of dense parts "
            "does not depend on it"
        )
    if w.text is None:
        yield f"prompts are random tokens (seed {w.seed})"
    if engine.device == "cpu":
        yield "peak memory is that of the process, other engines and peers included"
