"""linear(linear_glu(x, w), w_down) and experts(x', *router(x''))  ->  moe_mlp(x, x', x'', ...)

The dense MLP and the routed experts of a layer: x, x' and x'' are norms of one residual, so neither
depends on the other and a kernel can run both in one grid.
"""

from __future__ import annotations

from g4ir.ir.graph import Graph, Node, Value

from .match import (
    Edit,
    NoMatch,
    Note,
    edit_each,
    ignore,
    match_parts,
    norm_input,
    only_reader,
    produced_by,
)

AFTER = "fuse_glu"  # its result `linear_glu` is matched here


def fuse_moe(g: Graph, note: Note = ignore) -> Graph:
    """Fuse the two feed-forward blocks of a layer with experts into one op."""
    routed: dict[Value, list[Node]] = {}
    for n in g.find("experts"):
        routed.setdefault(norm_input(g, n["x"]), []).append(n)

    def edit(glu: Node) -> Edit:
        siblings = routed.get(norm_input(g, glu["x"]), [])
        if not siblings:
            raise NoMatch("no routed experts read the same residual")
        result = _edit(g, glu, siblings[0])
        del siblings[0]
        return result

    out = edit_each(g, g.find("linear_glu"), edit, note)
    for n in (n for siblings in routed.values() for n in siblings):
        note(n.out.name, "left: not fused with a gated MLP that reads the same residual")
    return out


def _edit(g: Graph, glu: Node, experts: Node) -> Edit:
    if len(glu.inputs) > 2:
        raise NoMatch("its gate and up are not packed")
    down = only_reader(g, glu.out, "linear")
    router = produced_by(g, experts["weights"], "router")
    if norm_input(g, router["x"]) != norm_input(g, experts["x"]):
        raise NoMatch(f"the router of {router.outputs[0]} reads another residual")
    weights = (*router.inputs, glu["w"], down["w"], *experts.inputs[3:])
    results, attrs = (down.out, experts.out), {**glu.attrs, **router.attrs}
    fused = Node("moe_mlp", (glu["x"], experts["x"], *weights), results, attrs)
    return Edit(match_parts(g, fused), [fused], f"fused with {experts.out}")
