"""Memory and cost of one engine from its optimised graphs, without weights.

KV cache and weights are the graphs' state and params, so both are what the runtime allocates;
activations and workspace are estimates (memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial

from g4ir.ir.graph import Graph, Program
from g4ir.ir.rewrite import bind, split_prologue
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT, build_draft
from g4ir.model.tensors import numel, text_tensors, tower_tensors
from g4ir.model.text import build_graph
from g4ir.model.towers import build_towers, is_tower
from g4ir.ops.types import ITEMSIZE
from g4ir.parallel.shard import shard_program
from g4ir.passes import PASSES, run_passes
from g4ir.passes.latent_kv import PLAIN, LatentOptions
from g4ir.passes.match import OFF
from g4ir.passes.narrow_kv import NarrowOptions
from g4ir.passes.plan_cache import RingOptions
from g4ir.quant.recipe import Recipe
from g4ir.quant.rewrite import quantised
from g4ir.spec.record import Spec
from g4ir.weights.pack import DEFAULT_PLACEMENT

from .cost import Cost, graph_costs, total
from .count import counts
from .formats import FORMATS, INTEGERS, naive_bytes, nominal, weight_sizes
from .memory import Needs, param_bytes
from .options import Resolved
from .records import MemoryUse, WeightBytes

MOST_ROWS = 1 << 16
#: kept free on a device: its driver's and the allocator's share, not measured per device
RESERVE_BYTES, RESERVE_SHARE = 512 << 20, 1 / 64


def device_graphs(r: Resolved) -> Program:
    """Build the unquantised graphs that decide memory: prefill has each param and cache of decode,
    and needs more of everything else, except for the logits of verification."""
    graphs = {"prefill": build_graph(r.spec, "prefill", r.all_logits, r.dtype)}
    if drafted := r.options.of(RingOptions).slack:
        verify = build_graph(r.spec, VERIFY, r.all_logits, r.dtype)
        graphs[VERIFY] = bind(verify, M=drafted + 1)
    if r.drafter:
        graphs[DRAFT] = build_draft(r.spec, r.drafter, r.dtype)
    program = Program(graphs | build_towers(r.spec, r.media, r.dtype))
    return shard_program(program, r.spec, r.ranks, r.ep)


def step_graph(r: Resolved, phase: str) -> Graph:
    """Build the optimised graph of a phase, quantised."""
    g = Program({phase: build_graph(r.spec, phase, r.all_logits, r.dtype)})
    held = shard_program(quantised(g, r.spec, r.recipe, r.dtype), r.spec, r.ranks, r.ep)
    return _optimised(held.graphs[phase], r, r.skip)


def _optimised(g: Graph, r: Resolved, skip: Iterable[str]) -> Graph:
    return split_prologue(run_passes(g, skip=skip, options=r.options))[1]


@dataclass(frozen=True)
class StepCosts:
    """Cost of a decode, verification or draft step; its graph is built on first use."""

    make: Callable[[], Graph]
    #: whether the graph's weights are quantised already
    quantised: bool = False

    @cached_property
    def graph(self) -> Graph:
        return self.make()

    @property
    def param_bytes(self) -> int:
        return param_bytes([self.graph])

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
    """Memory of one engine, and the cost of its steps. needs: as built; plain: with an unquantised,
    not latent KV cache."""

    setup: Resolved
    needs: Needs
    plain: Needs
    decode: StepCosts
    verify: StepCosts
    draft: StepCosts | None
    #: of the weights, for one of several ranks
    share: float = 1.0

    def placed(self, ple_placement: str | None) -> Footprint:
        return replace(self, setup=replace(self.setup, ple_placement=ple_placement))

    @property
    def placement(self) -> str:
        return self.setup.ple_placement or DEFAULT_PLACEMENT

    @cached_property
    def weights(self) -> dict[str, WeightBytes]:
        forms: list[str | Recipe] = [*dict.fromkeys(("f32", "bf16", self.setup.dtype, *INTEGERS))]
        found = map(self._weights, [*forms, *([self.setup.recipe] if self.setup.recipe else [])])
        return {w.sizes.format: w for w in found}

    @property
    def form(self) -> str:
        return self.setup.recipe.name if self.setup.recipe else self.setup.dtype

    def _weights(self, form: str | Recipe) -> WeightBytes:
        spec, dtype = self.setup.spec, self.setup.dtype
        sizes = weight_sizes(spec, form, dtype)
        places = {"device": 0, "host": 0, "mmap": sizes.tables}
        places[self.placement] += sizes.ple_table
        places["device"] += sizes.total - sizes.tables - sizes.ple_table
        known = FORMATS.get(sizes.format)
        each = known.nominal if known else sizes.total / numel(text_tensors(spec))
        towers = numel(tower_tensors(spec)) * ITEMSIZE[dtype]
        quoted = int(nominal(counts(spec).hub_parameters) * each)
        return WeightBytes(
            sizes, places["device"], places["host"], places["mmap"], towers, nominal=quoted
        )

    def resident(self, form: str) -> int:
        """Return bytes of weights in the device's memory; on the CPU that is the host's."""
        w = self.weights[form]
        table = w.sizes.ple_table if self.placement == "device" else 0  # every rank has it whole
        beside = table + param_bytes(self.needs.graphs, is_tower) + self.drafter_bytes
        own = round((w.device - table) * self.share)
        return own + beside + (w.host if self.setup.device == "cpu" else 0)

    @cached_property
    def drafter_bytes(self) -> int:
        return param_bytes(self.needs.graphs, lambda name: name == DRAFT)

    @cached_property
    def row(self) -> Callable[[int, int], MemoryUse]:
        """Function of a context and a batch."""
        spec = _rank_spec(self.setup.spec, self.setup.ranks)
        naive, chunk = naive_bytes(spec, self.setup.dtype), self.setup.limits.prefill_chunk

        @cache
        def row(ctx: int, batch: int) -> MemoryUse:
            return MemoryUse(
                ctx,
                batch,
                naive * ctx * batch,
                self.plain.cache(batch, ctx),
                self.needs.cache(batch, ctx),
                self.needs.activations(batch, ctx, chunk),
                self.needs.workspace(batch, ctx, chunk),
            )

        return row

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
def measure(r: Resolved) -> Footprint:
    """Build the graphs of an engine, and measure what they need."""
    graphs = device_graphs(r).graphs.values()

    def needs(skip: Iterable[str]) -> Needs:
        return Needs(tuple(_optimised(g, r, skip) for g in graphs))

    built = plain = needs(r.skip)
    if (r.options.of(LatentOptions).form, r.options.of(NarrowOptions).to) != (PLAIN, OFF):
        # The shapes of an unquantised, not latent KV cache depend on one pass alone.
        plain = needs({*r.skip, *(p for p in PASSES if p != "plan_cache")})
    decode, verify = (
        StepCosts(partial(step_graph, r, phase), quantised=r.recipe is not None)
        for phase in ("decode", VERIFY)
    )
    # A quantisation config is about the model's weights, not the draft model's.
    draft = next((g for g in built.graphs if g.name == DRAFT), None)
    costs = StepCosts(partial(bind, draft), True) if draft else None
    return Footprint(r, built, plain, decode, verify, costs)
