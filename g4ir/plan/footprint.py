"""Memory and cost of one engine from its optimised graphs, without weights.

KV cache and weights are the state and params of the graphs as the engine's backend stores them
(layout.py), so both are what the runtime allocates; activations and workspace are estimates
(memory.py). Plans (plan.py) and memory checks of builds (fit.py) take their bytes from here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any

from g4ir.ir.graph import Graph, Program
from g4ir.ir.rewrite import bind, split_prologue
from g4ir.model.decoder import BLOCKS, VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.tensors import numel, text_tensors, tower_tensors
from g4ir.model.text import PLE_PARAM, build_graph
from g4ir.model.towers import is_tower
from g4ir.ops.codecs import FORM_OF
from g4ir.ops.types import ITEMSIZE
from g4ir.parallel.shard import shard_program
from g4ir.passes import PASSES, run_passes
from g4ir.passes.latent_kv import PLAIN, LatentOptions
from g4ir.passes.match import OFF
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.passes.plan_cache import RingOptions
from g4ir.quant.rewrite import quantised
from g4ir.spec.record import Spec
from g4ir.weights.pack import DEFAULT_PLACEMENT, Packing, make_packing

from .cost import Cost, graph_costs, total
from .count import counts
from .engine_limits import Limits
from .formats import FORMATS, WeightSizes, naive_bytes, nominal, weight_sizes
from .memory import Needs, param_bytes
from .options import Resolved
from .records import MemoryUse, WeightBytes

MOST_ROWS = 1 << 16
#: graphs whose params and caches are those of prefill, and which need less of everything else
NO_MORE = ("decode",)
#: properties of a Footprint that depend on its graphs alone
OF_GRAPHS = ("needs", "least_chunk", "_tables", "upcast", "_scratch")
#: kept free on a device: its driver's and the allocator's share, not measured per device
RESERVE_BYTES, RESERVE_SHARE = 512 << 20, 1 / 64


def step_graph(r: Resolved, phase: str) -> Graph:
    """Build the optimised graph of a phase as its backend loads it."""
    g = Program({phase: build_graph(r.spec, phase, r.all_logits, r.dtype)})
    sharded = shard_program(quantised(g, r.spec, r.recipe, r.dtype), r.spec, r.ranks, r.ep)
    main = run_passes(sharded.graphs[phase], skip=r.skip, options=r.options)
    return split_prologue(r.layout.stored(Program({phase: main})).graphs[phase])[1]


@dataclass(frozen=True)
class StepCosts:
    """Cost of a decode, verification or draft step; its graph is built on first use."""

    make: Callable[[], Graph]
    #: whether the graph's weights are quantised already
    quantised: bool = False

    @cached_property
    def graph(self) -> Graph:
        return self.make()

    def at(self, ctx: int, batch: int, form: str, dtype: str, tokens: int = 1) -> Cost:
        """Return a cost: FLOPs and caches depend on the context, weights on the format."""
        held = max(ctx - tokens, 0)
        if self.quantised:
            return self._cost(held, batch, None, tokens)
        step = self._cost(held, batch, dtype, tokens)
        weights = self._cost(0, batch, form, tokens)
        return Cost(step.flops, weights.weight_bytes, step.state_bytes)

    @cached_property
    def _cost(self) -> Callable[[int, int, str | None, int], Cost]:
        @cache
        def cost(held: int, batch: int, form: str | None, tokens: int) -> Cost:
            return total(graph_costs(self.graph, B=batch, S=tokens, C=held, weights=form))

        return cost


@dataclass(frozen=True)
class Footprint:
    """Memory of one engine, or of one of its ranks, from the graphs that its backend loads: their
    params and state are what the runtime allocates."""

    setup: Resolved
    packing: Packing

    @staticmethod
    def of(r: Resolved, without: Collection[str] = ()) -> Footprint:
        """Build the graphs of an engine, but for some that need no more than others."""
        return Footprint(r, make_packing(**r.of_graphs(), without=without))

    def placed(self, ple_placement: str | None) -> Footprint:
        return self.at(ple_placement=ple_placement)

    def at(self, **fields: Any) -> Footprint:
        """Return the footprint with other settings on which no graph depends; what was counted of
        the graphs is counted once."""
        other = replace(self, setup=replace(self.setup, **fields))
        vars(other).update({n: v for n, v in vars(self).items() if n in OF_GRAPHS})
        return other

    def without_media(self) -> Footprint:
        graphs = self.packing.program.graphs
        text = {n: g for n, g in graphs.items() if not is_tower(n) and n != BLOCKS}
        return replace(self, packing=replace(self.packing, program=Program(text)))

    def changed(self, **fields: Any) -> Footprint:
        """Return the footprint with other settings that its graphs depend on."""
        return Footprint.of(replace(self.setup, **fields), self._absent)

    @property
    def _absent(self) -> tuple[str, ...]:
        return () if "decode" in self.packing.program.graphs else NO_MORE

    @property
    def placement(self) -> str:
        return self.setup.ple_placement or DEFAULT_PLACEMENT

    @cached_property
    def needs(self) -> Needs:
        """Of the graphs that run on the device."""
        graphs = {n: g for n, g in self.packing.program.graphs.items() if n != "embed"}
        if VERIFY in graphs:
            drafted = self.setup.options.of(RingOptions).slack
            graphs[VERIFY] = bind(graphs[VERIFY], M=drafted + 1)
        return Needs(tuple(graphs.values()))

    @cached_property
    def least_chunk(self) -> int:
        """Tokens of the largest image whose tokens see each other, which no chunk cuts."""
        media = self.setup.media
        return max(media.grids, default=1) if BLOCKS in self.packing.program.graphs else 1

    def limits(self, batch: int, ctx: int) -> Limits:
        chunk = max(self.setup.limits.prefill_chunk, self.least_chunk)
        return Limits(batch, ctx, min(chunk, ctx))

    # --- weights

    @cached_property
    def weights(self) -> WeightBytes:
        """Weights of the decoder, as the backend stores them."""
        setup, tables = self.setup, self._tables
        ple, others = (
            sum(n for name, n in tables.items() if name.startswith(PLE_PARAM) is of_ple)
            for of_ple in (True, False)
        )
        sizes = weight_sizes(setup.spec, setup.recipe or setup.dtype, setup.dtype)
        return _weight_bytes(setup, sizes, self.decoder_bytes, ple, others, self.upcast)

    @cached_property
    def _tables(self) -> dict[str, int]:
        """Bytes of tables that are only gathered from."""
        multiplied = {v.name for g in self.needs.graphs for v in g.params}
        tables = self.packing.program.graphs["embed"].params
        return {v.name: v.type.nbytes() for v in tables if v.name not in multiplied}

    @cached_property
    def upcast(self) -> dict[str, str]:
        """Format of weights -> the one with more bits that the backend stores them in."""
        nodes = self.packing.prologue.nodes
        made = {"dense": lambda n: n.word("to"), "as_bytes": lambda n: "int8"}
        found = (n for n in nodes if n.op in made)
        return {FORM_OF[n["codes"].type.dtype]: made[n.op](n) for n in found}

    @property
    def resident(self) -> int:
        """Bytes of weights in the device's memory; on the CPU that is the host's."""
        placed = ("device", "host") if self.setup.device == "cpu" else ("device",)
        ple = (n for name, n in self._tables.items() if name.startswith(PLE_PARAM))
        return self.needs.params + (sum(ple) if self.setup.ple_placement in placed else 0)

    @property
    def decoder_bytes(self) -> int:
        """Bytes of the decoder's weights without tables that are only gathered from."""
        return param_bytes(self.needs.graphs, lambda n: not is_tower(n) and n != DRAFT)

    @property
    def drafter_bytes(self) -> int:
        return param_bytes(self.needs.graphs, lambda name: name == DRAFT)

    # --- everything

    def cache(self, batch: int, ctx: int) -> int:
        """Return the bytes of KV caches that the backend allocates."""
        return self.setup.layout.caches(self.packing.program, self.limits(batch, ctx))

    @cached_property
    def _scratch(self) -> Callable[[Limits], int]:
        return self.setup.layout.scratch(self.packing.program)

    @cached_property
    def parts(self) -> Callable[[int, int], dict[str, int]]:
        """Function of a batch and a context: bytes in the device's memory by what they are for."""

        @cache
        def parts(batch: int, ctx: int) -> dict[str, int]:
            limits = self.limits(batch, ctx)
            sizes = (batch, ctx, limits.prefill_chunk)
            return {
                "weights": self.resident,
                "caches": self.cache(batch, ctx),
                "activations": self.needs.activations(*sizes),
                "workspace": self.needs.workspace(*sizes) + self._scratch(limits),
            }

        return parts


