"""Running compiled segments: bind operands once, then call one program after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from g4ir.ir import Program
from g4ir.ops.base import as_tuple
from g4ir.packing import ParamSource

from ..base import Limits, Progress, Tensors, Watch
from ..caches import Caches
from . import pyops
from .backend import KERNELS, phase_steps
from .cuda_graph import capture
from .segment import Glue, Segment, Step, state_steps

#: stands for an operand that is bound when its step runs
NOTHING = torch.empty(0)
Call = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Bound:
    """A step with its params in place: `slots` says which operand comes from which value, `last`
    which values no later step reads."""

    call: Call
    operands: list[torch.Tensor]
    slots: tuple[tuple[int, str], ...]
    outputs: tuple[str, ...]
    last: tuple[str, ...] = ()

    def run(self, env: dict[str, torch.Tensor], watch: Watch | None = None) -> None:
        operands = self.operands
        for i, name in self.slots:
            operands[i] = env[name]
        for name, t in zip(self.outputs, self.call(operands)):
            env[name] = t
            if watch:
                watch(name, t)
        # What is kept here would stay in memory until the next token.
        for i, _ in self.slots:
            operands[i] = NOTHING
        for name in self.last:
            del env[name]


class TorchRuntime:
    """A loaded engine of the torch backend."""

    def __init__(
        self, program: Program, limits: Limits, device: str, folder: Path,
        files: Mapping[str, Sequence[str | None]], params: ParamSource, progress: Progress,
    ) -> None:  # fmt: skip
        self.program, self.limits, self.device, self.source = program, limits, device, params
        steps = phase_steps(program, limits)
        names = dict.fromkeys(f for many in files.values() for f in many if f)
        calls = {name: _load_program(folder / name, device) for name in names}
        if device == "cpu":
            pyops.load_kernels(folder / KERNELS)
        self.weights = self._load_params(steps, params, progress)
        self.plans: dict[tuple[str, bool], list[Bound]] = {}
        for phase, many in steps.items():
            alias = {v.name: n for n, v in program.graphs[phase].next.items()}
            bound = {
                id(s): _bind(s, calls.get(f or ""), self.weights, alias)
                for s, f in zip(many, files[phase], strict=True)
            }
            feeds = {v.name for v in program.graphs[phase].inputs}
            keep = {v.name for v in program.graphs[phase].outputs} | feeds
            for logits, chosen in ((True, many), (False, state_steps(many))):
                plan = [bound[id(s)] for s in chosen]
                self.plans[phase, logits] = _freeing(plan, keep)

    def _load_params(
        self, steps: Mapping[str, Sequence[Step]], params: ParamSource, progress: Progress
    ) -> dict[str, torch.Tensor]:
        """Each param once, tensor by tensor, so that no more than one is held twice."""
        names = dict.fromkeys(
            name for many in steps.values() for s in many if isinstance(s, Segment)
            for name in s.params
        )  # fmt: skip
        loaded: dict[str, torch.Tensor] = {}
        for i, name in enumerate(names):
            loaded[name] = _own(params.tensor(name), self.device)
            params.release(name)
            progress(f"weights {i + 1}/{len(names)}")
        return loaded

    def resident(self, param: str) -> torch.Tensor | None:
        return self.weights.get(param)

    def new_state(self, batch: int) -> Caches:
        return Caches(self.program, batch, self.limits.max_seq, self.device)

    def run(
        self, phase: str, feeds: dict[str, torch.Tensor], state: Caches, context: int, logits: bool,
        watch: Watch | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        views = state.views(context)
        if self.device == "cuda" and phase == "decode" and logits and watch is None:
            return self._replay(feeds, state, views)
        env = self._run_plan(self.plans[phase, logits], feeds, views, watch)
        return env["logits"] if logits else None

    def _run_plan(
        self, plan: Sequence[Bound], feeds: Tensors, views: Tensors, watch: Watch | None = None
    ) -> dict[str, torch.Tensor]:
        env = {**feeds, **views}
        for step in plan:
            step.run(env, watch)
        return env

    def _replay(
        self, feeds: dict[str, torch.Tensor], state: Caches, views: Tensors
    ) -> torch.Tensor:
        """One launch; the graph belongs to the session's caches and to this many slots of them."""
        key = id(views)
        if key not in state.captured:
            plan = self.plans["decode", True]
            state.captured[key] = capture(
                lambda own: self._run_plan(plan, own, views)["logits"], feeds
            )
        return state.captured[key].replay(feeds)

    def close(self) -> None:
        self.plans.clear()
        self.weights.clear()
        self.source.close()


def _own(t: torch.Tensor, device: str) -> torch.Tensor:
    """An aligned copy on the device, not a view of a mapped file."""
    return t.to(device, copy=True).contiguous()


def _load_program(path: Path, device: str) -> Call:
    # It warns about every package that it did not write in this very process.
    logging.getLogger("torch._inductor.package.package").setLevel(logging.ERROR)
    index = torch.cuda.current_device() if device == "cuda" else -1
    # Not `torch._inductor.aoti_load_package`: it probes the instruction set with a compiler first.
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)
    call: Call = loader.run
    return call


def _freeing(plan: Sequence[Bound], keep: set[str]) -> list[Bound]:
    """Each step with the values that die there; caches and `keep` live on."""
    made = {name for b in plan for name in b.outputs} - keep
    out: list[Bound] = []
    for b in reversed(plan):
        touched = {*(name for _, name in b.slots), *b.outputs} & made
        out.append(replace(b, last=tuple(sorted(touched))))
        made -= touched
    return out[::-1]


def _bind(
    s: Step, call: Call | None, weights: Mapping[str, torch.Tensor], alias: Mapping[str, str]
) -> Bound:
    """`alias` maps the value of a written cache to the cache, which is written in place."""
    if isinstance(s, Glue):
        return _bind_glue(s, alias)
    assert call
    names = [*s.inputs, *s.params, *s.state]
    operands = [weights.get(n, NOTHING) for n in names]
    slots = tuple((i, alias.get(n, n)) for i, n in enumerate(names) if n not in weights)
    return Bound(call, operands, slots, s.outputs)


def _bind_glue(s: Glue, alias: Mapping[str, str]) -> Bound:
    reference, attrs = s.node.definition.reference, s.node.attrs
    assert reference

    def call(operands: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return as_tuple(reference(*operands, **attrs))

    slots = tuple((i, alias.get(n, n)) for i, n in enumerate(s.inputs))
    return Bound(call, [NOTHING] * len(slots), slots, s.outputs)
