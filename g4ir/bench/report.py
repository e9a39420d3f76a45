"""A whole benchmark: engines and peers over one workload, and the report of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g4ir.backends.inductor.device import find_device
from g4ir.builder.module import need_transformers
from g4ir.check.reference import acting, param_bytes
from g4ir.engine.engine import Engine
from g4ir.errors import InputError, check_all
from g4ir.ops.types import torch_dtype
from g4ir.passes.match import OFF
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.spec.reader import Line, on_one_line
from g4ir.spec.record import Spec
from g4ir.ui.progress import Progress, no_progress

from .agreement import Agreement, agreements_of, void_roles
from .llama import LLAMA, LlamaRunner, binding, gguf_file
from .measure import Number, RequestTiming, requests_per_round, timed_request
from .roof import Meter, Rates
from .runners import (
    MODES,
    BenchRunner,
    EngineRunner,
    HfRunner,
    Workload,
    draw_tokens,
    peer_model,
)
from .schema import (
    KIND,
    VERSION,
    BenchReport,
    EngineFacts,
    RawSamples,
    RoofFacts,
    RunReport,
    WorkFacts,
    WorkloadFacts,
)
from .system import OtherLoad, busy_text, environment, load_average, peak_memory, reset_peak
from .work import request_costs

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
) -> BenchReport:
    """Measure one engine, or two of the same variant, beside peers: transformers (keys of
    runners.MODES), llama.cpp; return the report.

    w: from `plan_workload`. rounds: at least 2, each runner takes its turn in each. warmup:
    requests of each before them, beside the one that its outputs are compared on. checkpoint:
    what peers load where the engine does not know. load_s: seconds that loading each engine took.

    Raises InputError and MissingError for what is asked wrongly; outputs that disagree are no
    error: the report says so and marks the numbers void.
    """
    check_options(peers, rounds, warmup)
    check_specs({str(e.path): e.spec for e in engines})
    if any(MODES[name][2] for name in {*peers} & {*MODES}):
        check_all(*find_device(engines[0].device).needs())
    bench = Bench(engines, w, draw_tokens(w, engines[0]), warmup, progress)
    bench.start(peers, checkpoint, load_s)
    progress("comparing outputs")
    agreements = agreements_of(w, bench.tokens, bench.runners)
    bench.measure(rounds)
    return bench.report(agreements)


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

    def measure(self, rounds: int) -> None:
        """Warm up, then take the rounds: A-B-A-B, each without the garbage of the one before."""
        engine = self.engines[0]
        meter = Meter(engine.device, torch_dtype(engine.dtype))
        self.progress("warming up")
        for runner in self.runners:
            for _ in range(self.warmup):
                timed_request(runner, self.w, self.tokens)
        self.per_round = requests_per_round(timed_request(self.runners[0], self.w, self.tokens).e2e)
        load = OtherLoad()
        for number in range(1, rounds + 1):
            self.progress(f"round {number} of {rounds}")
            self.rates.append(meter.measure())
            for r in self.runners:
                gc.collect()
                many = [timed_request(r, self.w, self.tokens) for _ in range(self.per_round)]
                self.requests.setdefault(r.role, []).append(many)
        self.other_cores = load.cores()

    def report(self, agreements: Sequence[Agreement]) -> BenchReport:
        """Return the report of the rounds."""
        void, w, engine = void_roles(agreements), self.w, self.engines[0]
        report = BenchReport(
            KIND,
            VERSION,
            date=time.strftime("%Y%m%d-%H%M%S"),
            backend=f"g4ir-{engine.config.backend}",
            model_id=engine.spec.name,
            workload=WorkloadFacts(
                **{**vars(w), "text": w.text and on_one_line(w.text)},
                rounds=len(self.rates),
                requests_per_round=self.per_round,
                warmup=self.warmup,
            ),
            env={
                **environment(engine.device),
                "load_average": self.load_average,
                "other_cores": self.other_cores,
            },
            roof=RoofFacts(engine.dtype, tuple(self.rates)),
            agreement=tuple(agreements),
            runs=tuple(self._run(r, r.role in void) for r in self.runners),
            notes=tuple(map(on_one_line, _notes(engine, w))),
        )
        return replace(report, warnings=tuple(map(on_one_line, self._warnings(report))))

    def _warnings(self, report: BenchReport) -> Iterator[str]:
        threads = 1 if self.engines[0].device == "cuda" else torch.get_num_threads()
        if busy := busy_text(threads, self.other_cores, self.load_average):
            yield busy
        for run in report.runs:
            found = {key: report.metrics(run)[name][1] for key, name in SPREADS.items()}
            if wide := [f"{k} ± {s.spread / s.value:.0%}" for k, s in found.items() if s.wide]:
                what = "rounds differ too much to compare; give more --rounds on a quiet machine"
                yield f"{run.name or run.role}: {', '.join(wide)}: {what}"

    def _run(self, runner: BenchRunner, void: bool) -> RunReport:
        rounds = self.requests[runner.role]
        return RunReport(
            runner.role,
            on_one_line(runner.label),
            void,
            RawSamples(
                tuple(tuple(r.ttft * 1e3 for r in many) for many in rounds),
                tuple(tuple(tuple(x * 1e3 for x in r.itl) for r in many) for many in rounds),
            ),
            runner.setup_s,
            runner.peak_memory,
            runner.name,
            **(self._engine_part(runner) if isinstance(runner, EngineRunner) else {}),
        )

    def _engine_part(self, runner: EngineRunner) -> dict[str, Any]:
        """Return what only an engine knows of itself: its work and parts."""
        engine, facts = runner.engine, runner.engine.facts
        form = acting(engine).of(ActivationOptions).to
        return {
            "engine": EngineFacts(
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
            "work": WorkFacts(**request_costs(engine, self.w)),
            "cache_bytes": runner.session.nbytes(),
            "param_bytes": param_bytes(engine),
        }


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
