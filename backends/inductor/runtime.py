"""Runs the steps of graphs: params are bound to programs once, then programs and eager nodes are
called in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from g4ir.backends.base import GraphRun, Task, Tensors, Watch
from g4ir.backends.kv_cache import Caches
from g4ir.errors import EngineError
from g4ir.ir.interpret import run_node
from g4ir.ui.paths import unpacking
from g4ir.weights.pack import ParamSource

from .programs import EMBED, Steps
from .segment import Step, state_steps

Tensor = torch.Tensor

#: placeholder of an operand that is bound when its step runs
NOTHING = torch.empty(0)
Call = Callable[[list[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class BoundStep:
    """A step with bound params, shared by all sessions. `slots`: (operand index, value name) of the
    operands that a run binds; `last`: values freed after the call (`_freeing`)."""

    call: Call
    operands: tuple[Tensor, ...]
    slots: tuple[tuple[int, str], ...]
    outputs: tuple[str, ...]
    last: tuple[str, ...] = ()

    def run(self, env: dict[str, Tensor], watch: Watch | None = None) -> None:
        operands = [*self.operands]  # per run: threads may run one step at the same time
        for i, name in self.slots:
            operands[i] = env[name]
        for name, t in zip(self.outputs, self.call(operands)):
            env[name] = t
            if watch:
                watch(name, t)
        for name in self.last:
            del env[name]


class ProgramRuntime:
    """A loaded engine whose graphs run as steps: compiled programs and eager nodes. The runtimes of
    devices subclass it."""

    #: torch's index of the device for programs; -1: default
    device_index = -1

    def __init__(self, task: Task, steps: Steps) -> None:
        self.program, self.limits, self.device = task.program, task.limits, task.device
        self.source, self.group = task.params, task.group
        folder = task.folder / "programs"
        names = dict.fromkeys(f for pairs in steps.values() for _, f in pairs if f)
        self.unpacked: TemporaryDirectory[str] | None = None
        self.calls = self._load_programs(folder, names) if names else {}
        self.weights = self._load_params(self._param_names(steps), task)
        self.plans: dict[tuple[str, bool], list[BoundStep]] = {}
        operands = self._operands(self.weights)
        for phase, pairs in steps.items():
            graph = self.program.graphs[phase]
            alias = {v.name: n for n, v in graph.next.items()}
            bound = {id(s): _bind(s, self._call(s, f), operands, alias) for s, f in pairs}
            many = [s for s, _ in pairs]
            keep = {v.name for v in (*graph.outputs, *graph.inputs)}
            for logits, chosen in ((True, many), (False, state_steps(many))):
                plan = [bound[id(s)] for s in chosen]
                self.plans[phase, logits] = _freeing(plan, keep)

    def _load_programs(self, folder: Path, names: Iterable[str]) -> dict[str, Call]:
        with unpacking() as self.unpacked:
            device, index = self.device, self.device_index
            return {name: _load_program(folder / name, device, index) for name in names}

    def _call(self, step: Step, file: str | None) -> Call:
        """Return the function that runs a step: its compiled program; or its node in torch, with
        several ranks by the rank group."""
        if step.node is None:
            return self.calls[str(file)]
        return partial(self.group.run_node if self.group else run_node, step.node)

    def _param_names(self, steps: Steps) -> Iterable[str]:
        """Return the params that steps read, each once, without those that only the embed graph
        reads."""
        many = (s for phase, pairs in steps.items() if phase != EMBED for s, _ in pairs)
        return dict.fromkeys(name for s in many for name in s.params)

    def _operands(self, params: Mapping[str, Any]) -> Tensors:
        """Return params in the dtypes that programs take."""
        return dict(params)

    def _load_params(self, names: Iterable[str], task: Task) -> dict[str, Tensor]:
        """Load the params of these names, one after another, to the device; the slots of LoRA
        adapters are taken from `task.added`."""
        names, loaded = list(names), dict[str, Tensor]()
        source, move = self._open_params(task)
        for i, name in enumerate(names):
            if name in task.added:
                loaded[name] = task.added[name]
                continue
            loaded[name] = move(source.tensor(name))
            if source is task.params:
                source.release(name)
            task.progress(f"weights {i + 1}/{len(names)}")
        return loaded

    def _open_params(self, task: Task) -> tuple[ParamSource, Callable[[Tensor], Tensor]]:
        """Return the source of params and a function that moves one to the device. If the source is
        `task.params`, `_load_params` releases the pages of each param that was moved."""
        return task.params, lambda t: t.to(self.device, copy=True).contiguous()

    def resident(self, param: str) -> Tensor | None:
        return self.weights.get(param)

    def new_state(self, batch: int) -> Caches:
        caches = Caches(self.program, batch, self.limits.max_seq, self.device)
        check_aligned(caches.tensors)
        return caches

    def run(self, step: GraphRun, state: Caches) -> Tensors | None:
        plan, views = self.plans[step.phase, step.logits], state.views(step.context)
        env = self._run_plan(plan, step.feeds, views, step.watch)
        return self._results(step.phase, env) if step.logits else None

    def _results(self, phase: str, env: Tensors) -> Tensors:
        return {v.name: env[v.name] for v in self.program.graphs[phase].outputs}

    def embed(self, tokens: Tensor, tables: Mapping[str, Any]) -> Tensors | None:
        return None

    def encode(self, tower: str, feeds: Tensors) -> Tensor:
        return self._run_plan(self.plans[tower, True], feeds, {})["soft"]

    def _run_plan(
        self, plan: Sequence[BoundStep], feeds: Tensors, views: Tensors, watch: Watch | None = None
    ) -> dict[str, Tensor]:
        env = {**feeds, **views}
        for step in plan:
            step.run(env, watch)
        return env

    def token_loop(self, *loop: Any) -> Any:
        return None

    def close(self) -> None:
        self.plans.clear()
        self.weights.clear()
        self.source.close()
        if self.unpacked:
            self.unpacked.cleanup()


def check_aligned(caches: Tensors) -> None:
    """Raise EngineError for a cache not aligned to 16 bytes: a program would write to a copy."""
    for name, t in caches.items():
        if t.data_ptr() % 16:
            raise EngineError(
                f"cache {name} lies at {t.data_ptr():#x}, which is no multiple of 16: a program "
                f"would write to a copy; use an allocator that aligns its memory"
            )


def _load_program(path: Path, device: str, index: int = -1) -> Call:
    """Load a program for the device of this index. EngineError if the system does not load it.

    The loader unpacks the package in TMPDIR; on a GPU it reads kernels from there at first use.
    """
    # torch warns about every package that another process wrote.
    logging.getLogger("torch._inductor.package.package").setLevel(logging.ERROR)
    try:
        # Not `torch._inductor.aoti_load_package`: it probes the instruction set with a compiler.
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)
    except RuntimeError as e:
        raise EngineError(f"{path} cannot be loaded: {reason(e)}") from e
    return loader.run


def reason(error: Exception) -> str:
    """Return the first line of an error's text, with advice for noexec and full folders."""
    text = str(error).splitlines()[0][:300]
    if "failed to map segment" in text:
        return f"{text}: that folder is mounted noexec; set TMPDIR to another one"
    if "extract" in text or "temporary" in text:
        return f"{text}: make room in the temporary folder, or set TMPDIR to another one"
    return text


def _freeing(plan: Sequence[BoundStep], keep: set[str]) -> list[BoundStep]:
    """Return the plan with `last` filled in: for each step the values that it is the last to
    produce or read, without caches and `keep`."""
    values = {name for b in plan for name in b.outputs} - keep
    out: list[BoundStep] = []
    for b in reversed(plan):
        touched = {*(name for _, name in b.slots), *b.outputs} & values
        out.append(replace(b, last=tuple(sorted(touched))))
        values -= touched
    return out[::-1]


def _bind(
    s: Step, call: Call, weights: Mapping[str, Tensor], alias: Mapping[str, str]
) -> BoundStep:
    """Bind a step's params; `alias` maps the value of a cache's new contents to the cache, which is
    written in place."""
    names = s.inputs + s.params + s.state
    operands = tuple(weights.get(n, NOTHING) for n in names)
    slots = tuple((i, alias.get(n, n)) for i, n in enumerate(names) if n not in weights)
    return BoundStep(call, operands, slots, s.outputs)
