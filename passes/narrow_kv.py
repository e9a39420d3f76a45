"""cache_write(cache, x), attention(.., x)  ->  cache_write(cache', row), attention(.., row)

row = narrow_row(x), cache' the state in the dtype `to`; "off": no change

Attention also reads the chunk in the cache's dtype, so that results do not depend on the chunk
size. The pass changes what a graph computes: it rounds K and V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from g4ir.ir.graph import Builder, Graph, Value
from g4ir.ir.rewrite import rebuild
from g4ir.ops.kv_quant import NARROW, quantized_type
from g4ir.ops.types import ITEMSIZE

from .match import OFF, Note, ignore, require_one_of

AFTER = "latent_kv"  # it decides what is cached: K and V, or latent rows
CHANGES_STATE = True
CHANGES_MEANING = True

DTYPES = (OFF, *NARROW)


@dataclass(frozen=True)
class NarrowOptions:
    """Dtype of the caches, one of DTYPES."""

    to: str = OFF

    def __post_init__(self) -> None:
        require_one_of("narrow_kv: to", self.to, DTYPES)


OPTIONS = NarrowOptions()


def narrow_kv(g: Graph, note: Note = ignore, options: NarrowOptions = OPTIONS) -> Graph:
    """Quantise the KV cache."""
    quantised = _quantised(g, options.to, note)
    if not quantised:
        return g
    written = {n["new"].name for n in g.find("cache_write") if n["cache"].name in quantised}
    b, rows = Builder(), dict[str, Value]()
    for n in g.nodes:
        if n.op == "cache_write" or n.definition.cache_range:
            for v in n.inputs:
                if v.name in written and v.name not in rows:
                    rows[v.name] = b.emit("narrow_row", v, to=options.to, name=f"{v.name}.row")
            n = replace(n, inputs=tuple(rows.get(v.name, v) for v in n.inputs))
        b.nodes.append(n)
    state = tuple(quantised.get(v.name, v) for v in g.state)
    return rebuild(replace(g, nodes=tuple(b.nodes), state=state))


def _quantised(g: Graph, to: str, note: Note) -> dict[str, Value]:
    """Return name -> cache of its quantised type, for each state that is wider than `to`; also for
    those that this graph only reads and another one writes."""
    caches: dict[str, Value] = {}
    for v in g.state:
        if to == OFF or ITEMSIZE[v.type.dtype] <= ITEMSIZE[to]:
            continue
        caches[v.name] = Value(v.name, quantized_type(v.type, to))
        note(v.name, f"cached as {caches[v.name].type.dtype}")
    return caches
