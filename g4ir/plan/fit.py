"""Checks whether an engine fits its device: asked before anything is loaded.

    require_fit(program, resolved, memory=device_memory("cuda"))

The need is that of `g4ir plan`: weights on the device, caches of max_batch x max_seq tokens,
activations, workspace, and the reserve.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from g4ir.errors import PlanError
from g4ir.ir.graph import Program
from g4ir.ir.rewrite import bind, split_prologue
from g4ir.model.decoder import BLOCKS, VERIFY
from g4ir.model.text import PLE_PARAM, build_graph
from g4ir.model.towers import build_towers, is_tower
from g4ir.ops.types import ITEMSIZE, TORCH_NAMES
from g4ir.passes import run_passes
from g4ir.passes.plan_cache import RingOptions
from g4ir.quant.rewrite import quantised
from g4ir.spec.record import Spec
from g4ir.ui.units import size_text
from g4ir.weights.pack import DEFAULT_PLACEMENT, as_it_is, split_program

from .engine_limits import Limits
from .footprint import MOST_ROWS, largest, reserve
from .formats import DTYPES
from .memory import Needs
from .options import Resolved

CGROUPS = Path("/sys/fs/cgroup")
CHUNKS = (512, 256, 128, 64)


def device_memory(device: str) -> int:
    """Return the bytes of memory of `cuda` (the current device) or of this machine's `cpu`: what is
    fitted, or the limit of the control groups that the process is in, if that is less."""
    if device == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_group_limits(CGROUPS, Path("/proc/self/cgroup"))])


def _group_limits(root: Path, membership: Path) -> Iterator[int]:
    """Yield memory limits of the process's control group and of those above it, in both layouts."""
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            folder = root / controllers / path.strip("/")
            for place in (folder, *folder.parents):
                if place == root.parent:
                    break
                if (text := _read(place / name).strip()).isdigit():
                    yield int(text)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class _Build:
    """The settings that decide the memory that a build needs."""

    spec: Spec
    device: str
    dtype: str
    placement: str | None
    limits: Limits
    needs: Needs
    remake: Callable[[str], Needs]
    #: dtype -> bytes of the table of per-layer embeddings
    table: Callable[[str], int]
    least_chunk: int = 1  # what the largest image needs whose tokens see each other

    def parts(self) -> dict[str, int]:
        """Return bytes in the device's memory; on the CPU that is the host's."""
        limits, needs = self.limits, self.needs
        placed = ("device", "host") if self.device == "cpu" else ("device",)
        sizes = (limits.max_batch, limits.max_seq, limits.prefill_chunk)
        return {
            "weights": needs.params + (self.table(self.dtype) if self.placement in placed else 0),
            "caches": needs.cache(*sizes[:2]),
            "activations": needs.activations(*sizes),
            "workspace": needs.workspace(*sizes),
        }

    def need(self) -> int:
        return sum(self.parts().values())

    def with_limits(self, **changes: int) -> _Build:
        limits = replace(self.limits, **changes)
        chunk = min(max(limits.prefill_chunk, self.least_chunk), limits.max_seq)
        return replace(self, limits=replace(limits, prefill_chunk=chunk))

    def without_media(self) -> _Build:
        graphs = self.needs.graphs
        text = Needs(tuple(g for g in graphs if not is_tower(g.name) and g.name != BLOCKS))
        return replace(self, needs=text, least_chunk=1)

    def with_dtype(self, dtype: str) -> _Build:
        return replace(self, dtype=dtype, needs=self.remake(dtype))


def require_fit(
    program: Program,
    r: Resolved,
    memory: int,
    more: int = 0,
    scratch: int = 0,
    stored: Callable[[Program], Program] = as_it_is,
) -> None:
    """Raise PlanError where an engine needs more than `memory` bytes of its device, with the
    number short and each single setting that would fit.

    `program` holds the optimised graphs, with or without their prologue. `more`: bytes of caches
    that a backend's layouts need beyond the planned ones; `scratch`: of workspace that its steps
    need beyond the planned one; `stored`: how it stores weights.
    """

    def remake(dtype: str) -> Needs:
        text = build_graph(r.spec, "prefill", r.all_logits, dtype)
        graphs = Program(
            {g.name: g for g in (text, *build_towers(r.spec, r.media, dtype).values())}
        )
        held = quantised(graphs, r.spec, r.recipe, dtype)
        made = held.map(lambda g: run_passes(g, skip=r.skip, options=r.options))
        return _needs(stored(made), r.options.of(RingOptions).slack)

    build = _build(program, r, remake)
    room = memory - reserve(memory) - more - scratch
    if build.need() > room:
        raise PlanError(_message(build, memory, room, more, scratch))


