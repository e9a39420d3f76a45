"""Plans the memory and speed of a variant, and what fits a device, from its spec alone: no weights,
no device, no torch.

plan = make_plan(load_spec("31b"), ctx=[32768], memory=find_gpu("h100-80gb"))
print(plan_text(plan))          # as text (table.py)
json.dumps(plan.to_dict())      # as JSON (records.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from g4ir.errors import InputError
from g4ir.model.media import find_media
from g4ir.quant.recipe import QuantConfig, choose_config, find_quant_config
from g4ir.spec.record import Spec
from g4ir.ui.units import count_text
from g4ir.weights.pack import DEFAULT_PLACEMENT

from . import resolve
from .backend import DEFINITION, PlannedBackend
from .cost import floor
from .count import counts
from .engine_limits import Limits
from .footprint import MAX_BATCH, Footprint, largest, measured, usable
from .formats import naive_bytes
from .gpus import Gpu
from .options import BuildConfig, BuildOptions
from .records import Largest, MemoryUse, Plan

CONTEXTS = (4096, 32768, 131072, 262144)
#: weight formats that the plan of an unquantised model compares
INTEGERS = ("int8", "int4")
#: default options of a plan: on CUDA, without towers
PLANNED = BuildOptions(device="cuda", media="none")


def make_plan(
    spec: Spec,
    options: BuildOptions = PLANNED,
    *,
    ctx: int | Sequence[int] | None = None,
    batch: int | Sequence[int] = 1,
    memory: Gpu | int | None = None,
    stored: QuantConfig | None = None,
    backend: PlannedBackend = DEFINITION,
) -> Plan:
    """Plan a spec at every pair of `ctx` (tokens of a sequence, prompt + generated; default 4K to
    256K, up to the model's limit) and `batch`, and what fits on `memory` (a device, or bytes).

    Weight formats: that of `options.quant` or `stored`; without either the dtype, int8 and int4
    (except one whose groups would be split among ranks). In each, unless `options.ple_placement` is
    set, the per-layer embedding table is planned on a CUDA device if every pair then fits (or
    `memory` is None), else memory-mapped; for the maximum sizes it is always memory-mapped. With
    `options.tp` > 1 all bytes are those of one rank, which has its own device. stored: quantisation
    of the spec's checkpoint. backend: pass that of `options.backend` (g4ir.backends.find_backend);
    the default counts weights and caches as the graphs declare them.

    Fields of `options` that are read (use `dataclasses.replace(PLANNED, ...)`): dtype, device,
    quant, quant_activations, kv_dtype, prefill_chunk, all_logits, drafter, draft_tokens, tp, ep,
    skip, latent_kv, ple_placement, media and settings.

    Raises InputError naming the argument for sizes out of range and unknown choices.
    """
    config = _resolved(spec, options, stored, backend)
    config.sharding.check()
    contexts, batches = _contexts(config, ctx), _positive("--batch", batch, MAX_BATCH)
    free = options.ple_placement is None and config.ple_placement == "device"
    formats = _formats(config, backend, () if config.quant else map(find_quant_config, INTEGERS))
    return _planned(formats, contexts, batches, _sized(memory), free)


def plan_engine(
    config: BuildConfig,
    backend: PlannedBackend,
    *,
    ctx: int | Sequence[int] | None = None,
    batch: int | Sequence[int] | None = None,
    memory: Gpu | int | None = None,
) -> Plan:
    """Plan an engine as it was built; its limits are the maximum and the default of ctx and batch.

    Raises InputError naming the argument for sizes out of range."""
    limits = config.limits
    contexts = _contexts(config, limits.max_seq if ctx is None else ctx)
    batches = _positive("--batch", limits.max_batch if batch is None else batch, limits.max_batch)
    formats = _formats(config, backend, ())
    return _planned(formats, contexts, batches, _sized(memory), free=False)


def _resolved(
    spec: Spec, options: BuildOptions, stored: QuantConfig | None, backend: PlannedBackend
) -> BuildConfig:
    """Resolve the options with the upper limits of a plan: MAX_BATCH, and the model's positions."""
    (chunk,) = _positive("--prefill-chunk", options.prefill_chunk)
    kinds = options.media if isinstance(options.media, str) else tuple(options.media)
    drafted = options.drafter not in resolve.NO_DRAFTER
    return resolve.resolved(
        spec,
        options,
        backend,
        limits=Limits(MAX_BATCH, spec.text.max_position_embeddings, chunk),
        media=find_media(spec, kinds),
        quant=choose_config(find_quant_config(options.quant), stored, "its file"),
        drafter=resolve.drafter_spec(spec, options.drafter) if drafted else None,
    )


def _formats(
    config: BuildConfig, backend: PlannedBackend, recipes: Iterable[QuantConfig | None]
) -> Iterator[Footprint]:
    """Yield the footprint of a config, then its footprint with each of `recipes`, except those
    whose groups would be split among ranks."""
    yield measured(config, backend)
    for recipe in recipes:
        with suppress(InputError):
            yield measured(replace(config, quant=recipe), backend)


def _planned(
    formats: Iterable[Footprint],
    contexts: Sequence[int],
    batches: Sequence[int],
    gpu: Gpu | None,
    free: bool,
) -> Plan:
    """Plan an engine in each weight format; `free`: the per-layer embedding table may be
    memory-mapped."""
    sizes = [(batch, ctx) for batch in batches for ctx in contexts]
    footprints = list(formats)
    every = [_place_ple(f, sizes, gpu) if free else f for f in footprints]
    # A build moves the table off the device before it refuses a size, so the maximum sizes are
    # without it.
    smallest = [f.at(ple_placement=DEFAULT_PLACEMENT) if free else f for f in footprints]
    config = every[0].config
    return Plan(
        config=config,
        counts=counts(config.spec),
        weights=tuple(f.weights for f in every),
        rows=tuple(_row(f, batch, ctx, gpu) for f in every for batch, ctx in sizes),
        gpu=gpu,
        largest=tuple(_largest(f, contexts, batches, gpu) for f in smallest) if gpu else (),
    )


def _place_ple(
    footprint: Footprint, sizes: Iterable[tuple[int, int]], gpu: Gpu | None
) -> Footprint:
    """Keep the per-layer embedding table on the device if all sizes then fit or no device is given;
    else memory-map it."""
    needs = (footprint.need_at(*size) for size in sizes)
    fits = gpu is None or max(needs) <= usable(gpu.memory_bytes)
    return footprint if fits else footprint.at(ple_placement=DEFAULT_PLACEMENT)


def _row(footprint: Footprint, batch: int, ctx: int, gpu: Gpu | None) -> MemoryUse:
    config = footprint.config
    parts = footprint.parts(batch, ctx)
    needed = footprint.need_at(batch, ctx)
    seconds = None
    if gpu and (roof := gpu.step_roof) and (step := footprint.step(batch, ctx)):
        seconds = floor(step, roof).seconds
    naive = 0 if config.spec.embedding else naive_bytes(config.spec, config.dtype, config.ranks)
    return MemoryUse(
        footprint.format,
        batch,
        ctx,
        naive=naive * ctx * batch,
        planned=parts["caches"],
        activations=parts["activations"],
        workspace=parts["workspace"],
        needed=needed,
        spare=usable(gpu.memory_bytes) - needed if gpu else None,
        step_s=seconds,
    )


def _largest(
    footprint: Footprint, contexts: Sequence[int], batches: Sequence[int], gpu: Gpu
) -> Largest:
    limits, capacity = footprint.config.limits, usable(gpu.memory_bytes)

    def fits(batch: int, ctx: int) -> bool:
        return footprint.need_at(batch, ctx) <= capacity

    return Largest(
        footprint.format,
        {b: largest(partial(fits, b), limits.max_seq) for b in batches},
        {c: largest(partial(fits, ctx=c), limits.max_batch) for c in contexts},
        _cards(footprint, batches[0], contexts[-1], capacity),
    )


def _cards(footprint: Footprint, batch: int, ctx: int, capacity: int) -> int | None:
    """Return the smallest number of cards, of 1, 2, 4, 8 and the plan's ranks, that suffices; None
    if none does, and for a plan of one rank."""
    ranks = footprint.config.ranks
    for n in sorted({1, 2, 4, 8, ranks} if ranks > 1 else ()):
        with suppress(InputError):  # ranks that cannot share the model
            rank = footprint.changed(ranks=n, ep=n > 1 and footprint.config.ep)
            rank.config.sharding.check()
            if rank.need_at(batch, ctx) <= capacity:
                return n
    return None


def _sized(memory: Gpu | int | None) -> Gpu | None:
    if memory is None or isinstance(memory, Gpu):
        return memory
    (size,) = _positive("--memory", memory)
    return Gpu(f"{size} bytes", size)


def _positive(name: str, value: int | Sequence[int], maximum: int | None = None) -> tuple[int, ...]:
    values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    for v in values:
        if type(v) is not int or v < 1 or (maximum and v > maximum):
            limit = f"from 1 to {maximum}" if maximum else "of at least 1"
            raise InputError(f"{name} {v!r}: expected a whole number {limit}")
    if not values:
        raise InputError(f"{name}: expected at least one number")
    return tuple(sorted(set(values)))


def _contexts(config: BuildConfig, ctx: int | Sequence[int] | None) -> tuple[int, ...]:
    spec, max_seq = config.spec, config.limits.max_seq
    if ctx is None:
        return tuple(c for c in CONTEXTS if c <= max_seq) or (max_seq,)
    contexts = _positive("--ctx", ctx)
    if contexts[-1] > max_seq:
        built = max_seq < spec.text.max_position_embeddings
        has = "the engine was built for" if built else f"{spec.name} has"
        raise InputError(f"--ctx {contexts[-1]}: {has} {max_seq} positions ({count_text(max_seq)})")
    return contexts
