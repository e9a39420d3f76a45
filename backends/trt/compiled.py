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

#: an entry of the list: name, type, inputs and outputs of a kernel
KERNEL = re.compile(
    r"^(?:\[\w+\] )?(?:Layers:\s+)?Name: (\S.*?), LayerType: (\w+), Inputs: \[(.*?)\], "
    r"Constants: \[.*?\], Outputs: \[(.*?)\], Tac",
    re.M,
)
#: name, dims and dtype of a tensor in inputs or outputs; in profiles after the first names have a
#: suffix
TENSOR = re.compile(
    r"Name: (.+?)(?: \[profile \d+\])?, Dimensions: \[([-\d,]*)\].*?Datatype: (\w+)"
)
#: suffix of a kernel's name, with the index of its profile
GRAPH = re.compile(r"_myl(\d+)_\d+$")
SCRATCH = re.compile(r"Max Scratch Memory: (\d+) bytes")
#: types of entries that are not kernels
AROUND = ("signal", "wait", "shape_call")
#: parts of the names of kernels that use a cache in place: scatter or attention
IN_PLACE = ("Scat", "mha")
#: TensorRT's name of a dtype -> bytes of an element; 2 for all others
BYTES = {"Float": 4, "Int32": 4, "Int64": 8, "Int8": 1, "FP8": 1, "Bool": 1}
#: minimum bytes of a tensor to count as a copy: smaller ones may be a chunk's rows
MIN_COPY = 1 << 12

#: a kernel in the builder's log: (name, layer type, inputs, outputs), the last two as text
Kernel = tuple[str, str, str, str]


@dataclass(frozen=True)
class CompiledProfile:
    """Cost of a step in one profile: kernel launches, bytes of KV cache that kernels copy, and
    bytes of scratch memory."""

    kernels: int
    copied_bytes: int
    scratch_bytes: int


def _kernels(log: str) -> list[list[Kernel]]:
    """Return the kernels of each profile, in order."""
    profiles: dict[int, list[Kernel]] = {}
    for kernel in KERNEL.findall(log):
        graph = GRAPH.search(kernel[0])
        profiles.setdefault(int(graph[1]) if graph else 0, []).append(kernel)
    return [[k for k in profiles[i] if k[1] not in AROUND] for i in sorted(profiles)]


def _copied_bytes(kernels: Sequence[Kernel], caches: Collection[str]) -> int:
    """Count the bytes written by kernels that copy a cache or a part of one: generated kernels
    (`kgen`) that read only a cache or such a copy, and are no scatter or attention. Unknown dims
    count as one."""
    sources, total = {*caches, *(f"{c}.next" for c in caches)}, 0
    for name, kind, inputs, outputs in kernels:
        read = {tensor for tensor, _, _ in TENSOR.findall(inputs)}
        sizes = {
            tensor: math.prod(abs(int(d)) for d in dims.split(",") if d) * BYTES.get(dtype, 2)
            for tensor, dims, dtype in TENSOR.findall(outputs)
        }
        written = {tensor for tensor, size in sizes.items() if size >= MIN_COPY}
        used = kind != "kgen" or any(part in name for part in IN_PLACE)
        if not used and read and read <= sources and written:
            sources |= written
            total += sum(sizes.values())
    return total


def compiled(
    log: str, profiles: Sequence[str], caches: Collection[str]
) -> dict[str, CompiledProfile]:
    """Return the cost of each profile, from the log of one build; `caches`: names of the KV caches
    among the network's inputs. ValueError if the log does not list the kernels of every profile."""
    kernels, scratch = _kernels(log), [int(n) for n in SCRATCH.findall(log)]
    names = [*profiles] or ["static"]
    if len(kernels) != len(names) or len(scratch) != len(names):
        raise ValueError(
            f"the builder's log lists kernels of {len(kernels)} profiles and scratch memory of "
            f"{len(scratch)}, the network has {len(names)}: not the verbose log of one build"
        )
    return {
        name: CompiledProfile(len(launched), _copied_bytes(launched, caches), scratch_bytes)
        for name, launched, scratch_bytes in zip(names, kernels, scratch, strict=True)
    }


def summary(profiles: Mapping[str, CompiledProfile]) -> list[str]:
    """Return a line for each profile: kernels, bytes of copied KV caches, and scratch memory."""
    return [
        f"{name}: {m.kernels} kernels, {size_text(m.copied_bytes)} of caches copied, "
        f"{size_text(m.scratch_bytes)} of scratch memory"
        for name, m in profiles.items()
    ]
