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
from g4ir.model.draft import DRAFT
from g4ir.model.media import find_media
from g4ir.parallel.shard import collectives
from g4ir.parallel.table import can_share, check_ranks
from g4ir.quant.recipe import Recipe, find_recipe, one_recipe
from g4ir.spec.record import Spec
from g4ir.ui.plots import CacheLines
from g4ir.ui.units import count_text
from g4ir.weights.pack import DEFAULT_PLACEMENT

from . import resolve
from .backend import DEFINITION, PlannedBackend
from .cost import floor
from .count import counts, distinct_blocks, layer_blocks, ple_parts
from .drafting import gains
from .engine_limits import Limits
from .footprint import (
    MOST_ROWS,
    Footprint,
    largest,
    measured,
    plain_weights,
    reserve,
)
from .formats import INTEGERS, capacity, naive_bytes
from .gpus import Gpu
from .media import media_plan
from .options import BuildConfig, BuildOptions
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
    WeightBytes,
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
    backend: PlannedBackend = DEFINITION,
) -> Plan:
    """Plan a spec at every pair of `ctx` (tokens of a sequence, prompt + generated; default 4K to
    256K, up to the model's limit) and `batch`, and what fits on `memory` (devices, or bytes).

    The per-layer embedding table is planned on the device if every pair fits there; each device in
    `fits` has its own placement. tp, ep: tensor-parallel size and expert parallelism; what fits is
    then of one rank with a device of its own.
    held: how the spec's file holds quantised weights. backend: whose engines are planned, that of
    `options.backend` (g4ir.backends.find_backend); by default weights and caches are counted as the
    graphs declare them.

    Fields of `options` that are read (use `dataclasses.replace(PLANNED, ...)`): dtype, device,
    quant, kv_dtype, prefill_chunk, all_logits, drafter, draft_tokens, skip, latent_kv,
    ple_placement, media and settings.

    Raises InputError naming the argument for sizes out of range and unknown choices.
    """
    config = _resolved(spec, replace(options, tp=tp, ep=ep), held, backend)
    if tp != 1 or ep:
        check_ranks(spec, tp, ep)
    return _planned(
        config,
        backend,
        _contexts(config, ctx),
        _positive("--batch", batch, MOST_ROWS),
        memory,
        others=() if config.quant else tuple(map(find_recipe, INTEGERS)),
        free=options.ple_placement is None and config.ple_placement == "device",
    )


def plan_engine(
    config: BuildConfig,
    backend: PlannedBackend,
    *,
    ctx: int | Sequence[int] | None = None,
    batch: int | Sequence[int] | None = None,
    memory: Gpu | int | Sequence[Gpu | int] | None = None,
) -> Plan:
    """Plan an engine as it was built; its limits are the most, and the default, of ctx and batch.

    Raises InputError naming the argument for sizes out of range."""
    limits = config.limits
    contexts = _contexts(config, limits.max_seq if ctx is None else ctx)
    batches = _positive("--batch", limits.max_batch if batch is None else batch, limits.max_batch)
    return _planned(config, backend, contexts, batches, memory, others=(), free=False)


def _planned(
    config: BuildConfig,
    backend: PlannedBackend,
    contexts: Sequence[int],
    batches: Sequence[int],
    memory: Gpu | int | Sequence[Gpu | int] | None,
    others: Sequence[Recipe | None],
    free: bool,
) -> Plan:
    """Plan settings, and the same with each of `others` as quantisation config; `free`: the table
    of per-layer embeddings may leave the device."""
    spec, shared = config.spec, config.ranks != 1 or config.ep
    gpus = [m if isinstance(m, Gpu) else _sized(m) for m in _many(memory)]
    counted = _by_ranks(config, backend, others, compare=bool(gpus))
    shape = tuple((c, b) for b in batches for c in contexts)
    planner = _DevicePlanner(counted, config.ranks, shared, shape, free)
    ranks = {form: planner.placed(costs, gpus) for form, costs in planner.own.items()}
    rank, *_ = ranks.values()
    every = [c.at(ple_placement=rank.config.ple_placement) for c in counted[1].values()]
    rows, layers = planner.rows(every[0]), layer_blocks(spec)
    return Plan(
        config=rank.config,
        counts=counts(spec),
        ple=ple_parts(spec),
        blocks=distinct_blocks(layers),
        layers=layers,
        weights=_weights(every),
        cache=_rates(every[0]),
        rows=rows,
        needed=tuple(
            Need(form, ctx, batch, costs.need_at(ctx, batch))
            for form, costs in ranks.items()
            for ctx, batch in shape
        ),
        fits=tuple(planner.fit(gpu, form) for gpu in gpus for form in ranks),
        media=media_plan(spec),
        drafts=_drafts(every[0], rows, gpus),
        ranks=_ranks(rank, planner.rows(rank)) if shared else None,
    )


