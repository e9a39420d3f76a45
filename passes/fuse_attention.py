"""q, k, v = qkv_write(..); attention(q, .., k, v)  ->  out, k, v = qkv_attention(..)
q = norm_rope(x, ..); attention(q, .., k, v)    ->  out = q_attention(x, ..)

For a device on which each kernel of a step waits for the one before (`on`), and for one token of a
row. The caches hold K and V as they are: no other form, and no fewer bits.
"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Node, splice_all

from .match import Left, Note, ignore, made_by

AFTER = "fuse_norm_moe"  # it takes what writes the caches


def fuse_attention(g: Graph, note: Note = ignore, on: bool = False) -> Graph:
    """Fuse an attention and what makes its queries, and its newest keys and values, into one op."""
    edits: list[tuple[list[Node], list[Node]]] = []
    for n in g.find("attention") if on else ():
        try:
            before, new = _fused(g, n)
        except Left as reason:
            note(n.out.name, f"left: {reason}")
            continue
        edits.append(([before, n], new))
        note(n.out.name, f"fused with {before.outputs[0]}")
    return splice_all(g, edits)


def _fused(g: Graph, n: Node) -> tuple[Node, list[Node]]:
    """Return what makes the queries, and the nodes in the place of both."""
    q, positions, written, *held = n.inputs
    if q.type.shape[1] != 1 or n.chunk:
        raise Left(f"{q} is of several tokens")
    if held[0].type.dtype != q.type.dtype:
        raise Left(f"{held[0]} holds rows in fewer bits")
    before = g.producers().get(q.name)
    b, seen = Builder(), (positions, written)
    if before is not None and before.op == "qkv_write":
        _check_alone(g, before, n)
        given, names = before.inputs, [n.out.name, *(v.name for v in before.outputs[1:])]
        attrs = {k: v for k, v in before.attrs.items() if k not in ("form", "pairs")}
        attrs |= n.attrs
        b.emit_all("qkv_attention", *given[:7], *seen, *given[7:], **attrs, name=names)
    else:
        before = made_by(g, q, "norm_rope")
        _check_alone(g, before, n)
        b.emit(
            "q_attention", *before.inputs, *seen, *held, **before.attrs, **n.attrs, name=n.out.name
        )
    return before, b.nodes


def _check_alone(g: Graph, before: Node, n: Node) -> None:
    """Check that nothing else reads the queries, and that the caches are those written with them;
    Left otherwise."""
    q, *caches = before.outputs
    if g.users()[q.name] != [n] or n.inputs.count(q) > 1:
        raise Left(f"{q} has another user")
    if caches and tuple(caches) != n.caches:
        raise Left(f"{n.caches[0]} is not written with {q}")


# --- what it must leave to nobody --------------------------------------------------------------


def left(g: Graph, n: Node, on: bool = False) -> bool:
    """Whether a node is an attention of one token over plain caches, with queries of its own that
    were normed and rotated."""
    if not on or n.op != "attention" or n["q"].type.shape[1] != 1 or len(n.inputs) > 5:
        return False
    before = g.producers().get(n["q"].name)
    return bool(
        before
        and (before.op == "norm_rope" or before.outputs[1:] == n.inputs[3:])
        and before.op in ("norm_rope", "qkv_write")
        and n.caches[0].type.dtype == n["q"].type.dtype
        and g.users()[n["q"].name] == [n]
    )
