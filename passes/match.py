"""Pattern matching and graph edits shared by passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from g4ir.errors import InputError, VerifyError
from g4ir.ir.graph import Builder, Graph, Node, Value
from g4ir.ir.rewrite import splice_all
from g4ir.ops import OPS
from g4ir.ops.codecs import FORMAT_OF, JOINED_AS_BYTES

#: callback(value name, what a pass did or why it did nothing)
Note = Callable[[str, str], None]

#: option value that disables a rounding pass
OFF = "off"
#: name suffix of a dequantised weight
DENSE = ".dense"


def require_one_of(option: str, value: object, allowed: Sequence[object]) -> None:
    """Raise InputError unless a pass's option, named `pass: option`, has an allowed value."""
    if value not in allowed:
        raise InputError(f"{option} {value!r}: expected one of {', '.join(map(str, allowed))}")


class NoMatch(Exception):
    """A pattern does not match; the message is the reason."""


def ignore(value: str, reason: str) -> None:
    """A `Note` that does nothing."""


@dataclass(frozen=True)
class Edit:
    """Nodes, their replacement, and the note."""

    old: Sequence[Node]
    new: Sequence[Node]
    note: str


def edit_each(g: Graph, nodes: Iterable[Node], edit: Callable[[Node], Edit], note: Note) -> Graph:
    """Apply the edit of each node; if it raises NoMatch, note the reason and leave the node."""
    edits = []
    for n in nodes:
        try:
            result = edit(n)
        except NoMatch as reason:
            note(n.outputs[0].name, f"left: {reason}")
            continue
        edits.append((result.old, result.new))
        note(n.outputs[0].name, result.note)
    return splice_all(g, edits)


def producer_of(g: Graph, v: Value, *ops: str) -> Node | None:
    """Return the node that defines a value if it is of one of these ops, else None."""
    n = g.producer(v)
    return n if n and n.op in ops else None


def produced_by(g: Graph, v: Value, op: str, otherwise: str = "") -> Node:
    """Return the node of op `op` that defines a value; if none does, NoMatch with the reason
    `otherwise` or a default."""
    n = producer_of(g, v, op)
    if n is None:
        raise NoMatch(otherwise or f"{v} is not a result of {op}")
    return n


def match_parts(g: Graph, fused: Node) -> list[Node]:
    """Return the graph's nodes that a fused node replaces; its expansion is the pattern. NoMatch if
    a node differs, or if an intermediate value has another user."""
    other_operands = f"{fused.op} takes other operands, or has results of other types"
    try:
        types = fused.inferred
    except VerifyError as e:
        raise NoMatch(other_operands) from e
    if types != tuple(v.type for v in fused.outputs):
        raise NoMatch(other_operands)
    pattern, results = fused.expanded
    same = {v.name: v for v in fused.inputs}
    same |= {v.name: actual for v, actual in zip(results, fused.outputs, strict=True)}
    nodes: list[Node] = []
    for template in reversed(pattern):
        n = produced_by(
            g, next(same[v.name] for v in template.outputs if v.name in same), template.op
        )
        other = dict(n.attrs.items() ^ template.attrs.items())
        if other:
            raise NoMatch(
                f"{n.outputs[0]} differs from the pattern in {' and '.join(sorted(other))}"
            )
        for expected, actual in ((template.inputs, n.inputs), (template.outputs, n.outputs)):
            alike = [same.setdefault(v.name, x) for v, x in zip(expected, actual, strict=False)]
            if len(expected) != len(actual) or alike != [*actual]:
                raise NoMatch(f"{n.outputs[0]}: {n.op} has other operands than in {fused.op}")
        nodes.insert(0, n)
    for v in (v for n in nodes for v in n.outputs if v not in fused.outputs):
        if v in fused.inputs or any(user not in nodes for user in g.readers(v)):
            raise NoMatch(f"{v} has another user")
    return nodes


def only_reader(g: Graph, v: Value, op: str) -> Node:
    """Return the node that alone reads a value, if its op is `op`; NoMatch if it is not, or if the
    value has no or several readers."""
    users = g.readers(v)
    if [n.op for n in users] != [op]:
        raise NoMatch(f"{v} is not read by one {op} alone")
    return users[0]


def after(g: Graph, values: Iterable[Value]) -> Iterator[Node]:
    """Yield the nodes that depend on `values`, breadth first, also RESULT; not those that depend
    only on a cache write's result."""
    visited = set[int]()
    queue = [u for v in values for u in g.readers(v)]
    for n in queue:
        if id(n) not in visited:
            visited.add(id(n))
            yield n
            results = n.outputs if n.op != "cache_write" else ()
            queue += [u for v in results for u in g.readers(v)]


def norm_input(g: Graph, v: Value) -> Value:
    """Return the residual whose pre-norm defines a value; the value itself if no norm does."""
    norm = producer_of(g, v, "rms_norm", "norm_residual")
    if norm is None:
        return v
    return norm["x"] if norm.op == "rms_norm" else norm.outputs[0]


def cache_names(g: Graph) -> dict[str, str]:
    """Return name of a cache value, before or after its write -> name of the state."""
    return {v.name: v.name for v in g.state} | {v.name: name for name, v in g.next.items()}


# --- weights -----------------------------------------------------------------------------------


def format_of(g: Graph, w: Value) -> tuple[object, ...] | None:
    """Return a weight's format; weights of equal formats can be concatenated. int6, int5, iq4
    and int3k count as int8, to which they can be converted. None if the weight is neither a param
    nor dequantised."""
    producer = g.producer(w)
    if producer is None and w in g.param_set:
        return (w.type.dtype,)
    if producer is None or producer.op != "dequantize":
        return None
    types = tuple(v.type for v in producer.inputs)
    if FORMAT_OF[types[0].dtype] in JOINED_AS_BYTES:
        types = OPS["as_bytes"].infer_types(types, {})
    parts = ((t.dtype, t.shape[1:]) for t in types)
    return (*parts, *producer.attrs.items())


def pack(
    b: Builder, g: Graph, products: Sequence[Node], weight: str, name: str
) -> tuple[Value, list[Node]]:
    """Emit one linear whose weight has the rows of several: quantised weights' codes and scales are
    concatenated, converted to int8 if the formats differ. `weight`, `name`: names of the packed
    weight and of the result. Returns the result and the nodes that the linear replaces."""
    dequantizers = [n for p in products if (n := g.producer(p["w"]))]
    if dequantizers:
        parts = [n.inputs for n in dequantizers]
        if len({tuple((v.type.dtype, v.type.shape[1:]) for v in pair) for pair in parts}) > 1:
            parts = [_to_int8(b, pair) for pair in parts]
        codes, scales = (
            b.emit("concat", *values, axis=0, name=f"{weight}.{part}")
            for part, values in zip(("codes", "scales"), zip(*parts, strict=True), strict=True)
        )
        w = b.emit("dequantize", codes, scales, name=f"{weight}{DENSE}", **dequantizers[0].attrs)
    else:
        w = b.emit("concat", *(n["w"] for n in products), axis=0, name=weight)
    unshared = [n for n in dequantizers if len(g.readers(n.out)) == 1]
    return b.emit("linear", products[0]["x"], w, name=name), [*products, *unshared]


def _to_int8(b: Builder, pair: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return the codes and scales of int8 for those of a format in JOINED_AS_BYTES; else `pair`."""
    if FORMAT_OF[pair[0].type.dtype] not in JOINED_AS_BYTES:
        return pair
    ends = (v.name.rpartition(".") for v in pair)
    return b.emit_all("as_bytes", *pair, name=[f"{weight}.bytes.{end}" for weight, _, end in ends])
