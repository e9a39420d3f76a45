"""`--backend trt`: TensorRT engines from the graphs that all backends share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from g4ir.backends.base import Backend, Setting, Task
from g4ir.backends.onnx_graph.backend import require
from g4ir.backends.primitives.graph import text_graph
from g4ir.backends.primitives.network import stored_bytes
from g4ir.backends.primitives.weights import by_columns, dequantize_at_build
from g4ir.errors import EngineError
from g4ir.ir.graph import Graph, Node, Program
from g4ir.parallel.shard import ranks_of
from g4ir.plan.engine_limits import Limits
from g4ir.spec.reader import Line, OneOf, Range
from g4ir.ui.progress import Progress

from .build import estimate, weight_bytes
from .dry_run import dry_run
from .host import Api, Host, installed, logger, recorded_by_all, require_target
from .interface import ENGINE, files, interface, networks
from .kernel_cache import SUFFIX, KernelCache
from .lowerings import SETTINGS, score_bytes
from .make import Make, read_plan
from .runtime import Opened, TrtRuntime
from .target import HOPPER, RTX, TARGETS, Target, find_target

if TYPE_CHECKING:
    from g4ir.backends.base import Prepared

Bytes = Annotated[int, Range(0, 1 << 60)]


@dataclass(frozen=True)
class Plans:
    """The manifest's record of a TensorRT build. `settings`: those of the attempt that succeeded,
    of which `attention` may be simpler than requested (make.py)."""

    #: `--target`; empty: the GPU of the build
    target: Annotated[str, OneOf(("", *TARGETS))]
    #: version of the TensorRT library
    version: str
    #: name of the GPU on which kernels were timed; empty if none was needed
    gpu: str
    settings: dict[str, str]
    notes: tuple[Line, ...]
    #: scratch memory of the text model's engine
    scratch_bytes: Bytes


@dataclass(frozen=True, eq=False)
class TrtBackend(Backend):
    """Builds and runs TensorRT engines: a plan for the text model (one per rank), with optimisation
    profiles for decode, prefill and verification; a plan with static shapes for each size of a
    tower; a plan for a draft model's step, over the text model's KV caches."""

    name: str = "trt"
    kv_dtypes: tuple[str, ...] = ()
    kv_reason: str = "TensorRT's KV cache layer supports only the engine's dtype"
    rounds_activations: bool = False
    verifies_in_chunks: bool = True
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...] = ("bf16", "f32")
    packs_weights: bool = True
    shares: bool = True
    of_torch: bool = False
    record: Any = Plans
    settings: Mapping[str, Setting] = field(default_factory=lambda: SETTINGS)
    host: Host = field(default_factory=Host)

    def aimed(self, target: str | None) -> TrtBackend:
        here = TARGETS.get(self.host.architecture().replace("_", ""))
        match = find_target(target) if target else here
        return self._for(match) if match else self

    def built(self, manifest: Mapping[str, Any]) -> TrtBackend:
        return self._for(find_target(manifest["target"])) if manifest["target"] else self

    def _for(self, target: Target) -> TrtBackend:
        return replace(self, host=self.host.aimed(target))

    @property
    def location(self) -> str:
        target = self.host.target
        return f"on a GPU of {target.gpus}" if target.ahead_of_time else "where it was built"

    def has_device(self, device: str) -> bool:
        return self.host.has_gpu()

    def packages(self, device: str) -> tuple[str, ...]:
        requirements = self.host.target.library.requirements
        return tuple(re.split("[<>=]", r)[0] for r in requirements)

    def needs(self, device: str) -> tuple[Callable[[], object], ...]:
        undecided = self.host.target is HOPPER and not self.host.capability()
        if undecided and (version := installed(RTX)):
            return (partial(require_target, version),)
        return (
            self.host.tensorrt,
            partial(require, "onnx", backend=self.name),
            self.host.check_gpu,
        )

    def machine(self, device: str) -> str:
        return self.host.machine(device)

    def stored(self, program: Program, device: str) -> Program:
        """Return graphs whose int4 weights are column-major, in two's complement; weights that
        `takes_codes` rejects are dequantised at build."""
        takes = partial(takes_codes, fp4=self.host.target.has_fp4)
        return program.map(lambda g: by_columns(dequantize_at_build(g, takes), ("u8",)))

    def compile(self, task: Task, settings: Mapping[str, str]) -> dict[str, Any]:
        return Make(self.host, task, dict(settings)).run()

    def cache_bytes(self, program: Program, limits: Limits) -> int:
        return stored_bytes(text_graph(program), limits)

    def scratch_bytes(
        self, program: Program, device: str, settings: Mapping[str, str]
    ) -> Callable[[Limits], int]:
        """Return a function from limits to the bytes of attention scores that exist at a time; 0
        if every attention is one fused layer."""
        graph, attention = text_graph(program), settings["attention"]
        return lambda limits: score_bytes(graph, limits, attention)

    def short(self, program: Program) -> str:
        return estimate([*networks(program).values()]).short()

    def repeated_bytes(self, program: Program, settings: Mapping[str, str]) -> int:
        """Count the bytes of weights in all plans: those of each rank, and of each size of a
        tower."""
        return sum(ranks_of(g) * weight_bytes(g) for g in networks(program).values())

    def dry_run(self, prepared: Prepared, progress: Progress) -> dict[str, Any]:
        return dry_run(prepared, progress)

    def has_native_code(self, compiled: Mapping[str, Any]) -> bool:
        return True

    def load(self, task: Task, manifest: dict[str, Any], cuda_graph: bool = True) -> TrtRuntime:
        api, graphs, group = self.host.tensorrt(), networks(task.program), task.group
        rank = group.rank if group else 0
        plans = {name: files(name, rank, ranks_of(g))[0] for name, g in graphs.items()}
        self._check_plans(manifest, api, task)
        for plan in plans.values():
            path = task.folder / plan
            if not path.is_file() or not path.stat().st_size:
                raise EngineError(f"{path} is missing or empty; build the engine again")
        log, kernels = logger(api.trt), self._kernels(api, task)

        def opened(name: str) -> Opened:
            plan = plans[name]
            task.progress(f"reading {plan}")
            engine = read_plan(task.folder / plan, api, log)
            io = interface(graphs[name], task.limits)
            return Opened(api, engine, log, io, task.device, self.host.stream(), kernels)

        main = opened(ENGINE)
        record = self.host.record if cuda_graph else None
        if record and group:
            record = recorded_by_all(record, group.gather_values)
        loaded = TrtRuntime(main, task.limits, record, task.params, opened, task.program)
        if group:
            loaded.link(partial(self.host.communicator, group))
        return loaded

    def _kernels(self, api: Api, task: Task) -> KernelCache | None:
        if not self.host.target.ahead_of_time:
            return None
        key = f"{task.digest} {self.host.gpu()} {self.host.architecture()} {api.version}"
        rank = f".rank{task.group.rank}" if task.group else ""
        folder = task.folder.resolve()
        file = folder.with_name(f"{folder.name}{rank}{SUFFIX}")
        return KernelCache(api, file, key, task.progress)

    def _check_plans(self, manifest: Mapping[str, Any], api: Api, task: Task) -> None:
        """Raise EngineError if plans were built with settings that this backend lacks, for another
        GPU, or by another TensorRT version; patch versions count too."""
        folder, settings = task.folder, manifest["settings"]
        if bad := [n for n, s in self.settings.items() if settings.get(n) not in s.choices]:
            why = f"its manifest has {bad[0]}={settings.get(bad[0])}, which this backend lacks"
            raise EngineError(f"{folder}: {why}; build it again")
        if not self.has_device(task.device):
            raise EngineError(
                f"{folder} runs on a GPU of {self.host.target.gpus}; the current one, "
                f"{self.host.gpu()}, is {self.host.architecture()}: choose another with "
                f"CUDA_VISIBLE_DEVICES, or build the engine again with --target for this one"
            )
        if manifest["version"] != api.version:
            raise EngineError(
                f"{folder} was built by {api.library.name} {manifest['version']}, this is "
                f"{api.version}: install that version, or build the engine again"
            )
        if manifest["gpu"] and manifest["gpu"] != self.host.gpu():
            raise EngineError(
                f"{folder} was built on {manifest['gpu']}, this is {self.host.gpu()}: build the "
                f"engine again here"
            )


def takes_codes(g: Graph, n: Node, fp4: bool = False) -> bool:
    """Whether the weight of a `dequantize` node stays quantised in TensorRT: 8 bits with per-row
    scales in the engine's dtype, int4, or, if `fp4`, matrices in that format with per-row scales.
    The small gates of per-layer embeddings are dequantised (unless in fp4): otherwise their
    activation is not fused with the kernel before it."""
    codes, scales = n["codes"].type, n["scales"].type
    one = scales.shape[-1] == 1
    if fp4 and codes.dtype == "f4" and codes.rank == 2 and one:
        return True
    rows = one and scales.dtype == n.word("to")
    gates = any(m.op == "linear_glu" and len(m.inputs) > 2 for m in g.readers(n.out))
    return not gates and (codes.dtype == "u8" or (codes.dtype in ("i8", "f8e4m3") and rows))


BACKEND = TrtBackend()
