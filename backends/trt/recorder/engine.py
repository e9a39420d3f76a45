"""Builder, runtime and engines of the recorder: a network is built, kept and run on the CPU.

A plan is a digest of layers and weights, by which this process has what it stands for (`_BUILT`).
Tensors are read and written at the addresses that a context is given, as in the real thing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from . import network as networks
from .enums import ENUMS, TORCH, Severity
from .layers import ITensor, Shape, Weights, agree, memory_at
from .network import INetworkDefinition
from .ranks import Exchange, exchange_of
from .record import Attribute, Recorded, RuleError, api, need

#: bytes of scratch memory that every engine asks for, and those of its first profile
SCRATCH, LEAST_SCRATCH = 4096, 1024

_Strategy = ENUMS["ExecutionContextAllocationStrategy"]
#: least, typical and largest shape
Range = tuple[Shape, Shape, Shape]


# --- what a caller derives from ---------------------------------------------------------------


class Callback(Recorded):
    @api
    def __init__(self) -> None: ...


class ILogger(Callback):
    Severity = Severity


class IProgressMonitor(Callback):
    pass


class IStreamWriter(Callback):
    write: Any = NotImplemented


# --- configuration ----------------------------------------------------------------------------


class IOptimizationProfile(Recorded):
    """Ranges of the shapes of inputs."""

    def __init__(self) -> None:
        self._ranges: dict[str, Range] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        low, typical, high = (tuple(int(d) for d in s) for s in (min, opt, max))
        fits = len(low) == len(typical) == len(high)
        fits = fits and all(0 <= a <= b <= c for a, b, c in zip(low, typical, high))
        need(fits, f"profile: {input}: {low} <= {typical} <= {high} does not hold")
        self._ranges[input] = (low, typical, high)


class ITimingCache(Recorded):
    """Counts builds; the real one keeps what they timed."""

    def __init__(self, builds: int) -> None:
        self._builds = builds

    def serialize(self) -> bytes:
        return f"recorder timing {self._builds}".encode()


class IBuilderConfig(Recorded):
    def __init__(self) -> None:
        self._set = {self._module.BuilderFlag.TF32}
        self._preview: set[Any] = set()
        self._profiles: list[IOptimizationProfile] = []
        self._pools: dict[Any, int] = {}
        self._timing: ITimingCache | None = None

    hardware_compatibility_level = Attribute(ENUMS["HardwareCompatibilityLevel"].NONE)
    profiling_verbosity = Attribute()
    progress_monitor = Attribute()

    def set_flag(self, flag: Any) -> None:
        self._set.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self._set.discard(flag)

    def set_preview_feature(self, feature: Any, enable: bool) -> None:
        (self._preview.add if enable else self._preview.discard)(feature)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._pools[pool] = pool_size

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: Any) -> Any:
        found = re.fullmatch(rb"recorder timing (\d+)|", bytes(serialized_timing_cache))
        return self._module.ITimingCache(int(found[1] or 0)) if found else None

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._timing = cache
        return True

    def get_timing_cache(self) -> Any:
        return self._timing


# --- building ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """The network that a plan stands for. `weights`: a constant layer's index -> its values;
    `refittable`: name -> index of those that the plan does not have."""

    network: INetworkDefinition
    profiles: tuple[Mapping[str, Range], ...]
    weights: Mapping[int, torch.Tensor]
    refittable: Mapping[str, int]
    streamed: bool


#: plan -> what was built in this process
_BUILT: dict[bytes, Built] = {}


class Builder(Recorded):
    """Checks a network as a whole, and keeps it."""

    @api
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    max_threads = Attribute(1)

    def create_network(self, flags: int = 0) -> Any:
        return self._module.INetworkDefinition(flags, self)

    def create_builder_config(self) -> Any:
        return self._module.IBuilderConfig()

    def create_optimization_profile(self) -> Any:
        return self._module.IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> Any:
        return self._plan(network, config)

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
        try:
            networks.check(network)
            _check_config(network, config)
            if config._timing:
                config._timing._builds += 1
            need(_told(config._progress_monitor, len(network._layers)), "the build was cancelled")
            built = _built(network, config)
        except RuleError as e:
            self._logger.log(Severity.ERROR, str(e))
            return None
        plan = f"recorder plan of {self._module.__version__}: {_digest(built)}".encode()
        _BUILT[plan] = built
        return plan


def _told(monitor: Any, steps: int) -> bool:
    if monitor is None:
        return True
    monitor.phase_start("Building the network", None, steps)
    going = all(monitor.step_complete("Building the network", i) for i in range(steps))
    monitor.phase_finish("Building the network")
    return going


def _check_config(network: INetworkDefinition, config: IBuilderConfig) -> None:
    dynamic = [t for t in network._inputs if -1 in t._dims]
    need(config._profiles or not dynamic, "inputs have dims of -1 and there is no profile")
    for index, profile in enumerate(config._profiles):
        for t in dynamic:
            shapes = profile._ranges.get(t._name, ())
            where = f"profile {index}: {t._name} {list(t._dims)}"
            need(shapes, f"{where} has no range")
            for shape in shapes:
                need(agree(t._dims, shape), f"{where}: {list(shape)} does not fit")
    # By default kernels of an engine for several GPUs have 48 KiB, which leaves out the best ones.
    told = any(pool.name == "TACTIC_SHARED_MEMORY" for pool in config._pools)
    exact = config._hardware_compatibility_level.name == "NONE"
    need(exact or told, "TACTIC_SHARED_MEMORY has no limit beside a hardware compatibility level")


def _built(network: INetworkDefinition, config: IBuilderConfig) -> Built:
    """Build with copies of the weights: the caller's need not outlive the build."""
    flags, names = {f.name for f in config._set}, dict[str, int]()
    constants = network._constant_layers()
    for x in constants if "STRIP_PLAN" in flags else ():
        name = network._weight_names.get(id(x._weights), "")
        x._need(name, "it is stripped, and has no name under which it could be set again")
        names[name] = x._index
    weights = {x._index: x._weights._tensor().clone().view(tuple(x._shape)) for x in constants}
    profiles = tuple(dict(p._ranges) for p in config._profiles)
    return Built(network, profiles, weights, names, "WEIGHT_STREAMING" in flags)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)


