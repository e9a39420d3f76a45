"""norm_residual(all_reduce(x), residual, w_post, ..)  ->  all_reduce_norm_residual(..)
dual_norm_residual of a, b = all_reduce(a, b)  ->  all_reduce_dual_norm_residual(..)

For a device on which ranks read what the others have in a kernel of ours (`on`), and for one token
of a row: the kernel that adds the parts makes the norms too. On one rank there is no sum, so
nothing is fused. It comes before norms are joined to products: a product behind a sum then asks for
its weights while the ranks wait for one another.
"""

from __future__ import annotations

from g4ir.ir.graph import Builder, Graph, Node, splice_all
from g4ir.ops.reduce_norm import WITH_SUMS

from .match import Left, Note, ignore, made_by

AFTER = "fuse_cache_write"  # the norms of a layer are what they will be


def fuse_all_reduce(g: Graph, note: Note = ignore, on: bool = False) -> Graph:
    """Fuse a sum over ranks with the norm that alone takes it."""
    edits: list[tuple[list[Node], list[Node]]] = []
    for n in g.find(*WITH_SUMS) if on else ():
        try:
            message = _message(g, n)
        except Left as reason:
            note(n.outputs[0].name, f"left: {reason}")
            continue
        parts = dict(zip(message.outputs, message.inputs, strict=True))
        b, (fused, _) = Builder(), WITH_SUMS[n.op]
        given = (parts.get(v, v) for v in n.inputs)
        names = [v.name for v in n.outputs]
        b.emit_all(fused, *given, **n.attrs, **message.attrs, name=names)
        edits.append(([message, n], b.nodes))
        note(n.outputs[0].name, f"fused with the sums of {' and '.join(map(str, message.inputs))}")
    return splice_all(g, edits)


def _message(g: Graph, n: Node) -> Node:
    """Return the one message whose sums the norm takes, for nobody else."""
    sums = tuple(n[operand] for operand in WITH_SUMS[n.op][1])
    message = made_by(g, sums[0], "all_reduce")
    if message.outputs != sums:
        raise Left(f"{sums[0]} travels with others, or in another order")
    if sums[0].type.rank != 3 or sums[0].type.shape[1] != 1:
        raise Left(f"{sums[0]} is of several rows each")
    for v in sums:
        if g.users()[v.name] != [n] or n.inputs.count(v) > 1:
            raise Left(f"{v} has another user")
    return message


# --- what it must leave to nobody --------------------------------------------------------------


def left(g: Graph, n: Node, on: bool = False) -> bool:
    """Whether a node is the norm of one token's sums over ranks, which it alone takes."""
    if not on or n.op not in WITH_SUMS:
        return False
    sums = [n[operand] for operand in WITH_SUMS[n.op][1]]
    made = [g.producers().get(v.name) for v in sums]
    return all(
        m is not None
        and m.op == "all_reduce"
        and [*m.outputs] == sums
        and v.type.shape[1:-1] == (1,)
        and g.users()[v.name] == [n]
        and n.inputs.count(v) == 1
        for v, m in zip(sums, made, strict=True)
    )
