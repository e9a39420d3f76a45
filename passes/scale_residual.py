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
    return g if options.divisor == 1 else _Scaling(g, 1 / options.divisor, note).graph()


def divided_values(g: Graph) -> set[str]:
    """Return the names of the values that the pass divides."""
    scaling = _Scaling(g, 0.5, ignore)
    scaling.graph()
    return scaling.divided


class _Scaling:
    """The pass on one graph; `s` is the factor of the stream."""

    def __init__(self, g: Graph, s: float, note: Note) -> None:
        self.g, self.s, self.note = g, s, note
        self.makers, self.users = g.producers(), g.users()
        self.divided = {START} if any(_starts(g, n) for n in g.nodes) else set[str]()
        #: first result of a node -> the nodes that replace it
        self.changed: dict[str, list[Node]] = {}
        self.scales: dict[str, Node] = {}

    def graph(self) -> Graph:
        if not self.divided:
            self.note(START, "left: no residual is added to it")
        for n in self.g.nodes:
            if any(v.name in self.divided for v in n.inputs):
                self.read(n)
        for v in self.g.outputs:
            if v.name in self.divided:
                raise PassError(f"output {v} is part of the residual stream")
        nodes: list[Node] = []
        for n in self.g.nodes:
            for made in self.changed.get(n.outputs[0].name, [n]):
                nodes += [self.scales.pop(v.name) for v in made.inputs if v.name in self.scales]
                nodes.append(made)
        return replace(self.g, nodes=tuple(nodes))

    def read(self, n: Node) -> None:
        """Change a node that reads the stream."""
        if n.op == "add":
            self.change(n, *map(self.branch, n.inputs))
            self.divided.add(n.out.name)
            self.note(n.out.name, f"divided by {1 / self.s:g}")
        elif n.op == "mul":
            self.divided.add(n.out.name)
        elif n.op == "rms_norm":
            self.change(n, self.branch(n["x"]), *n.inputs[1:], eps=n.number("eps") * self.s**2)
        elif n.op != "linear":
            raise PassError(f"{n.outputs[0]}: {n.op} reads the residual stream without a norm")
        elif n["x"].name != START:
            self.multiply_back(n)

    def multiply_back(self, n: Node) -> None:
        """Take the factor out of a product of the stream."""
        if n["w"] in self.g.params:
            self.change(n, n["x"], self.scaled(n["w"], 1 / self.s))
        else:
            small = replace(n, outputs=(replace(n.out, name=f"{n.out.name}.divided"),))
            back = Node("scale", small.outputs, n.outputs, {"value": 1 / self.s})
            self.changed[n.out.name] = [small, back]
        self.note(n.out.name, f"multiplied by {1 / self.s:g}")

    def branch(self, v: Value) -> Value:
        """Return s times what is added to the stream, made so from as far up as possible."""
        if v.name in self.divided and v.name != START:
            return v
        n = self.makers.get(v.name)
        if n is None or len(self.users[v.name]) > 1 or v in self.g.outputs:
            return self.scaled(v)
        product = WEIGHTS.get(n.op)
        if n.op in ("add", "all_reduce"):
            known = self.changed.get(n.outputs[0].name, [n])[0].inputs
            parts = n.inputs if n.op == "add" else (n.inputs[n.outputs.index(v)],)
            self.change(n, *(self.branch(x) if x in parts else x for x in known))
        elif n.op == "rms_norm" and len(n.inputs) == 2:
            eps = n.number("eps") * self.s**2
            self.change(n, self.branch(n["x"]), self.scaled(n["w"]), eps=eps)
        elif product and n[product] in self.g.params:
            w = n[product]
            self.change(n, *(self.scaled(x) if x == w else x for x in n.inputs))
        else:
            return self.scaled(v)
        self.divided.add(v.name)
        return v

    def scaled(self, v: Value, value: float | None = None) -> Value:
        """Emit the product of a value and `value`, or s."""
        b, name = Builder(), f"{v.name}.scaled"
        made = b.emit("scale", v, value=value or self.s, name=name)
        if name not in self.scales:
            self.scales[name] = b.nodes[0]
        return made

    def change(self, n: Node, *inputs: Value, **attrs: float) -> None:
        made = replace(n, inputs=inputs, attrs={**n.attrs, **attrs})
        self.changed[n.outputs[0].name] = [made]


def _starts(g: Graph, n: Node) -> bool:
    return n.op == "add" and n["a"] in g.inputs and n["a"].name == START
