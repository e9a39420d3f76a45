"""cache_write(cache, x), attention(.., x)  ->  cache_write(cache', row), attention(.., row)

row = narrow_row(x), cache' the state in the dtype `to`; "off" leaves everything

A chunk is read as its cache will hold it, so that results do not depend on how tokens are cut into
chunks. This pass changes what a graph computes, by a rounding of K and V that the user asked for.
Caches of the form `raw` are left: what they hold is bounded by no norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from g4ir.ir.graph import Graph, Node, Value
from g4ir.ir.rewrite import rebuild
from g4ir.ops.attention import split_chunk
from g4ir.ops.kv_quant import NARROW, as_held
from g4ir.ops.types import ITEMSIZE

from .match import OFF, Note, ignore, require_one_of

AFTER = "latent_kv"  # what caches hold is decided
CHANGES_STATE = True
CHANGES_MEANING = True

DTYPES = (OFF, *NARROW)


@dataclass(frozen=True)
class NarrowOptions:
    """The dtype of the caches, one of DTYPES."""

    to: str = OFF

    def __post_init__(self) -> None:
        require_one_of("narrow_kv: to", self.to, DTYPES)


OPTIONS = NarrowOptions()


def narrow_kv(g: Graph, note: Note = ignore, options: NarrowOptions = OPTIONS) -> Graph:
    """Hold caches in a dtype of fewer bits."""
    to = options.to
    writes = [n for n in g.find("cache_write") if _is_wide(n["cache"], to)]
    raw = _raw(g)
    for n in (n for n in writes if n["cache"] in raw or n.out in raw):
        note(n["cache"].name, "left: it holds a projection before its norm")
    writes = [n for n in writes if n["cache"] not in raw and n.out not in raw]
    # What is read alone is written by another graph, which holds it so.
    held = [n["cache"] for n in writes]
    held += [v for v in g.state if v.name not in g.next and _is_wide(v, to) and v not in raw]
    if not held:
        return g
    rows = {n["new"].name: _row(n["new"], to) for n in writes}
    states = {v.name: Value(v.name, as_held(v.type, to)) for v in held}
    for v in states.values():
        note(v.name, f"held as {v.type.dtype}")
    nodes: list[Node] = []
    missing = dict(rows)
    for n in g.nodes:
        made = _reading(n, rows)
        needed = [v.name for v in n.inputs if made is not n]
        nodes += [missing.pop(name) for name in needed if name in missing]
        nodes.append(made)
    state = tuple(states.get(v.name, v) for v in g.state)
    return rebuild(replace(g, nodes=tuple(nodes), state=state))


def _raw(g: Graph) -> set[Value]:
    """Return the caches of the form `raw` that attentions read."""
    readers = (n for n in g.find("attention_latent") if n.attrs["form"] == "raw")
    return {v for n in readers for v in n.caches}


def _is_wide(cache: Value, to: str) -> bool:
    return to != OFF and ITEMSIZE[cache.type.dtype] > ITEMSIZE[to]


def _row(v: Value, to: str) -> Node:
    return Node("narrow_row", (v,), (Value(f"{v.name}.row", as_held(v.type, to)),), {"to": to})


def _reading(n: Node, rows: dict[str, Node]) -> Node:
    """Return a cache's write or reader with rows in the place of what they are made of."""
    if n.op == "cache_write":
        new = rows[n["new"].name].out if n["new"].name in rows else n["new"]
        return replace(n, inputs=(n["cache"], new, *n.inputs[2:]))
    if not n.definition.held:
        return n
    chunk, block_ids = split_chunk(n.chunk, len(n.caches))
    fresh = tuple(rows[v.name].out if v.name in rows else v for v in chunk)
    ids = () if block_ids is None else (block_ids,)
    return replace(n, inputs=(*n.inputs[: len(n.inputs) - len(n.chunk)], *fresh, *ids))
