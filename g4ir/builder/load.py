"""Loads an engine directory; nothing is compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from g4ir.artefact.digests import has_digest
from g4ir.artefact.directory import (
    MANIFEST,
    Artefact,
    PackedWeights,
    RandomWeights,
    open_artefact,
    rebuild,
)
from g4ir.artefact.trust import require_trust
from g4ir.backends import find_backend
from g4ir.backends.base import Backend, Runtime, Task
from g4ir.engine.adapters import Adapters
from g4ir.engine.engine import Engine, Refusing
from g4ir.engine.parts import plain_params
from g4ir.engine.ranks import lead
from g4ir.errors import EngineError, InputError, MissingError
from g4ir.ir.graph import Value
from g4ir.model.text import PLE_PARAM
from g4ir.ops.types import torch, torch_dtype
from g4ir.parallel.group import Group, current
from g4ir.parallel.table import Share
from g4ir.plan.backend import checked_settings
from g4ir.plan.resolve import find_placement
from g4ir.ui.progress import Progress, no_progress, prefixed
from g4ir.weights import pack as packings
from g4ir.weights.adapter import Adapter, max_rank, with_adapters
from g4ir.weights.checkpoint import Checkpoint, sha256
from g4ir.weights.lora import Slots, with_slots
from g4ir.weights.origin import Origin, find_origin
from g4ir.weights.random import random_weights

#: ranks of adapter slots: the largest adapter's rank is rounded up to one of these, or kept if it
#: is above them; maximum rank, and maximum number of slots
ADAPTER_RANKS, MAX_RANK, MAX_SLOTS = (8, 16, 32, 64, 128), 1024, 1024


def load_engine(
    path: str | Path,
    *,
    check_weights: bool = True,
    ple_placement: str | None = None,
    cuda_graph: bool = True,
    trust: bool = False,
    huge_pages: bool = False,
    adapters: Mapping[str, str | Path] = MappingProxyType({}),
    adapter_slots: int | None = None,
    adapter_rank: int | None = None,
    progress: Progress = no_progress,
) -> Engine:
    """Load an engine directory; compiles nothing.

    Files are compared with the manifest's digests before any compiled file is opened;
    check_weights=False skips the weight files, which take about a second per GiB if they have
    changed since the last check (artefact/digests.py). ple_placement: memory of the per-layer
    embedding table (default: as built); cuda_graph=False launches kernels one by one instead of
    replaying a CUDA graph. trust=True runs native code of an engine that this user did not build
    here (artefact/trust.py). huge_pages=True copies the weights of a torch engine on a CPU to huge
    pages, which a decode step reads faster (docs/benchmarks.md), instead of mapping their files,
    which processes share. adapters: LoRA adapters by name, which requests choose
    (engine/adapters.py), in adapter_slots slots (default: their number, at least 4) of adapter_rank
    (default: the largest of theirs, rounded up, or 16). With several ranks (torchrun), rank 0 loads
    the engine after it has joined the process group; the others execute its calls (rank_worker.py).
    Raises EngineError for a file that is missing or changed, an engine of another machine or number
    of ranks, and huge_pages if not supported; MissingError for adapters with several ranks;
    TrustError for native code that needs trust=True; InputError for another invalid option.
    """
    group = current()
    artefact = open_artefact(Path(path), check_weights, group.rank if group else None)
    c, here = artefact.config, group.ranks if group else 1
    if here != c.ranks:
        raise EngineError(_of_ranks(artefact, here))
    if huge_pages:
        _check_huge_pages(artefact)
    slots = _adapter_slots(artefact, adapters, adapter_slots, adapter_rank)
    how = {"cuda_graph": cuda_graph, "trust": trust, "huge_pages": huge_pages}
    opens = partial(open_runtime, artefact, progress, group, slots=slots, **how)
    options = {"check_weights": check_weights, **how}
    digest = artefact.manifest.digest
    runtime = lead(group, str(artefact.path), digest, options, opens) if group else opens()
    engine = engine_of(artefact, runtime, ple_placement)
    if not slots:
        return engine
    loaded = Adapters(slots)
    for name, folder in adapters.items():
        loaded.load(name, folder)
    return replace(engine, adapters=loaded)


def _adapter_slots(
    artefact: Artefact, adapters: Mapping[str, str | Path], count: int | None, rank: int | None
) -> Slots | None:
    """Return the slots for adapters, with the program that reads them; None if none are
    requested."""
    c, min_slots = artefact.config, 4 if count is None else 0
    if not (adapters or count or rank):
        return None
    if c.ranks > 1:
        raise MissingError(f"{artefact.label}: adapters by request need an engine of one rank")
    largest = max((max_rank(Adapter.of(a)) for a in adapters.values()), default=ADAPTER_RANKS[1])
    rank = rank or next((r for r in ADAPTER_RANKS if r >= largest), largest)
    count = max(count or len(adapters), min_slots)
    if not (1 <= count <= MAX_SLOTS and 1 <= rank <= MAX_RANK):
        limits = f"adapter_slots 1 to {MAX_SLOTS}, adapter_rank 1 to {MAX_RANK}"
        raise InputError(f"{count} slots for adapters of rank {rank}: expected {limits}")
    plain = plain_params(c.spec, c.dtype, c.media)
    return with_slots(artefact.packing, c.spec, plain, count, rank)


def engine_of(artefact: Artefact, runtime: Runtime, ple_placement: str | None = None) -> Engine:
    """Create an engine from a checked directory and its runtime."""
    c = artefact.config
    placed = find_placement(ple_placement or c.ple_placement, c.spec, c.device)
    params = artefact.packing.program.graphs["embed"].params
    tables = {v.name: _table(runtime, v, placed, c.device) for v in params}
    return _engine(artefact, runtime, tables)


def _check_huge_pages(artefact: Artefact) -> None:
    c = artefact.config
    if (c.backend, c.device) != ("torch", "cpu"):
        why = f"{c.backend} on {c.device} has no huge pages"
        raise EngineError(f"{artefact.label}: {why}; leave huge_pages out")
    if sys.platform != "linux":
        raise EngineError(f"{artefact.label}: huge pages need Linux; leave huge_pages out")


def described(artefact: Artefact) -> Engine:
    """Return an engine that cannot run here (several ranks, or another machine's GPU): its manifest
    is readable, running it raises."""
    why = _of_ranks(artefact, 1) if artefact.config.ranks > 1 else _not_here(artefact)
    return _engine(artefact, Refusing(why), {})


def open_for_weights(path: str | Path) -> Engine:
    """Return an engine for its weights only: needs neither its device nor trust, and runs nothing.
    Seeded weights are computed on the CPU; all ranks' weights are available. EngineError for a
    missing or changed file."""
    artefact = open_artefact(Path(path), check_weights=True)
    why = f"{artefact.label} was opened to read its weights, not to run"
    return _engine(artefact, Refusing(why, _open_params(artefact, "cpu")), {})


def _engine(artefact: Artefact, runtime: Any, tables: dict[str, Any]) -> Engine:
    packing = artefact.packing
    facts, program = artefact.manifest, packing.program
    return Engine(artefact.path, facts, program, packing.prologue, runtime, tables)


def open_runtime(
    artefact: Artefact,
    progress: Progress,
    group: Group | None = None,
    *,
    cuda_graph: bool = True,
    trust: bool,
    huge_pages: bool = False,
    slots: Slots | None = None,
) -> Runtime:
    """Open the runtime of a checked engine with the params of this process's rank."""
    m, c = artefact.manifest, artefact.config
    if c.device == "cuda" and group and not group.on_gpus:
        why = f"rank {group.rank} has no GPU of its own, or its torch no NCCL"
        fix = "start at most one rank per GPU, with a torch that has NCCL"
        raise MissingError(f"{artefact.label} was built for cuda, and {why}; {fix}")
    backend = check_runnable(artefact, trust)
    params, load_progress = _open_params(artefact, c.device), prefixed(progress, "load")
    if slots:
        backend.require_adapters(artefact.label, c.device, c.settings)
    task = Task(
        program=slots.program if slots else artefact.packing.program,
        limits=c.limits,
        device=c.device,
        folder=artefact.path,
        params=params,
        progress=load_progress,
        group=group,
        huge_pages=huge_pages,
        digest=m.digest,
        added=slots.tensors if slots else {},
    )
    return backend.load(task, m.to_dict()["compiled"], cuda_graph)


def check_runnable(artefact: Artefact, trust: bool = False) -> Backend:
    """Return the backend of an engine that this machine can run and this user trusts; else raise
    EngineError, or TrustError."""
    backend = _backend_of(artefact)
    _check_machine(artefact, backend)
    if not trust:
        require_trust(artefact)
    return backend


def _of_ranks(artefact: Artefact, here: int) -> str:
    """Return why this number of processes cannot run an engine, and the command that does."""
    ranks = artefact.config.ranks
    how = f"torchrun --nproc-per-node {ranks} -m g4ir ..." if ranks > 1 else "g4ir ..."
    built = f"{artefact.label} was built for {ranks} rank{'s' * (ranks > 1)}"
    running = f"{here} {'are' if here > 1 else 'is'} running"
    return f"{built}, and {running}; start it by {how}, or build it again with --tp {here}"


def _backend_of(artefact: Artefact) -> Backend:
    m, c, where = artefact.manifest, artefact.config, artefact.path / MANIFEST
    backend = find_backend(c.backend).built(m.to_dict()["compiled"])
    try:
        settings = checked_settings(backend, c.settings)
    except InputError as e:
        raise EngineError(f"{where}: {e}; build the engine again") from None
    rules = {
        "device": c.device in backend.devices,
        "dtype": c.dtype in backend.dtypes,
        "settings": c.settings == settings,
        "ranks": c.ranks == 1 or backend.shares,
        "weights": not backend.packs_weights or isinstance(m.weights, PackedWeights),
    }
    if broken := next((key for key, holds in rules.items() if not holds), None):
        raise EngineError(
            f"{where}: {broken}: not supported by backend {c.backend}; build the engine again"
        )
    return backend


def _table(runtime: Runtime, v: Value, ple: str | None, device: str) -> Any:
    """Return the runtime's resident copy of a table, if it has one (tied head), or open it: the
    per-layer table in the memory `ple`, another one memory-mapped."""
    resident = runtime.resident(v.name)
    if resident is not None:
        return resident
    placement = ple if v.name.startswith(PLE_PARAM) and ple else packings.DEFAULT_PLACEMENT
    return packings.open_table(runtime.source, v, placement, device)


def _not_here(artefact: Artefact) -> str:
    """Return why a CUDA engine does not run on this machine, and what it needs."""
    backend = _backend_of(artefact)
    again = "build it again with --device cpu, or " if "cpu" in backend.devices else ""
    has = "machine has another GPU" if torch.cuda.is_available() else "torch sees no CUDA device"
    why = f"{artefact.label} was built for cuda and this {has}"
    return f"{why}; {again}run it {backend.location}"


def _check_machine(artefact: Artefact, backend: Backend) -> None:
    path, m, device = artefact.path, artefact.manifest, artefact.config.device
    # Not `backend.needs`, the requirements of a build: loading needs no compiler.
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineError(_not_here(artefact))
    if m.machine == "any":
        return
    built, here, why = m.machine, backend.machine(device), ""
    *kind, flags = built.split(" ")
    *kind_here, flags_here = here.split(" ")
    if kind != kind_here or not set(flags.split(",")) <= set(flags_here.split(",")):
        lacks = ", ".join(sorted({*flags.split(",")} - {*flags_here.split(",")}))
        without = f", without {lacks}" if kind == kind_here else ""
        why = f"for another machine ({built}); this is {here}{without}"
    elif backend.of_torch and m.versions.torch != torch.__version__:
        why = f"with torch {m.versions.torch}, this is {torch.__version__}"
    if why:
        raise EngineError(f"{artefact.label} was built {why}; {rebuild(path, m)}")


def _open_params(artefact: Artefact, device: str) -> packings.ParamSource:
    c, weights = artefact.config, artefact.manifest.weights
    if artefact.stored is not None:
        return artefact.stored
    from g4ir.backends.cpu.packing import quantized

    share = Share(c.sharding, artefact.rank)
    if isinstance(weights, RandomWeights):
        dtype = torch_dtype(c.dtype)
        source = random_weights(c.spec, weights.seed, dtype, device, c.drafter)
        return packings.MadeParams(artefact.packing, source, share=share, quantized=quantized)
    for name, digest in weights.files.items():
        file = Path(weights.directory) / name
        if not file.is_file() or (artefact.check_weights and not has_digest(file, digest)):
            why = f"{file} is missing or is not the file this engine was built from"
            raise EngineError(f"{why}; restore it, or build again without --link-weights")
    checkpoint = find_origin(weights.path).open(c.spec, c.media.kinds, c.dtype)
    if {*linked_files(checkpoint)} != weights.files.keys():
        why = f"its weight files are not those that {artefact.path / MANIFEST} names"
        fix = "restore them, or build again without --link-weights"
        raise EngineError(f"{weights.directory}: {why}; {fix}")
    return packings.MadeParams(artefact.packing, checkpoint, share=share, quantized=quantized)


def open_weights(engine: Engine, origin: Origin, kinds: Iterable[str]) -> Checkpoint:
    """Open the checkpoint `origin` of an engine, with its towers for these media `kinds` and the
    engine's adapters merged; EngineError if an adapter's directory is missing or its weights have
    changed."""
    source = origin.open(engine.spec, kinds, engine.dtype)
    adapters = [Adapter(Path(merged.path), merged.scale) for merged in engine.facts.adapters]
    for adapter, merged in zip(adapters, engine.facts.adapters):
        if not adapter.path.is_dir() or sha256(adapter.weights) != merged.sha256:
            why = f"is missing or is not the adapter that {engine.label} was built with"
            raise EngineError(f"{adapter.path} {why}; restore it")
    return with_adapters(source, engine.spec, adapters)


def linked_files(source: Checkpoint) -> dict[str, Path]:
    """Return a checkpoint's weight files and config, by their paths relative to its directory."""
    paths = [p for p, _ in source.files] + ([source.stated] if source.stated else [])
    return {p.relative_to(source.directory).as_posix(): p for p in paths}
