"""Plans what a variant needs and what fits, from its spec alone: no weights, no device, no torch.

    plan = make_plan(load_spec("31b"), ctx=[32768], memory=[find_gpu("h100-80gb")])
    print(plan_text(plan))          # a table for people (plan/table.py)
    json.dumps(plan.to_dict())      # KEYS says what is in it

Three cache totals everywhere. `naive`: every layer that has K and V of its own keeps both for the
whole context, as most calculators count. `planned`: sliding layers keep their window, layers that
share K and V have none. `built`: what this engine allocates, K=V layers in their latent form and
rows in fewer bits too.
The caches of `planned` and `built` are the state of the optimised graphs, and weights the graphs'
params, so both are what the runtime allocates; activations and workspace are estimates
(g4ir/plan/memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from g4ir.errors import InputError
from g4ir.ir.graph import Graph, Program
from g4ir.ir.rewrite import bind, split_prologue
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT, build_draft, layers_read
from g4ir.model.media import Media, find_media
from g4ir.model.tensors import numel, text_tensors, tower_tensors
from g4ir.model.text import build_graph
from g4ir.model.towers import build_towers, is_tower
from g4ir.ops.types import ITEMSIZE
from g4ir.parallel.shard import shard_program
from g4ir.parallel.table import can_share, check_ranks
from g4ir.passes import PASSES, run_passes
from g4ir.passes.latent_kv import PLAIN
from g4ir.passes.match import OFF
from g4ir.quant.recipe import Recipe, find_recipe
from g4ir.quant.rewrite import quantised
from g4ir.spec.record import Spec
from g4ir.ui.plots import CacheLines
from g4ir.ui.units import count_text
from g4ir.weights.pack import DEFAULT_PLACEMENT

from .blocks import Block, PleParts, blocks, layer_blocks, ple_parts
from .cost import Cost, floor, graph_costs, total
from .count import Counts, counts
from .drafting import ACCEPTANCE, Gain, gains
from .formats import (
    FORMATS,
    INTEGERS,
    WeightSizes,
    capacity,
    kv_bytes,
    nominal,
    tower_bytes,
    weight_sizes,
)
from .gpus import Gpu
from .media import MediaPart, media_plan
from .memory import Needs
from .options import BuildOptions
from .ranks import COUNTS, Ranks, StepModel, plan_ranks
from .resolve import (
    KV_NAMES,
    NO_DRAFTER,
    drafter_spec,
    find_draft_tokens,
    find_dtype,
    find_kv_dtype,
    find_latent,
    find_placement,
    pass_options,
)

SCHEMA = 1
CONTEXTS = (4096, 32768, 131072, 262144)
MOST_ROWS = 1 << 16
#: kept free on a device: its driver's and the allocator's share, not measured per device
RESERVE_BYTES, RESERVE_SHARE = 512 << 20, 1 / 64
TOTALS = ("naive", "planned", "built")

#: what `to_dict` holds; sizes are bytes, counts elements
KEYS = {
    "schema": "number of this layout; another number has other keys",
    "variant": "name of the spec",
    "hub": "where its weights are published, or null",
    "spec_digest": "SHA-256 of every field of the spec",
    "dtype": "of activations, unquantised weights, and caches but for those as built",
    "device": "cpu or cuda: decides the latent form where it is `auto`",
    "latent": "form of the caches of K=V layers: off, value or raw",
    "kv_dtype": "of the caches as built: bfloat16, float8 or int8; null for the dtype",
    "ple_placement": "device, host or mmap; null without per-layer embeddings",
    "prefill_chunk": "tokens of a prompt at a time",
    "skipped_passes": "passes left out",
    "max_context": "positions that the model has",
    "parameters": "elements: published (parameters as the hub counts them), published_elements "
    "(0-d ones too), published_tensors, published_bytes, loaded, text, active (head included), "
    "active_body (without), nominal (two digits), one_expert, and every part",
    "ple_parameters": "the per-layer embeddings by part",
    "blocks": "matrices per kind of layer: attention, mlp (dense), router, experts, "
    "experts_active, ffn (all three), ffn_active, total (attention + ffn), active, ple (apart), "
    "dead (K and V that only published files have), published (total + dead), vectors",
    "layers": "the same for each layer",
    "weights": "per format: layers, token_table (tied: the head too), head, ple_table, total, "
    "device, host, mapped (where they lie), towers (on the device where media are), nominal",
    "cache": "per row: naive_per_token; per_token and window of `planned` (bytes at a context not "
    "below the window = window + per_token * context); built_per_token, built_window",
    "rows": "per context and batch: the three cache totals, activations, workspace",
    "fits": "per device and weight format: device, memory, reserve, weights (format), "
    "weight_bytes; cells: need with each cache total, fits and spare (negative: short) as built, "
    "decode_floor_s, cards (with --tp: the fewest ranks that fit, each on such a device; null: "
    "none do); max_context per batch and max_batch per context (0: nothing fits); with --tp all of "
    "it is of one of `ranks` ranks; ple_placement as a build for this device has it",
    "drafts": "null, or: tokens drafted at a time at most, slack_bytes of a row's rings for them, "
    "context, weights, device (null: costs are bytes), acceptance; tables: per batch and number of "
    "drafted tokens the cost of a round in steps, pays_from (acceptance), speedup by acceptance; "
    "drafter (null: drafts cost nothing) and drafter_bytes of its weights, on the device",
    "ranks": "null, or with --tp: count; of each rank weights (beside tables that are only "
    "gathered from), those of its drafter, rows (context, batch, cache as built); messages of a "
    "decode step, message_bytes that a rank gives in them for a row; gpu, and on it steps (ranks, "
    "context, batch, us: least and most microseconds by the way to exchange), predicted",
    "media": "kinds that rows and fits count in; parts (vision, audio): params, and for each size "
    "that a tower may have its soft tokens, rows of its input, and flops of a run",
}


# --- parts of a plan ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights in one format and where they lie."""

    sizes: WeightSizes
    device: int
    host: int
    mapped: int
    towers: int
    nominal: int

    def to_dict(self) -> dict[str, Any]:
        places = {k: v for k, v in vars(self).items() if k != "sizes"}
        return {**vars(self.sizes), "total": self.sizes.total, **places}


