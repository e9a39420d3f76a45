"""Functions that walk a graph, for what a pass takes and for what it may not leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from g4ir.ir.graph import Graph, Node, Value

#: sees a value's name, and what a pass did there or why it left it
Note = Callable[[str, str], None]


class Left(Exception):
    """The reason why a pass leaves nodes as they are."""


def ignore(value: str, reason: str) -> None:
    """Take no note: for callers that do not ask."""


def maker(g: Graph, n: Node, operand: str, op: str) -> Node | None:
    """Return the node of this op that makes an operand, or None where another does."""
    found = g.producers().get(n[operand].name)
    return found if found and found.op == op else None


def made_by(g: Graph, v: Value, op: str) -> Node:
    """Return the node that makes a value; Left where it is of another op."""
    n = g.producers().get(v.name)
    if n is None or n.op != op:
        raise Left(f"{v} is not made by {op}")
    return n


def only_user(g: Graph, v: Value, op: str, reason: str = "has another user") -> Node:
    """Return the one node that reads a value; Left where there are others, or another op."""
    users = g.users().get(v.name, [])
    if [n.op for n in users] != [op]:
        raise Left(f"{v} {reason}")
    return users[0]


def after(g: Graph, values: Iterable[Value]) -> list[Node]:
    """Return the nodes that follow from values, up to cache writes."""
    found: dict[int, Node] = {}
    queue = [u for v in values for u in g.users().get(v.name, [])]
    while queue:
        n = queue.pop()
        if id(n) not in found:
            found[id(n)] = n
            after = n.outputs if n.op != "cache_write" else ()
            queue += [u for v in after for u in g.users().get(v.name, [])]
    return list(found.values())


def is_free_projection(g: Graph, n: Node, user: str) -> bool:
    """Whether it is a product with a parameter, read by one node of that op and nothing else."""
    return n["w"] in g.params and [u.op for u in g.users().get(n.out.name, [])] == [user]


def normed(g: Graph, v: Value) -> Value:
    """Return the value that a pre-norm norms; a value that is none stands for itself."""
    made = g.producers().get(v.name)
    if made is not None and made.op == "rms_norm":
        return made["x"]
    fused = made is not None and made.op in ("norm_residual", "dual_norm_residual")
    return made.outputs[0] if made is not None and fused else v
