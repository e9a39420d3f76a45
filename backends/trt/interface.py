"""Files, inputs, outputs and profiles of an engine: all that is needed to use `engine.plan` without
Python. `engine.io.json` lists them for one engine, docs/tensorrt.md says what each is."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4ir.backends.primitives.graph import network_graph, tower_graphs
from g4ir.backends.primitives.network import FULL, ROWS, SLOTS, full_slots, is_ring, network_inputs
from g4ir.ir.graph import Graph, Program
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.encoder import ENCODE
from g4ir.ops.types import Type
from g4ir.plan.engine_limits import Limits

#: name of the text model's network; networks of towers and of a draft step have their graphs' names
ENGINE = "engine"
#: file name of the builder's full log
LOG = "trt.log"
#: phases of the text model's engine with optimisation profiles, in this order
PHASES = ("decode", "prefill", VERIFY)
#: phases of one token per sequence, with an optimisation profile per context bucket
SINGLE = ("decode", DRAFT)
#: cache slots of the smallest context bucket, and the factor to the next bucket
MIN_SPAN, WIDER = 1024, 4
#: maximum tokens of a verification step if no sliding-window cache limits them
MAX_VERIFIED = 33
#: full-length cache slots for which prefill and verification kernels are timed, if max_seq allows
TYPICAL_SLOTS = 2048

#: minimum, typical and maximum size of a dim
Range = tuple[int, int, int]


@dataclass(frozen=True)
class Interface:
    """An engine's tensors by name. Named dims: B sequences, S tokens of a chunk, R tokens with
    logits, C slots of a full-length cache."""

    inputs: Mapping[str, Type]
    outputs: Mapping[str, Type]
    #: output -> input at the same address (KV caches)
    aliased: Mapping[str, str]
    #: inputs that are sliding-window (ring) caches
    rings: frozenset[str]
    #: profile -> dim -> range; empty for a tower, whose shapes are static
    profiles: Mapping[str, Mapping[str, Range]]

    def of_phase(self, phase: str) -> list[str]:
        """Return the profiles of a phase, smallest context first; prefill's for a phase without
        profiles."""
        profiles = [p for p in self.profiles if phase_of(p) == phase]
        return profiles or [p for p in self.profiles if phase_of(p) == "prefill"]

    def covering(self, phase: str, tokens: int) -> str:
        """Return the smallest profile of a phase for sequences of up to `tokens` tokens."""
        profiles = self.of_phase(phase)
        sizes = ((p, self.profiles[p].get(FULL)) for p in profiles)
        return next((p for p, r in sizes if r is None or r[2] >= tokens), profiles[-1])

    def index(self, profile: str) -> int:
        return list(self.profiles).index(profile)

    def span(self, profile: str) -> int | None:
        """Return the cache slots that each step of a profile reads; None if that varies, or without
        full-length caches."""
        low, _, high = self.profiles[profile].get(FULL, (0, 0, 1))
        return high if low == high else None

    def shapes(self, name: str, profile: str) -> tuple[tuple[int, ...], ...]:
        """Return the minimum, typical and maximum shape of an input in a profile."""
        dims = self.profiles[profile]
        return tuple(
            tuple(d if isinstance(d, int) else dims[d][i] for d in self.inputs[name].shape)
            for i in range(3)
        )

    def dynamic(self) -> list[str]:
        """Return the inputs with dynamic dims."""
        return [n for n, t in self.inputs.items() if any(isinstance(d, str) for d in t.shape)]

    def shape(self, name: str, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of an input or output for these sizes of the named dims."""
        t = self.inputs.get(name) or self.outputs[name]
        return tuple(d if isinstance(d, int) else dims[d] for d in t.shape)

    def as_json(self) -> dict[str, Any]:
        def described(tensors: Mapping[str, Type]) -> list[dict[str, Any]]:
            return [{"name": n, "dtype": t.dtype, "shape": [*t.shape]} for n, t in tensors.items()]

        inputs, outputs = described(self.inputs), described(self.outputs)
        for row in outputs:
            if row["name"] in self.aliased:
                row["aliased"] = self.aliased[row["name"]]
        profiles = [
            {"index": i, "phase": phase_of(name), "dims": {d: list(r) for d, r in dims.items()}}
            for i, (name, dims) in enumerate(self.profiles.items())
        ]
        return {"inputs": inputs, "outputs": outputs, "profiles": profiles}