def fitting_placement(program: Program, r: Resolved, memory: int, more: int = 0) -> str:
    """Return where the table of per-layer embeddings lies by default: on the device if all fits
    there, else in its file. Arguments as those of `require_fit`."""
    build = _build(program, replace(r, ple_placement="device"))
    fits = build.need() <= memory - reserve(memory) - more
    return "device" if fits else DEFAULT_PLACEMENT


def _build(program: Program, r: Resolved, remake: Callable[[str], Needs] | None = None) -> _Build:
    needs = _needs(program, r.options.of(RingOptions).slack)
    return _Build(
        spec=r.spec,
        device=r.device,
        dtype=r.dtype,
        placement=r.ple_placement,
        limits=r.limits,
        needs=needs,
        remake=remake or (lambda _: needs),
        table=partial(_table_bytes, program, r.dtype),
        least_chunk=max(r.media.grids, default=1) if BLOCKS in program.graphs else 1,
    )


def _table_bytes(program: Program, own: str, dtype: str) -> int:
    """Return the bytes of the table of per-layer embeddings with another dtype in the place of the
    engine's own; codes keep theirs."""
    parts = split_prologue(program.graphs["embed"])[1].params
    types = (v.type for v in parts if v.name.startswith(PLE_PARAM))
    return sum(t.numel() * ITEMSIZE[dtype if t.dtype == own else t.dtype] for t in types)


def _needs(program: Program, drafted: int) -> Needs:
    mains = split_program(program).program.graphs
    if VERIFY in mains:
        mains = {**mains, VERIFY: bind(mains[VERIFY], M=drafted + 1)}
    return Needs(tuple(g for name, g in mains.items() if name != "embed"))


def _message(build: _Build, memory: int, room: int, more: int, scratch: int) -> str:
    parts, limits = build.parts(), build.limits
    parts["caches"] += more
    parts["workspace"] += scratch
    parts["reserve"] = memory - room - more - scratch
    total = sum(parts.values())
    shares = ", ".join(f"{k} {size_text(v)}" for k, v in parts.items())
    return (
        f"{build.spec.name} at --max-batch {limits.max_batch} --max-seq {limits.max_seq} in "
        f"{TORCH_NAMES[build.dtype]} needs {size_text(total)} on {build.device} ({shares}), which "
        f"has {size_text(memory)}: {size_text(total - memory)} ({total - memory} bytes) short; "
        f"{_advice(build, room)}"
    )


def _advice(build: _Build, room: int) -> str:
    if fixes := [f"{flag} {value}" for flag, value in _alternatives(build, room)]:
        return f"any of these fits: {', '.join(fixes)}"
    smallest = _smallest(build)
    seq = largest(lambda n: smallest.with_limits(max_seq=n).need() <= room, build.limits.max_seq)
    if not seq:
        return "nothing of it fits: take a smaller variant or a device with more memory"
    place = f" --ple-placement {placement}" if (placement := smallest.placement) else ""
    return (
        f"all of these together fit: --max-batch 1 --max-seq {seq} --prefill-chunk "
        f"{smallest.limits.prefill_chunk} --dtype {TORCH_NAMES[smallest.dtype]}{place}"
    )


def _smallest(build: _Build) -> _Build:
    chunk = min(build.limits.prefill_chunk, CHUNKS[-1])
    build = build.with_limits(max_batch=1, prefill_chunk=chunk)
    build = replace(build, placement=build.placement and "mmap")
    return build.with_dtype(min(build.dtype, "bf16", key=lambda d: ITEMSIZE[d]))


def _alternatives(build: _Build, room: int) -> Iterator[tuple[str, Any]]:
    limits = build.limits

    def fits(**changes: int) -> bool:
        return build.with_limits(**changes).need() <= room

    if seq := largest(lambda n: fits(max_seq=n), limits.max_seq):
        yield "--max-seq", seq
    if rows := largest(lambda n: fits(max_batch=n), min(limits.max_batch, MOST_ROWS)):
        yield "--max-batch", rows
    chunks = [c for c in CHUNKS if build.least_chunk <= c < limits.prefill_chunk]
    if chunk := next((c for c in chunks if fits(prefill_chunk=c)), 0):
        yield "--prefill-chunk", chunk
    for dtype in DTYPES:
        smaller = ITEMSIZE[dtype] < ITEMSIZE[build.dtype]
        if smaller and build.with_dtype(dtype).need() <= room:
            yield "--dtype", TORCH_NAMES[dtype]
            break
    if any(is_tower(g.name) for g in build.needs.graphs) and build.without_media().need() <= room:
        yield "--media", "none"
    if build.placement:
        for place in ("host", "mmap"):
            if replace(build, placement=place).need() <= room:
                yield "--ple-placement", place
                break
