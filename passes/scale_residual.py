"""h = embeds; h = h + rms_norm(f(rms_norm(h, v; eps)), w; eps)  ->  the same of h / divisor

With s = 1 / divisor the stream starts at scale(embeds, s), a branch is rms_norm(s f, s w; s^2 eps)
and a norm of the stream rms_norm(s h, v; s^2 eps).

Keeps the residual stream, and the projections that are added to it, within the range of float16.
s is a power of two, so norms of the stream are the same numbers. s moves up through sums, norms and
all-reduces into the weight of a projection; a quantised weight stays, and its product is scaled. A
product of the stream itself, the gate of a per-layer embedding, is multiplied back.

Only what becomes subnormal is rounded: in float16 values below 2^-14, by 2^-25 at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle

from g4ir.errors import PassError
from g4ir.ir.graph import Builder, Graph, Node, Value

from .match import Note, ignore, require_one_of

AFTER = None  # stages of `verify --each-pass` begin with values within the range
CHANGES_MEANING = True  # divided values keep their names

DIVISORS = (1, 2, 4, 8, 16)
#: the input at which the stream starts
START = "embeds"
#: product -> its weight
WEIGHTS = {"linear": "w", "experts": "down"}


@dataclass(frozen=True)
class ScaleOptions:
    """The divisor of the residual stream, one of DIVISORS."""

    divisor: int = 1

    def __post_init__(self) -> None:
        require_one_of("scale_residual: divisor", self.divisor, DIVISORS)


OPTIONS = ScaleOptions()


def scale_residual(g: Graph, note: Note = ignore, options: ScaleOptions = OPTIONS) -> Graph:
    """Divide the residual stream."""
    if options.divisor == 1:
        return g
    divided = divided_values(g)
    if not divided:
        note(START, "left: no residual is added to it")
        return g
    scaling = _Scaling(g, 1 / options.divisor, divided, note)
    for n in g.nodes:
        scaling.copy(n)
    return replace(g, nodes=tuple(scaling.b.nodes))


def divided_values(g: Graph) -> set[str]:
    """Return the names of the values that the pass divides: the residual stream, and what is added
    to it, from as far up as possible. PassError if the stream is an output, or is read in another
    way than by a norm or a product."""
    if all(n["a"].name != START or n["a"] not in g.inputs for n in g.find("add")):
        return set()
    stream, divided = {START}, set[str]()
    for n in g.nodes:
        if stream.isdisjoint(v.name for v in n.inputs):
            continue
        if n.op in ("add", "mul"):
            stream.add(n.out.name)
            for v in n.inputs if n.op == "add" else ():
                _divide_branch(g, v, divided)
        elif n.op not in ("rms_norm", "linear"):
            raise PassError(f"{n.outputs[0]}: {n.op} reads the residual stream without a norm")
    for v in g.outputs:
        if v.name in stream:
            raise PassError(f"output {v} is part of the residual stream")
    return divided | stream


def _divide_branch(g: Graph, v: Value, divided: set[str]) -> None:
    """Add a value to `divided`, and its makers' inputs, if they can be divided in its place."""
    n = g.producer(v)
    if n is None or len(g.readers(v)) > 1:
        return
    if n.op in ("add", "all_reduce"):
        for x in n.inputs if n.op == "add" else (n.inputs[n.outputs.index(v)],):
            _divide_branch(g, x, divided)
    elif n.op == "rms_norm" and len(n.inputs) == 2:
        _divide_branch(g, n["x"], divided)
    elif n.op not in WEIGHTS or n[WEIGHTS[n.op]] not in g.params:
        return
    divided.add(v.name)


class _Scaling:
    """Copies nodes to `b`, those of `divided` values with results times `s`."""

    def __init__(self, g: Graph, s: float, divided: set[str], note: Note) -> None:
        self.g, self.s, self.divided, self.note = g, s, divided, note
        self.b = Builder()
        self.scaled: dict[str, Value] = {}

    def copy(self, n: Node) -> None:
        made = [v for v in n.outputs if v.name in self.divided]
        if n.op in ("add", "all_reduce") and made:
            pairs = zip(n.inputs, cycle(n.outputs), strict=False)
            self.change(n, *(self.small(x) if y in made else x for x, y in pairs))
            self.note(n.outputs[0].name, f"divided by {1 / self.s:g}")
        elif n.op == "rms_norm" and (made or n["x"].name in self.divided):
            x = self.small(n["x"])
            weight = [self.times(w, self.s) if made else w for w in n.inputs[1:]]
            self.change(n, x, *weight, eps=n.number("eps") * self.s**2)
        elif n.op in WEIGHTS and made:
            w = n[WEIGHTS[n.op]]
            self.change(n, *(self.times(x, self.s) if x == w else x for x in n.inputs))
        elif n.op == "linear" and n["x"].name in self.divided - {START}:
            self.multiply_back(n)
        else:
            self.b.nodes.append(n)

    def multiply_back(self, n: Node) -> None:
        """Take the factor out of a product of the stream."""
        x, w = n.inputs
        if w in self.g.params:
            self.change(n, x, self.times(w, 1 / self.s))
        else:
            y = self.b.emit("linear", x, w, name=f"{n.out.name}.divided")
            self.b.emit("scale", y, value=1 / self.s, name=n.out.name)
        self.note(n.out.name, f"multiplied by {1 / self.s:g}")

    def small(self, v: Value) -> Value:
        """Return s times a value."""
        return v if v.name in self.divided - {START} else self.times(v, self.s)

    def times(self, v: Value, factor: float) -> Value:
        if v.name not in self.scaled:
            made = self.b.emit("scale", v, value=factor, name=f"{v.name}.scaled")
            self.scaled[v.name] = made
        return self.scaled[v.name]

    def change(self, n: Node, *inputs: Value, **attrs: float) -> None:
        self.b.nodes.append(replace(n, inputs=inputs, attrs={**n.attrs, **attrs}))
