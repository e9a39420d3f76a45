"""A benchmark: engines and baselines over one workload, measured in interleaved rounds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from g4ir.backends.inductor.device import find_device
from g4ir.builder.module import need_transformers
from g4ir.engine.embeddings import need_decoder
from g4ir.engine.engine import Engine
from g4ir.engine.speculative import NONE, resolve_draft
from g4ir.errors import InputError, check_all
from g4ir.ops.types import torch_dtype
from g4ir.spec.record import Spec
from g4ir.ui.progress import Progress, no_progress

from .agreement import compare_outputs, shortened, void_roles
from .drafts import measure_drafts
from .llama import LLAMA, LlamaRunner, binding, gguf_file
from .measure import requests_per_round, timed_request
from .report import Values, build_report
from .roof import Meter
from .runners import MODES, BenchRunner, EngineRunner, HfRunner, Workload, draw_tokens, peer_model
from .system import environment, load_average, peak_memory, reset_peak

ENGINE_ROLES = ("engine", "engine-b")
#: baseline -> raises MissingError if its library is not installed
BASELINES: dict[str, Callable[[], Any]] = {
    **{mode: partial(need_transformers, f"--peer {mode}") for mode in MODES},
    LLAMA: binding,
}


def run_bench(
    engines: Sequence[Engine],
    w: Workload,
    *,
    peers: Sequence[str] = (),
    rounds: int = 5,
    warmup: int = 2,
    checkpoint: str | None = None,
    load_s: Sequence[float] = (),
    draft: str = NONE,
    compare_all: bool = False,
    agreement_cache: dict[Workload, list[Values]] | None = None,
    progress: Progress = no_progress,
) -> Values:
    """Measure one engine, or two of the same variant, and baselines (keys of BASELINES); return the
    report.

    w: from `plan_workload`. rounds: at least 2, each runner takes its turn in each (A-B-A-B).
    warmup: requests of each before them, after the one that its outputs are compared on.
    checkpoint: what baselines load if the engine does not refer to one. load_s: seconds that
    loading each engine took. draft: source of drafts that are measured after the rounds, on one
    sequence of the first engine. compare_all: compare outputs at every position of the request, not
    at the first ones of a shortened prompt. agreement_cache: agreements of earlier calls with the
    same engines and baselines, by compared request; those of this one are added.

    Raises InputError and MissingError for wrong arguments; outputs that disagree are no error: the
    report marks their speeds void.
    """
    check_options(peers, rounds, warmup)
    for engine in engines:
        need_decoder(engine, "see the speed that `g4ir embed --input FILE --out FILE.npy` prints")
    check_specs({str(e.path): e.spec for e in engines})
    engine = engines[0]
    if draft != NONE:
        resolve_draft(engine, draft)
    env = {**environment(engine.device), "load_average": load_average()}
    if any(MODES[name][2] for name in {*peers} & {*MODES}):
        check_all(*find_device(engine.device).needs())
    tokens, runners = draw_tokens(w, engine), list[BenchRunner]()
    for role, load_time, make in _runners(engines, w, peers, checkpoint, load_s, progress):
        progress(f"first request of {role}")
        runners.append(_start(make, load_time, w, tokens, engine.device))
    cache = {} if agreement_cache is None else agreement_cache
    compared = w if compare_all else shortened(w)
    if compared not in cache:
        progress("comparing outputs")
        cache[compared] = compare_outputs(engine, compared, tokens, runners)
    agreements = cache[compared]
    meter = Meter(engine.device, torch_dtype(engine.dtype))
    progress("warming up")
    for runner in runners:
        for _ in range(warmup):
            timed_request(runner, w, tokens)
    count = requests_per_round(timed_request(runners[0], w, tokens).e2e)
    for number in range(1, rounds + 1):
        progress(f"round {number} of {rounds}")
        meter.measure()
        for runner in runners:
            gc.collect()
            runner.rounds.append([timed_request(runner, w, tokens) for _ in range(count)])
    measured = {"env": env, "agreement": agreements, "void": void_roles(agreements)}
    report = build_report(engine, w, runners, meter, {**measured, "warmup": warmup})
    if draft == NONE:
        return report
    prompt = tokens[0, : w.context + w.input_len].tolist()
    drafts = measure_drafts(engine, prompt, w.output_len, draft, rounds, progress)
    return {**report, "drafts": drafts}


def check_options(peers: Sequence[str], rounds: int, warmup: int) -> None:
    """Refuse what can be refused before an engine is loaded."""
    if rounds < 2:
        raise InputError(f"bench: --rounds {rounds}: expected at least 2, or there is no spread")
    if warmup < 0:
        raise InputError(f"bench: --warmup {warmup}: expected 0 or more")
    if len(set(peers)) < len(peers):
        raise InputError(f"bench: --peer {', '.join(peers)}: each of them once")
    for name in peers:
        if name not in BASELINES:
            raise InputError(f"--peer {name!r}: expected one of {', '.join(BASELINES)}")
        BASELINES[name]()


def check_specs(specs: Mapping[str, Spec]) -> None:
    """Raise InputError for models of different specs; files of one model may have other names."""
    path, spec = next(iter(specs.items()))
    for file, other in specs.items():
        if replace(other, name=spec.name, hub=spec.hub).digest() != spec.digest():
            raise InputError(
                f"bench: {path} is {spec.name} and {file} is {other.name}, with "
                f"another spec: their outputs cannot agree"
            )


def _runners(
    engines: Sequence[Engine],
    w: Workload,
    peers: Sequence[str],
    checkpoint: str | None,
    load_s: Sequence[float],
    progress: Progress,
) -> Iterator[tuple[str, float | None, Callable[[], BenchRunner]]]:
    """Yield role, seconds of loading, and constructor of each runner."""
    names = [e.path.resolve().name for e in engines]
    if len({*names}) < len(names):
        names = [f"{name} ({role})" for name, role in zip(names, ENGINE_ROLES)]
    loads = [*load_s, *[None] * len(engines)]
    for engine, role, name, load in zip(engines, ENGINE_ROLES, names, loads):
        yield role, load, partial(EngineRunner, engine, w.batch, role, name)
    engine = engines[0]

    @cache
    def loaded_model() -> tuple[Any, float]:
        progress("loading the peer")
        start = time.perf_counter()
        return peer_model(engine, checkpoint), time.perf_counter() - start

    for mode in peers:
        if mode == LLAMA:
            file = gguf_file(engine, checkpoint)
            yield mode, None, partial(LlamaRunner, file, w.batch, w.max_len, engine.device)
        else:
            model, seconds = loaded_model()
            yield mode, seconds, partial(HfRunner, model, w.max_len, mode)


def _start(
    make: Callable[[], BenchRunner],
    load: float | None,
    w: Workload,
    tokens: torch.Tensor,
    device: str,
) -> BenchRunner:
    """Make a runner and run its first request, in which a baseline compiles and CUDA graphs are
    captured; store the seconds and the peak memory of that."""
    reset_peak(device)
    runner = make()
    start = time.perf_counter()
    runner.set_context(tokens[:, : w.context])
    filled = time.perf_counter() - start
    first = timed_request(runner, w, tokens).e2e
    runner.setup_s = {"fill_context": filled, "first_request": first, "load": load}
    runner.peak_memory, runner.rounds = peak_memory(device), []
    return runner
