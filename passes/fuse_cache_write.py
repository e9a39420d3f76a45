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

from g4ir.ir.graph import Attr, Builder, Graph, Node, Value
from g4ir.ir.rewrite import splice_all

from .match import Left, Note, ignore, made_by, maker, only_user

AFTER = "fuse_dual_norm"  # it takes whatever form the caches have


def fuse_cache_write(g: Graph, note: Note = ignore, several: bool = False) -> Graph:
    """Fuse everything between the projection of a token and attention into one op."""
    edits: list[tuple[list[Node], list[Node]]] = []
    seen = set[tuple[Value, ...]]()
    for n in (n for n in g.nodes if n.definition.held):
        caches, form = n.caches, str(n.attrs.get("form", "plain"))
        try:
            if caches in seen:
                raise Left(f"another layer writes {caches[0]}")
            match = _match(g, n, caches, form, several)
        except Left as reason:
            note(n.outputs[0].name, f"left: {reason}")
            continue
        finally:
            seen.add(caches)
        edits.append((match.nodes(), match.fused()))
        note(n.out.name, f"{match.split['x']} is written as {' and '.join(map(str, caches))}")
    return splice_all(g, edits)


@dataclass(frozen=True)
class _Rows:
    """The rows that are written, back to the heads of k and v; the nodes that make them."""

    k: Value
    v: Value
    norm_k: Value
    nodes: tuple[Node, ...]
    tables: tuple[Value, ...] | None  # that rotate K, where it is written
    pairs: Attr = 0


@dataclass(frozen=True)
class _Match:
    form: str
    split: Node
    heads: tuple[Node, ...]  # of q, k and v, the last where v is not k
    q: Node
    rows: _Rows
    narrowed: tuple[Node, ...]
    writes: tuple[Node, ...]

    def nodes(self) -> list[Node]:
        return [self.split, *self.heads, self.q, *self.rows.nodes, *self.narrowed, *self.writes]

    def fused(self) -> list[Node]:
        b, q, write = Builder(), self.q, self.writes[0]
        b.emit_all(
            "qkv_write",
            self.split["x"],
            q["w"],
            self.rows.norm_k,
            *q.inputs[2:],
            *write.inputs[2:],
            *(w["cache"] for w in self.writes),
            heads=self.heads[0].attrs["n"],
            kv_heads=self.heads[1].attrs["n"],
            values=len(self.heads) == 3,
            form=self.form,
            pairs=self.rows.pairs,
            eps=q.attrs["eps"],
            name=[q.out.name, *(w.out.name for w in self.writes)],
        )
        return b.nodes


def _match(g: Graph, n: Node, caches: tuple[Value, ...], form: str, several: bool) -> _Match:
    writes = tuple(_write(g, v) for v in caches)
    if any(w.inputs[2:] != writes[0].inputs[2:] for w in writes):
        raise Left("its caches are not written at the same slots")
    if not several and writes[0]["new"].type.shape[1] != 1:
        raise Left("several tokens are written at once")
    narrowed = tuple(m for w in writes if (m := maker(g, w, "new", "narrow_row")))
    rows = _rows(g, n, [m["x"] for m in narrowed] or [w["new"] for w in writes], form)
    heads = [made_by(g, v, "heads") for v in dict.fromkeys((rows.k, rows.v))]
    split = made_by(g, heads[0]["x"], "split")
    if split.outputs[1:] != tuple(m["x"] for m in heads):
        raise Left(f"{split['x']} is not packed as q, k and v")
    heads = [_user(g, split.outputs[0], "heads"), *heads]
    q = _user(g, heads[0].out, "norm_rope")
    match = _Match(form, split, tuple(heads), q, rows, narrowed, writes)
    _check(g, match)
    return match


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
    return _Rows(
        key["x"],
        value["x"],
        key["w"],
        (key, value, *joined),
        key.inputs[2:],
        joined[0].attrs["pairs"] if joined else 0,
    )


def _check(g: Graph, m: _Match) -> None:
    """Check for one eps, one rotation, as many heads of k as of v, and no other readers."""
    nodes = m.nodes()
    if len({n.attrs["eps"] for n in nodes if "eps" in n.attrs}) > 1:
        raise Left("the norms differ in eps")
    if m.rows.tables not in (None, m.q.inputs[2:]):
        raise Left("q and k are rotated by different tables")
    if m.form != "plain" and m.rows.k != m.rows.v:
        raise Left("K and V do not come from one projection")
    if len({n.attrs["n"] for n in m.heads[1:]}) > 1:
        raise Left("k and v differ in heads")
    results = {m.q.out, *(w.out for w in m.writes)}
    inside = (v for n in nodes for v in n.outputs if v not in results)
    for v in inside:
        if any(user not in nodes for user in g.users()[v.name]):
            raise Left(f"{v} has another user")


def _user(g: Graph, v: Value, op: str) -> Node:
    """Return the only user, which takes the value first."""
    user = only_user(g, v, op, f"goes elsewhere than into {op}")
    if user["x"] != v:
        raise Left(f"{v} goes elsewhere than into {op}")
    return user