@dataclass(frozen=True)
class CacheRates:
    """Cache bytes of one row: so much fixed, so much for each token of the context."""

    naive_per_token: int
    per_token: int
    window: int
    built_per_token: int
    built_window: int


@dataclass(frozen=True)
class Row:
    """Bytes at one context and batch."""

    ctx: int
    batch: int
    naive: int
    planned: int
    built: int
    activations: int
    workspace: int


@dataclass(frozen=True)
class Cell:
    """Need on a device at one context and batch, with each of the cache totals."""

    ctx: int
    batch: int
    naive: int
    planned: int
    built: int
    fits: bool
    spare: int
    decode_floor_s: float | None
    cards: int | None = None


@dataclass(frozen=True)
class Most:
    """The largest batch at a context, or the largest context at a batch (`at`)."""

    at: int
    naive: int
    planned: int
    built: int


@dataclass(frozen=True)
class Fit:
    """One device with weights in one format."""

    device: str
    memory: int
    reserve: int
    weights: str
    weight_bytes: int
    cells: tuple[Cell, ...]
    max_context: tuple[Most, ...]
    max_batch: tuple[Most, ...]
    ranks: int = 1
    ple_placement: str | None = None


@dataclass(frozen=True)
class Drafts:
    """The cost of drafting, and its gains by number of rows."""

    tokens: int
    slack_bytes: int
    context: int
    weights: str
    device: str | None
    tables: tuple[tuple[int, tuple[Gain, ...]], ...]
    drafter: str | None = None
    drafter_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        tables = [{"batch": b, "rounds": [g.to_dict() for g in found]} for b, found in self.tables]
        return {**vars(self), "acceptance": list(ACCEPTANCE), "tables": tables}


