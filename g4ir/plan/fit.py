"""Checks whether an engine fits its device, before anything is loaded.

    config, short = fitted(Footprint(config, backend, packing), device_memory("cuda"))

The need is that of `g4ir plan` (footprint.py): weights on the device, caches for max_batch
sequences of max_seq tokens, activations, workspace, and the reserve.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from g4ir.model.towers import is_tower
from g4ir.ops.types import ITEMSIZE, TORCH_NAMES
from g4ir.quant.recipe import find_quant_config
from g4ir.ui.memory import device_memory as device_memory
from g4ir.ui.units import size_text
from g4ir.weights.pack import DEFAULT_PLACEMENT

from .footprint import MAX_BATCH, Footprint, largest, usable
from .formats import DTYPES
from .options import BuildConfig

CHUNKS = (512, 256, 128, 64)
#: weight format of a build that does not fit (None: not quantised) -> smaller formats that the
#: error suggests, largest first
QUANTS = {None: ("int8", "int4"), "int8": ("int4",), "fp8": ("int4",)}


def fitted(build: Footprint, memory: int, free: bool = False) -> tuple[BuildConfig, str]:
    """Return the config, and the message that the engine does not fit into `memory` bytes of its
    device, with the bytes short and options that would make it fit, if there are such; "" if it
    fits. `free`: no placement of the per-layer embedding table was requested, so the returned
    config memory-maps it if not everything fits on the device."""
    capacity = usable(memory)
    if free and build.need > capacity:
        build = build.at(ple_placement=DEFAULT_PLACEMENT)
    short = build.need > capacity
    return build.config, _message(build, memory, capacity) if short else ""


def _at_limits(build: Footprint, **changes: int) -> Footprint:
    """Return the build at other limits, on which its graphs do not depend."""
    limits = replace(build.config.limits, **changes)
    chunk = min(max(limits.prefill_chunk, build.min_chunk), limits.max_seq)
    return build.at(limits=replace(limits, prefill_chunk=chunk))


def _message(build: Footprint, memory: int, capacity: int) -> str:
    config, limits = build.config, build.config.limits
    parts = {**build.built, "reserve": memory - capacity}
    total = sum(parts.values())
    sizes = ", ".join(f"{k} {size_text(v)}" for k, v in parts.items())
    return (
        f"{config.spec.name} at --max-batch {limits.max_batch} --max-seq {limits.max_seq} in "
        f"{TORCH_NAMES[config.dtype]} needs {size_text(total)} on {config.device} ({sizes}), which "
        f"has {size_text(memory)}: {size_text(total - memory)} ({total - memory} bytes) short; "
        f"{_advice(build, capacity)}"
    )


def _advice(build: Footprint, capacity: int) -> str:
    if fixes := [
        f"{flag} {value}" for flag, value in _alternatives(build, capacity).items() if value
    ]:
        return f"any of these fits: {', '.join(fixes)}"
    chunk = min(build.config.limits.prefill_chunk, CHUNKS[-1])
    smallest = _at_limits(build, max_batch=1, prefill_chunk=chunk)
    smallest = smallest.at(ple_placement=build.config.ple_placement and "mmap")
    smallest = smallest.changed(dtype=min(build.config.dtype, "bf16", key=lambda d: ITEMSIZE[d]))
    config, max_seq = smallest.config, build.config.limits.max_seq
    seq = largest(lambda n: _at_limits(smallest, max_seq=n).need <= capacity, max_seq)
    if not seq:
        return _quantised_advice(build, capacity)
    placement = f" --set ple_placement={config.ple_placement}" if config.ple_placement else ""
    return (
        f"all of these together fit: --max-batch 1 --max-seq {seq} --prefill-chunk "
        f"{config.limits.prefill_chunk} --dtype {TORCH_NAMES[config.dtype]}{placement}"
    )


def _quantised_advice(build: Footprint, capacity: int) -> str:
    """Return advice on quantisation, if nothing fits without it."""
    recipe = build.config.quant
    quants = QUANTS.get(recipe.name if recipe else None, ())
    if not quants or build.config.ranks > 1:  # some numbers of ranks would split groups
        return "no limits or dtype fit: take a smaller variant or a device with more memory"
    for quant in quants:
        smaller = build.changed(quant=find_quant_config(quant))
        if smaller.need <= capacity:
            return f"--quant {quant} fits"
    return f"with --quant {quant} {_advice(smaller, capacity)}"


def _alternatives(build: Footprint, capacity: int) -> dict[str, Any]:
    """Return flag -> a value with which the build would fit (of numbers the largest that is tried),
    all else unchanged; None or 0 if there is none."""
    config, limits = build.config, build.config.limits

    def fits(changed: Footprint) -> bool:
        return changed.need <= capacity

    chunks = (c for c in CHUNKS if build.min_chunk <= c < limits.prefill_chunk)
    dtypes = (d for d in DTYPES if ITEMSIZE[d] < ITEMSIZE[config.dtype])
    placements = ("host", "mmap") if config.ple_placement else ()
    towers = any(is_tower(g.name) for g in build.needs.graphs)
    max_batch = min(limits.max_batch, MAX_BATCH)
    return {
        "--max-seq": largest(lambda n: fits(_at_limits(build, max_seq=n)), limits.max_seq),
        "--max-batch": largest(lambda n: fits(_at_limits(build, max_batch=n)), max_batch),
        "--prefill-chunk": next(
            (c for c in chunks if fits(_at_limits(build, prefill_chunk=c))), None
        ),
        "--dtype": next((TORCH_NAMES[d] for d in dtypes if fits(build.changed(dtype=d))), None),
        "--media": "none" if towers and fits(build.without_media()) else None,
        "--set": next(
            (f"ple_placement={p}" for p in placements if fits(build.at(ple_placement=p))), None
        ),
    }
