"""Runs TensorRT engines, with KV caches in torch memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from g4ir.backends.base import GraphRun, Runtime, Tensors
from g4ir.backends.cuda.graph import Captured, Record, WithFallback
from g4ir.backends.primitives.network import (
    BLOCK_IDS,
    NO_BLOCK,
    ROWS,
    SLOTS,
    TURNED,
    full_slots,
    logit_rows,
)
from g4ir.backends.primitives.runtime import NetworkCaches
from g4ir.errors import EngineError
from g4ir.ir.graph import Program
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT
from g4ir.ops.types import torch_dtype
from g4ir.plan.engine_limits import Limits
from g4ir.weights.pack import ParamSource

from .host import DTYPES, Api
from .interface import MAX_VERIFIED, Interface, phase_of
from .kernel_cache import KernelCache

Feeds = dict[str, torch.Tensor]
#: returns this rank's NCCL communicator; all ranks call it at the same time
Communicator = Callable[[], Any]
#: minimum full-length cache slots that a step reads, if max_seq allows
MIN_SLOTS = 256
#: phases captured as CUDA graphs: few tokens, in few sizes
RECORDED = ("decode", VERIFY, DRAFT)


def step_slots(tokens: int, max_seq: int) -> int:
    """Return the cache slots that a step reads for a context of `tokens`: 256, 384, 512, 768, 1024,
    ..., at most max_seq; few sizes, since each needs its own CUDA graph."""
    size = MIN_SLOTS
    while size < tokens:
        size += size // 2 if size & (size - 1) == 0 else size // 3
    return min(size, max_seq)


@dataclass(frozen=True)
class Opened:
    """A deserialised engine; EngineError if its tensors differ from the interface."""

    api: Api
    engine: Any
    log: Any
    io: Interface
    device: str
    #: stream of the steps (host.Stream)
    stream: Any
    #: kernel cache of a library that compiles kernels at load
    kernels: KernelCache | None = None

    def __post_init__(self) -> None:
        check_engine(self.api, self.engine, self.io)


class TrtSteps:
    """An engine with an execution context per profile; steps run over sessions' KV caches, and
    steps of few tokens are captured as CUDA graphs. A tower has one context and no caches."""

    def __init__(self, opened: Opened, limits: Limits, record: Record | None = None) -> None:
        self.api, self.engine, self.log = opened.api, opened.engine, opened.log
        self.io, self.device, self.limits = opened.io, opened.device, limits
        self.stream, self.kernels = opened.stream, opened.kernels
        #: lock of a step: all threads' sessions share contexts and scratch memory
        self.turn = threading.RLock()
        #: captures a step as a CUDA graph; None: kernels are launched one by one
        self.record = WithFallback(record) if record else None
        recorded = [p for p in self.io.profiles if phase_of(p) in RECORDED]
        #: scratch memory of the phases in RECORDED, whose steps never run concurrently
        self.scratch = self._scratch(*recorded) if recorded else None
        self.slots = torch.arange(full_slots(limits), device=self.device)
        #: (sequences, tokens) -> block ids of steps of few tokens without images (NO_BLOCK);
        #: captured steps reference them
        self.no_blocks: dict[tuple[int, int], torch.Tensor] = {}
        self.communicator: Communicator | None = None
        #: contexts without a communicator yet
        self.unlinked: list[Any] = []
        self.contexts = {profile: self._context(profile) for profile in self.io.profiles or ("",)}

    # --- contexts and memory ------------------------------------------------------------------

    def _context(self, profile: str) -> Any:
        """Return an execution context of a profile. Outside of RECORDED it gets scratch memory,
        which may be gigabytes, only while a step runs."""
        recorded = phase_of(profile) in RECORDED
        if self.kernels:
            context = self.kernels.context(self.engine, profile or "a tower", recorded)
        else:
            strategy = self.api.trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context = self.engine.create_execution_context(strategy)
        if context is None:
            raise self._error(
                f"no execution context for {profile or 'a tower'}", "free device memory"
            )
        if profile:
            with self.stream.handle() as stream:
                if not context.set_optimization_profile_async(self.io.index(profile), stream):
                    raise self._error(f"no profile for {profile}")
        if self.scratch is not None and recorded:
            lend(context, self.scratch)
        return context

    def _scratch(self, *profiles: str) -> torch.Tensor:
        """Allocate scratch memory for the largest of these profiles, or for an engine without
        profiles."""
        of_profile = self.engine.get_device_memory_size_for_profile_v2
        sizes = [of_profile(self.io.index(p)) for p in profiles if p]
        size = max(sizes) if sizes else self.engine.device_memory_size_v2
        return torch.empty(max(1, size), dtype=torch.uint8, device=self.device)

    def link(self, communicator: Communicator) -> None:
        """Set the function that returns the communicator; contexts get it at the next step."""
        self.communicator, self.unlinked = communicator, [*self.contexts.values()]

    def _connect(self) -> None:
        """Set the communicator of new contexts. TensorRT blocks until all ranks do so. So it is
        done at a context's first step, after all checks that could fail on one rank alone."""
        if not self.communicator or not self.unlinked:
            return
        communicator = self.communicator()
        for context in self.unlinked:
            if not context.set_communicator(communicator):
                raise self._error("it rejects the communicator", "start all ranks again")
        self.unlinked.clear()

    # --- steps --------------------------------------------------------------------------------

    def step(self, phase: str, feeds: Feeds, state: NetworkCaches, tokens: int) -> Feeds:
        """Run a step with the smallest profile that covers `tokens`, the maximum length after the
        step; return outputs by name."""
        self._connect()
        profile = self.io.covering(phase, tokens)
        slots = self.io.span(profile) or step_slots(tokens, self.limits.max_seq)
        recorded = phase_of(profile) in RECORDED
        if self.record and recorded:
            return self._replay(profile, feeds, state, slots)
        outputs = self._outputs(feeds)
        with nullcontext() if recorded else self._lent(profile):
            self._step(self.contexts[profile], feeds, state, slots, outputs)
        return outputs

    def encode_static(self, feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run a tower; return its one output."""
        (name,) = self.io.outputs
        output = self._output(name, {})
        with self._lent(""):
            self._execute(self.contexts[""], dict(feeds), {name: output})
        return output

    @contextmanager
    def _lent(self, profile: str) -> Iterator[None]:
        """Context manager that lends scratch memory to the execution context of a profile."""
        scratch = self._scratch(profile)
        lend(self.contexts[profile], scratch)
        yield

    def _replay(self, profile: str, feeds: Feeds, state: NetworkCaches, slots: int) -> Feeds:
        """Replay a step as a CUDA graph: one for each session's caches, profile, visible slots and
        number of tokens, with its own execution context, which must not change while the graph is
        in use."""
        assert self.record
        record = self.record

        def make() -> Captured[Feeds]:
            context, outputs = self._context(profile), self._outputs(feeds)
            self.unlinked.append(context)
            self._connect()

            def step(inputs: Feeds) -> Feeds:
                self._step(context, inputs, state, slots, outputs)
                return outputs

            return Captured(step, feeds, record)

        key = profile, slots, feeds["positions"].shape[1]
        return state.captured.get(Captured, key, make).replay(feeds)

    def _outputs(self, feeds: Feeds) -> Feeds:
        batch, size = feeds["positions"].shape
        batch = len(feeds["ends"]) if "ends" in feeds else batch
        asked = feeds[ROWS].shape[1] if ROWS in feeds else 1
        dims = {"B": batch, "S": size, "R": asked}
        return {n: self._output(n, dims) for n in self.io.outputs if n not in self.io.aliased}

    def _output(self, name: str, dims: Mapping[str, int]) -> torch.Tensor:
        dtype = torch_dtype(self.io.outputs[name].dtype)
        return torch.empty(self.io.shape(name, dims), dtype=dtype, device=self.device)

    def _step(
        self, context: Any, feeds: Feeds, state: NetworkCaches, slots: int, outputs: Feeds
    ) -> None:
        inputs = {**state.caches, TURNED: state.turned, SLOTS: self.slots[:slots], **feeds}
        if BLOCK_IDS in self.io.inputs and BLOCK_IDS not in feeds:
            inputs[BLOCK_IDS] = self._no_blocks(*feeds["positions"].shape)
        caches = {o: state.caches[i] for o, i in self.io.aliased.items()}
        self._execute(context, inputs, caches | outputs)

    def _no_blocks(self, batch: int, size: int) -> torch.Tensor:
        key = batch, size
        if key in self.no_blocks:
            return self.no_blocks[key]
        ids = torch.full(key, NO_BLOCK, device=self.device)
        return self.no_blocks.setdefault(key, ids) if size <= MAX_VERIFIED else ids

    def _execute(self, context: Any, inputs: Feeds, outputs: Feeds) -> None:
        contiguous = {name: inputs[name].contiguous() for name in self.io.inputs}
        with self.stream.handle() as stream:
            self._bind(context, contiguous, outputs)
            if (
                self.kernels
                and self.stream.recording()
                and not context.is_stream_capturable(stream)
            ):
                raise self._error("it allocates memory in a step, which cannot be recorded")
            if not context.execute_async_v3(stream):
                recording = self.stream.recording()
                fix = ("load the engine with cuda_graph=False to see the error itself",)
                raise self._error("a step failed", *(fix if recording else ()))

    def _bind(self, context: Any, inputs: Feeds, outputs: Feeds) -> None:
        for name, t in (*inputs.items(), *outputs.items()):
            if t.data_ptr() % self.stream.alignment:
                raise EngineError(
                    f"TensorRT engine: {name} lies at {t.data_ptr():#x}, which is no multiple of "
                    f"{self.stream.alignment}: feed a tensor that is not a view into another"
                )
        for name, t in inputs.items():
            fits = context.set_input_shape(name, tuple(t.shape))
            if not fits or not context.set_tensor_address(name, t.data_ptr()):
                raise self._error(
                    f"it rejects the input {name} {list(t.shape)}", "build it with higher limits"
                )
        for name, t in outputs.items():
            if not context.set_tensor_address(name, t.data_ptr()):
                raise self._error(f"it rejects the output {name} {list(t.shape)}")
        try:
            missing = context.infer_shapes()
        except RuntimeError as e:  # the binding raises this for a result of -1
            raise self._error(f"shape inference fails for this step ({e})") from e
        if missing:
            raise self._error(f"shapes or addresses are missing: {', '.join(missing)}")

    def _error(self, problem: str, fix: str = "build it again") -> EngineError:
        return EngineError(f"TensorRT engine: {problem}: {self.log.reason()}; {fix}")


def lend(context: Any, scratch: torch.Tensor) -> None:
    """Set an execution context's scratch memory, which the caller keeps alive."""
    context.set_device_memory(scratch.data_ptr(), scratch.numel())


class TrtRuntime(TrtSteps, Runtime):
    """A loaded engine of the TensorRT backend. `open_engine` opens the engines of towers and of a
    draft step by name, on first use (that of a draft step, with several ranks, at `link`)."""

    def __init__(
        self,
        opened: Opened,
        limits: Limits,
        record: Record | None,
        params: ParamSource,
        open_engine: Callable[[str], Opened],
        program: Program,
    ) -> None:
        super().__init__(opened, limits, record)
        self.source, self.open_engine, self.recorder = params, open_engine, record
        self.program = program
        self.extra_engines: dict[str, TrtSteps] = {}
        if self.kernels:
            self.kernels.keep()

    def _extra_engine(self, name: str) -> TrtSteps:
        """Return the engine of a tower or of the draft step, which only reads the KV caches."""
        if name not in self.extra_engines:
            self.extra_engines[name] = TrtSteps(self.open_engine(name), self.limits, self.recorder)
            if self.communicator and name == DRAFT:
                self.extra_engines[name].link(self.communicator)
        return self.extra_engines[name]

    def link(self, communicator: Communicator) -> None:
        super().link(communicator)
        if DRAFT in self.program.graphs:
            self._extra_engine(DRAFT)  # eagerly: a later failure of one rank would deadlock

    def new_state(self, batch: int) -> NetworkCaches:
        types = {name: self.io.inputs[name] for name in self.io.aliased.values()}
        return NetworkCaches(types, self.io.rings, batch, self.limits, self.device)

    def run(self, step: GraphRun, state: NetworkCaches) -> Tensors | None:
        phase, feeds, context = step.phase, step.feeds, step.context
        with self.turn:
            if phase == DRAFT:
                return self._extra_engine(DRAFT).step(phase, feeds, state, context)
            if ROWS in self.io.inputs:
                feeds = {**feeds, ROWS: logit_rows(phase, feeds)}
            state.turn(feeds["positions"])
            outputs = self.step(phase, feeds, state, context)
            return step.take(outputs)

    def encode(self, tower: str, feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with self.turn:
            return self._extra_engine(tower).encode_static(feeds)

    def close(self) -> None:
        if self.kernels and self.engine:
            self.kernels.keep()
        self.contexts.clear()
        self.extra_engines.clear()
        self.engine = None
        self.source.close()


# --- engines ----------------------------------------------------------------------------------


def check_engine(api: Api, engine: Any, io: Interface) -> None:
    """Raise EngineError if the engine's tensors differ from the interface."""

    def alike(subject: str, actual: str, expected: str) -> None:
        if actual != expected:
            raise EngineError(
                f"TensorRT engine: {subject} {actual}, expected {expected}; build it again"
            )

    names = sorted(engine.get_tensor_name(i) for i in range(engine.num_io_tensors))
    described = {**io.inputs, **io.outputs}
    alike("its tensors are", ", ".join(names), ", ".join(sorted(described)))
    types = {getattr(api.trt.DataType, kind): dtype for dtype, kind in DTYPES.items()}
    for name, t in described.items():
        alike(f"{name} is", str(types.get(engine.get_tensor_dtype(name))), t.dtype)
    for out, source in io.aliased.items():
        actual = engine.get_aliased_input_tensor(out)
        alike(f"{out} lies at the address of", actual or "nothing else", source)


def deserialize(api: Api, plan: Any, log: Any) -> Any:
    """Deserialise a plan (bytes or mmap); EngineError with TensorRT's message."""
    engine = api.trt.Runtime(log).deserialize_cuda_engine(plan)
    if engine is None:
        name = api.library.name
        raise EngineError(
            f"{name} {api.version} does not take the plan: {log.reason()}; build the engine again "
            f"with this {name} {'for' if api.library.ahead_of_time else 'on'} this GPU"
        )
    return engine
