"""Interfaces of a backend, which compiles a program into an engine directory, and of the runtime
that loads the directory and runs its graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from g4ir.errors import InputError, MissingError
from g4ir.ir.graph import Program
from g4ir.ops.types import torch
from g4ir.parallel.group import Group
from g4ir.parallel.table import Share
from g4ir.passes import PassCounts
from g4ir.plan.backend import PlannedBackend
from g4ir.plan.backend import Setting as Setting
from g4ir.plan.engine_limits import Limits
from g4ir.plan.options import BuildConfig
from g4ir.ui.progress import Progress
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.pack import Packing, ParamSource, local_params

Tensors = Mapping[str, "torch.Tensor"]
#: token ids i64[B,S] -> the inputs of a text graph that depend on them (embeddings)
Embed = Callable[["torch.Tensor"], "dict[str, torch.Tensor]"]
#: callback(name, value) for the values that a graph computes
Watch = Callable[[str, "torch.Tensor"], None]


@dataclass(frozen=True)
class GraphRun:
    """One run of the graph `phase` on its inputs `feeds`. `context`: length of the longest sequence
    after it; `logits`: whether the outputs are needed; `watch`: called with the values that the
    backend can expose, in order."""

    phase: str
    feeds: dict[str, torch.Tensor]
    context: int
    logits: bool = True
    watch: Watch | None = None

    def take(self, outputs: Tensors) -> Tensors | None:
        """For runtimes that expose no values but the outputs: call `watch` with each output; return
        the outputs, or None unless `logits`."""
        if self.watch:
            for name, t in outputs.items():
                self.watch(name, t)
        return outputs if self.logits else None


@dataclass(frozen=True)
class DeviceChoice:
    """Settings of a loop that samples on the device: the methods that its sequences need
    (sampling.METHODS), and token ids that are never sampled (`suppress`)."""

    methods: tuple[str, ...]
    suppress: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nothing:
    """Manifest record of a backend that compiles nothing."""


@dataclass(frozen=True, eq=False)
class CacheSnapshot:
    """Copies of the KV cache slots that sequences of at most `context` tokens use, of the whole
    batch: cache name -> copy."""

    context: int
    tensors: Tensors


class State(Protocol):
    """KV caches of one session."""

    #: i64 [batch]: slot of each sequence's LoRA adapter, -1 for none. None: not supported
    adapters: Any = None

    @abstractmethod
    def views(self, context: int) -> Tensors:
        """Return views of the slots in use for sequences of at most `context` tokens."""

    @abstractmethod
    def row(self, index: int, context: int) -> Tensors:
        """Return views of one sequence's slots; shapes do not depend on the batch size."""

    @abstractmethod
    def nbytes(self) -> int:
        """Return the allocated bytes."""

    @abstractmethod
    def zero(self) -> None: ...

    def clear(self, row: int, context: int) -> None:
        """Zero the slots in use of one sequence of at most `context` tokens."""
        for t in self.row(row, context).values():
            t.zero_()

    def copy(self, source: Any, start: int, row: int, context: int) -> None:
        """Copy the slots in use of sequence number `start` of `source`, which may be this state, to
        sequence number `row`; both have at most `context` tokens."""
        mine = self.row(row, context)
        for name, t in source.row(start, context).items():
            mine[name].copy_(t)

    def snapshot(self, context: int) -> CacheSnapshot:
        """Return a copy of the slots in use, for `restore`."""
        return CacheSnapshot(context, {name: t.clone() for name, t in self.views(context).items()})

    def restore(self, snapshot: CacheSnapshot) -> None:
        views = self.views(snapshot.context)
        for name, t in snapshot.tensors.items():
            views[name].copy_(t)


class Runtime(Protocol):
    """A loaded engine. The graph `decode` takes one token per sequence, `prefill` a chunk of them.
    By default the host embeds and samples tokens, and `resident` exposes no param, since runtimes
    change the layout of params."""

    #: the packed params that the runtime was loaded from
    source: ParamSource

    def new_state(self, batch: int) -> State: ...

    def run(self, step: GraphRun, state: Any) -> Tensors | None:
        """Run one graph and update the caches in place. Return its outputs (of a decoder's graphs
        `logits` [B, 1 or S, vocab]); None unless `step.logits`."""

    def embed(self, tokens: torch.Tensor, tables: Mapping[str, Any]) -> Tensors | None:
        """Return the outputs of the embed graph for a few tokens i64[B,S], from its `tables`; None
        if the runtime does not compute them, so that the host has to."""
        return None

    def encode(self, tower: str, feeds: Tensors) -> torch.Tensor:
        """Run the graph of the image or audio tower `tower`; return its soft tokens
        [1, N, hidden]."""

    def token_loop(
        self, embed: Embed, state: Any, batch: int, choice: DeviceChoice, tables: Mapping[str, Any]
    ) -> Any:
        """Return a decode loop that samples on the device (cuda/token_loop.py, cpu/step_loop.py),
        or None if the runtime has none. `tables`: params of the embed graph, by name."""
        return None

    def resident(self, param: str) -> torch.Tensor | None:
        """Return a param that is in the runtime's memory in its packed layout; else None."""
        return None

    def close(self) -> None: ...


@dataclass(frozen=True)
class Task:
    """A program and the engine directory to compile it into or load it from."""

    program: Program
    limits: Limits
    device: str
    folder: Path
    params: ParamSource
    progress: Progress
    #: this process's rank and collectives of a tensor-parallel engine; None: single process
    group: Group | None = None
    #: whether weights are copied to huge pages (torch on a CPU)
    huge_pages: bool = False
    #: bytes of the device's memory that the build's `memory` option sets; None: not set
    memory: int | None = None
    #: the manifest's digest at load, empty at build
    digest: str = ""
    #: params without a file: slots of LoRA adapters, written while the engine runs
    added: Tensors = field(default_factory=dict)


