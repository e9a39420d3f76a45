"""attention(q, positions, start, old, chunk, *ids)  ->  attention(q, positions, end, written, *ids)

A network keeps more slots of a ring than the graph says, by as many as a chunk has tokens
(network.py): once the chunk is written, the ring still has all that the chunk's first queries see.
So attention reads caches alone, and no copy of one with the chunk behind it is ever made; rows of a
chunk go into the caches alone, so that one op (`qkv_write`) makes them beside q.
"""

from __future__ import annotations

from dataclasses import replace

from g4ir.ir.graph import Builder, Graph, Node, Program, Value
from g4ir.ir.rewrite import drop_dead, order, rebuild
from g4ir.ir.verify import verify
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT
from g4ir.ops.types import Type
from g4ir.passes.fuse_cache_write import fuse_cache_write

from .network import ROWS

#: what appends tokens, the form that the network is made of first; and what makes the rows of a
#: chunk. All other graphs are towers.
MEDIA = "prefill_media"
PREFILL, TEXT = (MEDIA, "prefill"), ("embed", "prefill", "decode", VERIFY, DRAFT, MEDIA)


def network_graph(program: Program) -> Graph:
    """Return the one graph of a network: prefill, of which a decode step is a chunk of one token.

    Where images are seen both ways it is prefill_media, which a chunk without images feeds
    block ids of -1: a second network of the text model would hold its weights twice. The mask
    that they make is one for all layers, and for a single token a few numbers.

    Where drafted tokens are verified, it is also that step: a chunk of which every row is asked
    for, and `rows` say of which rows there are logits.
    """
    g = next(program.graphs[name] for name in PREFILL if name in program.graphs)
    if VERIFY in program.graphs:
        g = _pick_logit_rows(g)
    b = Builder()
    nodes: list[Node] = []
    ends: dict[tuple[Value, ...], Value] = {}
    for n in g.nodes:
        caches = _old_caches(g, n)
        if caches:
            span = g.producers[g.next[caches[0].name].name].inputs[2:]
            if span not in ends:
                ends[span] = _end(g, span, b)
            first = n.inputs.index(caches[0])
            written = tuple(g.next[v.name] for v in caches)
            ids = n.inputs[first + 2 * len(caches) :]
            n = replace(n, inputs=(*n.inputs[:2], ends[span], *n.inputs[3:first], *written, *ids))
        nodes += [*b.nodes, n]
        b.nodes.clear()
    out = fuse_cache_write(drop_dead(order(replace(g, nodes=tuple(nodes)))), several=True)
    verify(out)
    return out


def _pick_logit_rows(g: Graph) -> Graph:
    """last_row(x, lengths)  ->  pick_rows(x, rows), rows i64[B,R] fed; as it is where there is
    none, since every row has logits."""
    if not any(g.find("last_row")):
        return g
    rows, b = Value(ROWS, Type("i64", ("B", "R"))), Builder()
    for n in g.nodes:
        if n.op == "last_row":
            b.emit("pick_rows", n["x"], rows, name=n.out.name)
        else:
            b.nodes.append(n)
    return rebuild(replace(g, inputs=(*g.inputs, rows), nodes=tuple(b.nodes)))


def tower_graphs(program: Program) -> dict[str, Graph]:
    """Return the graphs that make soft tokens: of images of a size, or audio of a length."""
    return {name: g for name, g in program.graphs.items() if name not in TEXT}


def _old_caches(g: Graph, n: Node) -> tuple[Value, ...]:
    """Return the caches that an attention reads as they were before its chunk."""
    old = n.definition.cache_range and n.chunk and all(v in g.state for v in n.caches)
    return n.caches if old else ()


def _end(g: Graph, span: tuple[Value, ...], b: Builder) -> Value:
    for n in g.find("add"):
        if n.inputs == span:
            return n.out
    return b.emit("add", *span, name="end")
