"""Checks whether an engine fits its device, before anything is loaded.

    resolved, short = fitted(packing, resolved, memory=device_memory("cuda"))

The need is that of `g4ir plan` (footprint.py): weights on the device, caches of max_batch x max_seq
tokens, activations, workspace, and the reserve.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from g4ir.model.towers import is_tower
from g4ir.ops.types import ITEMSIZE, TORCH_NAMES
from g4ir.quant.recipe import find_recipe
from g4ir.ui.memory import device_memory as device_memory
from g4ir.ui.units import size_text
from g4ir.weights.pack import DEFAULT_PLACEMENT, Packing

from .footprint import MOST_ROWS, Footprint, largest, reserve
from .formats import DTYPES
from .options import Resolved

CHUNKS = (512, 256, 128, 64)
#: weights of a build that is refused -> smaller ones that the refusal names, the larger first
QUANTS = {None: ("int8", "int4"), "int8": ("int4",), "fp8": ("int4",)}


@dataclass(frozen=True)
class _Build:
    """A build: its footprint at the limits of its settings."""

    footprint: Footprint

    @property
    def setup(self) -> Resolved:
        return self.footprint.setup

    def parts(self) -> dict[str, int]:
        """Return bytes in the device's memory; on the CPU that is the host's."""
        limits = self.setup.limits
        return self.footprint.parts(limits.max_batch, limits.max_seq)

    def need(self) -> int:
        return sum(self.parts().values())

    def with_limits(self, **changes: int) -> _Build:
        """Return the build at other limits; its graphs depend on none of them."""
        limits = replace(self.setup.limits, **changes)
        chunk = min(max(limits.prefill_chunk, self.footprint.least_chunk), limits.max_seq)
        return self._with(limits=replace(limits, prefill_chunk=chunk))

    def without_media(self) -> _Build:
        return _Build(self.footprint.without_media())

    def with_dtype(self, dtype: str) -> _Build:
        return _Build(self.footprint.changed(dtype=dtype))

    def with_quant(self, name: str) -> _Build:
        return _Build(self.footprint.changed(recipe=find_recipe(name)))

    def placed(self, placement: str | None) -> _Build:
        return self._with(ple_placement=placement)

    def _with(self, **changes: Any) -> _Build:
        return _Build(self.footprint.at(**changes))


def fitted(packing: Packing, r: Resolved, memory: int, free: bool = False) -> tuple[Resolved, str]:
    """Return the settings, and why the engine needs more than `memory` bytes of its device, with
    the number short and each single setting that would fit; "" if it fits. `free`: the table of
    per-layer embeddings goes into its file unless all fits with it on the device.

    `packing` holds the graphs that the engine's backend loads.
    """
    build, room = _Build(Footprint(r, packing)), memory - reserve(memory)
    if free and build.need() > room:
        build = build.placed(DEFAULT_PLACEMENT)
    short = build.need() > room
    return build.setup, _message(build, memory, room) if short else ""


def _message(build: _Build, memory: int, room: int) -> str:
    setup, limits = build.setup, build.setup.limits
    parts = {**build.parts(), "reserve": memory - room}
    total = sum(parts.values())
    sizes = ", ".join(f"{k} {size_text(v)}" for k, v in parts.items())
    return (
        f"{setup.spec.name} at --max-batch {limits.max_batch} --max-seq {limits.max_seq} in "
        f"{TORCH_NAMES[setup.dtype]} needs {size_text(total)} on {setup.device} ({sizes}), which "
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

    chunks = (c for c in CHUNKS if build.footprint.least_chunk <= c < limits.prefill_chunk)
    dtypes = (d for d in DTYPES if ITEMSIZE[d] < ITEMSIZE[setup.dtype])
    places = ("host", "mmap") if setup.ple_placement else ()
    towers = any(is_tower(g.name) for g in build.footprint.needs.graphs)
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