def _digest(built: Built) -> str:
    layers = [(type(x).__name__, x._name) for x in built.network._layers]
    text = json.dumps([layers, built.profiles, built.refittable, built.streamed])
    hasher = hashlib.sha256(text.encode())
    for index, values in built.weights.items():
        hasher.update(f"{index} {values.dtype}".encode())
        hasher.update(_bytes(values).numpy().tobytes())
    return hasher.hexdigest()


# --- running ----------------------------------------------------------------------------------


class Runtime(Recorded):
    @api
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> Any:
        built = _BUILT.get(bytes(memoryview(serialized_engine)))
        if built is None:
            self._logger.log(Severity.ERROR, "the plan was not built by this recorder")
            return None
        return self._module.ICudaEngine(built, self._logger)


class ICudaEngine(Recorded):
    def __init__(self, built: Built, logger: ILogger) -> None:
        self._built, self._logger, self._network = built, logger, built.network
        stripped = built.refittable.values()
        self._weights = {i: w for i, w in built.weights.items() if i not in stripped}
        tensors = (*self._network._inputs, *self._network._outputs)
        self._tensors: dict[str, ITensor] = {t._name: t for t in tensors}
        self._aliases = networks.aliases(self._network)
        self._contexts = 0

    num_io_tensors = Attribute(read=lambda e: len(e._tensors))
    device_memory_size_v2 = Attribute(read=lambda e: SCRATCH)
    weight_streaming_budget_v2 = Attribute()
    streamable_weights_size = Attribute(read=lambda e: e._streamable())

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return self._tensors[name]._type[0]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return SCRATCH if profile_index else LEAST_SCRATCH

    def get_aliased_input_tensor(self, name: str) -> Any:
        return self._aliases.get(name)

    def _changed(self, member: str) -> None:
        need(not self._contexts, f"{member} is set before there are execution contexts")

    def _streamable(self) -> int:
        return sum(t.nbytes for t in self._weights.values()) * self._built.streamed

    def _streams(self) -> bool:
        return (self._weight_streaming_budget_v2 or 0) < self._streamable()

    def create_execution_context(self, strategy: Any = _Strategy.STATIC) -> Any:
        chosen = self._weight_streaming_budget_v2 is not None or not self._streamable()
        need(chosen, "no weight_streaming_budget_v2: TensorRT's own is all memory that is free now")
        self._contexts += 1
        return self._module.IExecutionContext(self, strategy)


class Refitter(Recorded):
    @api
    def __init__(self, engine: ICudaEngine, logger: ILogger) -> None:
        self._engine, self._logger, self._names = engine, logger, engine._built.refittable

    def get_all_weights(self) -> list[str]:
        return list(self._names)

    def get_missing_weights(self) -> list[str]:
        return self._missing()

    def _missing(self) -> list[str]:
        return [n for n, index in self._names.items() if index not in self._engine._weights]

    def get_weights_prototype(self, weights_name: str) -> Any:
        weights = self._engine._network._layers[self._names[weights_name]]._weights
        return self._module.Weights(weights._dtype, 0, weights._count)

    def set_named_weights(self, name: str, weights: Weights, location: Any) -> bool:
        index = self._names[name]
        built = self._engine._built.weights[index]
        if not torch.equal(_bytes(weights._tensor()), _bytes(built)):
            self._logger.log(Severity.ERROR, f"{name}: not the weights that it was built with")
            return False
        self._engine._weights[index] = built
        return True

    def refit_cuda_engine(self) -> bool:
        return not self._missing()


