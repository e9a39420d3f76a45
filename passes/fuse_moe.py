"""linear(linear_glu(x, w), w_down) and experts(x', *router(x''))  ->  moe_mlp(x, x', x'', ...)

The dense MLP and the routed experts beside it: x, x' and x'' are norms of one residual, so neither
waits for the other, and a backend can run both in the same grids.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4ir.ir import Builder, Graph, Node, Value, splice_all

from . import Note, ignore


def fuse_moe(g: Graph, note: Note = ignore) -> Graph:
    """The two feed-forward blocks of a layer with experts in one op."""
    beside: dict[Value, list[Node]] = {}
    for n in g.find("experts"):
        beside.setdefault(_residual(g, n.inputs[0]), []).append(n)
    edits: list[tuple[list[Node], list[Node]]] = []
    for glu in g.find("linear_glu"):
        routed = beside.get(_residual(g, glu.inputs[0]), [])
        try:
            match = _match(g, glu, routed)
        except _Left as reason:
            note(glu.out.name, f"left: {reason}")
            continue
        routed.remove(match.experts)
        edits.append((match.nodes(), match.fused()))
        note(glu.out.name, f"fused with {match.experts.out}")
    for n in (n for many in beside.values() for n in many):
        note(n.out.name, "left: no gated MLP beside it")
    return splice_all(g, edits)


class _Left(Exception):
    """Why an MLP stays as it is."""


@dataclass(frozen=True)
class _Match:
    glu: Node
    down: Node
    router: Node
    experts: Node

    def nodes(self) -> list[Node]:
        return [self.glu, self.down, self.router, self.experts]

    def fused(self) -> list[Node]:
        b = Builder()
        b.emit(
            "moe_mlp", self.glu.inputs[0], self.experts.inputs[0], *self.router.inputs,
            self.glu.inputs[1], self.down.inputs[1], *self.experts.inputs[3:],
            **self.experts.attrs, **self.router.attrs,
            name=[self.down.out.name, self.experts.out.name],
        )  # fmt: skip
        return b.nodes


def _match(g: Graph, glu: Node, routed: list[Node]) -> _Match:
    if not routed:
        raise _Left("no experts beside it")
    experts = routed[0]
    if len(glu.inputs) > 2:
        raise _Left("its gate and up are not packed")
    if glu.attrs != experts.attrs:
        raise _Left(f"its activation is not that of {experts.out}")
    down = _only_user(g, glu.out, "linear")
    if down.inputs[0] != glu.out or down.out.type != experts.out.type:
        raise _Left(f"{down.out} is no result beside {experts.out}")
    router = g.producers().get(experts.inputs[1].name)
    if router is None or router.op != "router" or router.outputs != experts.inputs[1:3]:
        raise _Left(f"{experts.out} does not follow one router")
    for v in router.outputs:
        _only_user(g, v, "experts")
    if _residual(g, router.inputs[0]) != _residual(g, experts.inputs[0]):
        raise _Left(f"{router.outputs[0]} is of another residual")
    return _Match(glu, down, router, experts)


def _only_user(g: Graph, v: Value, op: str) -> Node:
    users = g.users().get(v.name, [])
    if [n.op for n in users] != [op]:
        raise _Left(f"{v} has another user")
    return users[0]


def _residual(g: Graph, v: Value) -> Value:
    """What a pre-norm is the norm of; a value that is none stands for itself."""
    made = g.producers().get(v.name)
    if made is None:
        return v
    if made.op == "rms_norm":
        return made.inputs[0]
    return made.outputs[0] if made.op in ("norm_residual", "dual_norm_residual") else v
