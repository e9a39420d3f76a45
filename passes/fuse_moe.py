"""linear(linear_glu(x, w), w_down) and experts(x', *router(x''))  ->  moe_mlp(x, x', x'', ...)

The dense MLP and the routed experts beside it: x, x' and x'' are norms of one residual, so neither
waits for the other, and a backend can run both in the same grids.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4ir.ir.graph import Builder, Graph, Node, Value
from g4ir.ir.rewrite import splice_all

from .match import Left, Note, ignore, normed, only_user

AFTER = "fuse_glu"  # it takes the fused MLP


def fuse_moe(g: Graph, note: Note = ignore) -> Graph:
    """Fuse the two feed-forward blocks of a layer with experts into one op."""
    beside: dict[Value, list[Node]] = {}
    for n in g.find("experts"):
        beside.setdefault(normed(g, n["x"]), []).append(n)
    edits: list[tuple[list[Node], list[Node]]] = []
    for glu in g.find("linear_glu"):
        routed = beside.get(normed(g, glu["x"]), [])
        try:
            match = _match(g, glu, routed)
        except Left as reason:
            note(glu.out.name, f"left: {reason}")
            continue
        routed.remove(match.experts)
        edits.append((match.nodes(), match.fused()))
        note(glu.out.name, f"fused with {match.experts.out}")
    for n in (n for many in beside.values() for n in many):
        note(n.out.name, "left: no gated MLP beside it")
    return splice_all(g, edits)


@dataclass(frozen=True)
class _Match:
    glu: Node
    down: Node
    router: Node
    experts: Node

    def nodes(self) -> list[Node]:
        return [self.glu, self.down, self.router, self.experts]

    def fused(self) -> list[Node]:
        b, own = Builder(), self.experts
        b.emit_all(
            "moe_mlp",
            self.glu["x"],
            own["x"],
            *self.router.inputs,
            self.glu["w"],
            self.down["w"],
            *own.inputs[3:],
            **self.glu.attrs,
            **self.router.attrs,
            name=[self.down.out.name, own.out.name],
        )
        return b.nodes


def _match(g: Graph, glu: Node, routed: list[Node]) -> _Match:
    if not routed:
        raise Left("no experts beside it")
    experts = routed[0]
    if len(glu.inputs) > 2:
        raise Left("its gate and up are not packed")
    if glu.attrs["act"] != experts.attrs["act"]:
        raise Left(f"its activation is not that of {experts.out}")
    down = only_user(g, glu.out, "linear")
    if down["x"] != glu.out or down.out.type != experts.out.type:
        raise Left(f"{down.out} is no result beside {experts.out}")
    router = g.producers().get(experts["weights"].name)
    if router is None or router.op != "router" or router.outputs != experts.inputs[1:3]:
        raise Left(f"{experts.out} does not follow one router")
    for v in router.outputs:
        only_user(g, v, "experts")
    if normed(g, router["x"]) != normed(g, experts["x"]):
        raise Left(f"{router.outputs[0]} is of another residual")
    return _Match(glu, down, router, experts)
