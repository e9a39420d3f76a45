"""`--backend trt`: TensorRT engines for H100 from the same graph."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import EngineError
from g4ir.fit import device_memory
from g4ir.ir import Graph, Program
from g4ir.packing import ParamSource
from g4ir.tensorfile import write_file

from ..base import Limits, Progress, Setting
from ..primitives.network import stored_bytes
from . import probe

if TYPE_CHECKING:
    from g4ir.engine import Prepared

    from .runtime import TrtRuntime

PLAN, TENSORS = "engine.plan", "engine.io.json"


def cache_dir() -> Path:
    """Where timing caches are kept between builds."""
    return Path.home() / ".cache" / "g4ir" / "tensorrt"


SETTINGS: Mapping[str, Setting] = {
    "attention": Setting(
        ("explicit", "fused", "plugin"), "explicit",
        "products and a softmax; TensorRT's own attention layer; or kernels of this project for "
        "decode steps",
    ),
    "experts": Setting(
        ("auto", "gather", "all", "plugin"), "auto",
        "weights of the chosen experts gathered, all experts multiplied, the first for single "
        "tokens only (auto), or kernels of this project",
    ),
    "weights": Setting(
        ("baked", "streamed", "refit"), "baked",
        "in the plan; in the plan, and on the device as far as they fit; or out of the plan, which "
        "takes them from the engine's safetensors when it is loaded",
    ),
    "hardware": Setting(
        ("exact", "same-capability"), "exact",
        "the plan runs on the GPU that it was built on; or on every GPU of its compute capability",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Host:
    """What a machine offers; other values stand for another machine."""

    tensorrt: Callable[[], probe.Api] = probe.require_tensorrt
    check_gpu: Callable[[], None] = probe.require_gpu
    gpu: Callable[[], str] = probe.gpu
    architecture: Callable[[], str] = probe.architecture
    memory: Callable[[str], int] = device_memory
    timings: Callable[[], Path] = cache_dir


@dataclass(frozen=True)
class TrtBackend:
    """Writes the network, has TensorRT's builder make a plan of it, runs the plan."""

    name: str = "trt"
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...] = ("bf16", "f16", "f32")
    packs_weights: bool = True
    settings: Mapping[str, Setting] = field(default_factory=lambda: SETTINGS)
    host: Host = Host()

    def check(self, device: str) -> None:
        self.host.tensorrt()
        self.host.check_gpu()

    def machine(self, device: str) -> str:
        return f"{device} {self.host.architecture()} tensorrt-{self.host.tensorrt().short}"

    def compile(
        self, program: Program, limits: Limits, device: str, out: Path, progress: Progress,
        params: ParamSource, settings: Mapping[str, str],
    ) -> dict[str, Any]:  # fmt: skip
        from . import build
        from .dry_run import EMULATED, check_sizes
        from .recorder import recorder

        api = self.host.tensorrt()
        progress("checking sizes")
        check_sizes(probe.probe(recorder(EMULATED)), program, limits, settings)
        progress("writing the network")
        written = build.write_network(api, program, limits, params, settings)
        for note in written.emitter.notes:
            progress(note)
        weights = weight_bytes(written.graph)
        progress(f"TensorRT's builder: {build.estimate(written, weights, settings)}")
        memory = self.host.memory(device)
        config = build.configure(api, written, settings, memory, weights)
        timing = build.timing_file(self.host.timings(), self.machine(device))
        build.build_plan(api, written, config, timing, out / PLAN, progress)
        text = json.dumps(written.interface.as_json(), indent=1) + "\n"
        write_file(out / TENSORS, [text.encode()])
        return {
            "plan": PLAN, "tensors": TENSORS, "tensorrt": api.version, "gpu": self.host.gpu(),
            "settings": dict(settings), "layers": written.network.num_layers,
        }  # fmt: skip

    def cache_bytes(self, program: Program, limits: Limits) -> int:
        return stored_bytes(program.graphs["prefill"], limits)

    def repeated_bytes(self, params: int, settings: Mapping[str, str]) -> int:
        return 0 if settings["weights"] == "refit" else params

    def dry_run(self, prepared: Prepared, progress: Progress) -> dict[str, Any]:
        from .dry_run import dry_run

        return dry_run(prepared, progress)

    def load(
        self, program: Program, limits: Limits, device: str, folder: Path, kept: dict[str, Any],
        params: ParamSource, progress: Progress, cuda_graph: bool = True,
    ) -> TrtRuntime:  # fmt: skip
        from ..primitives.graph import network_graph
        from ..torch_compile.cuda_graph import recorded
        from . import runtime
        from .interface import interface
        from .log import logger

        api = self.host.tensorrt()
        self._check_plan(kept, api)
        log = logger(api.trt)
        progress("reading the plan")
        engine = _read_plan(folder / kept["plan"], api, log)
        runtime.give_weights(api, engine, log, params, kept["settings"]["weights"])
        return runtime.TrtRuntime(
            api, engine, log, interface(network_graph(program), limits), limits, device, params,
            recorded if cuda_graph and device == "cuda" else None,
        )  # fmt: skip

    def _check_plan(self, kept: Mapping[str, Any], api: probe.Api) -> None:
        """EngineError where the plan is another TensorRT's or another GPU's. A patch version
        counts too: plans are read by the version that wrote them."""
        if kept["tensorrt"] != api.version:
            raise EngineError(
                f"the plan was built by TensorRT {kept['tensorrt']}, this is {api.version}: "
                f"install that version, or build the engine again"
            )
        exact = kept["settings"]["hardware"] == "exact"
        if exact and kept["gpu"] != self.host.gpu():
            raise EngineError(
                f"the plan was built on {kept['gpu']}, this is {self.host.gpu()}: build it again "
                f"here, or build it with --set hardware=same-capability for both"
            )


def weight_bytes(g: Graph) -> int:
    """Bytes of what the network holds of the params; tables of embeddings are not among it."""
    return sum(v.type.nbytes() for v in g.params)


def _read_plan(path: Path, api: probe.Api, log: Any) -> Any:
    """Mapped, not read: a plan is as large as the weights."""
    from .runtime import deserialize

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        return deserialize(api, plan, log)


BACKEND = TrtBackend()
