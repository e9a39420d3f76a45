"""q = norm_rope(q'), cache_write(.., norm_rope(k')), cache_write(.., rms_norm(v')),
q', k', v' the heads of split(qkv)  ->  q, caches = qkv_write(qkv, ..)

Applies only if attention reads the updated caches: in decode (one token), and in networks whose
caches have capacity for a chunk (`several`). Otherwise attention reads the chunk's rows as separate
inputs. V without a norm is v' (form `unnormed`). If K and V share a projection, v' is k'; rows have
the caches' form and dtype (see `latent_kv`, `narrow_kv`). A layer that reads another layer's caches
has only q and is not changed.
"""

from __future__ import annotations

from g4ir.ir.graph import Attr, Graph, Node, Value

from .match import (
    Edit,
    NoMatch,
    Note,
    edit_each,
    ignore,
    match_parts,
    only_reader,
    produced_by,
    producer_of,
)

AFTER = "fuse_moe"  # caches have their final layout


def fuse_cache_write(g: Graph, note: Note = ignore, several: bool = False) -> Graph:
    """Fuse all nodes between the QKV projection and attention into one op; `several`: also if more
    than one token is written at once."""
    seen = set[tuple[Value, ...]]()

    def edit(n: Node) -> Edit:
        if n.caches in seen:
            raise NoMatch(f"another layer writes {n.caches[0]}")
        seen.add(n.caches)
        return _edit(g, n, several)

    return edit_each(g, (n for n in g.nodes if n.definition.cache_range), edit, note)


def _edit(g: Graph, n: Node, several: bool) -> Edit:
    form = "value" if n.op == "attention_latent" else "plain"
    writes = [_write(g, v) for v in n.caches]
    row, other = writes[0]["new"], writes[-1]["new"]
    if not several and row.type.shape[1] != 1:
        raise NoMatch("several tokens are written at once")
    k = _unquantised(g, row)
    latent = produced_by(g, k, "latent_row") if form == "value" else None
    k = latent["k"] if latent else k
    key = produced_by(g, k, "norm_rope")
    kv_heads = produced_by(g, key["x"], "heads")
    split = produced_by(g, kv_heads["x"], "split")
    q_heads = only_reader(g, split.outputs[0], "heads")
    q = only_reader(g, q_heads.out, "norm_rope")
    if form == "plain" and not producer_of(g, _unquantised(g, other), "rms_norm"):
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
    fused = Node("qkv_write", inputs, (q.out, *(w.out for w in writes)), attrs)
    caches = " and ".join(map(str, n.caches))
    return Edit(match_parts(g, fused), [fused], f"{split['x']} is written as {caches}")


def _unquantised(g: Graph, row: Value) -> Value:
    """Return K, V or latent rows before `narrow_row` quantises them; `row` itself if none does."""
    narrowed = producer_of(g, row, "narrow_row")
    return narrowed["x"] if narrowed else row


def _write(g: Graph, v: Value) -> Node:
    """Return the write that defines the new value `v` of a cache; NoMatch if none does, or if the
    old value has other readers."""
    if v in g.state:
        raise NoMatch(f"it reads {v} itself, not the result of a write")
    write = produced_by(g, v, "cache_write")
    old = write["cache"]
    if old not in g.state or g.next.get(old.name) != v:
        raise NoMatch(f"{v} is not the new value of {old}")
    if g.readers(old) != [write]:
        raise NoMatch(f"{old} has another reader")
    return write
