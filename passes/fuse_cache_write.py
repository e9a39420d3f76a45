"""q = norm_rope(q'), cache_write(.., norm_rope(k')), cache_write(.., rms_norm(v')),
q', k', v' the heads of split(qkv)  ->  q, caches = qkv_write(qkv, ..)

Decode only: a single token, written before attention reads it. A chunk of several is read beside
the caches as they were, so its rows are wanted themselves. Where K and V come from one projection,
v' is k', and the rows are those of the caches' form (see `latent_kv`). A layer that reads another
layer's caches has q alone and is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4ir.ir import Attr, Builder, Graph, Node, Value, splice_all
from g4ir.ops.latent import PARTS

from . import Note, ignore


def fuse_cache_write(g: Graph, note: Note = ignore) -> Graph:
    """Everything between the projection of a token and attention in one op."""
    edits: list[tuple[list[Node], list[Node]]] = []
    seen = set[tuple[Value, ...]]()
    for n in g.find("attention", "attention_latent"):
        caches, form = _caches(n)
        try:
            if caches in seen:
                raise _Left(f"another layer writes {caches[0]}")
            match = _match(g, n, caches, form)
        except _Left as reason:
            note(n.out.name, f"left: {reason}")
            continue
        finally:
            seen.add(caches)
        edits.append((match.nodes(), match.fused()))
        note(n.out.name, f"{match.split.inputs[0]} is written as {' and '.join(map(str, caches))}")
    return splice_all(g, edits)


class _Left(Exception):
    """Why a layer stays as it is."""


@dataclass(frozen=True)
class _Rows:
    """What is written, back to the heads of k and v; the node that makes them from it."""

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
    writes: tuple[Node, ...]

    def nodes(self) -> list[Node]:
        return [self.split, *self.heads, self.q, *self.rows.nodes, *self.writes]

    def fused(self) -> list[Node]:
        b, q, write = Builder(), self.q, self.writes[0]
        b.emit(
            "qkv_write", self.split.inputs[0], q.inputs[1], self.rows.norm_k, *q.inputs[2:],
            *write.inputs[2:], *(w.inputs[0] for w in self.writes),
            heads=self.heads[0].attrs["n"], kv_heads=self.heads[1].attrs["n"],
            values=len(self.heads) == 3, form=self.form, pairs=self.rows.pairs,
            eps=q.attrs["eps"], name=[q.out.name, *(w.out.name for w in self.writes)],
        )  # fmt: skip
        return b.nodes


def _caches(n: Node) -> tuple[tuple[Value, ...], str]:
    """The caches that an attention reads, and their form."""
    if n.op == "attention":
        return n.inputs[3:5], "plain"
    form = str(n.attrs["form"])
    return n.inputs[4 : 4 + len(PARTS[form])], form


def _match(g: Graph, n: Node, caches: tuple[Value, ...], form: str) -> _Match:
    writes = tuple(_write(g, v) for v in caches)
    if any(w.inputs[2:] != writes[0].inputs[2:] for w in writes):
        raise _Left("its caches are not written at the same slots")
    if writes[0].inputs[1].type.shape[1] != 1:
        raise _Left("several tokens are written at once")
    rows = _rows(g, n, [w.inputs[1] for w in writes], form)
    heads = [_made(g, v, "heads") for v in dict.fromkeys((rows.k, rows.v))]
    split = _made(g, heads[0].inputs[0], "split")
    if split.outputs[1:] != tuple(m.inputs[0] for m in heads):
        raise _Left(f"{split.inputs[0]} is not packed as q, k and v")
    heads = [_user(g, split.outputs[0], "heads"), *heads]
    q = _user(g, heads[0].out, "norm_rope")
    match = _Match(form, split, tuple(heads), q, rows, writes)
    _check(g, match)
    return match


def _write(g: Graph, v: Value) -> Node:
    """The node that writes a cache; attention reads it afterwards."""
    if v in g.state:
        raise _Left(f"it reads {v} as it was before the write")
    write = _made(g, v, "cache_write")
    old = write.inputs[0]
    if old not in g.state or g.next.get(old.name) != v:
        raise _Left(f"{v} is not the next {old}")
    if g.users()[old.name] != [write]:
        raise _Left(f"{old} has another reader")
    return write


def _rows(g: Graph, n: Node, rows: list[Value], form: str) -> _Rows:
    if form == "raw":
        rms = _made(g, rows[1], "inverse_rms")
        if rms.inputs[0] != rows[0]:
            raise _Left(f"{rms.out} is not of {rows[0]}")
        return _Rows(rows[0], rows[0], n.inputs[3], (rms,), None)
    joined = [_made(g, rows[0], "latent_row")] if form == "value" else []
    k, v = joined[0].inputs[::-1] if joined else rows
    key, value = _made(g, k, "norm_rope"), _made(g, v, "rms_norm")
    if len(value.inputs) > 1:
        raise _Left(f"{v} is a norm with a weight")
    return _Rows(
        key.inputs[0], value.inputs[0], key.inputs[1], (key, value, *joined), key.inputs[2:],
        joined[0].attrs["pairs"] if joined else 0,
    )  # fmt: skip


def _check(g: Graph, m: _Match) -> None:
    """One eps, one rotation, as many heads of k as of v, and nothing that others read."""
    nodes = m.nodes()
    if len({n.attrs["eps"] for n in nodes if "eps" in n.attrs}) > 1:
        raise _Left("the norms differ in eps")
    if m.rows.tables not in (None, m.q.inputs[2:]):
        raise _Left("q and k are rotated by different tables")
    if m.form != "plain" and m.rows.k != m.rows.v:
        raise _Left("K and V do not come from one projection")
    if len({n.attrs["n"] for n in m.heads[1:]}) > 1:
        raise _Left("k and v differ in heads")
    results = {m.q.out, *(w.out for w in m.writes)}
    inside = (v for n in nodes for v in n.outputs if v not in results)
    for v in inside:
        if any(user not in nodes for user in g.users()[v.name]):
            raise _Left(f"{v} has another user")


def _made(g: Graph, v: Value, op: str) -> Node:
    n = g.producers().get(v.name)
    if n is None or n.op != op:
        raise _Left(f"{v} is not made by {op}")
    return n


def _user(g: Graph, v: Value, op: str) -> Node:
    """The only one."""
    users = g.users().get(v.name, [])
    if [n.op for n in users] != [op] or users[0].inputs[0] != v:
        raise _Left(f"{v} goes elsewhere than into {op}")
    return users[0]
