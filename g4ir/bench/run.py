"""A benchmark: engines and baselines over one workload, measured in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from g4ir.backends.inductor.device import find_device
from g4ir.builder.module import need_transformers
from g4ir.check.llama import LLAMA, LlamaSession, binding, gguf_file
from g4ir.engine.embeddings import need_decoder
from g4ir.engine.engine import Engine
from g4ir.engine.speculative import NONE, resolve_draft
from g4ir.errors import InputError, check_all
from g4ir.ir.distance import row_errors
from g4ir.ops.types import torch_dtype
from g4ir.spec.record import Spec
from g4ir.ui.progress import Progress, no_progress

from .drafts import measure_drafts
from .measure import measure_rounds, timed_request
from .report import Values, build_report
from .roof import Meter
from .runners import (
    MODES,
    BenchRunner,
    EngineRunner,
    Workload,
    draw_tokens,
    hf_runner,
    peer_model,
    reference_runner,
    request_steps,
)
from .system import environment, peak_memory, reset_peak

ENGINE_ROLES = ("engine", "engine-b")
#: maximum prompt and output tokens of the request on which outputs are compared: few, since the
#: interpreter may be a thousand times slower than an engine
CHECKED_INPUT, CHECKED_OUTPUT = 32, 4
#: outputs agree if the median cosine of the rows of logits is at least this. Each runner rounds and
#: quantises in its own way, and 16-bit routers choose other experts in some rows; `g4ir verify` has
#: strict tolerances
AGREE = 0.98
#: baseline -> function that raises MissingError if its library is not installed
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
    """Measure one engine, or two of the same spec, and baselines (`peers`: keys of BASELINES);
    return the report of each workload.

    workloads: from `plan_workload`. rounds: at least 2; every runner has a turn in each (A-B-A-B).
    warmup: requests of each runner before the rounds, in addition to its first one and the one
    whose outputs are compared. checkpoint: what baselines load (default: the first engine's
    checkpoint, or its random weights). draft: source of drafts that are measured after the rounds,
    on one sequence of the first engine.

    Raises InputError for wrong arguments and MissingError for a missing library; outputs that
    disagree are no error: the report marks their speeds void.
    """
    check_options(peers, rounds, warmup)
    for engine in engines:
        need_decoder(engine.spec, engine.label)
    check_specs({str(e.path): e.spec for e in engines})
    if draft != NONE:
        resolve_draft(engines[0].config, engines[0].label, draft)
    if any(MODES[name][2] for name in {*peers} & {*MODES}):
        check_all(*find_device(engines[0].device).needs())
    if peers:
        progress("loading the baseline")
    file = gguf_file(engines[0], checkpoint) if LLAMA in peers else None
    model = peer_model(engines[0], checkpoint) if {*peers} & {*MODES} else None
    reports, agreements = list[Values](), dict[Workload, list[Values]]()
    for w in workloads:
        tokens, compared = draw_tokens(w, engines[0]), shortened(w)
        runners = [*_runners(engines, w, peers, (model, file), tokens, progress)]
        if compared not in agreements:
            progress("comparing outputs")
            agreements[compared] = compare_outputs(engines[0], compared, tokens, runners)
        env = environment(engines[0].device)
        meter = Meter(engines[0].device, torch_dtype(engines[0].dtype))
        measure_rounds(runners, w, tokens, rounds, warmup, progress, meter.measure)
        facts = {"env": env, "agreement": agreements[compared], "warmup": warmup}
        reports.append(build_report(engines[0], w, runners, meter, facts))
        if draft != NONE:
            prompt = tokens[0, : w.context + w.input_len].tolist()
            how = w.output_len, draft, rounds, progress
            reports[-1]["drafts"] = measure_drafts(engines[0], prompt, *how)
    return reports


def check_options(peers: Sequence[str], rounds: int, warmup: int) -> None:
    """Raise InputError for invalid options, and MissingError for a baseline that is not
    installed."""
    if rounds < 2:
        raise InputError(f"bench: --rounds {rounds}: expected at least 2, or there is no spread")
    if warmup < 0:
        raise InputError(f"bench: --warmup {warmup}: expected 0 or more")
    for name in peers:
        if name not in BASELINES:
            raise InputError(f"--peer {name!r}: expected one of {', '.join(BASELINES)}")
        BASELINES[name]()


def check_specs(specs: Mapping[str, Spec]) -> None:
    """Raise InputError for specs that differ in more than their names; `specs`: path -> spec."""
    (path, spec), *others = specs.items()
    for file, other in others:
        if replace(other, name=spec.name, hub=spec.hub).digest() != spec.digest():
            why = f"{path} is {spec.name} and {file} is {other.name}, with another spec"
            raise InputError(f"bench: {why}: their outputs cannot agree")


def _runners(
    engines: Sequence[Engine],
    w: Workload,
    peers: Sequence[str],
    weights: tuple[Any, Any],
    tokens: torch.Tensor,
    progress: Progress,
) -> Iterator[BenchRunner]:
    """Yield each runner after its first request, in which a baseline compiles and CUDA graphs are
    captured; the runner stores that request's time, and the peak memory until its end. weights: the
    transformers model and the GGUF file for llama.cpp; None for one that `peers` do not need."""
    names, (model, file) = [e.name for e in engines], weights
    if len({*names}) < len(names):
        names = [f"{name} ({role})" for name, role in zip(names, ENGINE_ROLES)]
    device = engines[0].device
    for i, role in enumerate([*ENGINE_ROLES[: len(engines)], *dict.fromkeys(peers)]):
        progress(f"first request of {role}")
        reset_peak(device)
        if i < len(engines):
            runner: BenchRunner = EngineRunner(engines[i], w.batch, role, names[i])
        elif role == LLAMA:
            session = LlamaSession(file, w.batch, w.max_len, device)
            runner = BenchRunner(role, session.label, session)
        else:
            runner = hf_runner(model, w.max_len, role)
        runner.set_context(tokens[:, : w.context])
        runner.first_request_s = timed_request(runner, w, tokens).e2e
        runner.peak_memory = peak_memory(device)
        yield runner


# --- agreement of outputs ---------------------------------------------------------------------


def shortened(w: Workload) -> Workload:
    """Return the workload on which outputs are compared: the first tokens of a request."""
    lengths = min(w.input_len, CHECKED_INPUT), min(w.output_len, CHECKED_OUTPUT)
    return replace(w, input_len=lengths[0], output_len=lengths[1])


def compare_outputs(
    engine: Engine, w: Workload, tokens: torch.Tensor, runners: Sequence[BenchRunner]
) -> list[Values]:
    """Compare the outputs of each other runner with those of the first transformers runner, or, if
    there is none, of the interpreter on `engine`; return an `agreement` for each, with both
    roles."""
    base = next((r for r in runners if r.role in MODES), None) or reference_runner(engine, w.batch)
    tokens = tokens[:, : w.max_len]
    base.set_context(tokens[:, : w.context])
    want = request_logits(base, w, tokens)
    return [
        {"role": r.role, "base": base.role, **agreement(request_logits(r, w, tokens), want)}
        for r in runners
        if r is not base
    ]


def request_logits(runner: BenchRunner, w: Workload, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits f32[batch * output_len, vocab] of one request."""
    runner.rewind()
    steps = [runner.step(step).float().cpu() for step in request_steps(w, tokens)]
    return torch.stack(steps, 1).flatten(0, 1)


def agreement(got: torch.Tensor, want: torch.Tensor) -> Values:
    """Return JSON values: the worst `cosine` and `relative` error of `count` rows of logits; in how
    many both choose the same token (`equal`); whether they agree (`ok`, see AGREE)."""
    errors, equal = row_errors(got, want), got.argmax(-1) == want.argmax(-1)
    return {
        "count": len(want),
        "cosine": float(errors.cosine.min()),
        "relative": float(errors.relative.max()),
        "equal": int(equal.sum()),
        "ok": float(errors.cosine.median()) >= AGREE,
    }
