"""Builder, runtime and engines of the recorder: a network is built, kept and run on the CPU.

A plan is a short JSON text; what it stands for stays in this process (`_BUILT`), under a digest of
layers and weights. Tensors are read and written at the addresses that a context is given, as in the
real thing, so that a wrong address, shape or alias shows.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from mmap import mmap
from typing import Any

import torch

from . import network as networks
from .enums import (
    TORCH,
    BuilderFlag,
    DataType,
    ExecutionContextAllocationStrategy,
    HardwareCompatibilityLevel,
    MemoryPoolType,
    PreviewFeature,
    ProfilingVerbosity,
    Severity,
    TensorLocation,
)
from .execute import execute
from .layers import Dims, IConstantLayer, IPluginV3Layer, ITensor, Shape, Weights, memory_at
from .limits import ALIGNMENT, MAX_HELD
from .network import INetworkDefinition
from .ranks import Exchange, exchange_of
from .record import Attribute, Recorded, RuleError, api, held, need, was_set
from .refusals import check_wrapped

FORMAT = "recorder plan"
#: bytes of scratch memory that every engine asks for, and those of its first profile
SCRATCH, LEAST_SCRATCH = 4096, 1024


# --- what a caller derives from ---------------------------------------------------------------


class ILogger(Recorded):
    """Derived classes give `log(severity, msg)`."""

    Severity = Severity
    INTERNAL_ERROR, ERROR, WARNING = Severity.INTERNAL_ERROR, Severity.ERROR, Severity.WARNING
    INFO, VERBOSE = Severity.INFO, Severity.VERBOSE

    @api
    def __init__(self) -> None: ...

    def log(self, severity: Any, msg: str) -> None:
        raise NotImplementedError


class IProgressMonitor(Recorded):
    """Derived classes give `phase_start`, `step_complete` and `phase_finish`."""

    @api
    def __init__(self) -> None: ...


class IStreamWriter(Recorded):
    """Derived classes give `write(data)`, which returns how many bytes it wrote."""

    @api
    def __init__(self) -> None: ...

    def write(self, data: bytes) -> int:
        raise NotImplementedError


class IHostMemory(Recorded, bytes):
    """Behaves like bytes."""

    nbytes = Attribute(None, read=len)


# --- configuration ----------------------------------------------------------------------------


class IOptimizationProfile(Recorded):
    """Ranges of the shapes of inputs."""

    def __init__(self, module: Any) -> None:
        self._module, self._ranges = module, dict[str, tuple[Shape, Shape, Shape]]()

    @api
    def set_shape(self, input: str, min: Dims, opt: Dims, max: Dims) -> None:
        low, typical, high = (tuple(int(d) for d in s) for s in (min, opt, max))
        need(len(low) == len(typical) == len(high), f"profile: {input}: ranks differ")
        fits = all(0 <= a <= b <= c for a, b, c in zip(low, typical, high))
        need(fits, f"profile: {input}: {low} <= {typical} <= {high} does not hold")
        self._ranges[input] = (low, typical, high)


class ITimingCache(Recorded):
    """Counts builds; the real one keeps what they timed."""

    def __init__(self, module: Any, builds: int) -> None:
        self._module, self._builds = module, builds

    @api
    def serialize(self) -> IHostMemory:
        return self._module.IHostMemory(f"recorder timing {self._builds}".encode())

    @api
    def combine(self, input_cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._builds += input_cache._builds
        return True


class IBuilderConfig(Recorded):
    """Made by `Builder.create_builder_config`."""

    def __init__(self, module: Any) -> None:
        self._module, self._set = module, {module.BuilderFlag.TF32}
        self._preview: set[PreviewFeature] = set()
        self._profiles: list[IOptimizationProfile] = []
        self._pools: dict[Any, int] = {}
        self._timing: ITimingCache | None = None

    hardware_compatibility_level = Attribute(
        "HardwareCompatibilityLevel", HardwareCompatibilityLevel.NONE
    )
    profiling_verbosity = Attribute("ProfilingVerbosity", ProfilingVerbosity.LAYER_NAMES_ONLY)
    progress_monitor = Attribute("IProgressMonitor | None")

    @api
    def set_flag(self, flag: BuilderFlag) -> None:
        self._set.add(flag)

    @api
    def clear_flag(self, flag: BuilderFlag) -> None:
        self._set.discard(flag)

    @api
    def set_preview_feature(self, feature: PreviewFeature, enable: bool) -> None:
        (self._preview.add if enable else self._preview.discard)(feature)

    @api
    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        need(pool_size > 0, f"{pool.name}: a limit of {pool_size} bytes")
        self._pools[pool] = pool_size

    @api
    def get_memory_pool_limit(self, pool: MemoryPoolType) -> int:
        return self._pools.get(pool, 0)

    @api
    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    @api
    def create_timing_cache(self, serialized_timing_cache: bytes | bytearray | memoryview) -> Any:
        found = re.fullmatch(rb"recorder timing (\d+)|", bytes(serialized_timing_cache))
        return self._module.ITimingCache(self._module, int(found[1] or 0)) if found else None

    @api
    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._timing = cache
        return True

    @api
    def get_timing_cache(self) -> Any:
        return self._timing

    def _named(self, flag: str) -> bool:
        return any(f.name == flag for f in self._set)


# --- building ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """The network that a plan stands for. `weights`: a constant layer's index -> its values,
    without those that were stripped; `refittable`: name of stripped weights -> index."""

    network: INetworkDefinition
    profiles: tuple[Mapping[str, tuple[Shape, Shape, Shape]], ...]
    weights: Mapping[int, torch.Tensor]
    refittable: Mapping[str, int]
    streamed: bool
    #: digests of the weights that were stripped
    stripped: Mapping[str, bytes]


#: digest -> what was built in this process
_BUILT: dict[str, Built] = {}


class Builder(Recorded):
    """Checks a network as a whole, and keeps it."""

    _module: Any

    @api
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    max_threads = Attribute("int", 1)
    logger = Attribute(None, read=lambda b: b._logger)

    @api
    def create_network(self, flags: int = 0) -> INetworkDefinition:
        known = sum(1 << int(f) for f in self._module.NetworkDefinitionCreationFlag)
        need(not flags & ~known, f"create_network: {flags:#b} has unknown flags")
        return self._module.INetworkDefinition(self._module, flags, self)

    @api
    def create_builder_config(self) -> IBuilderConfig:
        return self._module.IBuilderConfig(self._module)

    @api
    def create_optimization_profile(self) -> IOptimizationProfile:
        return self._module.IOptimizationProfile(self._module)

    @api
    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> Any:
        constants = (x for x in network._layers if isinstance(x, IConstantLayer))
        size = sum(held(x, "weights")._bytes() for x in constants)
        need(size <= MAX_HELD, f"{size} bytes of weights: build_serialized_network_to_stream")
        plan = self._plan(network, config)
        return None if plan is None else self._module.IHostMemory(plan)

    @api
    def build_serialized_network_to_stream(
        self, network: INetworkDefinition, config: IBuilderConfig, writer: IStreamWriter
    ) -> bool:
        plan = self._plan(network, config)
        if plan is None:
            return False
        # In two pieces: a writer is called more than once.
        half = len(plan) // 2
        return all(writer.write(piece) == len(piece) for piece in (plan[:half], plan[half:]))

    def _plan(self, network: INetworkDefinition, config: IBuilderConfig) -> bytes | None:
        """Return the plan, or None, and the reason in the log, where the network is refused."""
        try:
            networks.check(network)
            _check_profiles(network, config)
            _check_flags(config)
            _check_compatible(config)
            _check_devices(network, config)
            _check_launches(network, self._module._shared_memory)
            check_wrapped(network, self._module._wraps_from)
            if config._timing:
                config._timing._builds += 1
            if not _told(held(config, "progress_monitor"), len(network._layers)):
                self._logger.log(Severity.ERROR, "the build was cancelled")
                return None
            built = _built(network, config)
        except RuleError as e:
            self._logger.log(Severity.ERROR, str(e))
            return None
        digest = _digest(built)
        _BUILT[digest] = built
        text = {"format": FORMAT, "tensorrt": self._module.__version__, "digest": digest}
        return json.dumps(text).encode()


def _told(monitor: Any, steps: int) -> bool:
    """Whether the monitor lets the build go on."""
    if monitor is None:
        return True
    monitor.phase_start("Building the network", None, steps)
    going = all(monitor.step_complete("Building the network", i) for i in range(steps))
    monitor.phase_finish("Building the network")
    return going


def _check_profiles(network: INetworkDefinition, config: IBuilderConfig) -> None:
    """Check that every profile gives a range to every dim that is not known, and to no other; all
    layers take the least and the largest shapes."""
    dynamic = [t for t in network._inputs if -1 in t._dims]
    need(config._profiles or not dynamic, "inputs have dims of -1 and there is no profile")
    for index, profile in enumerate(config._profiles):
        known = {held(t, "name") for t in network._inputs}
        unknown = profile._ranges.keys() - known
        need(not unknown, f"profile {index}: no input is called {', '.join(sorted(unknown))}")
        for tensor in dynamic:
            _check_range(profile, index, tensor)


def _check_flags(config: IBuilderConfig) -> None:
    """Check that there is one way to refit; to strip a plan sets REFIT_IDENTICAL by default."""
    ways = [f for f in ("REFIT", "REFIT_IDENTICAL") if config._named(f)]
    ways += ["STRIP_PLAN"] if config._named("STRIP_PLAN") and not ways else []
    both = config._named("REFIT_INDIVIDUAL") and ways
    need(not both, f"REFIT_INDIVIDUAL cannot be used together with {', '.join(both or [])}")


def _check_compatible(config: IBuilderConfig) -> None:
    """Check that kernels of an engine for several GPUs are told how much shared memory they have:
    by default it is 48 KiB, which leaves out the best of them."""
    exact = held(config, "hardware_compatibility_level") is HardwareCompatibilityLevel.NONE
    told = MemoryPoolType.TACTIC_SHARED_MEMORY in config._pools
    need(exact or told, "TACTIC_SHARED_MEMORY has no limit beside a hardware compatibility level")


def _check_devices(network: INetworkDefinition, config: IBuilderConfig) -> None:
    """Check that what several ranks need is asked for, in the version where it is tried out."""
    name = "MULTIDEVICE_RUNTIME_10_16"
    feature = config._module.PreviewFeature.__members__.get(name)
    apart = networks.ranks_of(network) == 1 or feature is None or feature in config._preview
    need(apart, f"the network has collectives, and PreviewFeature.{name} is not enabled")


def _check_launches(network: INetworkDefinition, room: int) -> None:
    """Check that kernels of plugins ask for no more shared memory than their launch is given."""
    for layer in network._layers:
        if isinstance(layer, IPluginV3Layer):
            types = [t._type for t in layer._inputs if t is not None]
            need = held(layer, "plugin").launch(types).params["shared_mem"]
            layer._need(need <= room, f"{need} bytes of dynamic shared memory, of {room}")


def _check_range(profile: IOptimizationProfile, index: int, tensor: ITensor) -> None:
    name = held(tensor, "name")
    ranges = profile._ranges.get(name)
    need(ranges, f"profile {index}: {name} {list(tensor._dims)} has no range")
    assert ranges
    for shape in ranges:
        fits = len(shape) == len(tensor._dims) and all(
            d in (-1, size) for d, size in zip(tensor._dims, shape)
        )
        need(fits, f"profile {index}: {name}: {list(shape)} is no {list(tensor._dims)}")


def _built(network: INetworkDefinition, config: IBuilderConfig) -> Built:
    """Build with copies of the weights: the caller's need not outlive the build."""
    constants = [x for x in network._layers if isinstance(x, IConstantLayer)]
    names: dict[str, int] = {}
    if config._named("STRIP_PLAN"):
        for x in constants:
            name = network._weight_names.get(id(held(x, "weights")), "")
            x._need(name, "it is stripped, and has no name under which it could be set again")
            names[name] = x._index
    kept = {
        x._index: held(x, "weights")._tensor().clone().view(tuple(held(x, "shape")))
        for x in constants
        if x._index not in names.values()
    }
    profiles = tuple(dict(p._ranges) for p in config._profiles)
    stripped = {n: _hash(held(network._layers[i], "weights")._tensor()) for n, i in names.items()}
    streamed = config._named("WEIGHT_STREAMING")
    return Built(network, profiles, kept, names, streamed, stripped)