def interface(g: Graph, limits: Limits) -> Interface:
    """Return the interface of a graph's network (primitives/network.py)."""
    inputs = network_inputs(g, limits)
    after = {f"{name}.next": name for name in g.next}
    return Interface(
        inputs,
        {v.name: v.type for v in g.outputs} | {o: inputs[i] for o, i in after.items()},
        after,
        frozenset(v.name for v in g.state if is_ring(v.type)),
        profiles_of(g, limits),
    )


def phase_of(profile: str) -> str:
    """Return the phase that a profile serves."""
    return profile.partition(".")[0]


def spans(limits: Limits) -> tuple[int, ...]:
    """Return the context buckets of decode steps, in full-length cache slots; the last one is the
    full cache, which needs no slice."""
    sizes, size = list[int](), MIN_SPAN
    while size < limits.max_seq:
        sizes.append(size)
        size *= WIDER
    return (*sizes, full_slots(limits))


def phases_of(g: Graph) -> tuple[str, ...]:
    """Return the phases for which a network has profiles: those of PHASES for the text model's
    (VERIFY only if it has the input `rows`); its graph's name for a draft step or an encoder; none
    for a tower."""
    if g.name in (DRAFT, ENCODE):
        return (g.name,)
    names = {v.name for v in g.inputs}
    return tuple(p for p in PHASES if g.state and (p != VERIFY or ROWS in names))


def profiles_of(g: Graph, limits: Limits) -> dict[str, dict[str, Range]]:
    """Return a network's profiles, in order: name -> dim -> range."""
    inputs, rows, seq = network_inputs(g, limits), limits.max_batch, limits.max_seq
    chunk = limits.prefill_chunk
    max_tokens = {"prefill": chunk, ENCODE: chunk, VERIFY: _verified(g, limits)}
    profiles: dict[str, dict[str, Range]] = {}
    for phase in phases_of(g):
        tokens = max_tokens.get(phase, 1)
        dims: dict[str, Range] = {"B": (1, rows, rows), "S": (1, tokens, tokens)}
        if any("R" in t.shape for t in inputs.values()):
            logits = tokens if phase == VERIFY else 1
            dims["R"] = (1, logits, logits)
        if SLOTS not in inputs:
            profiles[phase] = dims
        elif phase in SINGLE:
            profiles |= {f"{phase}.{n}": {**dims, FULL: (n, n, n)} for n in spans(limits)}
        else:
            profiles[phase] = {**dims, FULL: (1, min(seq, TYPICAL_SLOTS), seq)}
    return profiles


def _verified(g: Graph, limits: Limits) -> int:
    """Return the maximum tokens of a verification step: one more than the slots of ring caches
    beyond their window, or MAX_VERIFIED without ring caches; at most a chunk."""
    rings = (
        int(v.type.shape[0]) - n.integer("window")
        for n in g.nodes
        if n.definition.cache_range
        for v in n.caches
        if is_ring(v.type)
    )
    return min(max(rings, default=MAX_VERIFIED - 1) + 1, limits.prefill_chunk)


# --- files ------------------------------------------------------------------------------------


def files(name: str, rank: int = 0, ranks: int = 1) -> tuple[str, str]:
    """Return the file names of a network: a rank's plan, and the interface."""
    stem = f"{name}.rank{rank}of{ranks}" if ranks > 1 else name
    return f"{stem}.plan", f"{name}.io.json"


PLAN, TENSORS = files(ENGINE)


def keep_log(folder: Path) -> str:
    """Copy a failed build's log from its temporary directory `folder` (`.NAME.building-...`) to
    next to the engine's path; return a line for the error message."""
    name = folder.name.removeprefix(".").partition(".building-")[0]
    try:
        return f"TensorRT's log: {shutil.copy(folder / LOG, folder.parent / f'{name}.{LOG}')}"
    except OSError as e:
        return f"TensorRT's log could not be kept ({e.strerror})"


def networks(program: Program) -> dict[str, Graph]:
    """Return the graph of every network of an engine directory, by name."""
    drafter = {DRAFT: program.graphs[DRAFT]} if DRAFT in program.graphs else {}
    return {ENGINE: network_graph(program), **drafter, **tower_graphs(program)}
