"""Builds all plans of an engine; retries with simpler attention if TensorRT fails."""

from __future__ import annotations

import json
import mmap
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g4ir.backends.base import Task
from g4ir.backends.primitives.graph import text_graph
from g4ir.backends.primitives.network import stored_bytes
from g4ir.errors import G4Error, PlanError
from g4ir.ir.graph import Graph
from g4ir.model.draft import DRAFT
from g4ir.plan.footprint import reserve
from g4ir.ui.files import write_file
from g4ir.ui.units import size_text

from . import build
from .host import Api, Host, logger
from .interface import ENGINE, LOG, files, keep_log, networks
from .lowerings import AUTO
from .runtime import deserialize

#: attention kind -> fallback if the builder refuses the network
SIMPLER = {AUTO: "explicit", "explicit": "plain"}
#: in the builder's log, once for each profile
SCRATCH = re.compile(r"Max Scratch Memory: (\d+) bytes")


@dataclass
class Make:
    """State of a build; `settings` are updated on a fallback."""

    host: Host
    task: Task
    settings: dict[str, str]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.api, self.graphs = self.host.tensorrt(), networks(self.task.program)
        self.target, self.requested = self.host.target, self.settings["attention"]

    def run(self) -> dict[str, Any]:
        """Write the plans; return the manifest's record. On failure TensorRT's log is kept next to
        the engine's path, and named in the error."""
        self.log = logger(self.api.trt, self.task.folder / LOG)
        try:
            return self._write_plans()
        except G4Error as e:
            e.args = (f"{e}; {keep_log(self.task.folder)}",)
            raise
        finally:
            self.log.close()

    def _write_plans(self) -> dict[str, Any]:
        self.task.progress(f"TensorRT's builder: {build.estimate([*self.graphs.values()])}")
        for name, graph in self.graphs.items():
            self._or_simpler(name, graph)
        return {
            "target": self.target.name,
            "version": self.api.version,
            "gpu": "" if self.target.ahead_of_time else self.host.gpu(),
            "settings": self.settings,
            "notes": self.notes,
            "scratch_bytes": self._check_memory(),
        }

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.task.progress(text)

    def _or_simpler(self, name: str, graph: Graph) -> None:
        """Write a plan; if the builder refuses the network, or its attention fusion fails, retry
        with the fallback kind of attention."""
        while True:
            kind = self.settings["attention"]
            try:
                return self._write_plan(name, graph)
            except build.RefusedError as e:
                chosen = self.requested == AUTO or (kind != "fused" and build.WRAPPER in str(e))
                if kind not in SIMPLER or not chosen:
                    raise
                self.settings["attention"] = SIMPLER[kind]
                self._note(f"attention: {SIMPLER[kind]}, since TensorRT refused: {e}")

    def _memory(self) -> int | None:
        """Return the device's memory in bytes; None if it is another machine's and --memory was not
        given."""
        here = not self.target.ahead_of_time
        return self.task.memory or (self.host.memory(self.task.device) if here else None)

    def _write_plan(self, name: str, graph: Graph) -> None:
        task, (plan, tensors) = self.task, files(name)
        task.progress(f"writing the network {name}")
        w = build.write_network(self.api, graph, task.limits, task.params, self.settings, self.log)
        for note in w.notes:
            self._note(note)
        offset = (task.folder / LOG).stat().st_size
        config = build.configure(self.api, w, self._memory(), self.target)
        build.build_plan(self.api, w, config, task.folder / plan, task.progress)
        if name == ENGINE:
            self.scratch = self._scratch(task.folder / plan, offset)
        text = json.dumps(w.interface.as_json(), indent=1) + "\n"
        write_file(task.folder / tensors, [text.encode()])

    def _scratch(self, plan: Path, offset: int) -> int:
        """Return an engine's scratch bytes as it reports them, or from the builder's log after
        `offset` if only the target GPU can load the engine."""
        if not self.target.ahead_of_time:
            return int(read_plan(plan, self.api, self.log).device_memory_size_v2)
        with (self.task.folder / LOG).open(errors="replace") as log:
            log.seek(offset)
            return max(map(int, SCRATCH.findall(log.read())), default=0)

    def _check_memory(self) -> int:
        """Return the text model's scratch bytes. PlanError if they do not fit the device in
        addition to weights and KV caches."""
        memory = self._memory()
        if memory is None:
            return self.scratch
        steps = [self.graphs[name] for name in (ENGINE, DRAFT) if name in self.graphs]
        parts = {
            "weights": sum(map(build.weight_bytes, steps)),
            "caches": stored_bytes(text_graph(self.task.program), self.task.limits),
            "scratch": self.scratch,
            "reserve": reserve(memory),
        }
        if sum(parts.values()) > memory:
            shares = ", ".join(f"{k} {size_text(v)}" for k, v in parts.items())
            raise PlanError(
                f"the engine that TensorRT made needs {size_text(sum(parts.values()))} on "
                f"{self.task.device} ({shares}), which has {size_text(memory)}: build with a "
                f"smaller --prefill-chunk, --max-batch or --max-seq"
            )
        return self.scratch


def read_plan(path: Path, api: Api, log: Any) -> Any:
    """Deserialise a memory-mapped plan, which is as large as the weights."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        return deserialize(api, plan, log)