@dataclass(frozen=True)
class Plan:
    """Everything that `make_plan` finds out."""

    spec: Spec
    dtype: str
    device: str
    latent: str
    kv_dtype: str | None
    ple_placement: str | None
    prefill_chunk: int
    skip: tuple[str, ...]
    counts: Counts
    ple: PleParts
    blocks: tuple[Block, ...]
    layers: tuple[Block, ...]
    weights: tuple[Weights, ...]
    cache: CacheRates
    rows: tuple[Row, ...]
    fits: tuple[Fit, ...]
    #: kinds of media that the numbers above count in, and what each part costs
    kinds: tuple[str, ...]
    media: tuple[MediaPart, ...]
    #: None where nothing is drafted
    drafts: Drafts | None = None
    #: None for one rank
    ranks: Ranks | None = None

    def weights_as(self, form: str) -> Weights:
        return next(w for w in self.weights if w.sizes.format == form)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; KEYS describes them."""
        return {
            "schema": SCHEMA,
            "variant": self.spec.name,
            "hub": self.spec.hub,
            "spec_digest": self.spec.digest(),
            "dtype": self.dtype,
            "device": self.device,
            "latent": self.latent,
            "kv_dtype": self.kv_dtype,
            "ple_placement": self.ple_placement,
            "prefill_chunk": self.prefill_chunk,
            "skipped_passes": list(self.skip),
            "max_context": self.spec.text.max_position_embeddings,
            "parameters": _parameters(self.spec, self.counts),
            "ple_parameters": {**asdict(self.ple), "total": self.ple.total},
            "blocks": [b.to_dict() for b in self.blocks],
            "layers": [b.to_dict() for b in self.layers],
            "weights": [w.to_dict() for w in self.weights],
            "cache": asdict(self.cache),
            "rows": [asdict(r) for r in self.rows],
            "fits": [asdict(f) for f in self.fits],
            "drafts": self.drafts and self.drafts.to_dict(),
            "ranks": self.ranks and self.ranks.to_dict(),
            "media": {"kinds": list(self.kinds), "parts": [p.to_dict() for p in self.media]},
        }


def _parameters(spec: Spec, n: Counts) -> dict[str, int]:
    towers = tower_tensors(spec)
    moe = spec.text.moe
    return {
        "published": n.hub_parameters,
        "published_elements": n.hub,
        "published_tensors": n.hub_tensors,
        "published_bytes": n.hub * ITEMSIZE[spec.dtype],
        "loaded": n.loaded,
        "text": n.text,
        "active": n.active,
        "active_body": n.active - (n.head or n.embed),
        "nominal": nominal(n.hub_parameters),
        "one_expert": 3 * moe.intermediate_size * spec.text.hidden_size if moe else 0,
        **asdict(n),
        "vision_position_table": _elements(towers, ".position_embedding_table"),
        "vision_buffers": _elements(towers, ".std_bias", ".std_scale"),
    }


def _elements(tensors: dict[str, tuple[int, ...]], *endings: str) -> int:
    return numel({k: v for k, v in tensors.items() if k.endswith(endings)})


# --- what an engine needs ----------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """The memory of one engine, as built, and with plain caches in its dtype."""

    spec: Spec
    dtype: str
    device: str
    ple_placement: str | None
    needs: Needs
    plain: Needs
    recipe: Recipe | None = None
    drafter: Spec | None = None
    #: ranks that share the model: `needs` and `plain` are of one of them, which has this share of
    #: the weights
    ranks: int = 1
    share: float = 1.0
    _rows: dict[tuple[int, int, int], Row] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def weights(self) -> dict[str, Weights]:
        """Bytes by format, for every format that a plan may ask for."""
        forms = dict.fromkeys(("f32", "bf16", self.dtype, *INTEGERS))
        own = {self.recipe.name: self._weights(self.recipe)} if self.recipe else {}
        return {form: self._weights(form) for form in forms} | own

    @property
    def form(self) -> str:
        """The format of its weights."""
        return self.recipe.name if self.recipe else self.dtype

    def _weights(self, form: str | Recipe) -> Weights:
        sizes = weight_sizes(self.spec, form, self.dtype)
        places = {"device": 0, "host": 0, "mmap": sizes.tables}
        places[self.ple_placement or DEFAULT_PLACEMENT] += sizes.ple_table
        places["device"] += sizes.total - sizes.tables - sizes.ple_table
        quoted = nominal(counts(self.spec).hub_parameters)
        return Weights(
            sizes,
            places["device"],
            places["host"],
            places["mmap"],
            tower_bytes(self.spec, self.dtype),
            int(quoted * self._nominal(sizes)),
        )

    def _nominal(self, sizes: WeightSizes) -> float:
        if sizes.format in FORMATS:
            return FORMATS[sizes.format].nominal
        return sizes.total / numel(text_tensors(self.spec))

    def resident(self, form: str) -> int:
        """Return bytes of weights in the device's memory; on the CPU that is the host's."""
        w = self.weights[form]
        on_device = (self.ple_placement or DEFAULT_PLACEMENT) == "device"
        table = w.sizes.ple_table if on_device else 0  # every rank has it whole
        beside = table + self.towers + self.drafter_bytes
        own = round((w.device - table) * self.share)
        return own + beside + (w.host if self.device == "cpu" else 0)

    @cached_property
    def drafter_bytes(self) -> int:
        """Bytes of the packed weights of the drafter."""
        return param_bytes(g for g in self.needs.graphs if g.name == DRAFT)

    @cached_property
    def towers(self) -> int:
        """Bytes of the packed weights of the towers that the engine has."""
        return param_bytes(g for g in self.needs.graphs if is_tower(g.name))

    @cached_property
    def params(self) -> int:
        """Bytes of all packed weights but tables that are only gathered from."""
        return param_bytes(self.needs.graphs)

    @cached_property
    def naive_per_token(self) -> int:
        return kv_bytes(_rank_spec(self.spec, self.ranks), 1, 1, self.dtype).per_token

    def row(self, ctx: int, batch: int, chunk: int) -> Row:
        """Return the bytes at one context and batch, with `chunk` tokens to a prefill call."""
        key = (ctx, batch, chunk)
        if key not in self._rows:
            self._rows[key] = Row(
                ctx,
                batch,
                self.naive_per_token * ctx * batch,
                self.plain.cache(batch, ctx),
                self.needs.cache(batch, ctx),
                self.needs.activations(batch, ctx, chunk),
                self.needs.workspace(batch, ctx, chunk),
            )
        return self._rows[key]

    def need(self, row: Row, form: str, kind: str) -> int:
        """Return bytes in the device's memory with one of TOTALS, without the reserve."""
        cache: int = getattr(row, kind)
        return self.resident(form) + cache + row.activations + row.workspace


