"""Builds the graph of a network, in which attention reads KV caches that contain the chunk:

attention(q, positions, start, old, chunk, *ids)  ->  attention(q, positions, end, written, *ids)

A network's ring caches have prefill_chunk more slots than the graph's (network.py): after the chunk
is written, the ring still contains all keys visible to the chunk's first queries. So attention
reads only caches, without a concatenated copy; and since the chunk's K and V go only into caches,
one op (`qkv_write`) computes them together with q.
"""

from __future__ import annotations

from dataclasses import replace

from g4ir.ir.graph import Builder, Graph, Node, Program, Value
from g4ir.ir.rewrite import drop_dead, order, rebuild
from g4ir.ir.verify import verify
from g4ir.model.decoder import VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.encoder import ENCODE
from g4ir.ops.types import Type
from g4ir.passes.fuse_cache_write import fuse_cache_write

from .network import ROWS

MEDIA = "prefill_media"
#: candidates for the network's graph: the first one that a program has
PREFILL = (ENCODE, MEDIA, "prefill")
#: all graphs that are not towers
TEXT = ("embed", "prefill", "decode", VERIFY, DRAFT, MEDIA, ENCODE)


def text_graph(program: Program) -> Graph:
    """Return the graph from which the network is built."""
    return next(program.graphs[name] for name in PREFILL if name in program.graphs)


def network_graph(program: Program) -> Graph:
    """Return the single graph of a network: `encode` of an encoder, else prefill; a decode step is
    a chunk of one token. With bidirectional image attention it is prefill_media, where chunks
    without images have block ids of -1: a second network would store the weights twice. The image
    mask is computed once for all layers, and is tiny for a single token. With speculative decoding
    the network also serves verification steps; the input `rows` selects the tokens whose logits are
    computed."""
    g = text_graph(program)
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
    """Replace last_row(x, lengths) by pick_rows(x, rows), with the new input rows i64[B,R]: indices
    of tokens in the chunk. A graph without last_row (all_logits) is returned unchanged."""
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
    """Return the towers' graphs: one per image size or audio length."""
    return {name: g for name, g in program.graphs.items() if name not in TEXT}


def _old_caches(g: Graph, n: Node) -> tuple[Value, ...]:
    """Return the caches of an attention that reads them as they are before its chunk is written,
    and the chunk separately; () for all other nodes."""
    old = n.definition.cache_range and n.chunk and all(v in g.state for v in n.caches)
    return n.caches if old else ()


def _end(g: Graph, span: tuple[Value, ...], b: Builder) -> Value:
    for n in g.find("add"):
        if n.inputs == span:
            return n.out
    return b.emit("add", *span, name="end")
