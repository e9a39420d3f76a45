"""heads(x @ wq), heads(x @ wk), heads(x @ wv)  ->  heads of split(x @ concat(wq, wk, wv))

K=V layers pack Q and K; a layer that reads another's keys and values has Q only and is left.
"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Node
from g4ir.ir.rewrite import splice_all

from .match import Note, base, held_as, ignore, makers, stacked

AFTER = "share_rope_tables"  # the last of what layers repeat is gone


def fuse_qkv(g: Graph, note: Note = ignore) -> Graph:
    """Make one matrix product of the attention projections of one input."""
    users = g.users()
    groups: dict[object, list[Node]] = {}
    for n in g.find("linear"):
        if [u.op for u in users.get(n.out.name, [])] == ["heads"]:
            held = held_as(g, n["w"])
            if held is None:
                note(n.out.name, f"left: its weight {n['w']} is no parameter")
                continue
            groups.setdefault((n["x"].name, held), []).append(n)
    for n in g.find("linear_clipped"):
        if [u.op for u in users.get(n.out.name, [])] == ["heads"]:
            note(n.out.name, "left: its input is clamped to bounds of its own")
    edits: list[tuple[list[Node], list[Node]]] = []
    for group in groups.values():
        if len(group) == 1:
            note(group[0].out.name, "left: the only projection of its input")
            continue
        edits.append(([*group, *makers(g, group)], _packed(g, group)))
        note(group[0].out.name, f"packed with {', '.join(str(n.out) for n in group[1:])}")
    return splice_all(g, edits)


def _packed(g: Graph, group: list[Node]) -> list[Node]:
    b, outs, weights = Builder(), [n.out for n in group], [n["w"] for n in group]
    w = stacked(b, g, weights, join([base(v) for v in weights]))
    y = b.emit("linear", group[0]["x"], w, name=join([v.name for v in outs]))
    sizes = tuple(int(v.type.shape[-1]) for v in outs)
    b.emit_all("split", y, sizes=sizes, name=[v.name for v in outs])
    return b.nodes


def join(names: list[str]) -> str:
    """`L0.attn.wq`, `L0.attn.wk` -> `L0.attn.wqk`"""
    first = names[0]
    return first + "".join(n[-1] for n in names[1:])
