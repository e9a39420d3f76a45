"""Memory and cost of one engine from its optimised graphs, without weights.

KV cache and weights are the graphs' state and params, so both are what the runtime allocates;
activations and workspace are estimates (memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from g4ir.ir.graph import Graph, Program
from g4ir.ir.rewrite import bind, split_prologue
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT, build_draft, layers_read
from g4ir.model.media import Media
from g4ir.model.tensors import numel, text_tensors
from g4ir.model.text import build_graph
from g4ir.model.towers import build_towers, is_tower
from g4ir.parallel.shard import shard_program
from g4ir.passes import PASSES, PassOptions, run_passes
from g4ir.passes.latent_kv import PLAIN
from g4ir.passes.match import OFF
from g4ir.quant.recipe import Recipe
from g4ir.quant.rewrite import quantised
from g4ir.spec.record import Spec
from g4ir.weights.pack import DEFAULT_PLACEMENT

from .cost import Cost, graph_costs, total
from .count import counts
from .formats import FORMATS, INTEGERS, WeightSizes, kv_bytes, nominal, tower_bytes, weight_sizes
from .memory import Needs
from .records import MemoryUse, WeightBytes
from .resolve import pass_options

MOST_ROWS = 1 << 16
#: kept free on a device: its driver's and the allocator's share, not measured per device
RESERVE_BYTES, RESERVE_SHARE = 512 << 20, 1 / 64


@dataclass(frozen=True)
class Setup:
    """The settings that decide an engine's memory. drafted: maximum draft tokens; gpu_rows: batch
    size of steps whose kernels are chained on a GPU."""

    spec: Spec
    dtype: str
    device: str
    latent: str = PLAIN
    kv: str = OFF
    all_logits: bool = False
    skip: tuple[str, ...] = ()
    media: Media = field(default_factory=Media)
    recipe: Recipe | None = None
    drafted: int = 0
    drafter: Spec | None = None
    ranks: int = 1
    ep: bool = False
    gpu_rows: int = 0

    @property
    def options(self) -> PassOptions:
        keep = layers_read(self.spec, self.drafter)
        return pass_options(
            self.latent, self.kv, drafted=self.drafted, keep=keep, gpu_rows=self.gpu_rows
        )

    def optimised(self, g: Graph, skip: Iterable[str]) -> Graph:
        return split_prologue(run_passes(g, skip=skip, options=self.options))[1]

    def sharded(self, program: Program) -> Program:
        if self.ranks == 1:
            return program
        return shard_program(program, spec=self.spec, ranks=self.ranks, ep=self.ep)

    def device_graphs(self) -> Program:
        """Build the unquantised graphs that decide memory: prefill has each param and cache of
        decode, and needs more of everything else, except for the logits of verification."""
        spec, dtype = self.spec, self.dtype
        graphs = {"prefill": build_graph(spec, "prefill", self.all_logits, dtype)}
        if self.drafted:
            verify = build_graph(spec, VERIFY, self.all_logits, dtype)
            graphs[VERIFY] = bind(verify, M=self.drafted + 1)
        if self.drafter:
            graphs[DRAFT] = build_draft(spec, self.drafter, dtype)
        return self.sharded(Program(graphs | build_towers(spec, self.media, dtype)))

    def step_graph(self, phase: str) -> Graph:
        """Build the optimised graph of a phase, quantised."""
        g = Program({phase: build_graph(self.spec, phase, self.all_logits, self.dtype)})
        held = quantised(g, self.spec, self.recipe, self.dtype)
        return self.optimised(self.sharded(held).graphs[phase], self.skip)


@dataclass(frozen=True)
class Footprint:
    """Memory of one engine. needs: as built; plain: with an unquantised, not latent KV cache."""

    setup: Setup
    ple_placement: str | None
    needs: Needs
    plain: Needs
    #: of the weights, for one of several ranks
    share: float = 1.0
    _rows: dict[tuple[int, int, int], MemoryUse] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @cached_property
    def weights(self) -> dict[str, WeightBytes]:
        """Bytes by format, for every format that a plan may ask for."""
        forms = dict.fromkeys(("f32", "bf16", self.setup.dtype, *INTEGERS))
        own = (
            {self.setup.recipe.name: self._weights(self.setup.recipe)} if self.setup.recipe else {}
        )
        return {form: self._weights(form) for form in forms} | own

    @property
    def form(self) -> str:
        """The format of its weights."""
        return self.setup.recipe.name if self.setup.recipe else self.setup.dtype

    def _weights(self, form: str | Recipe) -> WeightBytes:
        sizes = weight_sizes(self.setup.spec, form, self.setup.dtype)
        places = {"device": 0, "host": 0, "mmap": sizes.tables}
        places[self.ple_placement or DEFAULT_PLACEMENT] += sizes.ple_table
        places["device"] += sizes.total - sizes.tables - sizes.ple_table
        quoted = nominal(counts(self.setup.spec).hub_parameters)
        return WeightBytes(
            sizes,
            places["device"],
            places["host"],
            places["mmap"],
            tower_bytes(self.setup.spec, self.setup.dtype),
            int(quoted * self._nominal(sizes)),
        )

    def _nominal(self, sizes: WeightSizes) -> float:
        if sizes.format in FORMATS:
            return FORMATS[sizes.format].nominal
        return sizes.total / numel(text_tensors(self.setup.spec))

    def resident(self, form: str) -> int:
        """Return bytes of weights in the device's memory; on the CPU that is the host's."""
        w = self.weights[form]
        on_device = (self.ple_placement or DEFAULT_PLACEMENT) == "device"
        table = w.sizes.ple_table if on_device else 0  # every rank has it whole
        beside = table + self.towers + self.drafter_bytes
        own = round((w.device - table) * self.share)
        return own + beside + (w.host if self.setup.device == "cpu" else 0)

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
        return kv_bytes(
            _rank_spec(self.setup.spec, self.setup.ranks), 1, 1, self.setup.dtype
        ).per_token

    def row(self, ctx: int, batch: int, chunk: int) -> MemoryUse:
        """Return the bytes at one context and batch, with `chunk` tokens to a prefill call."""
        key = (ctx, batch, chunk)
        if key not in self._rows:
            self._rows[key] = MemoryUse(
                ctx,
                batch,
                self.naive_per_token * ctx * batch,
                self.plain.cache(batch, ctx),
                self.needs.cache(batch, ctx),
                self.needs.activations(batch, ctx, chunk),
                self.needs.workspace(batch, ctx, chunk),
            )
        return self._rows[key]

    def need(self, row: MemoryUse, form: str, kind: str) -> int:
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
    """Cost of a decode, verification or draft step; its graph is built on first use."""

    make: Callable[[], Graph]
    #: whether the graph's weights are quantised already
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


@dataclass(frozen=True)
class Measurement:
    """An engine's memory, and the costs of its decode, verification and draft-model steps."""

    footprint: Footprint
    decode: StepCosts
    verify: StepCosts
    draft: StepCosts | None

    def placed(self, ple_placement: str | None) -> Measurement:
        return replace(self, footprint=replace(self.footprint, ple_placement=ple_placement))


@lru_cache(maxsize=64)
def measure(setup: Setup) -> Measurement:
    """Build the graphs of an engine, and measure what they need."""
    graphs = setup.device_graphs().graphs.values()

    def needs(skip: Iterable[str]) -> Needs:
        return Needs(tuple(setup.optimised(g, skip) for g in graphs))

    built = plain = needs(setup.skip)
    if (setup.latent, setup.kv) != (PLAIN, OFF):
        # The shapes of an unquantised, not latent KV cache depend on one pass alone.
        plain = needs({*setup.skip, *(p for p in PASSES if p != "plan_cache")})
    placement = DEFAULT_PLACEMENT if setup.spec.text.ple else None
    made = Footprint(setup, placement, needs=built, plain=plain)
    decode, verify = (
        StepCosts(partial(setup.step_graph, phase), quantised=setup.recipe is not None)
        for phase in ("decode", VERIFY)
    )
    # A quantisation config is about the model's weights, not the draft model's.
    draft = next((g for g in built.graphs if g.name == DRAFT), None)
    return Measurement(
        made, decode, verify, StepCosts(partial(bind, draft), True) if draft else None
    )