class Backend(PlannedBackend, ABC):
    """Compiles and runs programs. By default it compiles nothing and needs nothing."""

    #: whether `compile` needs the packed params in the folder, to refer to them or embed them
    packs_weights: bool = False
    #: whether compiled files (if `machine` is not "any") run only with the torch that built them
    of_torch: bool = True
    #: dataclass as which spec/reader.py reads the record that `compile` returned
    record: Any = Nothing

    def aimed(self, target: str | None) -> Backend:
        """Return this backend for the GPUs of `--target`; None: for the current GPU. InputError if
        unsupported."""
        if target is not None:
            problem = f"--target {target[:40]}: backend {self.name} builds for this machine"
            raise InputError(f"{problem}; leave it out, or give --backend trt")
        return self

    def built(self, record: Mapping[str, Any]) -> Backend:
        """Return this backend configured for an engine whose build wrote this record."""
        return self

    @property
    def location(self) -> str:
        """Where its engines run, as text for messages."""
        return "where it was built"

    def has_device(self, device: str) -> bool:
        """Whether this machine has the device, `cpu` or `cuda`."""
        return device != "cuda" or torch.cuda.is_available()

    def packages(self, device: str) -> tuple[str, ...]:
        """Return the Python packages whose versions its engines depend on."""
        return ("torch",)

    def needs(self, device: str) -> tuple[Callable[[], object], ...]:
        """Return checks of the environment for a build, the requirement that is easiest to satisfy
        first; a check that fails raises MissingError."""
        return ()

    def compile(self, task: Task, settings: Mapping[str, str]) -> dict[str, Any]:
        """Write compiled files into the folder; return their record for the manifest."""
        return {}

    def short(self, program: Program) -> str:
        """Return why compiling needs more memory than this machine has; empty if it does not."""
        return ""

    def repeated_bytes(self, program: Program, settings: Mapping[str, str]) -> int:
        """Return the bytes of packed params that compiled files duplicate."""
        return 0

    def dry_run(self, prepared: Prepared, progress: Progress) -> dict[str, Any]:
        """Check the program for a dry run; return additional keys of its plan. Raises a G4Error if
        a check fails."""
        return {}

    def machine(self, device: str) -> str:
        """Return the instruction set of compiled files as words, the last of which lists flags:
        "cuda sm_90", "x86_64 AVX2 avx2,fma". A machine refuses an engine if the other words differ
        or it lacks a flag. "any": none of this is checked."""
        return "any"

    def machine_of(self, device: str, compiled: Mapping[str, Any]) -> str:
        """Return the instruction set that an engine with this record needs."""
        return self.machine(device)

    def takes_adapters(self, device: str, settings: Mapping[str, str]) -> bool:
        """Whether its engines support LoRA adapters per request, which are added to the graphs at
        load."""
        return False

    def require_adapters(self, model: str, device: str, settings: Mapping[str, str]) -> None:
        """Raise MissingError unless engines of this model take LoRA adapters per request
        (`takes_adapters`)."""
        if not self.takes_adapters(device, settings):
            why = f"programs that {self.name} compiles for {device} take no adapters at load"
            fix = "use --backend torch --device cpu without --set programs=inductor, or merge one"
            raise MissingError(f"{model}: {why}; {fix} (g4ir build --adapter DIR)")

    def has_native_code(self, compiled: Mapping[str, Any]) -> bool:
        """Whether a record names native code, which runs with the user's permissions."""
        return False

    @abstractmethod
    def load(self, task: Task, record: Any, cuda_graph: bool = True) -> Runtime:
        """Return a runtime; `record` has the type `self.record`. EngineError if compiled files do
        not match the program."""


@dataclass(frozen=True)
class Prepared:
    """A build up to compilation, the input of `write_engine` (builder/build.py), which also checks
    the disk's free space."""

    config: BuildConfig
    backend: Backend
    packing: Packing
    #: number of edits by each pass in each graph
    acted: PassCounts
    source: Checkpoint
    #: manifest's record of how weights are stored (one of WEIGHTS of artefact/directory.py); None
    #: in a dry run without weights
    weights: Any
    #: side files of the checkpoint (tokenizer, configs), name -> content
    side_files: Future[Mapping[str, bytes]]
    #: dry run: why the engine does not fit its device, or empty
    short: str = ""
    #: bytes of the device's memory that the build's `memory` option sets; None: not set
    memory: int | None = None
    #: calibration text for quantised weights (builder/calibration.py), of --calibrate or --bits;
    #: None: none
    calibration: Any = None

    def param_bytes(self) -> int:
        """Count the bytes of the packed params, embedding tables included."""
        return sum(v.type.nbytes() for v in self.packing.program.params().values())

    def share(self, rank: int) -> Share:
        """Return the description of a rank's share of the weights."""
        return Share(self.config.sharding, rank)

    def written_bytes(self) -> int:
        """Count the bytes of the packed params of all ranks; shared params count once."""
        sizes = {name: v.type.nbytes() for name, v in self.packing.program.params().items()}
        rank_params, ranks = local_params(self.packing, self.share(0)), self.config.ranks
        return sum(size * (ranks if name in rank_params else 1) for name, size in sizes.items())

    def cache_bytes(self) -> int:
        """Count the bytes of the caches of a session of max_batch sequences."""
        return self.backend.cache_bytes(self.packing.program, self.config.limits)
