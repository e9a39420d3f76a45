"""Checks whether an engine fits its device: asked before anything is loaded.

    resolved, short = fitted(program, resolved, memory=device_memory("cuda"))

The need is that of `g4ir plan`: weights on the device, caches of max_batch x max_seq tokens,
activations, workspace, and the reserve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from g4ir.ir.graph import Program
from g4ir.ir.rewrite import bind
from g4ir.model.decoder import BLOCKS, VERIFY
from g4ir.model.text import PLE_PARAM
from g4ir.model.towers import is_tower
from g4ir.ops.types import ITEMSIZE, TORCH_NAMES
from g4ir.passes.plan_cache import RingOptions
from g4ir.quant.recipe import find_recipe
from g4ir.ui.memory import device_memory as device_memory
from g4ir.ui.units import size_text
from g4ir.weights.pack import DEFAULT_PLACEMENT, as_it_is, make_packing, split_program

from .footprint import MOST_ROWS, largest, reserve
from .formats import DTYPES
from .memory import Needs
from .options import Resolved

CHUNKS = (512, 256, 128, 64)
#: weights of a build that is refused -> smaller ones that the refusal names, the larger first
QUANTS = {None: ("int8", "int4"), "int8": ("int4",), "fp8": ("int4",)}


@dataclass(frozen=True)
class _Build:
    """A build's settings, and the memory that it needs with them."""

    setup: Resolved
    needs: Needs
    #: how a backend stores weights
    stored: Callable[[Program], Program]
    #: bytes of the table of per-layer embeddings
    table: int
    least_chunk: int = 1  # what the largest image needs whose tokens see each other

    def parts(self) -> dict[str, int]:
        """Return bytes in the device's memory; on the CPU that is the host's."""
        setup, needs = self.setup, self.needs
        placed = ("device", "host") if setup.device == "cpu" else ("device",)
        table = self.table if setup.ple_placement in placed else 0
        sizes = (setup.limits.max_batch, setup.limits.max_seq, setup.limits.prefill_chunk)
        return {
            "weights": needs.params + table,
            "caches": needs.cache(*sizes[:2]),
            "activations": needs.activations(*sizes),
            "workspace": needs.workspace(*sizes),
        }

    def need(self) -> int:
        return sum(self.parts().values())

    def with_limits(self, **changes: int) -> _Build:
        limits = replace(self.setup.limits, **changes)
        chunk = min(max(limits.prefill_chunk, self.least_chunk), limits.max_seq)
        return replace(self, setup=replace(self.setup, limits=replace(limits, prefill_chunk=chunk)))

    def without_media(self) -> _Build:
        graphs = self.needs.graphs
        text = Needs(tuple(g for g in graphs if not is_tower(g.name) and g.name != BLOCKS))
        return replace(self, needs=text, least_chunk=1)

    def with_dtype(self, dtype: str) -> _Build:
        return self._made(replace(self.setup, dtype=dtype))

    def with_quant(self, name: str) -> _Build:
        return self._made(replace(self.setup, recipe=find_recipe(name)))

    def _made(self, r: Resolved) -> _Build:
        return _build(make_packing(**r.of_graphs(), stored=self.stored).program, r, self.stored)

    def placed(self, placement: str | None) -> _Build:
        return replace(self, setup=replace(self.setup, ple_placement=placement))


def fitted(
    program: Program,
    r: Resolved,
    memory: int,
    free: bool = False,
    more: int = 0,
    scratch: int = 0,
    stored: Callable[[Program], Program] = as_it_is,
) -> tuple[Resolved, str]:
    """Return the settings, and why the engine needs more than `memory` bytes of its device, with
    the number short and each single setting that would fit; "" if it fits. `free`: the table of
    per-layer embeddings goes into its file unless all fits with it on the device.

    `program` holds the optimised graphs, with or without their prologue. `more`: bytes of caches
    that a backend's layouts need beyond the planned ones; `scratch`: of workspace that its steps
    need beyond the planned one; `stored`: how it stores weights.
    """
    build = _build(program, r, stored)
    room = memory - reserve(memory) - more - scratch
    if free and build.need() > room:
        build = build.placed(DEFAULT_PLACEMENT)
    short = build.need() > room
    return build.setup, _message(build, memory, room, more, scratch) if short else ""