def _weight_bytes(
    setup: Resolved,
    sizes: WeightSizes,
    decoder: int,
    ple: int,
    tables: int,
    upcast: Mapping[str, str] | None = None,
) -> WeightBytes:
    """Return weights by the memory that they are in; `decoder`: bytes of those that are multiplied
    with, `ple` and `tables`: of those that are only gathered from."""
    memory = {"device": decoder, "host": 0, "mmap": tables}
    memory[setup.ple_placement or DEFAULT_PLACEMENT] += ple
    known = FORMATS.get(sizes.format)
    each = known.nominal if known else sizes.total / numel(text_tensors(setup.spec))
    return WeightBytes(
        sizes,
        device=memory["device"],
        host=memory["host"],
        mapped=memory["mmap"],
        towers=numel(tower_tensors(setup.spec)) * ITEMSIZE[setup.dtype],
        nominal=int(nominal(counts(setup.spec).hub_parameters) * each),
        upcast=dict(upcast or {}),
    )


def plain_weights(setup: Resolved, dtype: str) -> WeightBytes:
    """Return weights that are not quantised, which every backend stores as they are."""
    sizes = weight_sizes(setup.spec, dtype)
    own = sizes.total - sizes.tables - sizes.ple_table
    return _weight_bytes(setup, sizes, own, sizes.ple_table, sizes.tables)


