"""A build from its graphs to its plans: what is tried first, and what is tried again."""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from g4ir.backends.primitives.network import stored_bytes
from g4ir.errors import LowerError, PlanError
from g4ir.ir.graph import Graph
from g4ir.model.draft import DRAFT
from g4ir.parallel.shard import ranks_of
from g4ir.plan.footprint import reserve
from g4ir.ui.files import write_file
from g4ir.ui.progress import Progress, no_progress
from g4ir.ui.units import size_text
from g4ir.weights.pack import ParamSource, params_of_rank

from ..base import Task
from . import build
from .build import Written
from .dry_run import check_sizes, emulator
from .host import Api, Host
from .interface import ENGINE, LOG, files, keep_log, networks
from .log import logger
from .runtime import deserialize

T = TypeVar("T")


@dataclass
class Make:
    """One build. `settings` become those that it ends with."""

    host: Host
    task: Task
    settings: dict[str, str]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.api, self.graphs = self.host.tensorrt(), networks(self.task.program)

    def run(self) -> dict[str, Any]:
        """Write the plans; return what the manifest keeps. Where it fails, TensorRT's log is kept
        beside the engine, and the error ends with its name."""
        self.log = logger(self.api.trt, self.task.folder / LOG)
        try:
            return self._made()
        except Exception as e:
            if e.args:
                e.args = (f"{e.args[0]}; {keep_log(self.task.folder)}", *e.args[1:])
            raise
        finally:
            self.log.close()

    def _made(self) -> dict[str, Any]:
        scratch = self._check_sizes()
        self._try_attention()
        self.task.progress(f"TensorRT's builder: {build.estimate([*self.graphs.values()])}")
        layers = {name: self._or_plain(partial(self._plans, name)) for name in self.graphs}
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

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.task.progress(text)

    def _check_sizes(self) -> int:
        """Return the estimate of scratch memory."""
        self.task.progress("checking sizes")
        api, limits = emulator(), self.task.limits
        return max(check_sizes(api, g, limits, self.settings)[1] for g in self.graphs.values())

    def _try_attention(self) -> None:
        """Build each kind of attention of the text model alone, into plans that are thrown away."""
        for g in build.attention_graphs(self.graphs[ENGINE]):
            place = g.outputs[0].name
            self.task.progress(f"trial build of the attention of {place}")
            try:
                self._or_plain(partial(self._build_alone, g))
            except build.RefusedError as e:
                raise LowerError(f"a trial build of the attention of {place} alone: {e}") from e

    def _build_alone(self, g: Graph) -> None:
        settings = {**self.settings, "weights": "baked"}
        with tempfile.TemporaryDirectory() as folder:
            self._build(self._network(g, None), settings, Path(folder) / "plan", no_progress)

    def _or_plain(self, work: Callable[[], T]) -> T:
        """Build something; where a refusal names the wrapper that takes layers for attention, once
        more with attention in plain layers."""
        try:
            return work()
        except build.RefusedError as e:
            if self.settings["attention"] == "plain" or build.WRAPPER not in str(e):
                raise
        self.settings["attention"] = "plain"
        self._note(
            "attention: plain, since TensorRT takes the layers of the other form for an attention "
            "of its own and fails"
        )
        return work()

    def _network(self, g: Graph, params: ParamSource | None) -> Written:
        return build.write_network(self.api, g, self.task.limits, params, self.settings, self.log)

    def _build(self, w: Written, settings: dict[str, str], plan: Path, progress: Progress) -> None:
        config = build.configure(self.api, w, settings, self.host.memory(self.task.device))
        timing = build.timing_file(self.host.timings(), self.host.machine(self.task.device))
        build.build_plan(self.api, w, config, timing, plan, progress)

    def _plans(self, name: str) -> int:
        """Write the plans of all ranks, one after the other: kernels are timed for the first.
        Return the number of its layers."""
        graph = self.graphs[name]
        layers, *_ = [self._plan_of(name, graph, rank) for rank in range(ranks_of(graph))]
        return layers

    def _plan_of(self, name: str, graph: Graph, rank: int) -> int:
        plan, tensors, constants = files(name, rank, ranks_of(graph))
        self.task.progress(f"writing the network {plan.removesuffix('.plan')}")
        params = self.task.params
        if rank:
            params = params_of_rank(params, self.task.folder, rank)
        w = self._network(graph, params)
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
            "caches": stored_bytes(self.task.program.graphs["prefill"], self.task.limits),
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


def read_plan(path: Path, api: Api, log: Any) -> Any:
    """Return the engine of a plan, mapped, not read: a plan is as large as the weights."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        return deserialize(api, plan, log)


def make(host: Host, task: Task, settings: Mapping[str, str]) -> dict[str, Any]:
    """Build in this process, which a crash of the builder would end; return what the manifest
    keeps."""
    return Make(host, task, dict(settings)).run()
