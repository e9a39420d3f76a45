"""The way from a graph to a plan: network, builder configuration, profiles, the builder's answer.

Everything takes the TensorRT module as an argument (host.Api), so that all of it runs over a
stand-in as well.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from g4ir.errors import LowerError, TrustError
from g4ir.ir.graph import Graph, Value
from g4ir.ir.names import layer_of
from g4ir.ops.codecs import FORMAT_OF, FORMATS
from g4ir.plan.engine_limits import Limits
from g4ir.ui.console import handled
from g4ir.ui.files import new_version, write_file
from g4ir.ui.memory import device_memory
from g4ir.ui.paths import check_private, private
from g4ir.ui.progress import Progress
from g4ir.ui.units import size_text
from g4ir.weights.pack import ParamSource

from .host import Api, all_taken, joined, logger, progress_monitor, stream_writer
from .interface import Interface, interface
from .target import HOPPER, Target

GIB = 1 << 30
#: what the builder may use of the device while it times kernels, whatever weights leave
LEAST_WORKSPACE = GIB
#: part of a refusal in which TensorRT took layers for attention, and failed at their mask
WRAPPER = "wrap_attention"
#: part of what TensorRT-RTX says after every refusal on a machine without a driver
NO_DRIVER = "CUDA driver version is insufficient"
#: part of the name of a layer that was refused, or of the message -> what to try
REMEDIES: Mapping[str, str] = {
    WRAPPER: "--set attention=plain, in which TensorRT finds no attention",
    "experts": "--set experts=all, whose products are plain ones",
    "attention": "--set attention=plain, whose attention is products and the plainest layers",
    "memory": "a smaller --prefill-chunk, --max-batch or --max-seq",
    "attn": "--set attention=plain, whose attention is products and the plainest layers",
    "": "--set attention=plain --set experts=all, the plainest form of the network",
}


@dataclass(frozen=True)
class Written:
    """A network that is complete, and what it is fed."""

    builder: Any
    network: Any
    graph: Graph
    interface: Interface
    log: Any
    notes: list[str]
    #: what the network points to until it is built: the parser, and the weights
    alive: tuple[Any, ...]


def write_network(
    api: Api,
    graph: Graph,
    limits: Limits,
    params: ParamSource,
    settings: Mapping[str, str],
    log: Any = None,
) -> Written:
    """Have NVIDIA's parser write a graph as an INetworkDefinition. LowerError names the op and the
    value, or the node, and ends with what TensorRT said."""
    from .dialect import emitted
    from .parse import Addresses, parse

    log = log or logger(api.trt)
    builder = api.trt.Builder(log)
    network = builder.create_network()
    if network is None:
        raise LowerError(f"TensorRT makes no network: {log.said()}")
    e, notes = emitted(graph, limits, Addresses(params), settings)
    with all_taken(log, f"the network of {graph.name}"):
        parser = parse(api, network, e, graph.name, log)
    io = interface(graph, limits)
    return Written(builder, network, graph, io, log, notes, (parser, e.storage))


# --- configuration ----------------------------------------------------------------------------


def configure(api: Api, w: Written, memory: int | None, target: Target = HOPPER) -> Any:
    """Return the builder's configuration. memory: bytes of the device, if known."""
    trt, config = api.trt, w.builder.create_builder_config()
    with all_taken(w.log, "the configuration"):
        # What the ops compute in fp32 is fp32, not products of 10 bits.
        config.clear_flag(trt.BuilderFlag.TF32)
        if memory is not None:
            # What weights leave of the device is for kernels.
            workspace = max(memory - weight_bytes(w.graph), LEAST_WORKSPACE)
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
        if target.ahead_of_time:
            _aim(trt, config, target)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        for name in w.interface.profiles:
            _add_profile(w, config, name)
    return config


def _aim(trt: Any, config: Any, target: Target) -> None:
    """Have the builder compile for the target's compute capability; without one, engines are
    portable. Steps allocate nothing, so that they can be recorded as CUDA graphs. Kernels run one
    after the other: side by side, as few of a chunk could, they need more scratch memory."""
    config.max_aux_streams = 0
    config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if len(target.capabilities) == 1:
        own = getattr(trt.ComputeCapability, f"SM{target.capabilities[0].replace('.', '')}")
        config.num_compute_capabilities = 1
        config.set_compute_capability(own, 0)


def _add_profile(w: Written, config: Any, name: str) -> None:
    profile = w.builder.create_optimization_profile()
    for tensor in w.interface.dynamic():
        profile.set_shape(tensor, *w.interface.shapes(tensor, name))
    if config.add_optimization_profile(profile) != w.interface.index(name):
        raise LowerError(
            f"TensorRT refuses the profile of {name}: {w.log.said()}; check --max-batch, --max-seq "
            f"and --prefill-chunk"
        )


# --- the builder at work ----------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """The memory of a build, before it is begun, by what the builder holds."""

    host_bytes: int
    device_bytes: int
    #: host memory of the model cut to its first layers: one, two and so on
    first_layers: tuple[int, ...] = ()
    #: weights of 4 bits
    four_bits: bool = False

    def __str__(self) -> str:
        return (
            f"{size_text(self.host_bytes)} of host memory, "
            f"{size_text(self.device_bytes)} of device memory"
        )

    def short(self) -> str:
        """Return why the build does not fit this machine's memory; nothing if it does."""
        has = device_memory("cpu")
        if self.host_bytes <= has:
            return ""
        count = sum(need <= has for need in self.first_layers)
        smaller = "" if self.four_bits else ", or with --quant int4"
        return (
            f"TensorRT's builder needs {size_text(self.host_bytes)} of host memory, this machine "
            f"has {size_text(has)}, enough for {count} of {len(self.first_layers)} layers: build "
            f"on a larger one{smaller}"
        )


