"""q = norm_rope(q'), cache_write(.., norm_rope(k')), cache_write(.., rms_norm(v')),
q', k', v' the heads of split(qkv)  ->  q, caches = qkv_write(qkv, ..)

Where attention reads what was written: in decode, whose kernel takes a single token, and in a
network, whose caches have room for a chunk (`several`). Otherwise attention reads the chunk apart
from the caches as they were, so its rows are needed themselves. V without a norm is v' (form
`unnormed`). Where K and V come from one projection, v' is k', and the rows are those of the caches'
form and dtype (see `latent_kv`, `narrow_kv`). A layer that reads another layer's caches has q alone
and is left.
"""

from __future__ import annotations

from g4ir.ir.graph import Attr, Graph, Node, Value

from .match import Edit, Left, Note, edit_each, ignore, made_by, maker, only_user, parts_of

AFTER = "fuse_moe"  # it takes whatever form the caches have


def fuse_cache_write(g: Graph, note: Note = ignore, several: bool = False) -> Graph:
    """Fuse everything between the projection of a token and attention into one op."""
    seen = set[tuple[Value, ...]]()

    def edit(n: Node) -> Edit:
        if n.caches in seen:
            raise Left(f"another layer writes {n.caches[0]}")
        seen.add(n.caches)
        return _edit(g, n, several)

    return edit_each(g, (n for n in g.nodes if n.definition.cache_range), edit, note)


def _edit(g: Graph, n: Node, several: bool) -> Edit:
    form = "value" if n.op == "attention_latent" else "plain"
    writes = [_write(g, v) for v in n.caches]
    row, other = writes[0]["new"], writes[-1]["new"]
    if not several and row.type.shape[1] != 1:
        raise Left("several tokens are written at once")
    k = _wide(g, row)
    latent = made_by(g, k, "latent_row") if form == "value" else None
    k = latent["k"] if latent else k
    key = made_by(g, k, "norm_rope")
    kv_heads = made_by(g, key["x"], "heads")
    split = made_by(g, kv_heads["x"], "split")
    q_heads = only_user(g, split.outputs[0], "heads")
    q = only_user(g, q_heads.out, "norm_rope")
    if form == "plain" and not maker(g, _wide(g, other), "rms_norm"):
        form = "unnormed"
    attrs: dict[str, Attr] = {
        "heads": q_heads.attrs["n"],
        "kv_heads": kv_heads.attrs["n"],
        "values": len(split.outputs) == 3,
        "eps": q.attrs["eps"],
        "form": form,
        "pairs": latent.attrs["pairs"] if latent else 0,
    }
    norms = (q["w"], key["w"], *q.inputs[2:])
    slots = (writes[0]["start"], writes[0]["lengths"])
    inputs = (split["x"], *norms, *slots, *(w["cache"] for w in writes))
    made = Node("qkv_write", inputs, (q.out, *(w.out for w in writes)), attrs)
    written = " and ".join(map(str, n.caches))
    return Edit(parts_of(g, made), [made], f"{split['x']} is written as {written}")


def _wide(g: Graph, row: Value) -> Value:
    """Return a row before it is quantised."""
    narrowed = maker(g, row, "narrow_row")
    return narrowed["x"] if narrowed else row


def _write(g: Graph, v: Value) -> Node:
    """Return the node that writes a cache; attention reads it afterwards."""
    if v in g.state:
        raise Left(f"it reads {v} as it was before the write")
    write = made_by(g, v, "cache_write")
    old = write["cache"]
    if old not in g.state or g.next.get(old.name) != v:
        raise Left(f"{v} is not the next {old}")
    if g.readers(old) != [write]:
        raise Left(f"{old} has another reader")
    return write
