"""Kernels of each profile of a built network, read from the builder's verbose log, and which of
them only copy a KV cache.

The log lists the kernels of every profile in the order in which they run, with the tensors that
each reads and writes; for this the configuration asks for detailed profiling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from g4ir.ui.units import size_text

#: a kernel in the list; a tensor in its inputs or outputs
LINE = re.compile(
    r"^(?:\[\w+\] )?(?:Layers:\s+)?Name: (\S.*?), LayerType: (\w+), Inputs: \[(.*?)\], "
    r"Constants: \[.*?\], Outputs: \[(.*?)\], Tac",
    re.M,
)
TENSOR = re.compile(r"Name: (.+?), Dimensions: \[([-\d,]*)\].*?Datatype: (\w+)")
#: suffix of a kernel's name: its profile
GRAPH = re.compile(r"_myl(\d+)_\d+$")
#: suffix of a tensor's name in profiles after the first
PROFILE = re.compile(r" \[profile \d+\]$")
SCRATCH = re.compile(r"Max Scratch Memory: (\d+) bytes")
WEIGHTS = re.compile(r"Total Weights Memory: (\d+) bytes")
#: prefixes of log entries that are not kernels
AROUND = ("signal", "wait", "shape_call")
#: parts of the names of kernels that use a cache in place: scatter or attention
IN_PLACE = ("Scat", "mha")
#: bytes of an element; 2 for all other types
BYTES = {"Float": 4, "Int32": 4, "Int64": 8, "Int8": 1, "FP8": 1, "Bool": 1}
#: minimum bytes of a tensor to count as a copy: smaller ones may be a chunk's rows
MIN_COPY = 1 << 12
#: profile name of a network without optimisation profiles (static shapes)
STATIC = "static"


@dataclass(frozen=True)
class Tensor:
    """A tensor of the compiled engine; dynamic dims are -1."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes; unknown dims count as one."""
        return math.prod(map(abs, self.shape)) * BYTES.get(self.dtype, 2)


@dataclass(frozen=True)
class Kernel:
    name: str
    kind: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class CompiledProfile:
    """Cost of a step in one profile: kernel launches, bytes of KV cache that kernels copy, and
    bytes of scratch memory."""

    kernels: int
    copied_bytes: int
    scratch_bytes: int


def kernels_of(log: str) -> list[list[Kernel]]:
    """Return the kernels of each profile, in order."""
    profiles: dict[int, list[Kernel]] = {}
    for name, kind, inputs, outputs in LINE.findall(log):
        graph = GRAPH.search(name)
        kernels = profiles.setdefault(int(graph[1]) if graph else 0, [])
        if kind not in AROUND:
            kernels.append(Kernel(name, kind, _tensors(inputs), _tensors(outputs)))
    return [profiles[i] for i in sorted(profiles)]


def _tensors(text: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(PROFILE.sub("", name), tuple(int(d) for d in dims.split(",") if d), dtype)
        for name, dims, dtype in TENSOR.findall(text)
    )


def copies(kernels: Sequence[Kernel], caches: Collection[str]) -> list[Kernel]:
    """Return the kernels that copy a cache or a part of one: they read only a cache or such a copy,
    and are no matmuls. `caches`: names of a network's inputs."""
    sources, result = {*caches, *(f"{c}.next" for c in caches)}, []
    for k in kernels:
        used = k.kind != "kgen" or any(part in k.name for part in IN_PLACE)
        read, written = {t.name for t in k.inputs}, [t for t in k.outputs if t.nbytes >= MIN_COPY]
        if not used and read and read <= sources and written:
            result.append(k)
            sources |= {t.name for t in written}
    return result


def compiled(
    log: str, profiles: Sequence[str], caches: Collection[str]
) -> dict[str, CompiledProfile]:
    """Return the cost of each profile, from the log of one build. ValueError if the log does not
    list the kernels of every profile."""
    kernels, scratch = kernels_of(log), [int(n) for n in SCRATCH.findall(log)]
    names = [*profiles] or [STATIC]
    if len(kernels) != len(names) or len(scratch) != len(names):
        raise ValueError(
            f"the builder's log lists kernels of {len(kernels)} profiles and scratch memory of "
            f"{len(scratch)}, the network has {len(names)}: no verbose log of one build"
        )
    rows = {}
    for name, launched, scratch_bytes in zip(names, kernels, scratch, strict=True):
        written = sum(t.nbytes for k in copies(launched, caches) for t in k.outputs)
        rows[name] = CompiledProfile(len(launched), written, scratch_bytes)
    return rows


def summary(profiles: Mapping[str, CompiledProfile]) -> list[str]:
    """Return a line for each profile."""
    return [
        f"{name}: {m.kernels} kernels, {size_text(m.copied_bytes)} of caches copied, "
        f"{size_text(m.scratch_bytes)} of scratch memory"
        for name, m in profiles.items()
    ]
