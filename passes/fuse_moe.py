"""linear(linear_glu(x, w), w_down) and experts(x', *router(x''))  ->  moe_mlp(x, x', x'', ...)

The dense MLP and the routed experts beside it: x, x' and x'' are norms of one residual, so neither
waits for the other, and a backend can run both in the same grids.
"""

from __future__ import annotations

from g4ir.ir.graph import Graph, Node, Value

from .match import Edit, Left, Note, edit_each, ignore, normed, only_user

AFTER = "fuse_glu"  # it takes the fused MLP


def fuse_moe(g: Graph, note: Note = ignore) -> Graph:
    """Fuse the two feed-forward blocks of a layer with experts into one op."""
    beside: dict[Value, list[Node]] = {}
    for n in g.find("experts"):
        beside.setdefault(normed(g, n["x"]), []).append(n)

    def edit(glu: Node) -> Edit:
        routed = beside.get(normed(g, glu["x"]), [])
        if not routed:
            raise Left("no experts beside it")
        found = _edit(g, glu, routed[0])
        del routed[0]
        return found

    out = edit_each(g, g.find("linear_glu"), edit, note)
    for n in (n for many in beside.values() for n in many):
        note(n.out.name, "left: no gated MLP beside it")
    return out


def _edit(g: Graph, glu: Node, experts: Node) -> Edit:
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
    weights = (*router.inputs, glu["w"], down["w"], *experts.inputs[3:])
    results, attrs = (down.out, experts.out), {**glu.attrs, **router.attrs}
    made = Node("moe_mlp", (glu["x"], experts["x"], *weights), results, attrs)
    return Edit([glu, down, router, experts], [made], f"fused with {experts.out}")
