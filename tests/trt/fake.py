"""A stand-in for the `tensorrt` module over onnxruntime: networks are parsed, kept as plans, and
run on the CPU. It refuses what TensorRT refuses of a runtime: shapes outside of a profile, tensors
without an address, caches that are not updated in place, too little scratch memory, and to capture
what cannot be captured. Of a network it checks nothing."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod
from types import ModuleType
from typing import Any

import onnx
import torch

from g4ir.backends.trt.dialect import COLLECTIVE
from tests.trt.segments import Exchange, Segment, computed, segments

VERSION = "11.4.0"
#: bytes of scratch memory that every engine asks for, and those of its first profile
SCRATCH, LEAST_SCRATCH = 4096, 1024

DataType = Enum("DataType", "FLOAT HALF BF16 INT32 INT64 BOOL")
Severity = Enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")
BuilderFlag = Enum("BuilderFlag", "TF32")
MemoryPoolType = Enum("MemoryPoolType", "WORKSPACE")
ProfilingVerbosity = Enum("ProfilingVerbosity", "DETAILED")
ExecutionContextAllocationStrategy = Enum(
    "ExecutionContextAllocationStrategy", "STATIC USER_MANAGED"
)
#: element type -> DataType, and torch's
ELEMENTS: Mapping[int, tuple[Any, torch.dtype]] = {
    onnx.TensorProto.FLOAT: (DataType.FLOAT, torch.float32),
    onnx.TensorProto.FLOAT16: (DataType.HALF, torch.float16),
    onnx.TensorProto.BFLOAT16: (DataType.BF16, torch.bfloat16),
    onnx.TensorProto.INT32: (DataType.INT32, torch.int32),
    onnx.TensorProto.INT64: (DataType.INT64, torch.int64),
    onnx.TensorProto.BOOL: (DataType.BOOL, torch.bool),
}
Shape = tuple[int, ...]


class RefusedError(ValueError):
    """What TensorRT would log, and refuse."""


def need(condition: Any, message: str) -> None:
    if not condition:
        raise RefusedError(message)


# --- what a caller derives from ---------------------------------------------------------------


class ILogger:
    Severity = Severity

    def log(self, severity: Any, msg: str) -> None:
        raise NotImplementedError


class IProgressMonitor:
    pass


class IStreamWriter:
    write: Any = NotImplemented


# --- building ---------------------------------------------------------------------------------


class INetworkDefinition:
    model = onnx.ModelProto()

    @property
    def num_layers(self) -> int:
        return len(self.model.graph.node)

    def get_layer(self, index: int) -> Any:
        return self.model.graph.node[index]


class OnnxParser:
    num_errors = 0

    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self.network, self.logger = network, logger

    def load_model_proto(self, data: bytes) -> bool:
        self.model = onnx.ModelProto.FromString(data)
        self.weights = {t.name: t for t in self.model.graph.initializer}
        return True

    def load_initializer(self, name: str, address: int, nbytes: int) -> bool:
        t = self.weights[name]
        t.ClearField("external_data")
        t.data_location = onnx.TensorProto.DEFAULT
        t.raw_data = ctypes.string_at(address, nbytes)
        return True

    def parse_model_proto(self) -> bool:
        self.network.model = self.model
        return True


class IOptimizationProfile:
    def __init__(self) -> None:
        self.ranges: dict[str, list[Shape]] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        shapes = [tuple(map(int, s)) for s in (min, opt, max)]
        need(all(a <= b <= c for a, b, c in zip(*shapes, strict=True)), f"profile: {input}")
        self.ranges[input] = shapes


class ITimingCache:
    """Counts builds; the real one keeps what they timed."""

    def __init__(self, builds: int) -> None:
        self.builds = builds

    def serialize(self) -> bytes:
        return f"timed {self.builds}".encode()


class IBuilderConfig:
    progress_monitor: Any = None
    profiling_verbosity: Any = None

    def __init__(self) -> None:
        self.flags, self.profiles = {BuilderFlag.TF32}, list[IOptimizationProfile]()
        self.timing: ITimingCache | None = None

    def set_flag(self, flag: Any) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        pass

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: Any) -> ITimingCache | None:
        found = re.fullmatch(rb"timed (\d+)|", bytes(serialized_timing_cache))
        return ITimingCache(int(found[1] or 0)) if found else None

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self.timing = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self.timing


@dataclass(frozen=True)
class Plan:
    """What a plan holds."""

    version: str
    profiles: list[dict[str, list[Shape]]]
    model: onnx.ModelProto

    def write(self) -> bytes:
        facts = {"version": self.version, "profiles": self.profiles}
        model = self.model.SerializeToString(deterministic=True)
        return b"fake plan" + json.dumps(facts).encode() + b"\n" + model

    @classmethod
    def read(cls, data: bytes) -> Plan:
        need(data.startswith(b"fake plan"), "the plan was not built by this library")
        facts, _, model = data.removeprefix(b"fake plan").partition(b"\n")
        return cls(model=onnx.ModelProto.FromString(model), **json.loads(facts))


class Builder:
    max_threads = 1

    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def create_network(self) -> INetworkDefinition:
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network_to_stream(
        self, network: INetworkDefinition, config: IBuilderConfig, writer: Any
    ) -> bool:
        try:
            check_config(network, config)
            if config.timing:
                config.timing.builds += 1
            going = reported(config.progress_monitor, network.num_layers)
            need(going, "the build was cancelled")
        except RefusedError as e:
            self.logger.log(Severity.ERROR, str(e))
            return False
        profiles = [p.ranges for p in config.profiles]
        plan = Plan(VERSION, profiles, network.model).write()
        half = len(plan) // 2  # a writer is called more than once
        return all(writer.write(piece) == len(piece) for piece in (plan[:half], plan[half:]))


def reported(monitor: Any, steps: int) -> bool:
    monitor.phase_start("Building the network", None, steps)
    going = all(monitor.step_complete("Building the network", i) for i in range(steps))
    monitor.phase_finish("Building the network")
    return going


def check_config(network: INetworkDefinition, config: IBuilderConfig) -> None:
    need(BuilderFlag.TF32 not in config.flags, "what is fp32 in the ops is fp32")
    dynamic = [v for v in network.model.graph.input if -1 in dims_of(v)]
    need(config.profiles or not dynamic, "inputs have dims of -1 and there is no profile")
    for p in config.profiles:
        for v in dynamic:
            fits = all(agree(dims_of(v), s) for s in p.ranges.get(v.name, [()]))
            need(fits, f"profile: {v.name} has no range, or one that does not fit")


def dims_of(v: onnx.ValueInfoProto) -> Shape:
    return tuple(-1 if d.dim_param else d.dim_value for d in v.type.tensor_type.shape.dim)


def agree(one: Shape, other: Shape) -> bool:
    return len(one) == len(other) and all(a in (-1, b) for a, b in zip(one, other, strict=True))


# --- running ----------------------------------------------------------------------------------

#: address of a communicator -> what is exchanged by
_EXCHANGES: dict[int, Exchange] = {}


def communicator(exchange: Exchange) -> int:
    """Return the address of a communicator, which a capsule holds that contexts are given."""
    address = len(_EXCHANGES) + 1
    _EXCHANGES[address] = exchange
    return address


def exchange_of(capsule: Any) -> Exchange | None:
    """Return what is exchanged by; None where a capsule holds no address of `communicator`."""
    name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return _EXCHANGES.get(pointer(capsule, name(capsule)))


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        try:
            return ICudaEngine(Plan.read(bytes(memoryview(serialized_engine))), self.logger)
        except RefusedError as e:
            self.logger.log(Severity.ERROR, str(e))
            return None


class ICudaEngine:
    device_memory_size_v2 = SCRATCH

    def __init__(self, plan: Plan, logger: ILogger) -> None:
        self.plan, self.logger, g = plan, logger, plan.model.graph
        self.inputs, self.outputs = ({v.name: v for v in side} for side in (g.input, g.output))
        self.tensors = {**self.inputs, **self.outputs}
        updates = [n for n in g.node if n.op_type == "TensorScatter"]
        self.aliases = {n.output[0]: n.input[0] for n in updates if n.output[0] in self.outputs}

    @cached_property
    def parts(self) -> list[Segment]:
        return [*segments(self.plan.model)]

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return [*self.tensors][index]

    def get_tensor_dtype(self, name: str) -> Any:
        return ELEMENTS[self.tensors[name].type.tensor_type.elem_type][0]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return SCRATCH if profile_index else LEAST_SCRATCH

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def create_execution_context(self, strategy: Any = None) -> IExecutionContext:
        return IExecutionContext(self, strategy)


class IExecutionContext:
    #: whether a step is captured now
    capturing = False

    def __init__(self, engine: ICudaEngine, strategy: Any) -> None:
        self.engine, self.profile = engine, 0
        managed = strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        self.memory = 0 if managed else SCRATCH
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}
        self.exchange: Exchange | None = None
        #: streams on which it ran
        self.streams: set[int] = set()

    def set_communicator(self, communicator: Any) -> bool:
        """Set what is exchanged by; it waits for the other ranks."""
        self.exchange = exchange_of(communicator)
        if self.exchange is None:
            return self._refuse("no communicator lies there")
        self.exchange(torch.zeros(1))
        return True

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < len(self.engine.plan.profiles):
            return self._refuse(f"there is no profile {profile_index}")
        self.profile = profile_index
        self.shapes.clear()
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self.memory = size

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        if name not in self.engine.inputs:
            return self._refuse(f"no input is called {name}")
        given, profiles = tuple(map(int, shape)), self.engine.plan.profiles
        ranges = profiles[self.profile] if profiles else {}
        low, _, high = ranges.get(name, [dims_of(self.engine.inputs[name])] * 3)
        if len(given) != len(low) or not all(a <= d <= b for a, d, b in zip(low, given, high)):
            span = f"{[*low]} to {[*high]}"
            return self._refuse(f"{name}: {[*given]} is outside profile {self.profile}, {span}")
        self.shapes[name] = given
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self.engine.tensors or not memory:
            return self._refuse(f"no tensor is called {name}, or it lies nowhere")
        self.addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        """Return inputs without a shape; RuntimeError, as the binding's, on shapes that differ."""
        sizes: dict[str, int] = {}
        for name, shape in self.shapes.items():
            dims = self.engine.inputs[name].type.tensor_type.shape.dim
            for d, size in zip(dims, shape, strict=True):
                if d.dim_param and sizes.setdefault(d.dim_param, size) != size:
                    raise RuntimeError(f"{name}: {d.dim_param} is {size}, and elsewhere not")
        return self._shapeless()

    def execute_async_v3(self, stream_handle: int) -> bool:
        try:
            self._check(stream_handle)
            feeds = {name: self._read(name) for name in self.engine.inputs}
            made = computed(self.engine.parts, feeds, self.exchange)
        except (RefusedError, RuntimeError) as e:
            return self._refuse(str(e))
        for name in self.engine.outputs:
            value = made[name].contiguous()
            ctypes.memmove(self.addresses[name], value.data_ptr(), value.nbytes)
        self.streams.add(stream_handle)
        return True

    def _read(self, name: str) -> torch.Tensor:
        dtype, shape = ELEMENTS[self._element(name)][1], self._shape(name)
        size = prod(shape) * dtype.itemsize
        raw = bytearray(ctypes.string_at(self.addresses[name], size))
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)

    def _element(self, name: str) -> int:
        return int(self.engine.tensors[name].type.tensor_type.elem_type)

    def _shape(self, name: str) -> Shape:
        return self.shapes.get(name) or dims_of(self.engine.inputs[name])

    def _shapeless(self) -> list[str]:
        dynamic = (n for n, v in self.engine.inputs.items() if -1 in dims_of(v))
        return [n for n in dynamic if n not in self.shapes]

    def _check(self, stream: int) -> None:
        """Check what must hold before a step, or before it is captured."""
        engine = self.engine
        absent = [n for n in engine.tensors if n not in self.addresses]
        need(not absent, f"no address for {', '.join(absent)}")
        least = SCRATCH if self.profile or not engine.plan.profiles else LEAST_SCRATCH
        need(self.memory >= least, f"{self.memory} bytes of device memory, {least} are needed")
        need(not self._shapeless(), f"no shape for {', '.join(self._shapeless())}")
        several = any(n.op_type == COLLECTIVE for n in engine.plan.model.graph.node)
        need(self.exchange or not several, "no communicator, by which ranks exchange")
        self._check_addresses()
        if IExecutionContext.capturing:
            said = f"stream {stream}: its first step makes events, and cannot be captured"
            need(stream in self.streams, said)

    def _check_addresses(self) -> None:
        spans = {}
        for n in self.engine.inputs:
            size = prod(self._shape(n)) * ELEMENTS[self._element(n)][1].itemsize
            spans[n] = range(self.addresses[n], self.addresses[n] + size)
        for name in self.engine.outputs:
            at, source = self.addresses[name], self.engine.aliases.get(name)
            same = not source or at == self.addresses[source]
            need(same, f"{name} is {source} updated in place: give both one address")
            inside = [n for n, span in spans.items() if at in span and not source]
            need(not inside, f"{name} lies over {', '.join(inside)}")

    def _refuse(self, message: str) -> bool:
        self.engine.logger.log(Severity.ERROR, message)
        return False


# --- the module -------------------------------------------------------------------------------

PARTS: Iterable[Any] = (
    *(DataType, BuilderFlag, MemoryPoolType, ProfilingVerbosity),
    *(ExecutionContextAllocationStrategy, ILogger, IProgressMonitor, IStreamWriter),
    *(INetworkDefinition, OnnxParser, IOptimizationProfile, ITimingCache, IBuilderConfig),
    *(Builder, Runtime, ICudaEngine, IExecutionContext),
)


def tensorrt() -> Any:
    """Return the module."""
    module: Any = ModuleType("tensorrt")
    module.__version__ = VERSION
    for part in PARTS:
        setattr(module, part.__name__, part)
    return module


def recording(work: Callable[[], None]) -> Callable[[], None]:
    """Run a step, and run it again under the rules of a CUDA graph."""
    work()
    IExecutionContext.capturing = True
    try:
        work()
    finally:
        IExecutionContext.capturing = False
    return work
