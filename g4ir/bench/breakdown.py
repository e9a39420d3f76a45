"""Where the time of a decode step goes, and how many calls it makes.

A runtime shows its values as it makes them; the time between two of them is the time of what made
the second. For compiled programs that is a measured time for each program, and a program holds
one stage of one layer: parts of a layer (attention, MLP, ...) are then estimated from the cost
model. The interpreter shows every node, so there the kinds are measured too. On CUDA the device is
waited for at every value, and the step runs as single launches, not as the one graph that a
session replays: shares are right, sums are not.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from g4ir.backends.torch_compile.programs import phase_steps
from g4ir.backends.torch_compile.segment import Segment
from g4ir.check.watch import Place, watching
from g4ir.engine.engine import Engine
from g4ir.ir.names import layer_of
from g4ir.plan.cost import NodeCost, Roof
from g4ir.spec.record import Spec

from .roof import synchronize
from .runners import EngineRunner, pieces, prepare
from .schema import Breakdown
from .stats import median
from .workload import Workload

#: decode steps that are taken apart
STEPS = 8
OUTSIDE = "session"
WHOLE = "all in one program"


class _Clock:
    """Seconds by the name of the value that they made."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.last = 0.0

    def start(self) -> None:
        self.last = time.perf_counter()

    def see(self, place: Place, name: str, t: torch.Tensor) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = time.perf_counter()


def step_times(engine: Engine, w: Workload, tokens: torch.Tensor) -> dict[str, float]:
    """Return the median seconds of a decode step by the name of the value made; OUTSIDE is the
    session's own work (gather the rows of the tables, choose the token)."""
    clock = _Clock(engine.device)
    runner = EngineRunner(watching(engine, clock.see, begin=clock.start), w.batch)
    prepare(runner, w, tokens)
    prompt, *steps = pieces(w, tokens)
    runner.step(prompt)
    found = []
    for piece in steps[: STEPS + 1]:
        clock.seconds.clear()
        start = time.perf_counter()
        runner.step(piece).argmax(-1).tolist()
        whole = time.perf_counter() - start
        clock.seconds[OUTSIDE] = max(0.0, whole - sum(clock.seconds.values()))
        found.append(dict(clock.seconds))
    warm = found[1:] or found
    return {name: median([step[name] for step in warm]) for name in warm[0]}


_HEAD = re.compile(r"(head\.|logits\b)")


def part_of(name: str, spec: Spec) -> str:
    """Return the part of the model that a program or node belongs to, by the value it makes."""
    if name == OUTSIDE:
        return OUTSIDE
    index = layer_of(name)
    if index is None:
        return "head" if _HEAD.match(name) else "before the layers"
    layer = spec.layers()[index]
    notes = [layer.kind]
    if layer.has_moe:
        notes.append("MoE")
    if layer.donor is not None:
        notes.append("shared KV")
    return f"{' '.join(notes)} layers"


def by_part(times: Mapping[str, float], spec: Spec) -> dict[str, float]:
    """Return the measured seconds of each part."""
    whole = _is_whole(times)
    out: defaultdict[str, float] = defaultdict(float)
    for name, seconds in times.items():
        out[WHOLE if whole and name != OUTSIDE else part_of(name, spec)] += seconds
    return dict(out)


def _is_whole(times: Mapping[str, float]) -> bool:
    """Return whether one program computes the step: no value of a layer is seen."""
    return all(layer_of(name) is None for name in times)


def by_kind(
    times: Mapping[str, float], costs: Sequence[NodeCost], roof: Roof
) -> tuple[dict[str, float], bool]:
    """Return (seconds of each kind of node, whether they are measured). Where only programs are
    shown, a layer's time is split by the least times of its nodes, activations included; so is the
    time of a node that is of several kinds, and that of a program of all layers."""
    measured = all(c.node in times for c in costs)
    place: Callable[[str], str] = (lambda name: name) if measured else _stage
    if not measured and _is_whole(times):
        place = _program
    least: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for c in costs:
        for kind, cost in c.kinds().items():
            bound = max(cost.nbytes / roof.bytes_per_s, cost.flops / roof.flops_per_s)
            least[place(c.node)][kind] += 1.0 if measured and not c.parts else bound
    out: defaultdict[str, float] = defaultdict(float)
    for name, seconds in times.items():
        kinds = least[place(name)]
        whole = sum(kinds.values())
        for kind, share in kinds.items():
            out[kind] += seconds * share / whole if whole else 0.0
        if not whole:
            out[OUTSIDE if name == OUTSIDE else "other"] += seconds
    return dict(out), measured


def _program(name: str) -> str:
    return OUTSIDE if name == OUTSIDE else WHOLE


def _stage(name: str) -> str:
    """Return the stage that a program holds: a layer, what comes before the layers, or the head."""
    layer = layer_of(name)
    if layer is not None:
        return f"L{layer}."
    return name if name == OUTSIDE else "head" if _HEAD.match(name) else "before"


def breakdown(
    engine: Engine, w: Workload, tokens: torch.Tensor, costs: Sequence[NodeCost], roof: Roof
) -> Breakdown:
    """Return milliseconds of a step by part (measured) and by kind (measured or estimated)."""
    times = step_times(engine, w, tokens)
    kinds, measured = by_kind(times, costs, roof)
    return Breakdown(
        _milliseconds(by_part(times, engine.spec)),
        _milliseconds(kinds),
        "measured" if measured else "estimated from the cost model",
        sum(times.values()) * 1e3,
    )


def _milliseconds(seconds: Mapping[str, float]) -> dict[str, float]:
    """Convert seconds to milliseconds, largest first."""
    ordered = sorted(seconds.items(), key=lambda x: -x[1])
    return {name: s * 1e3 for name, s in ordered}


# ---- calls ------------------------------------------------------------------------------------


def calls_per_step(engine: Engine) -> dict[str, int]:
    """Count the calls of a decode step: compiled programs and views, or the interpreter's nodes."""
    if engine.facts.backend != "torch":
        return {"nodes": len(engine.program.graphs["decode"].nodes)}
    steps = phase_steps(engine.program, engine.limits)["decode"]
    programs = sum(isinstance(s, Segment) for s in steps)
    return {"programs": programs, "glue": len(steps) - programs}


def kernels_per_step(step: Callable[[], Any]) -> dict[str, float]:
    """Count the kernels that a step runs on CUDA, and the milliseconds that they take."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = [
        e
        for e in profiler.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("Mem")
    ]
    return {"kernels": len(kernels), "device_ms": sum(e.device_time for e in kernels) / 1e3}
