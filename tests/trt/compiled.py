"""Networks as TensorRT-RTX's builder compiles them, on any machine: kernels and copied caches of
each profile, as its verbose log lists them."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from g4ir.backends.trt import build
from g4ir.backends.trt.host import Api, logger, require_library
from g4ir.backends.trt.interface import LOG, SINGLE, networks, phase_of
from g4ir.backends.trt.make import SCRATCH
from g4ir.backends.trt.target import RTX, TARGETS
from g4ir.builder.build import prepare
from g4ir.ir.graph import Graph
from g4ir.ops.types import torch_dtype
from g4ir.plan.options import BuildOptions
from g4ir.ui.progress import no_progress
from tests.cases import read_table
from tests.configs import cut, spec_called

TABLE: Mapping[str, Mapping[str, Any]] = read_table("trt/compiled.yaml")
#: of tiny networks; others have the limits of a build
TINY = {"max_batch": 2, "max_seq": 64, "prefill_chunk": 16}
#: name, kind, inputs and outputs of a kernel in the log, in the order of execution
KERNEL = re.compile(
    r"^(?:\[\w+\] )?(?:Layers:\s+)?Name: (\S.*?), LayerType: (\w+), Inputs: \[(.*?)\], "
    r"Constants: \[.*?\], Outputs: \[(.*?)\], Tac",
    re.M,
)
TENSOR = re.compile(
    r"Name: (.+?)(?: \[profile \d+\])?, Dimensions: \[([-\d,]*)\].*?Datatype: (\w+)"
)
#: end of a kernel's name: its profile
PROFILE = re.compile(r"_myl(\d+)_\d+$")
#: bytes of an element; 2 of other types
BYTES = {"Float": 4, "Int32": 4, "Int64": 8, "Int8": 1, "FP8": 1, "Bool": 1}
#: kinds in the list that are no kernels; parts of the names of kernels that use a cache in place
AROUND, IN_PLACE = ("signal", "wait", "shape_call"), ("Scat", "mha")
#: bytes of a copy; fewer may be a chunk's rows
MIN_COPY = 1 << 12


def real() -> Api:
    """The library; MissingError where it is not installed."""
    return require_library(RTX)


def words_of(row: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """A variant, settings of the backend and options of the build."""
    variant, *words = row.split()
    given: dict[str, Any] = {
        k: int(v) if v.isdigit() else v for k, v in (w.split("=") for w in words)
    }
    return variant, {k: given.pop(k) for k in ("attention",) if k in given}, given


def planned(row: str) -> Any:
    """`tiny-moe quant=int4 layers=6` as a build that is not made."""
    variant, settings, given = words_of(row)
    spec, layers = spec_called(variant), given.pop("layers", 0)
    tiny = TINY if variant.startswith("tiny") else {}
    how = {"dtype": "bfloat16", "media": "none", **tiny, **given}
    options = BuildOptions(backend="trt", settings=settings, random_weights=0, **how)
    return prepare(cut(spec, layers) if layers else spec, options, dry=True)


def copied(kernels: list[tuple[str, ...]], caches: set[str]) -> int:
    """Bytes that kernels write that only copy a cache or a part of one: they read nothing but a
    cache or such a copy, and are no matmuls."""
    sources, total = {*caches, *(f"{c}.next" for c in caches)}, 0
    for name, kind, inputs, outputs in kernels:
        used = kind != "kgen" or any(part in name for part in IN_PLACE)
        read = {m[0] for m in TENSOR.findall(inputs)}
        sizes = {
            n: math.prod(abs(int(d)) for d in dims.split(",") if d) * BYTES.get(dtype, 2)
            for n, dims, dtype in TENSOR.findall(outputs)
        }
        written = {n: size for n, size in sizes.items() if size >= MIN_COPY}
        if not used and read and read <= sources and written:
            sources |= written.keys()
            total += sum(sizes.values())
    return total


def profiles_of(log: str, caches: set[str]) -> list[list[int]]:
    """Kernels, bytes of caches that they copy and KiB of scratch memory, of each profile."""
    profiles: dict[int, list[tuple[str, ...]]] = {}
    for kernel in KERNEL.findall(log):
        number = PROFILE.search(kernel[0])
        profiles.setdefault(int(number[1]) if number else 0, []).append(kernel)
    lists = [[k for k in profiles[i] if k[1] not in AROUND] for i in sorted(profiles)]
    sizes = [int(n) >> 10 for n in SCRATCH.findall(log)]
    return [[len(k), copied(k, caches), size] for k, size in zip(lists, sizes, strict=True)]


def repeated(g: Graph) -> Any:
    """Params that are views of one buffer for each dtype: a plan holds equal weights once. The
    parser takes two of one address only if they are equally large."""
    types = {v.name: v.type for v in g.params}
    sizes = {
        d: sorted({t.numel() for t in types.values() if t.dtype == d})
        for d in {t.dtype for t in types.values()}
    }
    buffers = {d: values(d, n[-1] + 64 * len(n)) for d, n in sizes.items()}

    def tensor(name: str) -> torch.Tensor:
        t = types[name]
        start = 64 * sizes[t.dtype].index(t.numel())
        return buffers[t.dtype][start : start + t.numel()].view([*map(int, t.shape)])

    return SimpleNamespace(tensor=tensor)


def values(dtype: str, count: int) -> torch.Tensor:
    """Numbers that begin again after 4 million."""
    kind, g, size = torch_dtype(dtype), torch.Generator().manual_seed(0), min(count, 1 << 22)
    floats = kind.is_floating_point
    some = torch.rand(size, generator=g) * 0.05 + 1e-3 if floats else None
    some = torch.randint(-7, 8, (size,), generator=g) if some is None else some
    return some.to(kind).repeat(-(-count // size))[:count]


def compiled(p: Any, g: Graph, params: Any) -> tuple[str, list[str], int]:
    """The builder's log of a network, its profiles, and the bytes of its plan."""
    api, config = real(), p.config
    with TemporaryDirectory() as name:
        folder = Path(name)
        log = logger(api.trt, folder / LOG)
        w = build.write_network(api, g, config.limits, params, config.settings, log)
        how = build.configure(api, w, None, TARGETS["sm120"])
        build.build_plan(api, w, how, folder / "plan", no_progress)
        log.close()
        text = (folder / LOG).read_text(errors="replace")
        return text, [*w.interface.profiles], (folder / "plan").stat().st_size


def numbers(row: str) -> dict[str, dict[str, list[int]]]:
    """What compiled.yaml keeps of each network."""
    p, found = planned(row), {}
    for name, g in networks(p.packing.program).items():
        log, profiles, size = compiled(p, g, repeated(g))
        kept: dict[str, list[int]] = {}
        rows = profiles_of(log, {v.name for v in g.state})
        for profile, now in zip(profiles or ["static"], rows, strict=True):
            kind = "step" if phase_of(profile) in SINGLE else "chunk"
            kept[kind] = [*map(max, now, kept.get(kind, now))]
        found[name] = {**kept, "plan": [size >> 10]}
    return found


def lines(rows: list[str]) -> Iterator[str]:
    for row in rows:
        yield f"{row}:"
        for network, kept in numbers(row).items():
            yield f"  {network}: {yaml.safe_dump(kept, default_flow_style=True).strip()}"


if __name__ == "__main__":
    for line in lines(sys.argv[1:]):
        print(line, flush=True)
