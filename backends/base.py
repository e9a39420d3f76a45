"""A backend compiles a program into an engine directory and runs it from there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from g4ir.errors import InputError
from g4ir.ir.graph import Program
from g4ir.parallel.group import Group
from g4ir.parallel.table import Share
from g4ir.passes import Acted
from g4ir.plan.backend import PlannedBackend
from g4ir.plan.backend import Setting as Setting
from g4ir.plan.engine_limits import Limits
from g4ir.plan.options import BuildConfig
from g4ir.ui.progress import Progress
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.pack import Packing, ParamSource, own_params

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
#: token ids -> the feeds of a text graph
Embed = Callable[["torch.Tensor"], "dict[str, torch.Tensor]"]
#: sees values by name as a graph makes them
Watch = Callable[[str, "torch.Tensor"], None]


@dataclass(frozen=True)
class DeviceChoice:
    """How a step on the device chooses tokens: the ways that its sequences need (sampling.WAYS),
    and ids that none of them may get."""

    methods: tuple[str, ...]
    suppress: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nothing:
    """The record of a backend that compiles nothing."""


@dataclass(frozen=True, eq=False)
class CacheSnapshot:
    """A copy of the parts of caches that `context` tokens use."""

    context: int
    tensors: Tensors


class State(Protocol):
    """The caches of one session."""

    @abstractmethod
    def views(self, context: int) -> Tensors:
        """Return the parts in use while rows hold at most `context` tokens."""

    @abstractmethod
    def row(self, index: int, context: int) -> Tensors:
        """Return what one row has of these parts, whatever the number of rows: of the same shapes
        in every state of a runtime."""

    @abstractmethod
    def nbytes(self) -> int:
        """Count the allocated bytes."""

    @abstractmethod
    def zero(self) -> None: ...

    def clear(self, row: int, context: int) -> None:
        """Write zeros over what one row has of these parts."""
        for t in self.row(row, context).values():
            t.zero_()

    def copy(self, source: Any, start: int, row: int, context: int) -> None:
        """Give a row the parts that row `start` of another state has, or of this one."""
        mine = self.row(row, context)
        for name, t in source.row(start, context).items():
            mine[name].copy_(t)

    def snapshot(self, context: int) -> CacheSnapshot:
        """Return a copy of these parts, which `restore` writes back."""
        return CacheSnapshot(context, {name: t.clone() for name, t in self.views(context).items()})

    def restore(self, snapshot: CacheSnapshot) -> None:
        views = self.views(snapshot.context)
        for name, t in snapshot.tensors.items():
            views[name].copy_(t)


class Runtime(Protocol):
    """A loaded engine. `decode` takes chunks of one token, `prefill` of any length. Unless it says
    so, the host chooses tokens and drafts, and weights lie in layouts of its own."""

    #: where its params come from
    source: ParamSource

    def new_state(self, batch: int) -> State: ...

    def run(
        self,
        phase: str,
        feeds: dict[str, torch.Tensor],
        state: Any,
        context: int,
        logits: bool,
        watch: Watch | None = None,
    ) -> Tensors | None:
        """Run one chunk: caches are updated in place. `context` is the most tokens that a row holds
        afterwards. Returns the graph's outputs, `logits` [B, 1 or S, vocab] among them; None where
        they are not asked for.
        `watch` sees the graph's values that the backend can show, in order."""

    def embed(self, tokens: torch.Tensor, tables: Mapping[str, Any]) -> Tensors | None:
        """Return the outputs of the embed graph for a few tokens i64[B,S]; None where the host is
        as fast."""
        return None

    def encode(self, tower: str, feeds: Tensors) -> torch.Tensor:
        """Return the soft tokens [1, N, hidden] that a tower's graph makes of its inputs."""

    def token_loop(
        self,
        embed: Embed,
        state: Any,
        batch: int,
        choice: DeviceChoice,
        tables: Mapping[str, Any],
    ) -> Any:
        """Return decode steps that choose tokens on the device (cuda/token_loop.py and
        cpu/step_loop.py), or None. `tables` are those that `embed` reads."""
        return None

    def resident(self, param: str) -> torch.Tensor | None:
        """Return a param that the runtime holds whole, for others to read."""
        return None

    def close(self) -> None: ...


@dataclass(frozen=True)
class Task:
    """A program and the engine directory that it is compiled into, or loaded from."""

    program: Program
    limits: Limits
    device: str
    folder: Path
    params: ParamSource
    progress: Progress
    #: the processes that run it together, once it is loaded; None: it runs alone
    group: Group | None = None
    #: whether weights are copied to huge pages (torch on a CPU)
    huge_pages: bool = False
    #: bytes of the device's memory, if a build was given them
    memory: int | None = None
    #: of the manifest, when it is loaded
    digest: str = ""


