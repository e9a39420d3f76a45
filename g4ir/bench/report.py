"""A whole benchmark: engines and peers over one workload, and the report of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from g4ir.backends.inductor.device import find_device
from g4ir.builder.module import need_transformers
from g4ir.check.reference import acting, param_bytes
from g4ir.engine.engine import Engine
from g4ir.errors import InputError, check_all
from g4ir.ops.types import dtype_name, torch_dtype
from g4ir.passes.match import OFF
from g4ir.passes.quantize_activations import ActivationOptions
from g4ir.spec.record import Spec
from g4ir.ui.progress import Progress, no_progress

from .agreement import Agreement, agreements_of, void_roles
from .llama import LLAMA, LlamaRunner, binding, gguf_file
from .measure import RequestTiming, Rounds, requests_per_round, timed_request
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
    OF_ENGINES,
    VERSION,
    Values,
    metrics,
    plain,
    roof_values,
    sample_values,
    speedup,
    summary,
    work_values,
)
from .system import busy_text, environment, load_average, peak_memory, reset_peak
from .work import request_costs

#: what is looked at for its spread -> metric
SPREADS = {"prefill": "prefill_throughput", "decode": "itl_p50"}
ENGINE_ROLES = ("engine", "engine-b")
RANDOM_WEIGHTS = (
    "random weights: routing is near uniform and text means nothing; speed of dense parts does not "
    "depend on it"
)


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
) -> Values:
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
    matmul_dtype: str = ""
    requests: dict[str, list[list[RequestTiming]]] = field(default_factory=dict)
    load_average: float | None = field(default_factory=load_average)

    def start(self, peers: Sequence[str], checkpoint: str | None, load_s: Sequence[float]) -> None:
        """Make the runners of the engines and the peers."""
        names = [e.path.resolve().name for e in self.engines]
        if len({*names}) < len(names):
            names = [f"{name} ({role})" for name, role in zip(names, ENGINE_ROLES)]
        loads: list[float | None] = [*load_s, *[None] * len(self.engines)]
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

    def _add(self, role: str, make: Callable[[], BenchRunner], load: float | None) -> None:
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
        self.matmul_dtype = dtype_name(meter.matrix.dtype)
        self.progress("warming up")
        for runner in self.runners:
            for _ in range(self.warmup):
                timed_request(runner, self.w, self.tokens)
        self.per_round = requests_per_round(timed_request(self.runners[0], self.w, self.tokens).e2e)
        for number in range(1, rounds + 1):
            self.progress(f"round {number} of {rounds}")
            self.rates.append(meter.measure())
            for r in self.runners:
                gc.collect()
                many = [timed_request(r, self.w, self.tokens) for _ in range(self.per_round)]
                self.requests.setdefault(r.role, []).append(many)

    def report(self, agreements: Sequence[Agreement]) -> Values:
        """Return the report of the rounds, as JSON values."""
        void, w, engine = void_roles(agreements), self.w, self.engines[0]
        runs = [self._run(r, r.role in void) for r in self.runners]
        own, *others = (self.requests[r.role] for r in self.runners)
        ratios = {
            r.role: None
            if {r.role, runs[0]["role"]} & void
            else {"over": r.label, **speedup(own, rounds)}
            for r, rounds in zip(self.runners[1:], others, strict=True)
        }
        values = {
            "kind": KIND,
            "schema": VERSION,
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "backend": f"g4ir-{engine.config.backend}",
            "model_id": engine.spec.name,
            "workload": {
                **vars(w),
                "rounds": len(self.rates),
                "requests_per_round": self.per_round,
                "warmup": self.warmup,
            },
            "env": {**environment(engine.device), "load_average": self.load_average},
            "roof": roof_values(self.matmul_dtype, self.rates),
            "agreement": agreements,
            "outputs_agree": all(a.ok for a in agreements),
            "runs": runs,
            "notes": [RANDOM_WEIGHTS] if engine.facts.seed is not None else [],
            "warnings": [*self._warnings(runs)],
            "num_prompts": len(self.rates) * self.per_round * w.batch,
            "max_concurrency": w.batch,
            **summary(runs),
            "speedup": ratios,
        }
        return dict(plain(values))

    def _warnings(self, runs: Sequence[Values]) -> Iterator[str]:
        if busy := busy_text(self.load_average):
            yield busy
        for run in runs:
            found = {key: metrics(run)[name][1] for key, name in SPREADS.items()}
            if wide := [f"{k} ± {s.spread / s.value:.0%}" for k, s in found.items() if s.wide]:
                what = "rounds differ too much to compare; give more --rounds on a quiet machine"
                yield f"{run['name'] or run['role']}: {', '.join(wide)}: {what}"

    def _run(self, runner: BenchRunner, void: bool) -> Values:
        rounds = self.requests[runner.role]
        return {
            "role": runner.role,
            "label": runner.label,
            "void": void,
            **sample_values(self.w, rounds),
            "setup_s": runner.setup_s,
            "peak_memory": runner.peak_memory,
            **dict.fromkeys(OF_ENGINES),
            **(self._engine_part(runner, rounds) if isinstance(runner, EngineRunner) else {}),
        }

    def _engine_part(self, runner: EngineRunner, rounds: Rounds) -> Values:
        """Return what only an engine knows of itself: its work and parts."""
        engine, facts, config = runner.engine, runner.engine.facts, runner.engine.config
        form = acting(engine).of(ActivationOptions).to
        return {
            "name": runner.name,
            "engine": {
                "manifest": facts.digest,
                "dtype": engine.dtype,
                "backend": config.backend,
                "device": engine.device,
                "weights": facts.weights.kind,
                "skipped_passes": config.skip,
                "limits": engine.limits,
                "quant": config.quant and config.quant.name,
                "activations": form if form != OFF else None,
            },
            "cache_bytes": runner.session.nbytes(),
            "param_bytes": param_bytes(engine),
            **work_values(self.w, rounds, self.rates, request_costs(engine, self.w)),
        }
