"""linear(linear_glu(x, w), w_down) and experts(x', *router(x''))  ->  moe_mlp(x, x', x'', ...)

The dense MLP and the routed experts of a layer: x, x' and x'' are norms of one residual, so neither
waits for the other, and a backend can run both in the same grids.
"""

from __future__ import annotations

from g4ir.ir.graph import Graph, Node, Value

from .match import Edit, Left, Note, edit_each, ignore, made_by, normed, only_user, parts_of

AFTER = "fuse_glu"  # it takes the fused MLP


def fuse_moe(g: Graph, note: Note = ignore) -> Graph:
    """Fuse the two feed-forward blocks of a layer with experts into one op."""
    routed: dict[Value, list[Node]] = {}
    for n in g.find("experts"):
        routed.setdefault(normed(g, n["x"]), []).append(n)

    def edit(glu: Node) -> Edit:
        siblings = routed.get(normed(g, glu["x"]), [])
        if not siblings:
            raise Left("no experts beside it")
        found = _edit(g, glu, siblings[0])
        del siblings[0]
        return found

    out = edit_each(g, g.find("linear_glu"), edit, note)
    for n in (n for siblings in routed.values() for n in siblings):
        note(n.out.name, "left: no gated MLP beside it")
    return out


def _edit(g: Graph, glu: Node, experts: Node) -> Edit:
    if len(glu.inputs) > 2:
        raise Left("its gate and up are not packed")
    down = only_user(g, glu.out, "linear")
    router = made_by(g, experts["weights"], "router")
    if normed(g, router["x"]) != normed(g, experts["x"]):
        raise Left(f"{router.outputs[0]} is of another residual")
    weights = (*router.inputs, glu["w"], down["w"], *experts.inputs[3:])
    results, attrs = (down.out, experts.out), {**glu.attrs, **router.attrs}
    made = Node("moe_mlp", (glu["x"], experts["x"], *weights), results, attrs)
    return Edit(parts_of(g, made), [made], f"fused with {experts.out}")
