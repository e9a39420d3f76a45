"""Builds a plan from a graph: network, builder configuration, optimisation profiles, error
messages.

The TensorRT module is an argument (host.Api), so that tests can pass a fake.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from g4ir.errors import LowerError, TrustError
from g4ir.ir.graph import Graph
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

from .host import Api, joined, logger, progress_monitor, raise_refusals, stream_writer
from .interface import Interface, interface
from .target import HOPPER, Target

GIB = 1 << 30
#: minimum workspace of the builder while it times kernels, even if the weights leave less
MIN_WORKSPACE = GIB
#: part of the error when TensorRT's attention fusion fails at a mask
WRAPPER = "wrap_attention"
#: part of TensorRT-RTX's error message after any failure on a machine without a driver
NO_DRIVER = "CUDA driver version is insufficient"
#: part of the refused layer's name, or of the error message -> remedy; the first match counts
REMEDIES: Mapping[str, str] = {
    WRAPPER: "--set attention=plain, which TensorRT does not fuse",
    "attention": "--set attention=plain, whose attention is matmuls and elementwise layers",
    "memory": "a smaller --prefill-chunk, --max-batch or --max-seq",
    "attn": "--set attention=plain, whose attention is matmuls and elementwise layers",
    "": "--set attention=plain, whose layers are the simplest",
}
#: remedy if attention is plain already
OTHER_BACKEND = "--backend torch"


@dataclass(frozen=True)
class Written:
    """A complete INetworkDefinition, and what its build needs."""

    builder: Any
    network: Any
    graph: Graph
    interface: Interface
    log: Any
    notes: list[str]
    #: kind of attention (lowerings.py)
    attention: str
    #: objects that the network references until it is built: parser and weights
    alive: tuple[Any, ...]


def write_network(
    api: Api,
    graph: Graph,
    limits: Limits,
    params: ParamSource,
    settings: Mapping[str, str],
    log: Any = None,
) -> Written:
    """Parse a graph into an INetworkDefinition with NVIDIA's ONNX parser. LowerError names the op
    and value that cannot be lowered, or gives TensorRT's errors."""
    from .dialect import emitted
    from .parse import Addresses, parse

    log = log or logger(api.trt)
    builder = api.trt.Builder(log)
    network = builder.create_network()
    if network is None:
        raise LowerError(f"TensorRT cannot create a network: {log.reason()}")
    e, notes = emitted(graph, limits, Addresses(params), settings)
    with raise_refusals(log, f"the network of {graph.name}"):
        parser = parse(api, network, e, graph.name, log)
    io = interface(graph, limits)
    kept = parser, e.storage
    return Written(builder, network, graph, io, log, notes, settings["attention"], kept)


# --- configuration ----------------------------------------------------------------------------


def configure(api: Api, w: Written, memory: int | None, target: Target = HOPPER) -> Any:
    """Return the builder's configuration. memory: bytes of the device; None: unknown, and the
    workspace is TensorRT's default."""
    trt, config = api.trt, w.builder.create_builder_config()
    with raise_refusals(w.log, "the configuration"):
        # fp32 ops stay fp32: no TF32 (10-bit mantissa).
        config.clear_flag(trt.BuilderFlag.TF32)
        if memory is not None:
            # Workspace is all device memory that the weights leave.
            workspace = max(memory - weight_bytes(w.graph), MIN_WORKSPACE)
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
        if target.ahead_of_time:
            _aim(trt, config, target)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        for name in w.interface.profiles:
            _add_profile(w, config, name)
    return config


def _aim(trt: Any, config: Any, target: Target) -> None:
    """Set the compute capability of a target that has only one; an engine for several is portable.
    Steps must not allocate, so that they can be captured as CUDA graphs. One stream only: few
    kernels of a chunk could run concurrently, and would need more scratch memory."""
    config.max_aux_streams = 0
    config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if len(target.capabilities) == 1:
        capability = getattr(trt.ComputeCapability, f"SM{target.capabilities[0].replace('.', '')}")
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)


def _add_profile(w: Written, config: Any, name: str) -> None:
    profile = w.builder.create_optimization_profile()
    for tensor in w.interface.dynamic():
        profile.set_shape(tensor, *w.interface.shapes(tensor, name))
    if config.add_optimization_profile(profile) != w.interface.index(name):
        fix = "check --max-batch, --max-seq and --prefill-chunk"
        raise LowerError(f"TensorRT refuses the profile of {name}: {w.log.reason()}; {fix}")


# --- running the builder ----------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Estimate of the memory that TensorRT's builder needs, from the graphs."""

    host_bytes: int
    device_bytes: int
    #: whether there are 4-bit weights
    four_bits: bool = False

    def __str__(self) -> str:
        host, device = size_text(self.host_bytes), size_text(self.device_bytes)
        return f"{host} of host memory, {device} of device memory"

    def short(self) -> str:
        """Return why the build does not fit this machine's host memory; "" if it does."""
        has = device_memory("cpu")
        if self.host_bytes <= has:
            return ""
        smaller = "" if self.four_bits else ", or with --quant int4"
        return (
            f"TensorRT's builder needs {size_text(self.host_bytes)} of host memory, this machine "
            f"has {size_text(has)}: build on a larger one{smaller}"
        )


