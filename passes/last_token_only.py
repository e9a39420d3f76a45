"""last_row(f(x))  ->  f(last_row(x)), up to the last layer that owns keys and values

Everything that only the last token's logits need runs on the last valid row of each sequence.
Attention there reads the cache after the chunk was written, as in decode, so that the layers of the
tail are the same programs as decode's. It needs no block ids: a block lies within its chunk, so
nothing follows a row's last token in its block.
"""

from __future__ import annotations

from dataclasses import replace

from g4ir.ir.graph import Builder, Graph, Node, Value
from g4ir.ir.rewrite import drop_dead, order, rebuild

from .match import Note, after, ignore

AFTER = "plan_cache"  # rows are chosen when weights are packed, for prefill and decode alike


def last_token_only(g: Graph, note: Note = ignore) -> Graph:
    """Move the choice of the last row as far up as every use allows."""
    sink = next((n for n in g.find("last_row") if n.out in g.outputs), None)
    if sink is None:
        note(g.outputs[0].name, "left: every row is asked for")
        return g
    region = _region(g, sink)
    for n in (n for n in g.find("attention") if n.out.name not in region):
        write = next((m for m in after(g, n.outputs) if m.op == "cache_write"), None)
        why = f"for {write.out}" if write else "by others than the last row's"
        note(n.out.name, f"left: every row is read, {why}")
    if sink["x"].name not in region:
        note(sink.out.name, f"left: {sink['x']} has another user")
        return g
    return _narrow(g, sink, region, note)


def _region(g: Graph, sink: Node) -> set[str]:
    """Return names of values of which only the last row is read."""
    users, region = g.users(), set[str]()
    for n in reversed(g.nodes):
        reads = {v: users.get(v.name, []) for v in n.outputs}
        if not any(reads.values()) or not n.definition.rows:
            continue
        if all(_last_only(v, u, sink, region) for v, read in reads.items() for u in read):
            region.update(v.name for v in n.outputs)
    return region


def _last_only(v: Value, user: Node, sink: Node, region: set[str]) -> bool:
    if user is sink:
        return True
    at = {i for i, x in enumerate(user.inputs) if x == v}
    inside = bool(user.outputs) and user.outputs[0].name in region
    return inside and at <= {*user.definition.rows}


def _narrow(g: Graph, sink: Node, region: set[str], note: Note) -> Graph:
    b = Builder()
    lengths = sink["lengths"]
    last: dict[str, Value] = {}

    def narrow(v: Value) -> Value:
        if v.name in region:
            return v
        if v.name not in last:
            last[v.name] = b.emit("last_row", v, lengths, name=f"{v.name}.last")
            note(f"{v.name}.last", f"what follows reads only the last row of {v}")
        return last[v.name]

    end = _end(g, b)
    nodes: list[Node] = []
    for n in g.nodes:
        if n is sink:
            continue
        if n.outputs[0].name in region:
            rows = n.definition.rows
            n = replace(
                n, inputs=tuple(narrow(v) if i in rows else v for i, v in enumerate(n.inputs))
            )
            if n.op == "attention":
                n = _read_written(g, n, end)
        nodes += [*b.nodes, n]
        b.nodes.clear()
    result = {sink["x"].name: Value(sink.out.name, sink["x"].type)}
    nodes = [replace(n, outputs=tuple(result.get(v.name, v) for v in n.outputs)) for n in nodes]
    return drop_dead(rebuild(order(replace(g, nodes=tuple(nodes)))))


def _end(g: Graph, b: Builder) -> Value | None:
    """Return the tokens in the cache after the chunk: start + lengths."""
    write = next(g.find("cache_write"), None)
    if write is None:
        return None
    for n in g.find("add"):
        if n.inputs == write.inputs[2:]:
            return n.out
    return b.emit("add", *write.inputs[2:], name="end")


def _read_written(g: Graph, n: Node, end: Value | None) -> Node:
    """Return the same attention, over the caches that the chunk was written to."""
    if not n.chunk or end is None:
        return n
    q, positions = n.inputs[:2]
    caches = tuple(g.next[v.name] for v in n.caches)
    return replace(n, inputs=(q, positions, end, *caches))