#: host memory of a builder beside weights, and for each layer, as measured of TensorRT-RTX 1.7
#: (bench/results/rtx-builds.txt)
HOST_BYTES, LAYER_HOST_BYTES = 2 * GIB // 5, GIB // 28


def estimate(graphs: Sequence[Graph]) -> Estimate:
    """Return the estimate for networks that are built one after the other, for each rank again; the
    first is the text model's."""
    text, *others = graphs
    rest = max(map(_host_bytes, others), default=0)
    first = [max(rest, _host_bytes(text, n + 1)) for n in range(_layers(text.params))]
    host = max(rest, _host_bytes(text))
    device = max(map(weight_bytes, graphs)) + LEAST_WORKSPACE
    four_bits = any(v.type.dtype == FORMATS["int4"].codes for v in text.params)
    return Estimate(host, device, tuple(first), four_bits)


def _host_bytes(g: Graph, layers: float = inf) -> int:
    """Return what a builder holds of the first layers: the plan's weights, what it keeps of each
    layer and, while the plan is written, once more the matrices that it lays out for their
    products: quantised ones, and those of layers. Params are mapped files, whose pages the system
    may drop."""
    held = [v for v in g.params if (layer_of(v.name) or 0) < layers]
    laid = (v for v in held if v.type.dtype in FORMAT_OF or layer_of(v.name) is not None)
    again = sum(v.type.nbytes() for v in laid if v.type.rank < 3)
    weights = sum(v.type.nbytes() for v in held)
    return weights + again + HOST_BYTES + _layers(held) * LAYER_HOST_BYTES


def _layers(params: Iterable[Value]) -> int:
    return len({layer_of(v.name) for v in params} - {None})


def weight_bytes(g: Graph) -> int:
    """Count the bytes that a network holds of the params, without tables of embeddings."""
    return sum(v.type.nbytes() for v in g.params)


def build_plan(
    api: Api, w: Written, config: Any, timing: Path | None, plan: Path, progress: Progress
) -> None:
    """Run the builder, which writes its plan piece by piece. The timing cache is read first and
    written at the end, also where the build is refused or interrupted (Ctrl-C, SIGTERM). LowerError
    with the builder's own words where it refuses; OSError where the plan cannot be written."""
    if timing:
        _begin_with(config, timing)
    w.builder.max_threads = max(1, os.cpu_count() or 1)
    w.log.errors.clear()
    monitor = progress_monitor(api.trt, progress)
    config.progress_monitor = monitor
    with new_version(plan) as file:
        writer = stream_writer(api.trt, file)
        with _interruptible(monitor):
            made = w.builder.build_serialized_network_to_stream(w.network, config, writer)
        if timing:
            _keep(timing, config.get_timing_cache())
        if monitor.stopped:
            raise KeyboardInterrupt
        if writer.error:
            raise writer.error
        if not made:
            layers = (w.network.get_layer(i) for i in range(w.network.num_layers))
            raise RefusedError(refusal(w.log.errors, [layer.name for layer in layers]))


class RefusedError(LowerError):
    """The builder takes every layer and not the network."""


def _begin_with(config: Any, timing: Path) -> None:
    """Hand over what was timed before, or nothing where others could have written it, or TensorRT
    does not take it."""
    kept = b""
    with suppress(OSError, TrustError):
        check_private(timing.parent)
        kept = timing.read_bytes()
    cache = config.create_timing_cache(kept)
    if cache is None or not config.set_timing_cache(cache, False):
        config.set_timing_cache(config.create_timing_cache(b""), False)


def _keep(timing: Path, cache: Any) -> None:
    """Keep what was timed, by best effort: a full or read-only folder fails no build."""
    with suppress(OSError, TrustError):
        write_file(private(timing.parent) / timing.name, [memoryview(cache.serialize())])


def timing_file(folder: Path, machine: str) -> Path:
    """Return the file for this GPU and TensorRT: the builder refuses another's."""
    return folder / f"{machine.replace(' ', '-')}.timing"


def refusal(errors: Sequence[str], layers: Sequence[str]) -> str:
    """Return a sentence: what the builder said, the layer of ours it spoke of, and what to try."""
    said = joined([e for e in errors if NO_DRIVER not in e] or errors) or "it gave no reason"
    layer = max((n for n in layers if n in said), key=len, default="")
    about = f"{layer} {said}".lower()
    advice = next(text for word, text in REMEDIES.items() if word in about)
    place = f" at layer {layer}" if layer else ""
    return f"TensorRT's builder refuses the network{place}: {said}; try {advice}"


def _interruptible(monitor: Any) -> AbstractContextManager[None]:
    """Return a context in which signals ask the builder to stop, not the process to end inside
    it."""

    def stop(number: int, frame: FrameType | None) -> None:
        monitor.stopped = True

    return handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), stop))
