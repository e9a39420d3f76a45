"""q = norm_rope(q'), cache_write(.., norm_rope(k')), cache_write(.., rms_norm(v')),
q', k', v' the heads of split(qkv)  ->  q, caches = qkv_write(qkv, ..)

Where attention reads what was written: in decode, whose kernel takes a single token, and in a
network, whose caches have room for a chunk (`several`). Else a chunk is read beside the caches as
they were, so its rows are wanted themselves. Where K and V come from one projection,
v' is k', and the rows are those of the caches' form and dtype (see `latent_kv`, `narrow_kv`). A
layer that reads another layer's caches has q alone and is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4ir.ir.graph import Attr, Graph, Node, Value

from .match import Edit, Left, Note, edit_each, ignore, made_by, maker, only_user

AFTER = "fuse_dual_norm"  # it takes whatever form the caches have


def fuse_cache_write(g: Graph, note: Note = ignore, several: bool = False) -> Graph:
    """Fuse everything between the projection of a token and attention into one op."""
    seen = set[tuple[Value, ...]]()

    def edit(n: Node) -> Edit:
        if n.caches in seen:
            raise Left(f"another layer writes {n.caches[0]}")
        seen.add(n.caches)
        return _edit(g, n, several)

    return edit_each(g, (n for n in g.nodes if n.definition.held), edit, note)


@dataclass(frozen=True)
class _Rows:
    """The rows that are written, back to the heads of k and v; the nodes that make them."""

    k: Value
    v: Value
    norm_k: Value
    nodes: tuple[Node, ...]
    tables: tuple[Value, ...] | None  # that rotate K, where it is written
    pairs: Attr = 0


def _edit(g: Graph, n: Node, several: bool) -> Edit:
    form = str(n.attrs.get("form", "plain"))
    writes = tuple(_write(g, v) for v in n.caches)
    if any(w.inputs[2:] != writes[0].inputs[2:] for w in writes):
        raise Left("its caches are not written at the same slots")
    if not several and writes[0]["new"].type.shape[1] != 1:
        raise Left("several tokens are written at once")
    narrowed = tuple(m for w in writes if (m := maker(g, w["new"], "narrow_row")))
    rows = _rows(g, n, [m["x"] for m in narrowed] or [w["new"] for w in writes], form)
    kv_heads = [made_by(g, v, "heads") for v in dict.fromkeys((rows.k, rows.v))]
    split = made_by(g, kv_heads[0]["x"], "split")
    if split.outputs[1:] != tuple(m["x"] for m in kv_heads):
        raise Left(f"{split['x']} is not packed as q, k and v")
    q_heads = _user(g, split.outputs[0], "heads")
    q = _user(g, q_heads.out, "norm_rope")
    nodes = [split, q_heads, *kv_heads, q, *rows.nodes, *narrowed, *writes]
    results = (q.out, *(w.out for w in writes))
    if rows.tables not in (None, q.inputs[2:]):
        raise Left("q and k are rotated by different tables")
    if form != "plain" and rows.k != rows.v:
        raise Left("K and V do not come from one projection")
    _check(g, nodes, results, kv_heads)
    given = (split["x"], q["w"], rows.norm_k, *q.inputs[2:], *writes[0].inputs[2:])
    attrs = {"form": form, "pairs": rows.pairs, "eps": q.attrs["eps"]}
    attrs |= {"heads": q_heads.attrs["n"], "kv_heads": kv_heads[0].attrs["n"]}
    attrs |= {"values": len(kv_heads) == 2}
    made = Node("qkv_write", (*given, *(w["cache"] for w in writes)), results, attrs)
    caches = " and ".join(map(str, n.caches))
    return Edit(nodes, [made], f"{split['x']} is written as {caches}")


def _write(g: Graph, v: Value) -> Node:
    """Return the node that writes a cache; attention reads it afterwards."""
    if v in g.state:
        raise Left(f"it reads {v} as it was before the write")
    write = made_by(g, v, "cache_write")
    old = write["cache"]
    if old not in g.state or g.next.get(old.name) != v:
        raise Left(f"{v} is not the next {old}")
    if g.users()[old.name] != [write]:
        raise Left(f"{old} has another reader")
    return write


def _rows(g: Graph, n: Node, rows: list[Value], form: str) -> _Rows:
    if form == "raw":
        rms = made_by(g, rows[1], "inverse_rms")
        if rms["x"] != rows[0]:
            raise Left(f"{rms.out} is not of {rows[0]}")
        return _Rows(rows[0], rows[0], n["w"], (rms,), None)
    joined = [made_by(g, rows[0], "latent_row")] if form == "value" else []
    k, v = joined[0].inputs[::-1] if joined else rows
    key, value = made_by(g, k, "norm_rope"), made_by(g, v, "rms_norm")
    if len(value.inputs) > 1:
        raise Left(f"{v} is a norm with a weight")
    pairs = joined[0].attrs["pairs"] if joined else 0
    nodes = (key, value, *joined)
    return _Rows(key["x"], value["x"], key["w"], nodes, key.inputs[2:], pairs)


def _check(g: Graph, nodes: list[Node], results: tuple[Value, ...], kv_heads: list[Node]) -> None:
    """Check for one eps, as many heads of k as of v, and no other readers."""
    if len({n.attrs["eps"] for n in nodes if "eps" in n.attrs}) > 1:
        raise Left("the norms differ in eps")
    if len({n.attrs["n"] for n in kv_heads}) > 1:
        raise Left("k and v differ in heads")
    for v in (v for n in nodes for v in n.outputs if v not in results):
        if any(user not in nodes for user in g.users()[v.name]):
            raise Left(f"{v} has another user")


def _user(g: Graph, v: Value, op: str) -> Node:
    """Return the only user, which takes the value first."""
    user = only_user(g, v, op, f"goes elsewhere than into {op}")
    if user["x"] != v:
        raise Left(f"{v} goes elsewhere than into {op}")
    return user
