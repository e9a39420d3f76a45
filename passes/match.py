"""Walks over a graph, and edits of it, that passes share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from g4ir.errors import InputError, VerifyError
from g4ir.ir.graph import Builder, Graph, Node, Value
from g4ir.ir.rewrite import splice_all
from g4ir.ops import OPS
from g4ir.ops.codecs import AS_BYTES, FORMAT_OF

#: sees a value's name, and what a pass did there or why it left it
Note = Callable[[str, str], None]

#: the option of a pass that rounds, to leave everything
OFF = "off"
#: what the name of a dequantised weight ends with
DENSE = ".dense"


def require_one_of(option: str, value: object, known: Sequence[object]) -> None:
    """Raise InputError for a pass's option with another value: `pass: option` names it."""
    if value not in known:
        raise InputError(f"{option} {value!r}: expected one of {', '.join(map(str, known))}")


class Left(Exception):
    """The reason why a pass leaves nodes as they are."""


def ignore(value: str, reason: str) -> None:
    """The Note of callers that need none."""


@dataclass(frozen=True)
class Edit:
    """Nodes, the nodes that replace them, and the note."""

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


def maker(g: Graph, v: Value, *ops: str) -> Node | None:
    """Return the node that makes a value if it is of one of these ops."""
    n = g.producer(v)
    return n if n and n.op in ops else None


def made_by(g: Graph, v: Value, op: str, otherwise: str = "") -> Node:
    """Return the node that makes a value; Left if it is of another op."""
    n = maker(g, v, op)
    if n is None:
        raise Left(otherwise or f"{v} is not made by {op}")
    return n


def parts_of(g: Graph, fused: Node) -> list[Node]:
    """Return the nodes of the graph that a fused node stands for: its expansion is the pattern.
    Left if a node differs from it, or a value inside has another user."""
    other_operands = f"{fused.op} takes other operands"
    try:
        results = fused.inferred
    except VerifyError as e:
        raise Left(other_operands) from e
    if results != tuple(v.type for v in fused.outputs):
        raise Left(other_operands)
    pattern, made = fused.expanded
    same = {v.name: v for v in fused.inputs}
    same |= {v.name: own for v, own in zip(made, fused.outputs, strict=True)}
    found: list[Node] = []
    for wanted in reversed(pattern):
        n = made_by(g, next(same[v.name] for v in wanted.outputs if v.name in same), wanted.op)
        other = dict(n.attrs.items() ^ wanted.attrs.items())
        if other:
            raise Left(f"{n.outputs[0]} has another {' and '.join(sorted(other))}")
        for known, own in ((wanted.inputs, n.inputs), (wanted.outputs, n.outputs)):
            alike = [same.setdefault(v.name, x) for v, x in zip(known, own, strict=False)]
            if len(known) != len(own) or alike != [*own]:
                raise Left(f"{n.outputs[0]} is not {n.op} as in {fused.op}")
        found.insert(0, n)
    for v in (v for n in found for v in n.outputs if v not in fused.outputs):
        if v in fused.inputs or any(user not in found for user in g.readers(v)):
            raise Left(f"{v} has another user")
    return found


def only_user(g: Graph, v: Value, op: str) -> Node:
    """Return the one node that reads a value; Left if there are others, or it is of another op."""
    users = g.readers(v)
    if [n.op for n in users] != [op]:
        raise Left(f"{v} has another user")
    return users[0]


def after(g: Graph, values: Iterable[Value]) -> Iterator[Node]:
    """Yield the nodes that follow from values, up to cache writes, the nearest first."""
    visited = set[int]()
    queue = [u for v in values for u in g.readers(v)]
    for n in queue:
        if id(n) not in visited:
            visited.add(id(n))
            yield n
            results = n.outputs if n.op != "cache_write" else ()
            queue += [u for v in results for u in g.readers(v)]


def normed(g: Graph, v: Value) -> Value:
    """Return the value that a pre-norm norms; any other value stands for itself."""
    made = maker(g, v, "rms_norm", "norm_residual")
    if made is None:
        return v
    return made["x"] if made.op == "rms_norm" else made.outputs[0]


def cache_names(g: Graph) -> dict[str, str]:
    """Name of a cache before or after its write -> the name of the state."""
    return {v.name: v.name for v in g.state} | {v.name: name for name, v in g.next.items()}


# --- weights -----------------------------------------------------------------------------------


def held_as(g: Graph, w: Value) -> tuple[object, ...] | None:
    """Return the format of a weight: weights of equal formats can be one. int5 and int6 count as
    the int8 that they can become. None for a value that is neither a param nor dequantised."""
    made = g.producer(w)
    if made is None and w in g.param_set:
        return (w.type.dtype,)
    if made is None or made.op != "dequantize":
        return None
    types = tuple(v.type for v in made.inputs)
    if FORMAT_OF[types[0].dtype] in AS_BYTES:
        types = OPS["as_bytes"].infer_types(types, {})
    parts = ((t.dtype, t.shape[1:]) for t in types)
    return (*parts, *made.attrs.items())


def packed(
    b: Builder, g: Graph, products: Sequence[Node], weight: str, name: str
) -> tuple[Value, list[Node]]:
    """Emit one product with the weights of several, concatenated by rows: codes and scales if they
    are quantised, as int8 if they are in several forms. Returns it, and the nodes that it
    replaces."""
    made = [n for p in products if (n := g.producer(p["w"]))]
    if made:
        parts = [n.inputs for n in made]
        if len({tuple((v.type.dtype, v.type.shape[1:]) for v in pair) for pair in parts}) > 1:
            parts = [_in_bytes(b, pair) for pair in parts]
        codes, scales = (
            b.emit("concat", *values, axis=0, name=f"{weight}.{part}")
            for part, values in zip(("codes", "scales"), zip(*parts, strict=True), strict=True)
        )
        w = b.emit("dequantize", codes, scales, name=f"{weight}{DENSE}", **made[0].attrs)
    else:
        w = b.emit("concat", *(n["w"] for n in products), axis=0, name=weight)
    own = [n for n in made if len(g.readers(n.out)) == 1]
    return b.emit("linear", products[0]["x"], w, name=name), [*products, *own]


def _in_bytes(b: Builder, pair: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return codes and scales as int8 if they are in a form that can become it."""
    if FORMAT_OF[pair[0].type.dtype] not in AS_BYTES:
        return pair
    ends = (v.name.rpartition(".") for v in pair)
    return b.emit_all("as_bytes", *pair, name=[f"{weight}.bytes.{end}" for weight, _, end in ends])
