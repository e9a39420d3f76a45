"""A benchmark: engines and baselines over one workload, measured in interleaved rounds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from g4ir.ui.progress import Progress, no_progress, prefixed

from .agreement import compare_outputs, shortened
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
    workloads: Sequence[Workload],
    *,
    peers: Sequence[str] = (),
    rounds: int = 5,
    warmup: int = 2,
    checkpoint: str | None = None,
    draft: str = NONE,
    progress: Progress = no_progress,
) -> list[Values]:
    """Measure one engine, or two of the same variant, and baselines (keys of BASELINES); return the
    report of each workload.

    workloads: from `plan_workload`. rounds: at least 2, each runner takes its turn in each
    (A-B-A-B). warmup: requests of each before them, after the one that its outputs are compared on.
    checkpoint: what baselines load if the engine does not refer to one. draft: source of drafts
    that are measured after the rounds, on one sequence of the first engine.

    Raises InputError and MissingError for wrong arguments; outputs that disagree are no error: the
    report marks their speeds void.
    """
    check_options(peers, rounds, warmup)
    for engine in engines:
        need_decoder(engine, "see the speed that `g4ir embed --input FILE --out FILE.npy` prints")
    check_specs({str(e.path): e.spec for e in engines})
    if draft != NONE:
        resolve_draft(engines[0], draft)
    if any(MODES[name][2] for name in {*peers} & {*MODES}):
        check_all(*find_device(engines[0].device).needs())
    if peers:
        progress("loading the peer")
    file = gguf_file(engines[0], checkpoint) if LLAMA in peers else None
    model = peer_model(engines[0], checkpoint) if {*peers} & {*MODES} else None
    reports, agreements = list[Values](), dict[Workload, list[Values]]()
    for w in workloads:
        size = f"{w.batch} x {w.input_len} tokens"
        stage = prefixed(progress, size) if len(workloads) > 1 else progress
        runners = [*_runners(engines, w, peers, (model, file), stage)]
        tokens, compared = draw_tokens(w, engines[0]), shortened(w)
        if compared not in agreements:
            stage("comparing outputs")
            agreements[compared] = compare_outputs(engines[0], compared, tokens, runners)
        env = {**environment(engines[0].device), "load_average": load_average()}
        meter = _measure(runners, w, tokens, rounds, warmup, stage)
        facts = {"env": env, "agreement": agreements[compared], "warmup": warmup}
        reports.append(build_report(engines[0], w, runners, meter, facts))
        if draft != NONE:
            prompt = tokens[0, : w.context + w.input_len].tolist()
            drafts = measure_drafts(engines[0], prompt, w.output_len, draft, rounds, stage)
            reports[-1]["drafts"] = drafts
    return reports


def _measure(
    runners: Sequence[BenchRunner],
    w: Workload,
    tokens: torch.Tensor,
    rounds: int,
    warmup: int,
    progress: Progress,
) -> Meter:
    """Time the rounds of each runner, which stores them; return the machine's rates."""
    engine = runners[0].engine
    assert engine
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
    return meter


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
    weights: tuple[Any, Any],
    progress: Progress,
) -> Iterator[BenchRunner]:
    """Yield the runners after their first request, in which a baseline compiles and CUDA graphs are
    captured; its seconds and the peak memory are stored. weights: the model of transformers and the
    file of llama.cpp, where they are baselines."""
    names = [e.path.resolve().name for e in engines]
    if len({*names}) < len(names):
        names = [f"{name} ({role})" for name, role in zip(names, ENGINE_ROLES)]
    makers: dict[str, Callable[[], BenchRunner]] = {
        role: partial(EngineRunner, engine, w.batch, role, name)
        for engine, role, name in zip(engines, ENGINE_ROLES, names)
    }
    (model, file), device = weights, engines[0].device
    for mode in peers:
        of_llama = partial(LlamaRunner, file, w.batch, w.max_len, device)
        makers[mode] = of_llama if mode == LLAMA else partial(HfRunner, model, w.max_len, mode)
    tokens = draw_tokens(w, engines[0])
    for role, make in makers.items():
        progress(f"first request of {role}")
        reset_peak(device)
        runner = make()
        runner.set_context(tokens[:, : w.context])
        runner.first_request_s = timed_request(runner, w, tokens).e2e
        runner.peak_memory, runner.rounds = peak_memory(device), []
        yield runner