def _rank_spec(spec: Spec, ranks: int) -> Spec:
    """Return the spec with a rank's KV heads: at least one of each kind."""
    text = spec.text
    sliding, full = (
        replace(kind, num_key_value_heads=max(1, kind.num_key_value_heads // ranks))
        for kind in (text.sliding, text.full)
    )
    return replace(spec, text=replace(text, sliding=sliding, full=full))


def param_bytes(graphs: Iterable[Graph]) -> int:
    """Return the bytes of the params that graphs share."""
    return sum(t.nbytes() for t in {v.name: v.type for g in graphs for v in g.params}.values())


@dataclass(frozen=True)
class StepCosts:
    """The cost of a step, of one token or of several that are verified; its graph is made for the
    first who asks."""

    make: Callable[[], Graph]
    #: whether its weights are held in a format already
    quantised: bool = False
    _known: dict[Any, Cost] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def graph(self) -> Graph:
        return self.make()

    def at(self, ctx: int, batch: int, form: str, dtype: str, tokens: int = 1) -> Cost:
        """Return a cost: FLOPs and caches depend on the context, weights on the format."""
        if self.quantised:
            return self._cost(ctx, batch, None, tokens)
        step = self._cost(ctx, batch, dtype, tokens)
        weights = self._cost(None, batch, form, tokens)
        return Cost(step.flops, weights.weight_bytes, step.state_bytes)

    def _cost(self, ctx: int | None, batch: int, form: str | None, tokens: int) -> Cost:
        key = (ctx, batch, form, tokens)
        if key not in self._known:
            held = max((ctx or 0) - tokens, 0)
            costs = graph_costs(self.graph, B=batch, S=tokens, C=held, weights=form)
            self._known[key] = total(costs)
        return self._known[key]


def reserve(memory: int) -> int:
    """Return bytes of a device that a plan leaves alone."""
    return int(RESERVE_BYTES + memory * RESERVE_SHARE)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest n in 1..most that fits, where all smaller ones do too; 0 for none."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# --- making a plan -----------------------------------------------------------------------------


#: what a plan counts on unless it is told otherwise
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
    steps: StepModel | None = None,
) -> Plan:
    """Make the plan of a spec. `ctx` (tokens of a row, new ones too; default 4K to 256K as far as
    the model goes) and `batch` (rows) give a table of every pair; `memory` (devices, or bytes) what
    fits. By default the table of per-layer embeddings lies on the device where that leaves room for
    every row on the device; what fits is told for each device's own choice. `tp` ranks share the
    model, with `ep` some experts each: what fits is then of one of them, with a device of its own.
    `steps` predicts how long theirs are.

    Read of `options`, best made with `dataclasses.replace(PLANNED, ...)`: dtype, device, quant,
    kv_dtype, prefill_chunk, all_logits, drafter, draft_tokens, skip, latent_kv, ple_placement and
    media.

    Raises InputError naming the argument for sizes out of range and unknown choices.
    """
    contexts = _contexts(spec, ctx)
    batches = _positive("batch", batch, MOST_ROWS)
    (chunk,) = _positive("prefill-chunk", options.prefill_chunk)
    dtype, device = find_dtype(options.dtype or spec.dtype), options.device or "cuda"
    kv = find_kv_dtype(options.kv_dtype, dtype)
    form = find_latent(options.latent_kv, spec, device, dtype, max(contexts), kv)
    placement = find_placement(options.ple_placement, spec, device)
    skip, kinds = tuple(options.skip), options.media
    media = find_media(spec, kinds if isinstance(kinds, str) else tuple(kinds))
    recipe = find_recipe(options.quant)
    given = options.drafter
    drafter = None if given in NO_DRAFTER else drafter_spec(spec, given)
    most = spec.text.max_position_embeddings
    drafted = find_draft_tokens(options.draft_tokens, most, drafter is not None)
    every = options.all_logits
    passes = pass_options(form, kv, drafted=drafted, keep=layers_read(spec, drafter))
    shared = tp != 1 or ep
    if shared:
        check_ranks(spec, tp, ep)
    footprint = partial(
        _footprint,
        *(spec, dtype, device, placement, form, kv, every, skip, media, recipe, drafted, drafter),
    )
    made, whole_costs, drafting = footprint()
    costs = whole_costs
    rows = tuple(made.row(c, b, chunk) for b in batches for c in contexts)
    shape = [(r.ctx, r.batch) for r in rows]
    gpus = [m if isinstance(m, Gpu) else _sized(m) for m in _many(memory)]
    counted = {1: made}
    known = [n for n in COUNTS if n > 1 and can_share(spec, n, ep)] if gpus else []
    for n in {tp, *known} - {1} if shared else ():
        one, steps_of, _ = footprint(n, ep)
        try:
            share = param_bytes([steps_of.graph]) / param_bytes([whole_costs.graph])
        except InputError:  # groups of a recipe that so many ranks would cut
            if n == tp:
                raise
            continue
        counted[n] = replace(one, share=share)
        costs = steps_of if n == tp else costs
    free = options.ple_placement is None and placement == "device"

    def placed(own: Footprint, gpus: Sequence[Gpu]) -> Footprint:
        fits = not free or _all_fit(own, rows_of(own), gpus)
        return own if fits else replace(own, ple_placement=DEFAULT_PLACEMENT)

    def rows_of(own: Footprint) -> tuple[Row, ...]:
        return tuple(own.row(c, b, chunk) for c, b in shape)

    def fit_of(gpu: Gpu, f: str) -> Fit:
        own = placed(counted[tp], [gpu])
        found = _fit(own, gpu, f, rows_of(own), chunk, costs)
        others = [placed(counted[n], [gpu]) for n in sorted(counted)] if shared else []
        cells = (replace(c, cards=_cards(others, gpu, f, c, chunk)) for c in found.cells)
        return replace(found, cells=tuple(cells))

    ranked = placed(counted[tp], gpus)
    made = replace(made, ple_placement=ranked.ple_placement)
    placement = made.ple_placement
    formats = (recipe.name,) if recipe else (dtype, *INTEGERS)
    return Plan(
        spec,
        dtype,
        device,
        form,
        KV_NAMES.get(kv),
        placement,
        chunk,
        skip,
        counts(spec),
        ple_parts(spec),
        blocks(spec),
        layer_blocks(spec),
        tuple(made.weights.values()),
        _rates(made),
        rows,
        tuple(fit_of(gpu, f) for gpu in gpus for f in formats),
        media.kinds,
        media_plan(spec),
        _drafts(made, drafted, rows, gpus, (whole_costs, *drafting)) if drafted else None,
        plan_ranks(spec, tp, dtype, shape, skip, passes, recipe, ep, steps, drafter)
        if shared
        else None,
    )


def _drafts(
    made: Footprint,
    drafted: int,
    rows: Sequence[Row],
    gpus: Sequence[Gpu],
    costs: Sequence[StepCosts],
) -> Drafts:
    """Say what drafting costs and gains, at the shortest context and on the first card whose speed
    is known. costs: of a step, of one that verifies and, where there is one, of the drafter's."""
    card = next((gpu for gpu in gpus if gpu.bytes_per_s is not None), None)
    roof = card.roof if card else None
    ctx = min(r.ctx for r in rows)

    def table(batch: int) -> tuple[Gain, ...]:
        def cost(tokens: int) -> Cost:
            return costs[tokens > 1].at(ctx, batch, made.form, made.dtype, tokens)

        draft = [c.at(ctx, batch, made.form, made.dtype) for c in costs[2:]]
        return gains(cost, min(drafted, ctx - 1) or 1, roof, *draft)

    tables = tuple((b, table(b)) for b in sorted({r.batch for r in rows}))
    state = made.needs.graphs[0].state
    rings = [v.type for v in state if isinstance(v.type.shape[0], int)]
    slack = sum(t.bind({"B": 1}).nbytes() // int(t.shape[0]) * drafted for t in rings)
    drafter = made.drafter.name if made.drafter else None
    return Drafts(
        *(drafted, slack, ctx, made.form, card.name if card else None, tables),
        *(drafter, made.drafter_bytes),
    )


def _cards(made: Sequence[Footprint], gpu: Gpu, form: str, cell: Cell, chunk: int) -> int | None:
    """Return the smallest number of ranks, each on such a device, that fit a cell; None of none."""
    room = gpu.memory_bytes - reserve(gpu.memory_bytes)
    needs = ((m.need(m.row(cell.ctx, cell.batch, chunk), form, "built"), m.ranks) for m in made)
    return next((ranks for need, ranks in needs if need <= room), None)


def _all_fit(made: Footprint, rows: Sequence[Row], gpus: Sequence[Gpu]) -> bool:
    """Whether every row fits on every device."""
    rooms = [gpu.memory_bytes - reserve(gpu.memory_bytes) for gpu in gpus]
    return all(made.need(r, made.form, "built") <= room for r in rows for room in rooms)


def _many(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _sized(memory: int) -> Gpu:
    (size,) = _positive("memory", memory)
    return Gpu(f"{size} bytes", size)


def _positive(name: str, given: int | Sequence[int], most: int | None = None) -> tuple[int, ...]:
    """Check whole numbers from 1; return each once and in order."""
    values = _many(given)
    for v in values:
        if type(v) is not int or v < 1 or (most and v > most):
            limit = f"from 1 to {most}" if most else "of at least 1"
            raise InputError(f"{name} {v!r}: expected a whole number {limit}")
    if not values:
        raise InputError(f"{name}: expected at least one number")
    return tuple(sorted(set(values)))


def _contexts(spec: Spec, ctx: int | Sequence[int] | None) -> tuple[int, ...]:
    most = spec.text.max_position_embeddings
    if ctx is None:
        return tuple(c for c in CONTEXTS if c <= most) or (most,)
    contexts = _positive("ctx", ctx)
    if contexts[-1] > most:
        raise InputError(
            f"ctx {contexts[-1]}: {spec.name} has {most} positions ({count_text(most)})"
        )
    return contexts


@lru_cache(maxsize=64)
def _footprint(
    spec: Spec,
    dtype: str,
    device: str,
    placement: str | None,
    form: str,
    kv: str,
    all_logits: bool,
    skip: tuple[str, ...],
    media: Media,
    recipe: Recipe | None,
    drafted: int,
    drafter: Spec | None,
    ranks: int = 1,
    ep: bool = False,
) -> tuple[Footprint, StepCosts, tuple[StepCosts, ...]]:
    """Measure prefill: it has each param and cache of decode, and needs more of everything else but
    for the logits of a step that verifies. Return what steps of one token cost too, and of several
    that are verified, and of a drafter; of `ranks` that share the model, those of one."""
    options = pass_options(form, kv, drafted=drafted, keep=layers_read(spec, drafter))
    plain = {"prefill": build_graph(spec, "prefill", all_logits, dtype)}
    if drafted:
        plain[VERIFY] = bind(build_graph(spec, VERIFY, all_logits, dtype), M=drafted + 1)
    if drafter:
        plain[DRAFT] = build_draft(spec, drafter, dtype)
    plain |= build_towers(spec, media, dtype)
    cut = partial(shard_program, spec=spec, ranks=ranks, ep=ep)
    if ranks > 1:
        plain = dict(cut(Program(plain)).graphs)
    # The caches without the latent form, in the dtype, depend on one pass alone.
    others = {*skip, *(p for p in PASSES if p != "plan_cache")}

    def needs(skip: Iterable[str]) -> Needs:
        made = (run_passes(g, skip=skip, options=options) for g in plain.values())
        return Needs(tuple(split_prologue(g)[1] for g in made))

    def step(phase: str) -> Graph:
        plain = Program({phase: build_graph(spec, phase, all_logits, dtype)})
        held = quantised(plain, spec, recipe, dtype)
        graph = (cut(held) if ranks > 1 else held).graphs[phase]
        return split_prologue(run_passes(graph, skip=skip, options=options))[1]

    built = needs(skip)
    planned = needs(others) if (form, kv) != (PLAIN, OFF) else built
    made = Footprint(spec, dtype, device, placement, built, planned, recipe, drafter, ranks)
    costs = [StepCosts(partial(step, phase), bool(recipe)) for phase in ("decode", VERIFY)]
    # A recipe is about the model's weights: those of the drafter are in the dtype.
    costs += [StepCosts(partial(bind, g), True) for g in built.graphs if g.name == DRAFT]
    return made, costs[0], tuple(costs[1:])


def _rates(made: Footprint) -> CacheRates:
    """Derive rates from two contexts beyond every window; a row's cache is linear in between."""
    windows = [layer.attention.window or 1 for layer in made.spec.layers()]
    near = -(-max(windows) // 256) * 256
    far = 2 * near
    kv = kv_bytes(made.spec, far, 1, made.dtype)
    rates = []
    for needs in (made.plain, made.needs):
        per_token = (needs.cache(1, far) - needs.cache(1, near)) // (far - near)
        rates += [per_token, needs.cache(1, near) - per_token * near]
    return CacheRates(kv.per_token, *rates)


def _fit(
    made: Footprint, gpu: Gpu, form: str, rows: tuple[Row, ...], chunk: int, costs: StepCosts
) -> Fit:
    kept = reserve(gpu.memory_bytes)
    room = gpu.memory_bytes - kept
    longest = made.spec.text.max_position_embeddings

    def fits(ctx: int, batch: int, kind: str) -> bool:
        return made.need(made.row(ctx, batch, chunk), form, kind) <= room

    contexts = tuple(
        Most(b, *(largest(partial(fits, batch=b, kind=kind), longest) for kind in TOTALS))
        for b in sorted({r.batch for r in rows})
    )
    batches = tuple(
        Most(c, *(largest(partial(fits, c, kind=kind), MOST_ROWS) for kind in TOTALS))
        for c in sorted({r.ctx for r in rows})
    )
    return Fit(
        gpu.name,
        gpu.memory_bytes,
        kept,
        form,
        made.resident(form),
        tuple(_cell(made, gpu, form, r, room, costs) for r in rows),
        contexts,
        batches,
        made.ranks,
        made.ple_placement,
    )


def _cell(made: Footprint, gpu: Gpu, form: str, row: Row, room: int, costs: StepCosts) -> Cell:
    naive, planned, built = (made.need(row, form, kind) for kind in TOTALS)
    seconds = None
    if gpu.bytes_per_s is not None:
        cost = costs.at(row.ctx, row.batch, form, made.dtype)
        seconds = floor(cost, gpu.roof).seconds
    spare = room - built
    return Cell(row.ctx, row.batch, naive, planned, built, spare >= 0, spare, seconds)


def cache_lines(plan: Plan) -> CacheLines:
    """Return cache bytes of one row from 1K tokens to the model's limit, for a plot; `built` where
    it is not `planned`."""
    longest, rates = plan.spec.text.max_position_embeddings, plan.cache
    powers = (1 << n for n in range(10, longest.bit_length()))
    contexts = sorted({*(c for c in powers if c <= longest), longest})
    totals = {"naive": [rates.naive_per_token * c for c in contexts]}
    totals["planned"] = [rates.window + rates.per_token * capacity(c) for c in contexts]
    if plan.latent != PLAIN or plan.kv_dtype:
        built = [rates.built_window + rates.built_per_token * capacity(c) for c in contexts]
        totals |= {"built": built} if built != totals["planned"] else {}
    return CacheLines(plan.spec.name, contexts, totals)
