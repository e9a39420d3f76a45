"""Builds all plans of an engine; retries with a simpler attention kind if the builder refuses a
network."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from g4ir.backends.base import Task
from g4ir.backends.primitives.graph import text_graph
from g4ir.backends.primitives.network import stored_bytes
from g4ir.errors import G4Error, PlanError
from g4ir.ir.graph import Graph
from g4ir.model.draft import DRAFT
from g4ir.parallel.shard import ranks_of
from g4ir.plan.footprint import reserve
from g4ir.ui.files import write_file
from g4ir.ui.units import size_text
from g4ir.weights.pack import params_of_rank

from . import build
from .build import Written
from .compiled import CompiledProfile, compiled, summary
from .host import Api, Host, logger
from .interface import ENGINE, LOG, files, keep_log, networks
from .lowerings import AUTO
from .runtime import deserialize

#: attention kind -> fallback if the builder refuses the network
SIMPLER = {AUTO: "explicit", "explicit": "plain"}


@dataclass
class Make:
    """State of a build; `settings` are updated on a fallback."""

    host: Host
    task: Task
    settings: dict[str, str]
    notes: list[str] = field(default_factory=list)
    #: profile -> cost, of the text model's plan
    profiles: dict[str, CompiledProfile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.api, self.graphs = self.host.tensorrt(), networks(self.task.program)
        self.target, self.requested = self.host.target, self.settings["attention"]

    def run(self) -> dict[str, Any]:
        """Write the plans; return the manifest's record. On a G4Error TensorRT's log is kept next
        to the engine's path, and named in the error."""
        self.log = logger(self.api.trt, self.task.folder / LOG)
        try:
            return self._write_plans()
        except G4Error as e:
            e.args = (f"{e}; {keep_log(self.task.folder)}",)
            raise
        finally:
            self.log.close()

    def _write_plans(self) -> dict[str, Any]:
        self.task.progress(f"TensorRT's builder needs {build.estimate([*self.graphs.values()])}")
        for name in self.graphs:
            self._or_simpler(partial(self._plans, name))
        scratch = self._check_memory()
        return {
            "target": self.target.name,
            "version": self.api.version,
            "gpu": "" if self.target.ahead_of_time else self.host.gpu(),
            "settings": self.settings,
            "notes": self.notes,
            "scratch_bytes": scratch,
        }

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.task.progress(text)

    def _or_simpler(self, work: Callable[[], None]) -> None:
        """Run `work`. If the builder refuses the network, retry with the next simpler kind of
        attention: if `auto` was requested, or if TensorRT's attention fusion failed and the kind is
        not `fused`."""
        while True:
            kind = self.settings["attention"]
            try:
                return work()
            except build.RefusedError as e:
                chosen = self.requested == AUTO or (kind != "fused" and build.WRAPPER in str(e))
                if kind not in SIMPLER or not chosen:
                    raise
                self.settings["attention"] = SIMPLER[kind]
                self._note(f"attention: {SIMPLER[kind]}, since TensorRT refused: {e}")

    def _look(self, w: Written, offset: int) -> None:
        """Record the text model's compiled profiles from the builder's log after `offset`; builders
        that time kernels may log another format."""
        with (self.task.folder / LOG).open(errors="replace") as log:
            log.seek(offset)
            try:
                caches = [v.name for v in w.graph.state]
                self.profiles = compiled(log.read(), [*w.interface.profiles], caches)
            except ValueError as e:
                self.task.progress(str(e))
        for note in summary(self.profiles):
            self._note(note)

    def _memory(self) -> int | None:
        """Return the device's memory in bytes; None for a build ahead of time without --memory."""
        here = not self.target.ahead_of_time
        return self.task.memory or (self.host.memory(self.task.device) if here else None)

    def _plans(self, name: str) -> None:
        """Write the plans of all ranks in sequence. Kernels are timed for the first only, since the
        others read its timing cache."""
        graph = self.graphs[name]
        for rank in range(ranks_of(graph)):
            self._plan_of(name, graph, rank)

    def _plan_of(self, name: str, graph: Graph, rank: int) -> None:
        plan, tensors = files(name, rank, ranks_of(graph))
        self.task.progress(f"writing the network {plan.removesuffix('.plan')}")
        params = self.task.params
        if rank:
            params = params_of_rank(params, self.task.folder, rank)
        w = build.write_network(self.api, graph, self.task.limits, params, self.settings, self.log)
        for note in () if rank else w.notes:
            self._note(note)
        offset = (self.task.folder / LOG).stat().st_size
        config = build.configure(self.api, w, self._memory(), self.target)
        timing = build.timing_file(self.host.timings(), self.host.machine(self.task.device))
        timed = None if self.target.ahead_of_time else timing
        path, progress = self.task.folder / plan, self.task.progress
        build.build_plan(self.api, w, config, timed, path, progress)
        if name == ENGINE and not rank:
            self._look(w, offset)
        text = json.dumps(w.interface.as_json(), indent=1) + "\n"
        write_file(self.task.folder / tensors, [text.encode()])
        if rank:
            params.close()

    def _check_memory(self) -> int:
        """Return the text model's scratch bytes. PlanError if they do not fit the device in
        addition to weights and KV caches."""
        self.task.progress("checking the engine's memory")
        scratch, memory = self._scratch(), self._memory()
        if memory is None:
            return scratch
        steps = [self.graphs[name] for name in (ENGINE, DRAFT) if name in self.graphs]
        parts = {
            "weights": sum(map(build.weight_bytes, steps)),
            "caches": stored_bytes(text_graph(self.task.program), self.task.limits),
            "scratch": scratch,
            "reserve": reserve(memory),
        }
        if sum(parts.values()) > memory:
            shares = ", ".join(f"{k} {size_text(v)}" for k, v in parts.items())
            raise PlanError(
                f"the engine that TensorRT built needs {size_text(sum(parts.values()))} on "
                f"{self.task.device} ({shares}), which has {size_text(memory)}: build with a "
                f"smaller --prefill-chunk, --max-batch or --max-seq"
            )
        return scratch

    def _scratch(self) -> int:
        """Return the text model's scratch bytes as the engine reports them, or from the builder's
        log if only the target GPU can load the engine."""
        plan = files(ENGINE, 0, ranks_of(self.graphs[ENGINE]))[0]
        if self.target.ahead_of_time:
            return max((m.scratch_bytes for m in self.profiles.values()), default=0)
        engine = read_plan(self.task.folder / plan, self.api, self.log)
        return int(engine.device_memory_size_v2)


def read_plan(path: Path, api: Api, log: Any) -> Any:
    """Deserialise a memory-mapped plan, which is as large as the weights."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        return deserialize(api, plan, log)