def _weights(every: Sequence[Footprint]) -> tuple[WeightBytes, ...]:
    """Return the weights unquantised, and in each quantised format; of an engine that is not
    quantised also in other dtypes."""
    config = every[0].config
    dtypes = [config.dtype] if config.quant or len(every) == 1 else ["f32", "bf16", config.dtype]
    plain = {d: plain_weights(config, d) for d in dtypes}
    return tuple((plain | {c.form: c.weights for c in every}).values())


def _resolved(
    spec: Spec, options: BuildOptions, held: Recipe | None, backend: PlannedBackend
) -> BuildConfig:
    """Return the settings of a build whose limits are the most there is."""
    (chunk,) = _positive("--prefill-chunk", options.prefill_chunk)
    kinds = options.media if isinstance(options.media, str) else tuple(options.media)
    drafted = options.drafter not in resolve.NO_DRAFTER
    return resolve.resolved(
        spec,
        options,
        backend,
        limits=Limits(MOST_ROWS, spec.text.max_position_embeddings, chunk),
        media=find_media(spec, kinds),
        quant=one_recipe(find_recipe(options.quant), held, "its file"),
        drafter=resolve.drafter_spec(spec, options.drafter) if drafted else None,
    )


def _by_ranks(
    config: BuildConfig, backend: PlannedBackend, others: Sequence[Recipe | None], compare: bool
) -> dict[int, dict[str, Footprint]]:
    """Measure one rank and, to compare, one of each other number that can share the model: number
    of ranks -> weight format -> costs, that of the settings first."""
    tp, ep = config.ranks, config.ep
    counted = {1: _by_format(replace(config, ranks=1, ep=False), backend, others)}
    if tp == 1 and not ep:
        return counted
    numbers = [n for n in COUNTS if n > 1 and can_share(config.spec, n, ep)] if compare else []
    for n in {tp, *numbers} - {1}:
        found = replace(config, ranks=n, ep=ep)
        if n == tp or config.quant is None or _uncut(found, backend):
            counted[n] = _by_format(found, backend, others)
    return counted


def _by_format(
    config: BuildConfig, backend: PlannedBackend, others: Sequence[Recipe | None]
) -> dict[str, Footprint]:
    """Measure settings, and with other quantisation configs whose groups no rank cuts."""
    more = (_uncut(replace(config, quant=r), backend) for r in others)
    return {c.form: c for c in (measured(config, backend), *more) if c}


def _uncut(config: BuildConfig, backend: PlannedBackend) -> Footprint | None:
    """Measure settings; None if ranks cut a group of quantised weights."""
    try:
        return measured(config, backend)
    except InputError:
        if config.ranks == 1:
            raise
        return None


