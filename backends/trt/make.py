"""A build from its graphs to its plans: what is tried first, and what is tried again."""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g4ir.backends.primitives.network import stored_bytes
from g4ir.errors import LowerError, PlanError
from g4ir.ir.graph import Graph
from g4ir.model.draft import DRAFT
from g4ir.parallel.shard import ranks_of
from g4ir.plan.footprint import reserve
from g4ir.ui.files import write_file
from g4ir.ui.progress import Progress
from g4ir.ui.units import size_text
from g4ir.weights.pack import ParamSource, params_of_rank

from ..base import Task
from . import build
from .build import Written
from .dry_run import check_sizes, emulator
from .files import ENGINE, LOG, files, keep_log, networks
from .forms import resolved
from .host import Host
from .log import logger
from .probe import Api
from .runtime import deserialize


@dataclass
class Make:
    """One build. `settings` become those that it ends with; `cache_bytes`: of a session."""

    host: Host
    task: Task
    graphs: Mapping[str, Graph]
    settings: dict[str, str]
    machine: str
    cache_bytes: int
    notes: list[str] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Write the plans; return what the manifest keeps. Where it fails, TensorRT's log is kept
        beside the engine, and the error ends with its name."""
        self.api = self.host.tensorrt()
        self.log = logger(self.api.trt, self.task.folder / LOG)
        try:
            return self._made()
        except Exception as e:
            self._keep_log(e)
            raise
        finally:
            self.log.close()

    def _keep_log(self, error: Exception) -> None:
        if error.args:
            error.args = (f"{error.args[0]}; {keep_log(self.task.folder)}", *error.args[1:])

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.task.progress(text)

    def _made(self) -> dict[str, Any]:
        scratch = self._check_sizes()
        self._choose()
        self.task.progress(f"TensorRT's builder: {build.estimate([*self.graphs.values()])}")
        layers = {name: self._plan(name, g) for name, g in self.graphs.items()}
        found = self._check_memory()
        first = {name: files(name, 0, ranks_of(g))[0] for name, g in self.graphs.items()}
        return {
            "plan": first.pop(ENGINE),
            "tensors": files(ENGINE)[1],
            "tensorrt": self.api.version,
            "gpu": self.host.gpu(),
            "settings": self.settings,
            "layers": layers[ENGINE],
            "notes": self.notes,
            "scratch_bytes": {"estimated": scratch, "engine": found},
            "others": first,
        }

    def _check_sizes(self) -> int:
        """Return the estimate of scratch memory."""
        self.task.progress("checking sizes")
        emulated = emulator()
        return max(
            check_sizes(emulated, g, self.task.limits, self.settings)[1]
            for g in self.graphs.values()
        )

    def _choose(self) -> None:
        graph, self.settings = self.graphs[ENGINE], resolved(self.settings)
        form = self.settings["attention"]
        self._use_form(attention_form(graph, form, self._build_alone, self.task.progress))

    def _build_alone(self, g: Graph, form: str) -> None:
        """Build a plan that is thrown away."""
        settings = {**self.settings, "attention": form, "weights": "baked"}
        with tempfile.TemporaryDirectory() as folder:
            w = self._network(g, None, settings)
            self._build(w, settings, Path(folder) / "plan", lambda message: None)

    def _network(self, g: Graph, params: ParamSource | None, settings: dict[str, str]) -> Written:
        return build.write_network(self.api, g, self.task.limits, params, settings, self.log)

    def _build(self, w: Written, settings: dict[str, str], plan: Path, progress: Progress) -> None:
        config = build.configure(self.api, w, settings, self.host.memory(self.task.device))
        timing = build.timing_file(self.host.timings(), self.machine)
        build.build_plan(self.api, w, config, timing, plan, progress)

    def _use_form(self, form: str) -> None:
        if form != self.settings["attention"]:
            self.settings["attention"] = form
            self._note(
                f"attention: {form}, since TensorRT takes the layers of the other form for an "
                f"attention of its own and fails"
            )

    def _plan(self, name: str, graph: Graph) -> int:
        """Write one network's files; return the number of its layers. Where its attention is
        refused, it is tried once more in plain layers."""
        try:
            return self._plan_once(name, graph)
        except build.RefusedError as e:
            if self.settings["attention"] == "plain" or build.WRAPPER not in str(e):
                raise
            self._use_form("plain")
            return self._plan_once(name, graph)

    def _plan_once(self, name: str, graph: Graph) -> int:
        """Write the plans of all ranks, one after the other: kernels are timed for the first."""
        layers, *_ = [self._plan_of(name, graph, rank) for rank in range(ranks_of(graph))]
        return layers

    def _plan_of(self, name: str, graph: Graph, rank: int) -> int:
        plan, tensors, constants = files(name, rank, ranks_of(graph))
        self.task.progress(f"writing the network {plan.removesuffix('.plan')}")
        params = self.task.params
        if rank:
            params = params_of_rank(params, self.task.folder, rank)
        w = self._network(graph, params, self.settings)
        for note in () if rank else w.emitter.notes:
            self._note(note)
        self._build(w, self.settings, self.task.folder / plan, self.task.progress)
        text = json.dumps(w.interface.as_json(), indent=1) + "\n"
        write_file(self.task.folder / tensors, [text.encode()])
        if self.settings["weights"] == "refit":
            build.write_constants(w, self.task.folder / constants)
        if rank:
            params.close()
        return int(w.network.num_layers)

    def _check_memory(self) -> int:
        """Count the bytes of scratch memory of the text model's engine. PlanError where they do not
        fit the device beside weights and caches."""
        self.task.progress("checking the engine's memory")
        plan = files(ENGINE, 0, ranks_of(self.graphs[ENGINE]))[0]
        engine = read_plan(self.task.folder / plan, self.api, self.log)
        scratch, memory = int(engine.device_memory_size_v2), self.host.memory(self.task.device)
        streamed = self.settings["weights"] == "streamed"
        steps = [self.graphs[name] for name in (ENGINE, DRAFT) if name in self.graphs]
        parts = {
            "weights": 0 if streamed else sum(map(build.weight_bytes, steps)),
            "caches": self.cache_bytes,
            "scratch": scratch,
            "reserve": reserve(memory),
        }
        if sum(parts.values()) > memory:
            shares = ", ".join(f"{k} {size_text(v)}" for k, v in parts.items())
            raise PlanError(
                f"the engine that TensorRT made needs {size_text(sum(parts.values()))} on "
                f"{self.task.device} ({shares}), which has {size_text(memory)}: build with a "
                f"smaller --prefill-chunk, --max-batch or --max-seq, or with --set weights=streamed"
            )
        return scratch


# --- small builds before the large one ---------------------------------------------------------


def attention_form(
    graph: Graph, form: str, build_alone: Callable[[Graph, str], None], progress: Progress
) -> str:
    """Return the form of attention that TensorRT builds: this one, or `plain` where a refusal names
    the wrapper that takes layers for attention. LowerError of another refusal."""
    for g in build.attention_graphs(graph):
        place = g.outputs[0].name
        progress(f"trial build of the attention of {place}")
        try:
            build_alone(g, form)
        except build.RefusedError as e:
            if form == "plain" or build.WRAPPER not in str(e):
                raise LowerError(f"a trial build of the attention of {place} alone: {e}") from e
            form = "plain"
            build_alone(g, form)
    return form


# --- plans ------------------------------------------------------------------------------------


def read_plan(path: Path, api: Api, log: Any) -> Any:
    """Return the engine of a plan, mapped, not read: a plan is as large as the weights."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        return deserialize(api, plan, log)


def make(host: Host, task: Task, settings: Mapping[str, str]) -> dict[str, Any]:
    """Build in this process, which a crash of the builder would end; return what the manifest
    keeps."""
    host.tensorrt()
    cache_bytes = stored_bytes(task.program.graphs["prefill"], task.limits)
    graphs = networks(task.program)
    return Make(host, task, graphs, dict(settings), host.machine(task.device), cache_bytes).run()