def _hash(values: torch.Tensor) -> bytes:
    return hashlib.sha256(values.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()


def _digest(built: Built) -> str:
    hasher = hashlib.sha256()
    layers = [(type(x).__name__, held(x, "name")) for x in built.network._layers]
    hasher.update(json.dumps([layers, built.profiles, built.refittable, built.streamed]).encode())
    for name, digest in built.stripped.items():
        hasher.update(name.encode() + digest)
    for index, values in built.weights.items():
        hasher.update(f"{index} {values.dtype}".encode())
        hasher.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


# --- running ----------------------------------------------------------------------------------


class Runtime(Recorded):
    """Finds what a plan stands for."""

    _module: Any

    @api
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    logger = Attribute(None, read=lambda r: r._logger)

    @api
    def deserialize_cuda_engine(self, serialized_engine: bytes | memoryview | mmap) -> Any:
        try:
            plan = json.loads(bytes(memoryview(serialized_engine)))
            version, built = plan["tensorrt"], _BUILT[plan["digest"]]
        except (ValueError, LookupError, TypeError):
            self._logger.log(Severity.ERROR, "the plan was not built by this recorder")
            return None
        if version != self._module.__version__:
            self._logger.log(Severity.ERROR, f"the plan was built by version {version}")
            return None
        return self._module.ICudaEngine(self._module, built, self._logger)


class ICudaEngine(Recorded):
    """A built network with its weights."""

    def __init__(self, module: Any, built: Built, logger: ILogger) -> None:
        self._module, self._built, self._logger = module, built, logger
        self._network = built.network
        self._weights = dict(built.weights)
        tensors = (*self._network._inputs, *self._network._outputs)
        self._tensors = {held(t, "name"): t for t in tensors}
        self._aliases = networks.aliases(self._network)

    num_io_tensors = Attribute(None, read=lambda e: len(e._tensors))
    num_layers = Attribute(None, read=lambda e: len(e._network._layers))
    device_memory_size_v2 = Attribute(None, read=lambda e: SCRATCH)
    refittable = Attribute(None, read=lambda e: bool(e._built.refittable))
    weight_streaming_budget_v2 = Attribute("int", 0)
    _contexts: int = 0
    streamable_weights_size = Attribute(None, read=lambda e: e._streamable())

    @api
    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    @api
    def get_tensor_dtype(self, name: str) -> DataType:
        return self._tensors[name]._dtype

    @api
    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return SCRATCH if profile_index else LEAST_SCRATCH

    @api
    def get_aliased_input_tensor(self, name: str) -> Any:
        return self._aliases.get(name)

    def _changed(self, member: str) -> None:
        need(not self._contexts, f"{member} is set before there are execution contexts")

    def _streamable(self) -> int:
        return sum(t.nbytes for t in self._weights.values()) * self._built.streamed

    def _streams(self) -> bool:
        """Whether some weights are copied to the device at each step."""
        return held(self, "weight_streaming_budget_v2") < self._streamable()

    def _run(
        self, inputs: Mapping[str, torch.Tensor], exchange: Exchange | None
    ) -> dict[str, torch.Tensor]:
        self._network._constants = dict(self._weights)
        return execute(self._network, inputs, exchange)

    @api
    def create_execution_context(
        self,
        strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC,
    ) -> IExecutionContext:
        chosen = was_set(self, "weight_streaming_budget_v2") or not self._streamable()
        need(chosen, "no weight_streaming_budget_v2: TensorRT's own is all memory that is free now")
        self._contexts += 1
        return self._module.IExecutionContext(self, strategy)


class Refitter(Recorded):
    """Gives an engine the weights that its plan lacks."""

    _module: Any

    @api
    def __init__(self, engine: ICudaEngine, logger: ILogger) -> None:
        self._engine, self._logger = engine, logger
        self._given: dict[str, torch.Tensor] = {}

    @api
    def get_all_weights(self) -> list[str]:
        return list(self._engine._built.refittable)

    @api
    def get_missing_weights(self) -> list[str]:
        return self._missing()

    def _missing(self) -> list[str]:
        return [n for n in self._engine._built.refittable if n not in self._given]

    @api
    def get_weights_prototype(self, weights_name: str) -> Weights:
        weights = self._weights(weights_name)
        return self._module.Weights(weights._dtype, 0, weights._count)

    @api
    def set_named_weights(self, name: str, weights: Weights, location: TensorLocation) -> bool:
        expected = self._weights(name)
        if (weights._dtype, weights._count) != (expected._dtype, expected._count):
            self._logger.log(Severity.ERROR, f"{name}: other weights were expected")
            return False
        need(location is TensorLocation.HOST, f"{name}: the recorder has no device")
        if _hash(weights._tensor()) != self._engine._built.stripped[name]:
            self._logger.log(Severity.ERROR, f"{name}: not the weights that it was built with")
            return False
        self._given[name] = weights._tensor().clone()
        return True

    @api
    def refit_cuda_engine(self) -> bool:
        if self._missing():
            self._logger.log(Severity.ERROR, f"no weights for {', '.join(self._missing())}")
            return False
        for name, values in self._given.items():
            index = self._engine._built.refittable[name]
            shape = held(self._engine._network._layers[index], "shape")
            self._engine._weights[index] = values.view(tuple(shape))
        return True

    def _weights(self, name: str) -> Weights:
        layer = self._engine._network._layers[self._engine._built.refittable[name]]
        return held(layer, "weights")


class IExecutionContext(Recorded):
    """Shapes, addresses and a profile of one engine."""

    def __init__(self, engine: ICudaEngine, strategy: Any) -> None:
        self._engine, self._strategy = engine, strategy
        self._profile = 0
        self._memory = 0 if strategy is ExecutionContextAllocationStrategy.USER_MANAGED else SCRATCH
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._exchange: Exchange | None = None
        #: streams on which it ran
        self._streams: set[int] = set()

    engine = Attribute(None, read=lambda c: c._engine)

    @api
    def set_communicator(self, communicator: Any) -> bool:
        """Set what is exchanged by; it waits for the other ranks, as that of version 11 does."""
        self._exchange = exchange_of(communicator)
        if self._exchange is None:
            return self._refuse("no communicator lies there")
        self._exchange(torch.zeros(1))
        return True

    @api
    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < len(self._engine._built.profiles):
            return self._refuse(f"there is no profile {profile_index}")
        self._profile = profile_index
        self._shapes.clear()
        return True

    @api
    def set_device_memory(self, memory: int, size: int) -> None:
        need(memory % ALIGNMENT == 0, f"device memory at {memory:#x} is not aligned")
        self._memory = size

    @api
    def set_input_shape(self, name: str, shape: tuple | list | Dims) -> bool:
        tensor = self._engine._tensors.get(name)
        if tensor is None or tensor._layer is not None:
            return self._refuse(f"no input is called {name}")
        given = tuple(int(d) for d in shape)
        # An engine of static shapes needs no profile.
        profiles = self._engine._built.profiles
        ranges = profiles[self._profile] if profiles else {}
        low, _, high = ranges.get(name, (tensor._dims,) * 3)
        fits = len(given) == len(low) and all(a <= d <= b for a, d, b in zip(low, given, high))
        if not fits:
            return self._refuse(
                f"{name}: {list(given)} is outside profile {self._profile}, {list(low)} to "
                f"{list(high)}"
            )
        self._shapes[name] = given
        return True

    @api
    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine._tensors or not memory:
            return self._refuse(f"no tensor is called {name}, or it lies nowhere")
        need(memory % ALIGNMENT == 0, f"{name} at {memory:#x} is not aligned")
        self._addresses[name] = memory
        return True

    @api
    def infer_shapes(self) -> list[str]:
        """Return inputs without a shape; RuntimeError, as the binding's, on shapes that differ."""
        sizes: dict[str, int] = {}
        try:
            for name, shape in self._shapes.items():
                self._engine._tensors[name]._agree(shape, sizes)
        except RuleError as e:
            raise RuntimeError(str(e)) from e
        return self._shapeless()

    @api
    def execute_async_v3(self, stream_handle: int) -> bool:
        wrong = self._unready() or self._unrecordable(stream_handle)
        if wrong:
            return self._refuse(wrong)
        inputs = {
            n: memory_at(self._addresses[n], t._dtype, self._shape(n))
            for n, t in self._inputs().items()
        }
        try:
            made = self._engine._run(inputs, self._exchange)
        except RuleError as e:
            return self._refuse(str(e))
        for name, value in made.items():
            value = value.contiguous()
            ctypes.memmove(self._addresses[name], value.data_ptr(), value.nbytes)
        self._streams.add(stream_handle)
        return True

    def _inputs(self) -> dict[str, ITensor]:
        return {n: t for n, t in self._engine._tensors.items() if t._layer is None}

    def _shape(self, name: str) -> Shape:
        return self._shapes.get(name, self._engine._tensors[name]._dims)

    def _unready(self) -> str:
        """Say what is missing, or wrong, before a step."""
        engine = self._engine
        lacking = [n for n in engine._tensors if n not in self._addresses]
        if lacking:
            return f"no address for {', '.join(lacking)}"
        need = SCRATCH if self._profile or not engine._built.profiles else LEAST_SCRATCH
        if self._memory < need:
            return f"{self._memory} bytes of device memory, {need} are needed"
        stripped = set(engine._built.refittable.values()) - engine._weights.keys()
        if stripped:
            return f"{len(stripped)} weights were stripped and not set again"
        if self._shapeless():
            return f"no shape for {', '.join(self._shapeless())}"
        if networks.ranks_of(engine._network) > 1 and self._exchange is None:
            return "no communicator, by which ranks exchange"
        return self._misplaced()

    def _shapeless(self) -> list[str]:
        return [n for n, t in self._inputs().items() if n not in self._shapes and -1 in t._dims]

    def _unrecordable(self, stream: int) -> str:
        """Return why the step cannot be recorded, where it is being."""
        if not self._engine._module._capturing:
            return ""
        if self._engine._network._conditionals:
            return "a conditional's side is chosen by the host: the step cannot be captured"
        if self._engine._streams():
            return "weights are streamed: the step waits, and cannot be captured"
        ran = stream in self._streams
        return (
            "" if ran else f"stream {stream}: its first step makes events, and cannot be captured"
        )

    def _misplaced(self) -> str:
        """Say which output is misplaced: an aliased one lies with its input, others apart."""
        spans = {
            n: range(at, at + prod(self._shape(n)) * TORCH[t._dtype].itemsize)
            for n, t in self._inputs().items()
            for at in [self._addresses[n]]
        }
        outputs = self._engine._tensors.keys() - spans.keys()
        for name in sorted(outputs):
            at, source = self._addresses[name], self._engine._aliases.get(name)
            if source and at != self._addresses[source]:
                return f"{name} is {source} updated in place: give both one address"
            inside = [n for n, span in spans.items() if at in span]
            if not source and inside:
                return f"{name} lies over {', '.join(inside)}"
        return ""

    def _refuse(self, message: str) -> bool:
        self._engine._logger.log(Severity.ERROR, message)
        return False