@dataclass(frozen=True)
class _DevicePlanner:
    """Plans devices for an engine, measured by number of ranks and weight format; `free`: the
    per-layer embedding table may leave the device."""

    counted: dict[int, dict[str, Footprint]]
    ranks: int
    shared: bool
    shape: tuple[tuple[int, int], ...]
    free: bool

    @property
    def own(self) -> dict[str, Footprint]:
        return self.counted[self.ranks]

    def rows(self, costs: Footprint) -> tuple[MemoryUse, ...]:
        return tuple(costs.row(c, b) for c, b in self.shape)

    def placed(self, costs: Footprint, gpus: Sequence[Gpu]) -> Footprint:
        """Place the per-layer embedding table on the devices if every row then fits."""
        needs = [costs.need_at(c, b) for c, b in self.shape] if self.free else []
        fits = all(need <= _room(gpu) for need in needs for gpu in gpus)
        return costs if fits else costs.at(ple_placement=DEFAULT_PLACEMENT)

    def fit(self, gpu: Gpu, form: str) -> Fit:
        own = self.placed(self.own[form], [gpu])
        room, limits = _room(gpu), own.config.limits

        def fits(ctx: int, batch: int, kind: str) -> bool:
            return own.need_at(ctx, batch, kind) <= room

        def most(at: int, limit: int, fit: Callable[..., bool]) -> Largest:
            return Largest(at, *(largest(partial(fit, kind=kind), limit) for kind in TOTALS))

        contexts, batches = (sorted({*sizes}) for sizes in zip(*self.shape, strict=True))
        return Fit(
            device=gpu.name,
            memory=gpu.memory_bytes,
            reserve=reserve(gpu.memory_bytes),
            weights=form,
            weight_bytes=own.resident,
            cells=tuple(self._cell(own, gpu, r) for r in self.rows(own)),
            max_context=tuple(most(b, limits.max_seq, partial(fits, batch=b)) for b in batches),
            max_batch=tuple(most(c, limits.max_batch, partial(fits, c)) for c in contexts),
            ranks=own.config.ranks,
            ple_placement=own.config.ple_placement,
        )

    def _cell(self, own: Footprint, gpu: Gpu, row: MemoryUse) -> DeviceUse:
        totals = {kind: own.need_at(row.ctx, row.batch, kind) for kind in TOTALS}
        seconds = None
        if gpu.bytes_per_s is not None:
            seconds = floor(own.step(row.ctx, row.batch), gpu.roof).seconds
        spare = _room(gpu) - totals["built"]
        return DeviceUse(
            ctx=row.ctx,
            batch=row.batch,
            **totals,
            fits=spare >= 0,
            spare=spare,
            decode_floor_s=seconds,
            cards=self._cards(gpu, own.form, row) if self.shared else None,
        )

    def _cards(self, gpu: Gpu, form: str, row: MemoryUse) -> int | None:
        """Return the fewest ranks, each on such a device, that fit; None if none do."""
        for ranks, costs in sorted(self.counted.items()):
            own = self.placed(costs[form], [gpu]) if form in costs else None
            if own and own.need_at(row.ctx, row.batch) <= _room(gpu):
                return ranks
        return None


def _room(gpu: Gpu) -> int:
    return gpu.memory_bytes - reserve(gpu.memory_bytes)


def _drafts(made: Footprint, rows: Sequence[MemoryUse], gpus: Sequence[Gpu]) -> Drafts | None:
    """Plan speculative decoding at the shortest context, on the first card of known speed."""
    drafted, drafter = made.config.draft_tokens, made.config.drafter
    if not drafted:
        return None
    card = next((gpu for gpu in gpus if gpu.bytes_per_s is not None), None)
    ctx = min(r.ctx for r in rows)

    def table(batch: int) -> Any:
        return gains(
            lambda tokens: made.step(ctx, batch, tokens),
            min(drafted, ctx - 1) or 1,
            card.roof if card else None,
            made.step(ctx, batch, graph=DRAFT) if drafter else None,
        )

    prefill, *_ = made.needs.graphs
    rings = [v.type for v in prefill.state if isinstance(v.type.shape[0], int)]
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
    sent = list(collectives(rank.packing.program.graphs["prefill"]))
    token = {"B": 1, "S": 1}
    return Ranks(
        count=rank.config.ranks,
        weights=rank.decoder_bytes,
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


def _contexts(config: BuildConfig, ctx: int | Sequence[int] | None) -> tuple[int, ...]:
    spec, most = config.spec, config.limits.max_seq
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
    windows = [layer.attention.window or 1 for layer in made.config.spec.layers()]
    near = -(-max(*windows, made.config.limits.prefill_chunk) // 256) * 256
    far = 2 * near
    rates = []
    for cache in (made.plain.cache, made.cache):
        per_token = (cache(1, far) - cache(1, near)) // (far - near)
        rates += [per_token, cache(1, near) - per_token * near]
    return CacheRates(naive_bytes(made.config.spec, made.config.dtype), *rates)


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
