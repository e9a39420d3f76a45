"""Memory and cost of one engine from its optimised graphs, without weights.

KV cache and weights are the state and params of the graphs as the engine's backend stores them
(backend.py), so both are what the runtime allocates; activations and workspace are estimates
(memory.py). Plans (plan.py) and memory checks of builds (fit.py) take their bytes from here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

from g4ir.ir.graph import Program
from g4ir.ir.rewrite import bind
from g4ir.model.decoder import BLOCKS, VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.text import PLE_PARAM
from g4ir.model.towers import is_tower
from g4ir.ops.codecs import FORMAT_OF
from g4ir.weights.pack import DEFAULT_PLACEMENT, Packing

from .backend import PlannedBackend
from .cost import Cost, Step, step_costs
from .engine_limits import Limits
from .memory import Needs, param_bytes
from .options import BuildConfig
from .records import WeightBytes

MAX_BATCH = 1 << 16
#: graphs that have prefill's params and caches, and never need more memory than prefill
NO_MORE = ("decode",)
#: cached properties that `Footprint.at` copies: they depend on neither limits nor placement
OF_GRAPHS = ("needs", "min_chunk", "_tables", "_upcast", "_session")
#: memory left free on a device for driver and allocator: these bytes, plus this share of the
#: device's memory; not measured per device
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
        """Build the graphs of an engine, except those named in `without`, such as NO_MORE."""
        return Footprint(config, backend, config.packing(backend, without=without))

    @property
    def format(self) -> str:
        """The name of the quantisation config, or without one the dtype of the weights."""
        return self.config.quant.name if self.config.quant else self.config.dtype

    def at(self, **fields: Any) -> Footprint:
        """Return the footprint with other `limits` or `ple_placement`, on which no graph depends;
        cached counts of the graphs are reused."""
        other = replace(self, config=replace(self.config, **fields))
        vars(other).update({n: v for n, v in vars(self).items() if n in OF_GRAPHS})
        vars(other)["_step_costs"] = self._step_costs
        return other

    def without_media(self) -> Footprint:
        graphs = self.packing.program.graphs
        text = {n: g for n, g in graphs.items() if not is_tower(n) and n != BLOCKS}
        return replace(self, packing=replace(self.packing, program=Program(text)))

    def changed(self, **fields: Any) -> Footprint:
        """Return the footprint with other settings, of newly built graphs."""
        without = () if "decode" in self.packing.program.graphs else NO_MORE
        return Footprint.of(replace(self.config, **fields), self.backend, without)

    @cached_property
    def needs(self) -> Needs:
        """Memory needs of the graphs that run on the device: all but `embed`."""
        graphs = {n: g for n, g in self.packing.program.graphs.items() if n != "embed"}
        if VERIFY in graphs:
            graphs[VERIFY] = bind(graphs[VERIFY], M=self.config.draft_tokens + 1)
        return Needs(tuple(graphs.values()))

    @cached_property
    def min_chunk(self) -> int:
        """Soft tokens of the largest image if they attend bidirectionally, so that it must fit in
        one prefill chunk; else 1."""
        media = self.config.media
        return max(media.grids, default=1) if BLOCKS in self.packing.program.graphs else 1

    def limits(self, batch: int, ctx: int) -> Limits:
        chunk = max(self.config.limits.prefill_chunk, self.min_chunk)
        return Limits(batch, ctx, min(chunk, ctx))

    # --- weights

    @cached_property
    def weights(self) -> WeightBytes:
        """Weights by memory (device, host, mapped), as the backend stores them."""
        tables = self._tables
        ple = sum(n for name, n in tables.items() if name.startswith(PLE_PARAM))
        memory = {"device": self.needs.params, "host": 0, "mmap": sum(tables.values()) - ple}
        memory[self.config.ple_placement or DEFAULT_PLACEMENT] += ple
        text = (g for g in self.needs.graphs if not is_tower(g.name) and g.name != DRAFT)
        decoder = param_bytes(text) + sum(tables.values())
        device, host, mapped = memory.values()
        return WeightBytes(self.format, decoder, device, host, mapped, self._upcast)

    @cached_property
    def _tables(self) -> dict[str, int]:
        """Name -> bytes of embedding tables that are only gathered from, not multiplied with."""
        multiplied = {v.name for g in self.needs.graphs for v in g.params}
        tables = self.packing.program.graphs["embed"].params
        return {v.name: v.type.nbytes() for v in tables if v.name not in multiplied}

    @cached_property
    def _upcast(self) -> dict[str, str]:
        """Weight format of the config -> the wider format in which the backend stores it."""
        nodes = self.packing.prologue.nodes
        stored_as = {"dense": lambda n: n.word("to"), "as_bytes": lambda n: "int8"}
        repacked = (n for n in nodes if n.op in stored_as)
        return {FORMAT_OF[n["codes"].type.dtype]: stored_as[n.op](n) for n in repacked}

    # --- everything

    @cached_property
    def _session(self) -> Callable[[Limits], dict[str, int]]:
        """Function of limits: bytes of a session's caches, activations and workspace."""
        program, device = self.packing.program, self.config.device
        scratch = self.backend.scratch_bytes(program, device, self.config.settings)

        @cache
        def session(limits: Limits) -> dict[str, int]:
            sizes = (limits.max_batch, limits.max_seq, limits.prefill_chunk)
            return {
                "caches": self.backend.cache_bytes(program, limits),
                "activations": self.needs.activations(*sizes),
                "workspace": self.needs.workspace(*sizes) + scratch(limits),
            }

        return session

    def parts(self, batch: int, ctx: int) -> dict[str, int]:
        """Return the bytes in the device's memory (on a CPU the host's) at a batch and context
        length: weights, caches, activations and workspace."""
        host = self.weights.host if self.config.device == "cpu" else 0
        return {"weights": self.weights.device + host, **self._session(self.limits(batch, ctx))}

    def step(self, batch: int, ctx: int) -> Cost | None:
        """Return the cost of a decode step with `ctx` tokens, the new one included; it is that of
        the prefill graph with one token. None for an encoder."""
        return self._step_costs and self._step_costs(Step(batch, 1, ctx - 1))

    @cached_property
    def _step_costs(self) -> Callable[[Step], Cost] | None:
        g = self.packing.program.graphs.get("prefill")
        return step_costs(g) if g else None

    def need_at(self, batch: int, ctx: int) -> int:
        """Return bytes in the device's memory, without the reserve."""
        return sum(self.parts(batch, ctx).values())

    @property
    def built(self) -> dict[str, int]:
        """Bytes in the device's memory at the limits of the engine."""
        return self.parts(self.config.limits.max_batch, self.config.limits.max_seq)

    @property
    def need(self) -> int:
        return sum(self.built.values())


def reserve(memory: int) -> int:
    """Return the bytes of a device that a plan leaves free."""
    return int(RESERVE_BYTES + memory * RESERVE_SHARE)


def usable(memory: int) -> int:
    """Return the bytes of a device without the reserve."""
    return memory - reserve(memory)


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest n in 1..limit that fits, by binary search (if n fits, so do smaller ones);
    0 if none fits."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@lru_cache(maxsize=64)
def measured(config: BuildConfig, backend: PlannedBackend) -> Footprint:
    """Return the footprint of an engine without its decode graph (NO_MORE), cached."""
    return Footprint.of(config, backend, NO_MORE)
