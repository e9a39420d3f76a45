"""Memory and cost of one engine from its optimised graphs, without weights.

KV cache and weights are the state and params of the graphs as the engine's backend stores them
(backend.py), so both are what the runtime allocates; activations and workspace are estimates
(memory.py). Plans (plan.py) and memory checks of builds (fit.py) take their bytes from here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

from g4ir.ir.graph import Program
from g4ir.ir.rewrite import bind
from g4ir.model.decoder import BLOCKS, VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.tensors import numel, tower_tensors
from g4ir.model.text import PLE_PARAM
from g4ir.model.towers import is_tower
from g4ir.ops.codecs import FORM_OF
from g4ir.ops.types import ITEMSIZE
from g4ir.passes import PASSES
from g4ir.passes.latent_kv import PLAIN
from g4ir.weights.pack import DEFAULT_PLACEMENT, Packing

from .backend import PlannedBackend
from .cost import Cost, graph_costs, total
from .count import counts
from .engine_limits import Limits
from .formats import FORMATS, naive_bytes, nominal
from .memory import Needs, param_bytes
from .options import BuildConfig
from .records import MemoryUse, WeightBytes

MOST_ROWS = 1 << 16
#: graphs whose params and caches are those of prefill, and which need less of everything else
NO_MORE = ("decode",)
#: how params of tables begin -> field of WeightBytes
TABLE_PARTS = {"embed.table": "token_table", "head.w": "head", PLE_PARAM: "ple_table"}
#: properties of a Footprint that depend on its graphs alone
OF_GRAPHS = ("needs", "least_chunk", "_tables", "upcast", "_scratch", "plain", "step")
#: kept free on a device: its driver's and the allocator's share, not measured per device
RESERVE_BYTES, RESERVE_SHARE = 512 << 20, 1 / 64


@dataclass(frozen=True)
class Footprint:
    """Memory of one engine, or of one of its ranks, from the graphs that its backend loads: their
    params and state are what the runtime allocates."""

    config: BuildConfig
    backend: PlannedBackend
    packing: Packing

    @staticmethod
    def of(
        config: BuildConfig, backend: PlannedBackend, without: Collection[str] = ()
    ) -> Footprint:
        """Build the graphs of an engine, but for some that need no more than others."""
        return Footprint(config, backend, config.packing(backend, without=without))

    @property
    def form(self) -> str:
        """The name of the quantisation config; the dtype of weights that are not quantised."""
        return self.config.quant.name if self.config.quant else self.config.dtype

    def at(self, **fields: Any) -> Footprint:
        """Return the footprint with other settings on which no graph depends; what was counted of
        the graphs is counted once."""
        other = replace(self, config=replace(self.config, **fields))
        vars(other).update({n: v for n, v in vars(self).items() if n in OF_GRAPHS})
        return other

    def without_media(self) -> Footprint:
        graphs = self.packing.program.graphs
        text = {n: g for n, g in graphs.items() if not is_tower(n) and n != BLOCKS}
        return replace(self, packing=replace(self.packing, program=Program(text)))

    def changed(self, **fields: Any) -> Footprint:
        """Return the footprint with other settings that its graphs depend on."""
        return Footprint.of(replace(self.config, **fields), self.backend, self._absent)

    @property
    def _absent(self) -> tuple[str, ...]:
        return () if "decode" in self.packing.program.graphs else NO_MORE

    @cached_property
    def needs(self) -> Needs:
        """Of the graphs that run on the device."""
        graphs = {n: g for n, g in self.packing.program.graphs.items() if n != "embed"}
        if VERIFY in graphs:
            graphs[VERIFY] = bind(graphs[VERIFY], M=self.config.draft_tokens + 1)
        return Needs(tuple(graphs.values()))

    @cached_property
    def least_chunk(self) -> int:
        """Tokens of the largest image whose tokens see each other, which no chunk cuts."""
        media = self.config.media
        return max(media.grids, default=1) if BLOCKS in self.packing.program.graphs else 1

    def limits(self, batch: int, ctx: int) -> Limits:
        chunk = max(self.config.limits.prefill_chunk, self.least_chunk)
        return Limits(batch, ctx, min(chunk, ctx))

    # --- weights

    @cached_property
    def weights(self) -> WeightBytes:
        """Weights of the decoder, as the backend stores them."""
        text = (g for g in self.needs.graphs if not is_tower(g.name) and g.name != DRAFT)
        params = {v.name: v.type.nbytes() for g in text for v in g.params} | self._tables
        parts = dict.fromkeys((*TABLE_PARTS.values(), "layers"), 0)
        for name, size in params.items():
            begins = (part for table, part in TABLE_PARTS.items() if name.startswith(table))
            parts[next(begins, "layers")] += size
        ple = sum(n for name, n in self._tables.items() if name.startswith(PLE_PARAM))
        others = sum(self._tables.values()) - ple
        return weight_bytes(self.config, self.form, parts, ple, others, self.upcast)

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
        placed = ("device", "host") if self.config.device == "cpu" else ("device",)
        ple = (n for name, n in self._tables.items() if name.startswith(PLE_PARAM))
        return self.needs.params + (sum(ple) if self.config.ple_placement in placed else 0)

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
        return self.backend.cache_bytes(self.packing.program, self.limits(batch, ctx))

    @cached_property
    def _scratch(self) -> Callable[[Limits], int]:
        device, settings = self.config.device, self.config.settings
        return self.backend.scratch_bytes(self.packing.program, device, settings)

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

    @cached_property
    def plain(self) -> Footprint:
        """The same without quantised weights and caches and latent rows."""
        if (self.config.latent_kv, self.config.kv_dtype) == (PLAIN, None):
            return self
        # The shapes of an unquantised, not latent KV cache depend on one pass alone.
        skip = (*self.config.skip, *(p for p in PASSES if p != "plan_cache"))
        return self.changed(skip=skip, quant=None)

    @cached_property
    def row(self) -> Callable[[int, int], MemoryUse]:
        """Function of a context and a batch."""
        naive = naive_bytes(self.config.spec, self.config.dtype, self.config.ranks)

        @cache
        def row(ctx: int, batch: int) -> MemoryUse:
            parts = self.parts(batch, ctx)
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

    def need_at(self, ctx: int, batch: int, kind: str = "built") -> int:
        """Return bytes in the device's memory with one of TOTALS, without the reserve."""
        row = self.row(ctx, batch)
        caches: int = getattr(row, kind)
        return self.resident + caches + row.activations + row.workspace

    @cached_property
    def step(self) -> Callable[..., Cost]:
        """Function of a context, a batch and new tokens of each sequence: the cost of a step. One
        of a single token costs what a prompt of one token does."""
        graphs = self.packing.program.graphs

        @cache
        def cost(ctx: int, batch: int, tokens: int = 1, graph: str = "") -> Cost:
            g = graphs[graph or (VERIFY if tokens > 1 else "prefill")]
            return total(graph_costs(g, B=batch, S=tokens, C=max(ctx - tokens, 0)))

        return cost

    @property
    def built(self) -> dict[str, int]:
        """Bytes in the device's memory at the limits of the engine."""
        return self.parts(self.config.limits.max_batch, self.config.limits.max_seq)

    @property
    def need(self) -> int:
        return sum(self.built.values())


