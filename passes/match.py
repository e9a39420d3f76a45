"""Functions that walk a graph, shared by passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from g4ir.errors import InputError
from g4ir.ir.graph import Builder, Graph, Node, Value
from g4ir.ir.rewrite import splice_all

#: sees a value's name, and what a pass did there or why it left it
Note = Callable[[str, str], None]

#: the option of a pass that rounds, to leave everything
OFF = "off"
#: as GPU_ROWS: any number of sequences in a step
ANY_ROWS = 1 << 30


def require_one_of(option: str, value: object, known: Sequence[object]) -> None:
    """Raise InputError for a pass's option with another value: `pass: option` names it."""
    if value not in known:
        raise InputError(f"{option} {value!r}: expected one of {', '.join(map(str, known))}")


class Left(Exception):
    """The reason why a pass leaves nodes as they are."""


def ignore(value: str, reason: str) -> None:
    """Take no note: for callers that do not ask."""


@dataclass(frozen=True)
class Edit:
    """Nodes, those that replace them, and what is noted of it."""

    old: Sequence[Node]
    new: Sequence[Node]
    note: str


def edit_each(g: Graph, nodes: Iterable[Node], edit: Callable[[Node], Edit], note: Note) -> Graph:
    """Make the edit at each node, or note the reason of a Left."""
    edits = []
    for n in nodes:
        try:
            found = edit(n)
        except Left as reason:
            note(n.outputs[0].name, f"left: {reason}")
            continue
        edits.append((found.old, found.new))
        note(n.outputs[0].name, found.note)
    return splice_all(g, edits)


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
    """Return the nodes that follow from values, up to cache writes, the nearest first."""
    found: dict[int, Node] = {}
    queue = [u for v in values for u in g.users().get(v.name, [])]
    for n in queue:
        if id(n) not in found:
            found[id(n)] = n
            results = n.outputs if n.op != "cache_write" else ()
            queue += [u for v in results for u in g.users().get(v.name, [])]
    return list(found.values())


def normed(g: Graph, v: Value) -> Value:
    """Return the value that a pre-norm norms; a value that is none stands for itself."""
    made = g.producers().get(v.name)
    if made is not None and made.op == "rms_norm":
        return made["x"]
    fused = made is not None and made.op in ("norm_residual", "dual_norm_residual")
    return made.outputs[0] if made is not None and fused else v


# --- weights -----------------------------------------------------------------------------------


def held_as(g: Graph, w: Value) -> tuple[object, ...] | None:
    """Return how a weight is held: those of equal tuples can be one weight. None for a value that
    is neither a param nor made of codes."""
    if w in g.params:
        return (w.type.dtype,)
    made = g.producers().get(w.name)
    if made is None or made.op != "dequantize":
        return None
    parts = ((v.type.dtype, v.type.shape[1:]) for v in made.inputs)
    return (*parts, *made.attrs.items())


def stacked(b: Builder, g: Graph, weights: Sequence[Value], name: str) -> Value:
    """Return weights held alike as one, rows after rows: codes and scales, where they have them."""
    made = [g.producers().get(w.name) for w in weights]
    if not made[0]:
        return b.emit("concat", *weights, axis=0, name=name)
    rows = zip(*(n.inputs for n in made if n), strict=True)
    names = [f"{name}.{made[0].definition.operands[i]}" for i in range(2)]
    parts = [b.emit("concat", *vs, axis=0, name=n) for vs, n in zip(rows, names, strict=True)]
    return b.emit("dequantize", *parts, name=f"{name}.dense", **made[0].attrs)


def base(w: Value) -> str:
    """Return the name of a weight however it is held."""
    return w.name.removesuffix(".dense")


def makers(g: Graph, products: Iterable[Node]) -> list[Node]:
    """Return the nodes that make weights of these products of codes, for nobody else."""
    found = (g.producers().get(n["w"].name) for n in products)
    return [m for m in found if m and len(g.users()[m.out.name]) == 1]