class Backend(PlannedBackend, ABC):
    """One way to make a program run. What is not said here again compiles nothing and needs
    nothing."""

    #: whether `compile` finds the packed params in the folder: its files refer to them or contain
    #: them
    packs_weights: bool = False
    #: whether its engines run with the torch that built them alone
    of_torch: bool = True
    #: the type of what `compile` returns, as spec/reader.py reads it
    record: Any = Nothing

    def aimed(self, target: str | None) -> Backend:
        """Return this backend as it builds for the GPUs of `--target`; None: for the current one.
        InputError if it cannot."""
        if target is not None:
            raise InputError(
                f"--target {target[:40]}: backend {self.name} builds for this machine; leave it "
                f"out, or give --backend trt"
            )
        return self

    def built(self, record: Mapping[str, Any]) -> Backend:
        """Return this backend as it runs engines whose `record` is `record`."""
        return self

    @property
    def location(self) -> str:
        """Where its engines run, in a message."""
        return "where it was built"

    def has_device(self, device: str) -> bool:
        """Whether this machine has the device that its engines run on."""
        import torch

        return device != "cuda" or torch.cuda.is_available()

    def packages(self, device: str) -> tuple[str, ...]:
        """Return the Python packages whose versions its engines depend on."""
        return ("torch",)

    def needs(self, device: str, ranks: int) -> tuple[Callable[[], object], ...]:
        """Return checks of the environment for a build for so many ranks, cheapest to meet first;
        each raises MissingError. A dry run makes none of them."""
        return ()

    def about_to_compile(self, device: str) -> AbstractContextManager[None]:
        """Return a context that surrounds `compile` and what comes before, in which what it needs
        in any case is begun."""
        return nullcontext()

    def compile(self, task: Task, settings: Mapping[str, str]) -> dict[str, Any]:
        """Write compiled files into the folder; returns what the manifest keeps of them."""
        return {}

    def short(self, program: Program) -> str:
        """Return why compiling needs more memory than this machine has; nothing if it does not."""
        return ""

    def repeated_bytes(self, program: Program, settings: Mapping[str, str]) -> int:
        """Return the bytes of packed params that the compiled files hold once more."""
        return 0

    def dry_run(self, prepared: Prepared, progress: Progress) -> dict[str, Any]:
        """Return what can be checked and told of a build without compiling: more keys of the plan.
        CheckError where a check fails."""
        return {}

    def machine(self, device: str) -> str:
        """Return the instruction set that the files need; an engine refuses any other machine."""
        return "any"

    def machine_of(self, device: str, compiled: Mapping[str, Any]) -> str:
        """Return the same of what an engine's `compile` returned."""
        return self.machine(device)

    def has_native_code(self, compiled: Mapping[str, Any]) -> bool:
        """Whether what an engine's `compile` returned names native code, which can do all that the
        user can."""
        return False

    @abstractmethod
    def load(self, task: Task, record: Any, cuda_graph: bool = True) -> Runtime:
        """Return a runtime; `record` is of the type `record`. EngineError where compiled files are
        not those of the program, before any of them is opened."""


@dataclass(frozen=True)
class Prepared:
    """A build up to compilation: everything is checked, nothing is written."""

    config: BuildConfig
    backend: Backend
    packing: Packing
    #: how often each pass acted
    acted: Acted
    source: Checkpoint
    #: one of artefact.WEIGHTS; None in a dry run without any
    weights: Any
    #: of the checkpoint, name -> content
    side_files: Future[Mapping[str, bytes]]
    #: of a dry run: why the engine does not fit its device, or nothing
    short: str = ""
    #: bytes of the device's memory, if given
    memory: int | None = None
    #: what 4-bit weights are calibrated on (builder/calibration.py)
    calibration: Any = None

    def param_bytes(self) -> int:
        """Count the bytes of the packed params, tables included."""
        return sum(v.type.nbytes() for v in self.packing.program.params().values())

    def share(self, rank: int) -> Share:
        """Return what a rank has of the weights."""
        return Share(self.config.sharding, rank)

    def written_bytes(self) -> int:
        """Count the bytes of the packed params of all ranks; what they share counts once."""
        sizes = {name: v.type.nbytes() for name, v in self.packing.program.params().items()}
        rank_params, ranks = own_params(self.packing, self.share(0)), self.config.ranks
        return sum(size * (ranks if name in rank_params else 1) for name, size in sizes.items())

    def cache_bytes(self) -> int:
        """Count the bytes of the caches of a session of max_batch sequences."""
        return self.backend.cache_bytes(self.packing.program, self.config.limits)