class IExecutionContext(Recorded):
    """Shapes, addresses and a profile of one engine."""

    def __init__(self, engine: ICudaEngine, strategy: Any) -> None:
        self._engine, self._profile = engine, 0
        self._memory = 0 if strategy is _Strategy.USER_MANAGED else SCRATCH
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._exchange: Exchange | None = None
        #: streams on which it ran
        self._streams: set[int] = set()

    def set_communicator(self, communicator: Any) -> bool:
        """Set what is exchanged by; it waits for the other ranks, as that of version 11 does."""
        self._exchange = exchange_of(communicator)
        if self._exchange is None:
            return self._refuse("no communicator lies there")
        self._exchange(torch.zeros(1))
        return True

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < len(self._engine._built.profiles):
            return self._refuse(f"there is no profile {profile_index}")
        self._profile = profile_index
        self._shapes.clear()
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self._memory = size

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        tensor = self._inputs().get(name)
        if tensor is None:
            return self._refuse(f"no input is called {name}")
        given = tuple(int(d) for d in shape)
        # An engine of static shapes needs no profile.
        profiles = self._engine._built.profiles
        ranges = profiles[self._profile] if profiles else {}
        low, _, high = ranges.get(name, (tensor._dims,) * 3)
        if len(given) != len(low) or not all(a <= d <= b for a, d, b in zip(low, given, high)):
            span = f"{list(low)} to {list(high)}"
            return self._refuse(f"{name}: {list(given)} is outside profile {self._profile}, {span}")
        self._shapes[name] = given
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine._tensors or not memory:
            return self._refuse(f"no tensor is called {name}, or it lies nowhere")
        self._addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        """Return inputs without a shape; RuntimeError, as the binding's, on shapes that differ."""
        sizes: dict[str, int] = {}
        try:
            for name, shape in self._shapes.items():
                self._engine._tensors[name]._agree(shape, sizes)
        except RuleError as e:
            raise RuntimeError(str(e)) from e
        return self._shapeless()

    def execute_async_v3(self, stream_handle: int) -> bool:
        try:
            self._check(stream_handle)
            inputs = {
                n: memory_at(self._addresses[n], t._type[0], self._shape(n))
                for n, t in self._inputs().items()
            }
            network = self._engine._network
            network._constants = dict(self._engine._weights)
            made = networks.execute(network, inputs, self._exchange)
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

    def _shapeless(self) -> list[str]:
        return [n for n, t in self._inputs().items() if n not in self._shapes and -1 in t._dims]

    def _check(self, stream: int) -> None:
        """Check what must hold before a step, or before it is captured."""
        engine = self._engine
        lacking = [n for n in engine._tensors if n not in self._addresses]
        need(not lacking, f"no address for {', '.join(lacking)}")
        room = SCRATCH if self._profile or not engine._built.profiles else LEAST_SCRATCH
        need(self._memory >= room, f"{self._memory} bytes of device memory, {room} are needed")
        stripped = set(engine._built.refittable.values()) - engine._weights.keys()
        need(not stripped, f"{len(stripped)} weights were stripped and not set again")
        need(not self._shapeless(), f"no shape for {', '.join(self._shapeless())}")
        alone = networks.ranks_of(engine._network) > 1 and self._exchange is None
        need(not alone, "no communicator, by which ranks exchange")
        self._check_places()
        if engine._module._capturing:
            said = "weights are streamed: the step waits, and cannot be captured"
            need(not engine._streams(), said)
            said = f"stream {stream}: its first step makes events, and cannot be captured"
            need(stream in self._streams, said)

    def _check_places(self) -> None:
        spans = {}
        for n, t in self._inputs().items():
            size = prod(self._shape(n)) * TORCH[t._type[0]].itemsize
            spans[n] = range(self._addresses[n], self._addresses[n] + size)
        for name in sorted(self._engine._tensors.keys() - spans.keys()):
            at, source = self._addresses[name], self._engine._aliases.get(name)
            same = not source or at == self._addresses[source]
            need(same, f"{name} is {source} updated in place: give both one address")
            inside = [n for n, span in spans.items() if at in span and not source]
            need(not inside, f"{name} lies over {', '.join(inside)}")

    def _refuse(self, message: str) -> bool:
        self._engine._logger.log(Severity.ERROR, message)
        return False