def _build(program: Program, r: Resolved, stored: Callable[[Program], Program]) -> _Build:
    graphs = split_program(program).program.graphs
    if VERIFY in graphs:
        drafted = r.options.of(RingOptions).slack
        graphs = {**graphs, VERIFY: bind(graphs[VERIFY], M=drafted + 1)}
    tables = (v.type.nbytes() for v in graphs["embed"].params if v.name.startswith(PLE_PARAM))
    return _Build(
        r,
        Needs(tuple(g for name, g in graphs.items() if name != "embed")),
        stored,
        table=sum(tables),
        least_chunk=max(r.media.grids, default=1) if BLOCKS in graphs else 1,
    )


def _message(build: _Build, memory: int, room: int, more: int, scratch: int) -> str:
    parts, setup, limits = build.parts(), build.setup, build.setup.limits
    parts["caches"] += more
    parts["workspace"] += scratch
    parts["reserve"] = memory - room - more - scratch
    total = sum(parts.values())
    shares = ", ".join(f"{k} {size_text(v)}" for k, v in parts.items())
    return (
        f"{setup.spec.name} at --max-batch {limits.max_batch} --max-seq {limits.max_seq} in "
        f"{TORCH_NAMES[setup.dtype]} needs {size_text(total)} on {setup.device} ({shares}), which "
        f"has {size_text(memory)}: {size_text(total - memory)} ({total - memory} bytes) short; "
        f"{_advice(build, room)}"
    )


def _advice(build: _Build, room: int) -> str:
    if fixes := [f"{flag} {value}" for flag, value in _alternatives(build, room).items() if value]:
        return f"any of these fits: {', '.join(fixes)}"
    chunk = min(build.setup.limits.prefill_chunk, CHUNKS[-1])
    smallest = build.with_limits(max_batch=1, prefill_chunk=chunk)
    smallest = smallest.placed(build.setup.ple_placement and "mmap")
    smallest = smallest.with_dtype(min(build.setup.dtype, "bf16", key=lambda d: ITEMSIZE[d]))
    setup, most = smallest.setup, build.setup.limits.max_seq
    seq = largest(lambda n: smallest.with_limits(max_seq=n).need() <= room, most)
    if not seq:
        return _quantised_advice(build, room)
    place = f" --ple-placement {setup.ple_placement}" if setup.ple_placement else ""
    return (
        f"all of these together fit: --max-batch 1 --max-seq {seq} --prefill-chunk "
        f"{setup.limits.prefill_chunk} --dtype {TORCH_NAMES[setup.dtype]}{place}"
    )


def _quantised_advice(build: _Build, room: int) -> str:
    """Return what fits with smaller quantised weights, if nothing does without."""
    recipe = build.setup.recipe
    quants = QUANTS.get(recipe.name if recipe else None, ())
    if not quants or build.setup.ranks > 1:  # not every number of ranks cuts whole groups
        return "nothing of it fits: take a smaller variant or a device with more memory"
    for quant in quants:
        smaller = build.with_quant(quant)
        if smaller.need() <= room:
            return f"--quant {quant} fits"
    return f"with --quant {quant} {_advice(smaller, room)}"


def _alternatives(build: _Build, room: int) -> dict[str, Any]:
    """Return flag -> its value with which the build would fit, if there is one."""
    setup, limits = build.setup, build.setup.limits

    def fits(changed: _Build) -> bool:
        return changed.need() <= room

    chunks = (c for c in CHUNKS if build.least_chunk <= c < limits.prefill_chunk)
    dtypes = (d for d in DTYPES if ITEMSIZE[d] < ITEMSIZE[setup.dtype])
    places = ("host", "mmap") if setup.ple_placement else ()
    towers = any(is_tower(g.name) for g in build.needs.graphs)
    most = min(limits.max_batch, MOST_ROWS)
    return {
        "--max-seq": largest(lambda n: fits(build.with_limits(max_seq=n)), limits.max_seq),
        "--max-batch": largest(lambda n: fits(build.with_limits(max_batch=n)), most),
        "--prefill-chunk": next(
            (c for c in chunks if fits(build.with_limits(prefill_chunk=c))), None
        ),
        "--dtype": next((TORCH_NAMES[d] for d in dtypes if fits(build.with_dtype(d))), None),
        "--media": "none" if towers and fits(build.without_media()) else None,
        "--ple-placement": next((p for p in places if fits(build.placed(p))), None),
    }
