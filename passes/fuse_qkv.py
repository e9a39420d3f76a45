"""heads(x @ wq), heads(x @ wk), heads(x @ wv)  ->  heads of split(x @ concat(wq, wk, wv))

K=V layers pack Q and K; a layer that reads another layer's KV cache has only Q and is not changed.
"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Node

from .match import DENSE, Edit, NoMatch, Note, edit_each, format_of, ignore, pack

AFTER = "share_rope_tables"  # any order would do: neither depends on the other


def fuse_qkv(g: Graph, note: Note = ignore) -> Graph:
    """Pack the attention projections of one input, with weights of one format, into one linear."""
    groups: dict[object, list[Node]] = {}
    for n in g.find("linear", "linear_clipped"):
        if [u.op for u in g.readers(n.out)] == ["heads"]:
            fmt = format_of(g, n["w"]) if n.op == "linear" else None
            groups.setdefault((n["x"], fmt) if fmt else n.out, []).append(n)
    siblings = {group[0].out: group for group in groups.values()}
    first = (group[0] for group in groups.values())
    return edit_each(g, first, lambda n: _edit(g, siblings[n.out]), note)


def _edit(g: Graph, group: list[Node]) -> Edit:
    outs, weights = [n.out for n in group], [n["w"] for n in group]
    if group[0].op == "linear_clipped":
        raise NoMatch("its input is clamped to bounds of its own")
    if format_of(g, weights[0]) is None:
        raise NoMatch(f"its weight {weights[0]} is not a param")
    if len(group) == 1:
        raise NoMatch("the only projection of its input with a weight of its format")
    b = Builder()
    weight = _joined([v.name.removesuffix(DENSE) for v in weights])
    y, old = pack(b, g, group, weight, _joined([v.name for v in outs]))
    sizes = tuple(int(v.type.shape[-1]) for v in outs)
    b.emit_all("split", y, sizes=sizes, name=[v.name for v in outs])
    return Edit(old, b.nodes, f"packed with {', '.join(map(str, outs[1:]))}")


def _joined(names: list[str]) -> str:
    """`L0.attn.wq`, `L0.attn.wk` -> `L0.attn.wqk`"""
    return names[0] + "".join(name[-1] for name in names[1:])
