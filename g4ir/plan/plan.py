"""Plans what a variant needs and what fits, from its spec alone: no weights, no device, no torch.

plan = make_plan(load_spec("31b"), ctx=[32768], memory=[find_gpu("h100-80gb")])
print(plan_text(plan))          # as text (table.py)
json.dumps(plan.to_dict())      # as JSON (records.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from g4ir.errors import InputError
from g4ir.model.draft import layers_read
from g4ir.model.media import find_media
from g4ir.parallel.shard import collectives
from g4ir.parallel.table import can_share, check_ranks
from g4ir.passes.latent_kv import LatentOptions
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.passes.plan_cache import RingOptions
from g4ir.quant.recipe import Recipe, find_recipe, one_recipe
from g4ir.spec.record import Spec
from g4ir.ui.plots import CacheLines
from g4ir.ui.units import count_text
from g4ir.weights.pack import DEFAULT_PLACEMENT

from . import resolve
from .cost import Cost, floor
from .count import counts, distinct_blocks, layer_blocks, ple_parts
from .drafting import gains
from .engine_limits import Limits
from .footprint import (
    MOST_ROWS,
    Footprint,
    StepCosts,
    largest,
    measure,
    reserve,
)
from .formats import INTEGERS, capacity, naive_bytes
from .gpus import Gpu
from .media import media_plan
from .options import BuildOptions, Resolved
from .records import (
    TOTALS,
    CacheRates,
    DeviceUse,
    Drafts,
    Fit,
    Largest,
    MemoryUse,
    Need,
    Plan,
    RankRow,
    Ranks,
)

CONTEXTS = (4096, 32768, 131072, 262144)
#: numbers of ranks that are compared
COUNTS = (1, 2, 4, 8)
#: defaults of a plan
PLANNED = BuildOptions(device="cuda", media="none")


def make_plan(
    spec: Spec,
    options: BuildOptions = PLANNED,
    *,
    ctx: int | Sequence[int] | None = None,
    batch: int | Sequence[int] = 1,
    memory: Gpu | int | Sequence[Gpu | int] | None = None,
    tp: int = 1,
    ep: bool = False,
    held: Recipe | None = None,
) -> Plan:
    """Plan a spec at every pair of `ctx` (tokens of a sequence, prompt + generated; default 4K to
    256K, up to the model's limit) and `batch`, and what fits on `memory` (devices, or bytes).

    The per-layer embedding table is planned on the device if every pair fits there; each device in
    `fits` has its own placement. tp, ep: tensor-parallel size and expert parallelism; what fits is
    then of one rank with a device of its own.
    held: how the spec's file holds quantised weights.

    Fields of `options` that are read (use `dataclasses.replace(PLANNED, ...)`): dtype, device,
    quant, kv_dtype, prefill_chunk, all_logits, drafter, draft_tokens, skip, latent_kv,
    ple_placement and media.

    Raises InputError naming the argument for sizes out of range and unknown choices.
    """
    setup = _resolved(spec, options, ctx, held)
    if tp != 1 or ep:
        check_ranks(spec, tp, ep)
    return _planned(
        replace(setup, ranks=tp, ep=ep),
        _contexts(setup, ctx),
        _positive("--batch", batch, MOST_ROWS),
        memory,
        forms=(setup.recipe.name,) if setup.recipe else (setup.dtype, *INTEGERS),
        free=options.ple_placement is None and setup.ple_placement == "device",
    )


def plan_engine(
    setup: Resolved,
    *,
    ctx: int | Sequence[int] | None = None,
    batch: int | Sequence[int] | None = None,
    memory: Gpu | int | Sequence[Gpu | int] | None = None,
) -> Plan:
    """Plan an engine as it was built; its limits are the most, and the default, of ctx and batch.

    Raises InputError naming the argument for sizes out of range."""
    limits, recipe = setup.limits, setup.recipe
    return _planned(
        setup,
        _contexts(setup, limits.max_seq if ctx is None else ctx),
        _positive("--batch", limits.max_batch if batch is None else batch, limits.max_batch),
        memory,
        forms=(recipe.name if recipe else setup.dtype,),
        free=False,
    )


def _planned(
    setup: Resolved,
    contexts: Sequence[int],
    batches: Sequence[int],
    memory: Gpu | int | Sequence[Gpu | int] | None,
    forms: Sequence[str],
    free: bool,
) -> Plan:
    """Plan settings with weights in each of `forms`; `free`: the table of per-layer embeddings may
    leave the device."""
    spec, shared = setup.spec, setup.ranks != 1 or setup.ep
    gpus = [m if isinstance(m, Gpu) else _sized(m) for m in _many(memory)]
    counted = _by_ranks(setup, compare=bool(gpus))
    shape = tuple((c, b) for b in batches for c in contexts)
    planner = _DevicePlanner(counted, counted[setup.ranks], shared, shape, free)
    rank = planner.placed(planner.rank, gpus)
    made = counted[1].placed(rank.setup.ple_placement)
    rows, layers = planner.rows(made), layer_blocks(spec)
    shown = (setup.dtype, *forms) if len(forms) == 1 else tuple(made.weights)
    return Plan(
        spec=spec,
        dtype=setup.dtype,
        device=setup.device,
        latent=setup.options.of(LatentOptions).form,
        kv_dtype=resolve.KV_NAMES.get(setup.options.of(NarrowOptions).to),
        ple_placement=made.setup.ple_placement,
        prefill_chunk=setup.limits.prefill_chunk,
        skip=setup.skip,
        counts=counts(spec),
        ple=ple_parts(spec),
        blocks=distinct_blocks(layers),
        layers=layers,
        weights=tuple(made.weights[form] for form in dict.fromkeys(shown)),
        cache=_rates(made),
        rows=rows,
        needed=tuple(
            Need(form, r.ctx, r.batch, rank.need(r, form, "built"))
            for form in forms
            for r in planner.rows(rank)
        ),
        fits=tuple(planner.fit(gpu, form) for gpu in gpus for form in forms),
        kinds=setup.media.kinds,
        media=media_plan(spec),
        drafts=_drafts(made, rows, gpus),
        ranks=_ranks(planner.rank, planner.rows(planner.rank)) if shared else None,
    )


def _resolved(
    spec: Spec,
    options: BuildOptions,
    ctx: int | Sequence[int] | None,
    held: Recipe | None,
) -> Resolved:
    """Return the settings of a build whose limits are the most there is."""
    most = spec.text.max_position_embeddings
    longest = min(most, CONTEXTS[-1]) if ctx is None else max(_positive("--ctx", ctx))
    (chunk,) = _positive("--prefill-chunk", options.prefill_chunk)
    dtype, device = resolve.find_dtype(options.dtype or spec.dtype), options.device or "cuda"
    kv = resolve.find_kv_dtype(options.kv_dtype, dtype)
    latent = resolve.find_latent(options.latent_kv, spec, device, dtype, longest, kv)
    kinds = options.media if isinstance(options.media, str) else tuple(options.media)
    drafter = (
        None
        if options.drafter in resolve.NO_DRAFTER
        else resolve.drafter_spec(spec, options.drafter)
    )
    drafted = resolve.find_draft_tokens(options.draft_tokens, most, drafter is not None)
    return Resolved(
        spec=spec,
        device=device,
        dtype=dtype,
        limits=Limits(MOST_ROWS, most, chunk),
        all_logits=options.all_logits,
        skip=tuple(options.skip),
        options=resolve.pass_options(latent, kv, drafted=drafted, keep=layers_read(spec, drafter)),
        ple_placement=resolve.find_placement(options.ple_placement, spec, device),
        media=find_media(spec, kinds),
        recipe=one_recipe(find_recipe(options.quant), held, "its file"),
        drafter=drafter,
        ranks=1,
        ep=False,
    )


def _by_ranks(setup: Resolved, compare: bool) -> dict[int, Footprint]:
    """Measure one rank and, to compare, one of each other number that can share the model."""
    tp, ep = setup.ranks, setup.ep
    counted = {1: measure(replace(setup, ranks=1, ep=False))}
    if tp == 1 and not ep:
        return counted
    others = [n for n in COUNTS if n > 1 and can_share(setup.spec, n, ep)] if compare else []
    whole = counted[1].decode.param_bytes
    for n in {tp, *others} - {1}:
        found = measure(replace(setup, ranks=n, ep=ep))
        try:
            share = found.decode.param_bytes / whole
        except InputError:  # the ranks would cut groups of quantised weights
            if n == tp:
                raise
            continue
        counted[n] = replace(found, share=share)
    return counted


@dataclass(frozen=True)
class _DevicePlanner:
    """Plans devices for an engine, measured by number of ranks; `free`: the per-layer embedding
    table may leave the device."""

    counted: dict[int, Footprint]
    rank: Footprint
    shared: bool
    shape: tuple[tuple[int, int], ...]
    free: bool

    def rows(self, own: Footprint) -> tuple[MemoryUse, ...]:
        return tuple(own.row(c, b) for c, b in self.shape)

    def placed(self, own: Footprint, gpus: Sequence[Gpu]) -> Footprint:
        """Place the per-layer embedding table on the devices if every row then fits."""
        needs = [own.need(r, own.form, "built") for r in self.rows(own)] if self.free else []
        fits = all(need <= _room(gpu) for need in needs for gpu in gpus)
        return own if fits else own.placed(DEFAULT_PLACEMENT)

    def fit(self, gpu: Gpu, form: str) -> Fit:
        own = self.placed(self.rank, [gpu])
        room, limits = _room(gpu), own.setup.limits

        def fits(ctx: int, batch: int, kind: str) -> bool:
            return own.need(own.row(ctx, batch), form, kind) <= room

        def most(at: int, limit: int, fit: Callable[..., bool]) -> Largest:
            return Largest(at, *(largest(partial(fit, kind=kind), limit) for kind in TOTALS))

        contexts, batches = (sorted({*sizes}) for sizes in zip(*self.shape, strict=True))
        return Fit(
            device=gpu.name,
            memory=gpu.memory_bytes,
            reserve=reserve(gpu.memory_bytes),
            weights=form,
            weight_bytes=own.resident(form),
            cells=tuple(self._cell(own, gpu, form, r) for r in self.rows(own)),
            max_context=tuple(most(b, limits.max_seq, partial(fits, batch=b)) for b in batches),
            max_batch=tuple(most(c, limits.max_batch, partial(fits, c)) for c in contexts),
            ranks=own.setup.ranks,
            ple_placement=own.setup.ple_placement,
        )

    def _cell(self, own: Footprint, gpu: Gpu, form: str, row: MemoryUse) -> DeviceUse:
        totals = {kind: own.need(row, form, kind) for kind in TOTALS}
        seconds = None
        if gpu.bytes_per_s is not None:
            cost = own.decode.at(row.ctx, row.batch, form, own.setup.dtype)
            seconds = floor(cost, gpu.roof).seconds
        spare = _room(gpu) - totals["built"]
        return DeviceUse(
            ctx=row.ctx,
            batch=row.batch,
            **totals,
            fits=spare >= 0,
            spare=spare,
            decode_floor_s=seconds,
            cards=self._cards(gpu, form, row) if self.shared else None,
        )

    def _cards(self, gpu: Gpu, form: str, row: MemoryUse) -> int | None:
        """Return the fewest ranks, each on such a device, that fit; None if none do."""
        for ranks in sorted(self.counted):
            own = self.placed(self.counted[ranks], [gpu])
            if own.need(own.row(row.ctx, row.batch), form, "built") <= _room(gpu):
                return ranks
        return None


def _room(gpu: Gpu) -> int:
    return gpu.memory_bytes - reserve(gpu.memory_bytes)


def _drafts(made: Footprint, rows: Sequence[MemoryUse], gpus: Sequence[Gpu]) -> Drafts | None:
    """Plan speculative decoding at the shortest context, on the first card of known speed."""
    drafted, drafter = made.setup.options.of(RingOptions).slack, made.setup.drafter
    if not drafted:
        return None
    card = next((gpu for gpu in gpus if gpu.bytes_per_s is not None), None)
    ctx = min(r.ctx for r in rows)

    def table(batch: int) -> Any:
        def at(costs: StepCosts, tokens: int = 1) -> Cost:
            return costs.at(ctx, batch, made.form, made.setup.dtype, tokens)

        return gains(
            lambda tokens: at(made.verify if tokens > 1 else made.decode, tokens),
            min(drafted, ctx - 1) or 1,
            card.roof if card else None,
            at(made.draft) if made.draft else None,
        )

    rings = [v.type for v in made.needs.graphs[0].state if isinstance(v.type.shape[0], int)]
    return Drafts(
        tokens=drafted,
        slack_bytes=sum(t.bind({"B": 1}).nbytes() // int(t.shape[0]) * drafted for t in rings),
        context=ctx,
        weights=made.form,
        device=card.name if card else None,
        tables=tuple((b, table(b)) for b in sorted({r.batch for r in rows})),
        drafter=drafter.name if drafter else None,
        drafter_bytes=made.drafter_bytes,
    )


def _ranks(rank: Footprint, rows: Sequence[MemoryUse]) -> Ranks:
    """Return what one rank needs at every context and batch of `rows`, from its measurement."""
    sent = list(collectives(rank.decode.graph))
    token = {"B": 1, "S": 1, "M": 1}
    return Ranks(
        count=rank.setup.ranks,
        weights=rank.decode.param_bytes,
        drafter=rank.drafter_bytes,
        rows=tuple(RankRow(r.ctx, r.batch, r.built) for r in rows),
        messages=len(sent),
        message_bytes=sum(v.type.bind(token).nbytes() for n in sent for v in n.inputs),
    )


def _sized(memory: int) -> Gpu:
    (size,) = _positive("--memory", memory)
    return Gpu(f"{size} bytes", size)


def _many(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _positive(name: str, given: int | Sequence[int], most: int | None = None) -> tuple[int, ...]:
    values = _many(given)
    for v in values:
        if type(v) is not int or v < 1 or (most and v > most):
            limit = f"from 1 to {most}" if most else "of at least 1"
            raise InputError(f"{name} {v!r}: expected a whole number {limit}")
    if not values:
        raise InputError(f"{name}: expected at least one number")
    return tuple(sorted(set(values)))


def _contexts(setup: Resolved, ctx: int | Sequence[int] | None) -> tuple[int, ...]:
    spec, most = setup.spec, setup.limits.max_seq
    if ctx is None:
        return tuple(c for c in CONTEXTS if c <= most) or (most,)
    contexts = _positive("--ctx", ctx)
    if contexts[-1] > most:
        built = most < spec.text.max_position_embeddings
        has = "the engine was built for" if built else f"{spec.name} has"
        raise InputError(f"--ctx {contexts[-1]}: {has} {most} positions ({count_text(most)})")
    return contexts


def _rates(made: Footprint) -> CacheRates:
    """Derive rates from two contexts beyond every window, between which the size is linear."""
    windows = [layer.attention.window or 1 for layer in made.setup.spec.layers()]
    near = -(-max(windows) // 256) * 256
    far = 2 * near
    rates = []
    for needs in (made.plain, made.needs):
        per_token = (needs.cache(1, far) - needs.cache(1, near)) // (far - near)
        rates += [per_token, needs.cache(1, near) - per_token * near]
    return CacheRates(naive_bytes(made.setup.spec, made.setup.dtype), *rates)


def cache_lines(plan: Plan) -> CacheLines:
    """Return KV cache bytes of one sequence from 1K tokens to the model's limit, for a plot;
    `built` only if it differs from `planned`."""
    longest, rates = plan.spec.text.max_position_embeddings, plan.cache

    def sizes(window: int, per_token: int) -> list[int]:
        return [window + per_token * capacity(c) for c in contexts]

    powers = (1 << n for n in range(10, longest.bit_length()))
    contexts = sorted({*(c for c in powers if c <= longest), longest})
    totals = {"naive": [rates.naive_per_token * c for c in contexts]}
    totals["planned"] = sizes(rates.window, rates.per_token)
    built = sizes(rates.built_window, rates.built_per_token)
    totals |= {"built": built} if built != totals["planned"] else {}
    return CacheLines(plan.spec.name, contexts, totals)