def weight_bytes(
    config: BuildConfig,
    form: str,
    parts: Mapping[str, int],
    ple: int,
    tables: int,
    upcast: Mapping[str, str] | None = None,
) -> WeightBytes:
    """Return weights by the memory that they are in; `ple` and `tables`: bytes of those that are
    only gathered from."""
    total = sum(parts.values())
    memory = {"device": total - ple - tables, "host": 0, "mmap": tables}
    memory[config.ple_placement or DEFAULT_PLACEMENT] += ple
    n, known = counts(config.spec), FORMATS.get(form)
    return WeightBytes(
        form,
        **parts,
        device=memory["device"],
        host=memory["host"],
        mapped=memory["mmap"],
        towers=numel(tower_tensors(config.spec)) * ITEMSIZE[config.dtype],
        nominal=int(nominal(n.hub_parameters) * (known.nominal if known else total / n.text)),
        upcast=dict(upcast or {}),
    )


def plain_weights(config: BuildConfig, dtype: str) -> WeightBytes:
    """Return weights that are not quantised, which every backend stores as they are."""
    n = counts(config.spec)
    elements = {"token_table": n.embed, "head": n.head, "ple_table": n.ple_table}
    elements["layers"] = n.text - sum(elements.values())
    parts = {part: count * ITEMSIZE[dtype] for part, count in elements.items()}
    tables = parts["token_table"] if n.head else 0
    return weight_bytes(config, dtype, parts, parts["ple_table"], tables)


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
def measured(config: BuildConfig, backend: PlannedBackend) -> Footprint:
    """Return the footprint of an engine to plan: each is measured once."""
    return Footprint.of(config, backend, NO_MORE)
