"""last_row(f(x))  ->  f(last_row(x)), up to the last layer that owns keys and values

Nodes that only the last token's logits depend on run on the last valid token of each sequence.
Their attention reads the updated cache, as in decode, so that both phases share compiled layers,
and needs no block ids: a bidirectional block ends within its chunk, so no visible token follows the
last one.
"""

from __future__ import annotations

from dataclasses import replace

from g4ir.ir.graph import Builder, Graph, Node, Value
from g4ir.ir.rewrite import drop_dead, order, rebuild

from .match import Note, after, ignore

AFTER = "plan_cache"  # weights are packed before, alike for prefill and decode


def last_token_only(g: Graph, note: Note = ignore) -> Graph:
    """Move `last_row` towards the inputs as far as all readers allow."""
    sink = next((n for n in g.find("last_row") if n.out in g.outputs), None)
    if sink is None:
        note(g.outputs[0].name, "left: it has all tokens' rows; no output is a `last_row`")
        return g
    region = _region(g, sink)
    for n in (n for n in g.find("attention") if n.out.name not in region):
        write = next((m for m in after(g, n.outputs) if m.op == "cache_write"), None)
        why = f"{write.out} depends on" if write else "other nodes read"
        note(n.out.name, f"left: {why} every token of it")
    if sink["x"].name not in region:
        note(sink.out.name, f"left: {sink['x']} has another user, or its op mixes tokens")
        return g
    return _narrow(g, sink, region, note)


def _region(g: Graph, sink: Node) -> set[str]:
    """Return the names of values [B,S,...] of which only each sequence's last valid token is read,
    and whose op can run on that token alone."""
    region = set[str]()

    def last_only(v: Value, user: Node) -> bool:
        if user is sink:
            return True
        if not user.outputs or user.outputs[0].name not in region:
            return False
        return all(i in user.definition.rows for i, x in enumerate(user.inputs) if x == v)

    for n in reversed(g.nodes):
        reads = [(v, user) for v in n.outputs for user in g.readers(v)]
        if n.definition.rows and reads and all(last_only(v, user) for v, user in reads):
            region.update(v.name for v in n.outputs)
    return region


def _narrow(g: Graph, sink: Node, region: set[str], note: Note) -> Graph:
    b, last = Builder(), dict[str, Value]()
    end = _end(g, b)

    def row(v: Value) -> Value:
        if v.name in region:
            return v
        if v.name not in last:
            last[v.name] = b.emit("last_row", v, sink["lengths"], name=f"{v.name}.last")
            note(f"{v.name}.last", f"what follows reads only the last token of {v}")
        return last[v.name]

    for n in g.nodes:
        if n.outputs[0].name in region:
            rows = n.definition.rows
            inputs = [row(v) if i in rows else v for i, v in enumerate(n.inputs)]
            if n.op == "attention" and n.chunk and end:
                inputs[2:] = [end, *(g.next[v.name] for v in n.caches)]
            outputs = (replace(v, name=sink.out.name) if v == sink["x"] else v for v in n.outputs)
            n = replace(n, inputs=tuple(inputs), outputs=tuple(outputs))
        if n is not sink:
            b.nodes.append(n)
    return drop_dead(rebuild(order(replace(g, nodes=tuple(b.nodes)))))


def _end(g: Graph, b: Builder) -> Value | None:
    """Return the value start + lengths, the number of cached tokens after the chunk; None if the
    graph writes no cache."""
    write = next(g.find("cache_write"), None)
    if write is None:
        return None
    chunk = (write["start"], write["lengths"])
    total = next((n.out for n in g.find("add") if n.inputs == chunk), None)
    return total or b.emit("add", *chunk, name="end")
