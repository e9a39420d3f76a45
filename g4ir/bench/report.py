"""A whole benchmark: engines and peers over one workload, and the report of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from g4ir.check.logits import find_anchor, rounding_error
from g4ir.check.peers import EnginePeer, HfPeer, Peer
from g4ir.check.room import float64_refusal
from g4ir.engine.engine import Engine
from g4ir.ir.distance import ROUNDED, Anchor, widened
from g4ir.ops.types import torch_dtype
from g4ir.plan.cost import Cost, Floor, Roof
from g4ir.plan.cost import floor as cost_floor
from g4ir.ui.progress import Progress, no_progress

from ..errors import InputError
from .agreement import Agreement, anchored, compare_runners, pair_budget, void_roles
from .breakdown import breakdown, calls_per_step, kernels_per_step
from .measure import (
    Request,
    interleave,
    latencies,
    requests_per_round,
    shares,
    speeds,
    timed_request,
    turn,
)
from .peers import HfRunner, check_compiler, check_peers, peer_model
from .roof import Meter, Rates, middle
from .runners import EngineRunner, Runner, interpreter, pieces, prepare, reference_runner
from .schema import KIND, LATENCIES, VERSION, VLLM_STATISTICS
from .stats import Stat, around, median
from .system import environment, peak_memory, reset_peak
from .work import Work, find_work
from .workload import Workload, draw_tokens

ENGINE_ROLES = ("engine", "engine-b")
#: what a step is, for whomever is measured
SAME_WORK = (
    "every runner leaves its logits on the device that made them and takes the largest there; the "
    "chosen tokens come to the host at each step"
)


@dataclass
class Contestant:
    """A runner and what is known of it besides its requests."""

    runner: Runner
    engine: Engine | None = None
    setup_s: dict[str, float | None] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """The rounds: the machine's rates, and each runner's requests."""

    per_round: int
    rates: list[Rates]
    requests: dict[str, list[list[Request]]]


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
) -> dict[str, Any]:
    """Measure one engine, or two of the same variant, beside peers of transformers (keys of
    peers.MODES); returns the report (see schema.py).

    w: from `plan_workload`. rounds: at least 2, each runner takes its turn in each. warmup:
    requests of each before them, beside the one that its outputs are compared on. checkpoint:
    what peers load where the engine does not know. load_s: seconds that loading each engine took.

    Raises InputError and MissingError for what is asked wrongly; outputs that disagree are no
    error: the report says so and marks the numbers void.
    """
    check_options(peers, rounds, warmup)
    check_engines(engines, peers)
    first = engines[0]
    tokens = draw_tokens(w, first)
    contestants = [
        _engine_contestant(e, w, tokens, ENGINE_ROLES[i], dict(enumerate(load_s)).get(i), progress)
        for i, e in enumerate(engines)
    ]
    contestants += _peer_contestants(first, w, tokens, peers, checkpoint, progress)
    progress("comparing outputs")
    agreements = _agreements(contestants, w, tokens)
    measured = _measure(contestants, w, tokens, rounds, warmup, progress)
    runs = [_run(c, w, tokens, measured, agreements, progress) for c in contestants]
    return _report(first, w, measured, agreements, runs, warmup)


def check_options(peers: Sequence[str], rounds: int, warmup: int) -> None:
    """What can be refused before an engine is loaded."""
    if rounds < 2:
        raise InputError(f"bench: --rounds {rounds}: expected at least 2, or there is no spread")
    if warmup < 0:
        raise InputError(f"bench: --warmup {warmup}: expected 0 or more")
    if len(set(peers)) < len(peers):
        raise InputError(f"bench: --peer {', '.join(peers)}: each of them once")
    check_peers(peers)


def check_engines(engines: Sequence[Engine], peers: Sequence[str]) -> None:
    """What can be refused before anything is measured."""
    first = engines[0]
    for other in engines[1:]:
        if other.spec.digest() != first.spec.digest():
            raise InputError(
                f"bench: {first.path} is {first.spec.name} and {other.path} is {other.spec.name}, "
                f"with another spec: their outputs cannot agree"
            )
    check_compiler(peers, first.device)


# ---- getting ready ----------------------------------------------------------------------------


def _engine_contestant(
    engine: Engine,
    w: Workload,
    tokens: torch.Tensor,
    role: str,
    load_s: float | None,
    progress: Progress,
) -> Contestant:
    progress(f"first request of {role}")
    reset_peak(engine.device)
    runner = EngineRunner(engine, w.batch, role)
    found = _first_request(runner, w, tokens)
    found["load"] = load_s
    return Contestant(runner, engine, found, peak_memory(engine.device))


def _peer_contestants(
    engine: Engine,
    w: Workload,
    tokens: torch.Tensor,
    peers: Sequence[str],
    checkpoint: str | None,
    progress: Progress,
) -> list[Contestant]:
    if not peers:
        return []
    progress("loading the peer")
    start = time.perf_counter()
    model = peer_model(engine, checkpoint)
    loaded = time.perf_counter() - start
    out = []
    for name in peers:
        progress(f"first request of {name}")
        reset_peak(engine.device)
        runner = HfRunner(model, w.fed, name)
        found = {**_first_request(runner, w, tokens), "load": loaded}
        out.append(Contestant(runner, None, found, peak_memory(engine.device)))
    return out


def _first_request(runner: Runner, w: Workload, tokens: torch.Tensor) -> dict[str, float | None]:
    """Seconds of the first request of all, in which a peer compiles and CUDA graphs are captured,
    and of bringing the rows to their depth."""
    start = time.perf_counter()
    prepare(runner, w, tokens)
    depth = time.perf_counter() - start
    return {"fill_context": depth, "first_request": timed_request(runner, w, tokens).e2e}


def _agreements(
    contestants: Sequence[Contestant], w: Workload, tokens: torch.Tensor
) -> list[Agreement]:
    """Everybody against the first peer, or against the interpreter where there is none."""
    engines = [c.engine for c in contestants if c.engine]
    peers = [c.runner for c in contestants if isinstance(c.runner, HfRunner)]
    base: Runner = peers[0] if peers else reference_runner(engines[0], w.batch)
    if not peers:
        prepare(base, w, tokens)
    against, dtype = "hf" if peers else "reference", engines[0].dtype
    rivals = [c for c in contestants if c.runner is not base]
    budgets = [pair_budget([dtype, (c.engine or engines[0]).dtype], against) for c in rivals]
    anchor = None
    if dtype in ROUNDED:
        peer = HfPeer(peers[0].model) if peers else EnginePeer(_interpreted(engines[0]))
        anchor = _anchor(peer, engines[0], w, tokens)
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


def _interpreted(engine: Engine) -> Engine:
    return replace(engine, runtime=interpreter(engine))


def _anchor(peer: Peer, engine: Engine, w: Workload, tokens: torch.Tensor) -> Anchor | None:
    refusal = float64_refusal(engine, w.fed, w.batch * w.output_len, engine.device)
    return find_anchor(peer, list(tokens), _turns(w), False, refusal)


# ---- measuring --------------------------------------------------------------------------------


def _measure(
    contestants: Sequence[Contestant],
    w: Workload,
    tokens: torch.Tensor,
    rounds: int,
    warmup: int,
    progress: Progress,
) -> Measured:
    first = contestants[0]
    assert first.engine
    meter = Meter(first.engine.device, torch_dtype(first.engine.dtype))
    progress("warming up")
    for c in contestants:
        for _ in range(warmup):
            timed_request(c.runner, w, tokens)
    count = requests_per_round(timed_request(first.runner, w, tokens).e2e)
    done = 0

    def before() -> Rates:
        nonlocal done
        done += 1
        progress(f"round {done} of {rounds}")
        return meter.measure()

    turns = {c.runner.role: partial(turn, c.runner, w, tokens, count) for c in contestants}
    rates, requests = interleave(rounds, before, turns)
    return Measured(count, rates, requests)


# ---- the report -------------------------------------------------------------------------------


def _run(
    c: Contestant,
    w: Workload,
    tokens: torch.Tensor,
    measured: Measured,
    agreements: Sequence[Agreement],
    progress: Progress,
) -> dict[str, Any]:
    rounds = measured.requests[c.runner.role]
    run = {
        "role": c.runner.role,
        "label": c.runner.label,
        "void": c.runner.role in void_roles(agreements),
        "samples_ms": {
            "ttft": [[r.ttft * 1e3 for r in many] for many in rounds],
            "itl": [[[x * 1e3 for x in r.itl] for r in many] for many in rounds],
        },
        "stats": {k: _dicts(v) for k, v in latencies(rounds).items()},
        "tokens_per_s": _dicts(speeds(w, rounds)),
        "setup_s": c.setup_s,
        "peak_memory": c.peak,
    }
    if c.engine is None:
        return run
    progress(f"taking {c.runner.role} apart")
    return run | _engine_part(c.engine, c.runner, w, tokens, measured)


def _engine_part(
    engine: Engine, runner: Runner, w: Workload, tokens: torch.Tensor, measured: Measured
) -> dict[str, Any]:
    """What only an engine knows of itself: its work, its share of the roof, its parts."""
    rates, rounds = measured.rates, measured.requests[runner.role]
    roof = middle(rates).roof()
    work = find_work(engine, w, tokens)
    nbytes, flops = work.decode_cost().needed_bytes, work.prefill_cost().flops
    assert isinstance(runner, EngineRunner)

    def share(take: Callable[[Request], Sequence[float]], least: Callable[[Rates], float]) -> Any:
        return shares(rounds, rates, take, least).to_dict()

    def first_token(r: Request) -> Sequence[float]:
        return (r.ttft,)

    def steps(r: Request) -> Sequence[float]:
        return r.itl

    return {
        "engine": _engine_facts(engine),
        "work": _work_facts(work, roof),
        "mbu": share(steps, lambda r: nbytes / r.bandwidth),
        "mfu": share(first_token, lambda r: flops / r.matmul),
        "roof_ratio": {
            "prefill": share(first_token, lambda r: work.prefill_floor(r.roof())),
            "decode": share(steps, lambda r: work.decode_floor(r.roof())),
        },
        "calls_per_step": {**calls_per_step(engine), **_kernels(engine, runner, w, tokens)},
        "breakdown": breakdown(engine, w, tokens, work.decode[0][1], roof),
        "cache_bytes": runner.session.nbytes(),
        "param_bytes": sum(v.type.nbytes() for v in engine.program.params().values()),
    }


def _kernels(
    engine: Engine, runner: EngineRunner, w: Workload, tokens: torch.Tensor
) -> dict[str, float]:
    if engine.device != "cuda":
        return {}
    runner.rewind()
    prompt, step, *_ = pieces(w, tokens)
    runner.step(prompt)
    session = runner.session
    held = session.snapshot()

    def once() -> None:
        session.restore(held)
        runner.step(step)

    return kernels_per_step(once)


def _engine_facts(engine: Engine) -> dict[str, Any]:
    m = engine.manifest
    return {
        "manifest": m["digest"],
        "dtype": engine.dtype,
        "backend": m["backend"],
        "device": engine.device,
        "weights": m["weights"]["kind"],
        "skipped_passes": m["skipped_passes"],
        "limits": asdict(engine.limits),
    }


def _work_facts(work: Work, roof: Roof) -> dict[str, Any]:
    def facts(cost: Cost, seconds: float) -> dict[str, Any]:
        bound: Floor = cost_floor(cost, roof)
        return {**asdict(cost), "floor_ms": seconds * 1e3, "bound": bound.bound}

    return {
        "prefill": facts(work.prefill_cost(), work.prefill_floor(roof)),
        "decode": facts(work.decode_cost(), work.decode_floor(roof)),
        "experts": work.experts,
    }


def _dicts(stats: dict[str, Stat]) -> dict[str, dict[str, float]]:
    return {name: s.to_dict() for name, s in stats.items()}


def _report(
    engine: Engine,
    w: Workload,
    measured: Measured,
    agreements: Sequence[Agreement],
    runs: list[dict[str, Any]],
    warmup: int,
) -> dict[str, Any]:
    own = runs[0]
    rounds = len(measured.rates)
    peers = [r for r in runs if "engine" not in r]
    return {
        "kind": KIND,
        "schema": VERSION,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": f"g4ir-{engine.manifest['backend']}",
        "model_id": engine.spec.name,
        "num_prompts": rounds * measured.per_round * w.batch,
        "max_concurrency": w.batch,
        **_vllm_keys(own),
        "workload": {
            **w.to_dict(),
            "rounds": rounds,
            "requests_per_round": measured.per_round,
            "warmup": warmup,
        },
        "env": environment(engine.device),
        "roof": _roof_facts(measured.rates, engine.dtype),
        "mbu": own["mbu"]["value"],
        "mfu": own["mfu"]["value"],
        "roof_ratio": {k: v["value"] for k, v in own["roof_ratio"].items()},
        "outputs_agree": all(a.ok for a in agreements),
        "agreement": [a.to_dict() for a in agreements],
        "peer": min(peers, key=_pace)["role"] if peers else None,
        "speedup": {r["role"]: _speedup(own, r, measured) for r in runs[1:]},
        "runs": runs,
        "notes": _notes(engine, w),
    }


def _pace(run: dict[str, Any]) -> float:
    return float(run["stats"]["itl_ms"]["p50"]["value"])


def _vllm_keys(run: dict[str, Any]) -> dict[str, float | None]:
    """As vLLM's benchmark names them; nothing where the outputs disagree."""
    speed = run["tokens_per_s"]
    found = {
        "request_throughput": speed["request"]["value"],
        "output_throughput": speed["output"]["value"],
        "total_token_throughput": speed["total"]["value"],
    }
    for key in LATENCIES:
        for name, statistic in VLLM_STATISTICS.items():
            found[f"{name}_{key}_ms"] = run["stats"][f"{key}_ms"][statistic]["value"]
    return {k: None if run["void"] else v for k, v in found.items()}