INT4 = FORMATS["int4"].codes
#: host memory of a builder in addition to weights, and per layer, as measured with TensorRT-RTX 1.7
#: (bench/results/rtx-builds.txt)
HOST_BYTES, LAYER_HOST_BYTES = 2 * GIB // 5, GIB // 28


def estimate(graphs: Sequence[Graph]) -> Estimate:
    """Return the estimate for networks that are built one after another, as are the ranks' plans of
    each: the maximum over them. The first graph must be the text model's."""
    host, device = max(map(_host_bytes, graphs)), max(map(weight_bytes, graphs)) + MIN_WORKSPACE
    return Estimate(host, device, any(v.type.dtype == INT4 for v in graphs[0].params))


def _host_bytes(g: Graph) -> int:
    """Estimate the builder's host memory: a constant, another per layer, the plan's weights, and a
    second copy of the matrices that it repacks while it writes the plan (quantised ones and those
    of layers). The params themselves are memory-mapped and count nothing."""
    laid = (v for v in g.params if v.type.dtype in FORMAT_OF or layer_of(v.name) is not None)
    again = sum(v.type.nbytes() for v in laid if v.type.rank < 3)
    layers = len({layer_of(v.name) for v in g.params} - {None})
    return weight_bytes(g) + again + HOST_BYTES + layers * LAYER_HOST_BYTES


def weight_bytes(g: Graph) -> int:
    """Count the bytes of a network's params, without tables that only the `embed` graph reads."""
    return sum(v.type.nbytes() for v in g.params)


def build_plan(
    api: Api, w: Written, config: Any, timing: Path | None, plan: Path, progress: Progress
) -> None:
    """Run the builder, which streams its plan to the file `plan`. The timing cache (`timing`; None:
    none) is read first and written at the end, even if the build fails or is interrupted (Ctrl-C,
    SIGTERM). RefusedError with the builder's errors if it fails; OSError if the plan cannot be
    written."""
    if timing:
        _begin_with(config, timing)
    w.builder.max_threads = max(1, os.cpu_count() or 1)
    w.log.errors.clear()
    monitor = progress_monitor(api.trt, progress)
    config.progress_monitor = monitor
    with new_version(plan) as file:
        writer = stream_writer(api.trt, file)
        with _interruptible(monitor):
            written = w.builder.build_serialized_network_to_stream(w.network, config, writer)
        if timing:
            _keep(timing, config.get_timing_cache())
        if monitor.stopped:
            raise KeyboardInterrupt
        if writer.error:
            raise writer.error
        if not written:
            layers = [w.network.get_layer(i).name for i in range(w.network.num_layers)]
            raise RefusedError(refusal(w.log.errors, layers, w.attention))


class RefusedError(LowerError):
    """The builder fails on a network that the parser accepted."""


def _begin_with(config: Any, timing: Path) -> None:
    """Load the timing cache; start an empty one if there is no file, other users could have written
    it, or TensorRT rejects it."""
    timings = b""
    with suppress(OSError, TrustError):
        check_private(timing.parent)
        timings = timing.read_bytes()
    cache = config.create_timing_cache(timings)
    if cache is None or not config.set_timing_cache(cache, False):
        config.set_timing_cache(config.create_timing_cache(b""), False)


def _keep(timing: Path, cache: Any) -> None:
    """Write the timing cache, best effort: a full or read-only folder does not fail a build."""
    with suppress(OSError, TrustError):
        write_file(private(timing.parent) / timing.name, [memoryview(cache.serialize())])


def timing_file(folder: Path, machine: str) -> Path:
    """Return the timing cache file of a GPU and TensorRT version (`machine`): the builder refuses
    the cache of another."""
    return folder / f"{machine.replace(' ', '-')}.timing"


def refusal(errors: Sequence[str], layers: Sequence[str], attention: str) -> str:
    """Return the error text: the builder's errors, the layer that they name, if any (layers have
    names of IR values), and a remedy for this kind of attention."""
    reason = joined([e for e in errors if NO_DRIVER not in e] or errors) or "it gave no reason"
    layer = max((n for n in layers if n in reason), key=len, default="")
    about = f"{layer} {reason}".lower()
    advice = next(text for word, text in REMEDIES.items() if word in about)
    if attention == "plain" and "attention=plain" in advice:
        advice = OTHER_BACKEND
    where = f" at layer {layer}" if layer else ""
    return f"TensorRT's builder refuses the network{where}: {reason}; try {advice}"


def _interruptible(monitor: Any) -> AbstractContextManager[None]:
    """Within this context, SIGINT and SIGTERM cancel the build instead of ending the process inside
    TensorRT."""

    def stop(number: int, frame: FrameType | None) -> None:
        monitor.stopped = True

    return handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), stop))