@dataclass(frozen=True)
class EngineCosts:
    """An engine to plan: its footprint, its caches without quantisation and latent rows, and the
    costs of its steps."""

    footprint: Footprint
    plain: Needs
    decode: StepCosts
    verify: StepCosts
    draft: StepCosts | None

    @property
    def setup(self) -> Resolved:
        return self.footprint.setup

    @property
    def form(self) -> str:
        return self.setup.recipe.name if self.setup.recipe else self.setup.dtype

    def placed(self, ple_placement: str | None) -> EngineCosts:
        return replace(self, footprint=self.footprint.placed(ple_placement))

    @cached_property
    def row(self) -> Callable[[int, int], MemoryUse]:
        """Function of a context and a batch."""
        spec = _rank_spec(self.setup.spec, self.setup.ranks)
        naive = naive_bytes(spec, self.setup.dtype)

        @cache
        def row(ctx: int, batch: int) -> MemoryUse:
            parts = self.footprint.parts(batch, ctx)
            return MemoryUse(
                ctx,
                batch,
                naive * ctx * batch,
                self.plain.cache(batch, ctx),
                parts["caches"],
                parts["activations"],
                parts["workspace"],
            )

        return row

    def need(self, ctx: int, batch: int, kind: str = "built") -> int:
        """Return bytes in the device's memory with one of TOTALS, without the reserve."""
        row = self.row(ctx, batch)
        cache: int = getattr(row, kind)
        return self.footprint.resident + cache + row.activations + row.workspace


def _rank_spec(spec: Spec, ranks: int) -> Spec:
    """Return the spec with a rank's KV heads: at least one of each kind."""
    text = spec.text
    sliding, full = (
        replace(kind, num_key_value_heads=max(1, kind.num_key_value_heads // ranks))
        for kind in (text.sliding, text.full)
    )
    return replace(spec, text=replace(text, sliding=sliding, full=full))


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


@lru_cache(maxsize=64)
def measure(r: Resolved) -> EngineCosts:
    """Build the graphs of an engine, and measure what they need."""
    footprint = Footprint.of(r, NO_MORE)
    plain = footprint.needs
    if (r.options.of(LatentOptions).form, r.options.of(NarrowOptions).to) != (PLAIN, OFF):
        # The shapes of an unquantised, not latent KV cache depend on one pass alone.
        skip = (*r.skip, *(p for p in PASSES if p != "plan_cache"))
        plain = Footprint.of(replace(r, skip=skip, recipe=None), NO_MORE).needs
    decode, verify = (
        StepCosts(partial(step_graph, r, phase), quantised=r.recipe is not None)
        for phase in ("decode", VERIFY)
    )
    # A quantisation config is about the model's weights, not the draft model's.
    draft = next((g for g in footprint.needs.graphs if g.name == DRAFT), None)
    costs = StepCosts(partial(bind, draft), True) if draft else None
    return EngineCosts(footprint, plain, decode, verify, costs)