def _roof_facts(rates: list[Rates], dtype: str) -> dict[str, Any]:
    names = {"read": "read_bytes_per_s", "copy": "copy_bytes_per_s", "matmul": "matmul_flops_per_s"}
    values = {k: [getattr(r, k) for r in rates] for k in names}
    return {
        **{name: around(median(values[k]), values[k]).to_dict() for k, name in names.items()},
        "matmul_dtype": dtype,
        "samples": [r.to_dict() for r in rates],
    }


def _speedup(
    own: dict[str, Any], other: dict[str, Any], measured: Measured
) -> dict[str, Any] | None:
    """Median time of the other over our own, by round and over all; null where either is void."""
    if own["void"] or other["void"]:
        return None
    a, b = (measured.requests[r["role"]] for r in (own, other))

    def ratio(take: Callable[[Request], Sequence[float]]) -> dict[str, float]:
        def middle_of(many: Sequence[Request]) -> float:
            return median([x for r in many for x in take(r)])

        def over(x: Sequence[Request], y: Sequence[Request]) -> float:
            return middle_of(y) / middle_of(x)

        whole = over([r for many in a for r in many], [r for many in b for r in many])
        return around(whole, [over(x, y) for x, y in zip(a, b, strict=True)]).to_dict()

    return {
        "over": other["label"],
        "prefill": ratio(lambda r: (r.ttft,)),
        "decode": ratio(lambda r: r.itl),
        "e2e": ratio(lambda r: (r.e2e,)),
    }


def _notes(engine: Engine, w: Workload) -> list[str]:
    notes = [SAME_WORK]
    if engine.manifest["weights"]["kind"] == "random":
        notes.append(
            "random weights: routing is near uniform and text means nothing; speed of dense parts "
            "does not depend on it"
        )
    if w.text is None:
        notes.append(f"prompts are random tokens (seed {w.seed})")
    if engine.device == "cpu":
        notes.append("peak memory is that of the process, other engines and peers included")
    return notes
