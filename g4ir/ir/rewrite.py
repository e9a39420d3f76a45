"""The rewrite primitives: splice nodes, rebuild types, bind dims, split off the weight prologue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from g4ir.errors import VerifyError

from .graph import Graph, Node, Value


def splice(g: Graph, old: Sequence[Node], new: Sequence[Node]) -> Graph:
    """Replace the nodes `old` by `new`, which must define all values of `old` that other nodes or
    the graph's results use.

    The new nodes take the position of the last old one, or move up to their first reader if that
    comes earlier (`order`).
    """
    return splice_all(g, [(old, new)])


def splice_all(g: Graph, edits: Sequence[tuple[Sequence[Node], Sequence[Node]]]) -> Graph:
    """Apply `splice` for each (old, new), with one sort; no node may be in two edits. VerifyError
    if the result has a cycle."""
    index = {id(n): i for i, n in enumerate(g.nodes)}
    gone = {id(n) for old, _ in edits for n in old}
    inserted: dict[int, list[Node]] = {}
    for old, new in edits:
        inserted.setdefault(max(index[id(n)] for n in old), []).extend(new)
    nodes: list[Node] = []
    for i, n in enumerate(g.nodes):
        nodes += [n] if id(n) not in gone else []
        nodes += inserted.get(i, [])
    return order(replace(g, nodes=tuple(nodes))) if edits else g


def order(g: Graph) -> Graph:
    """Sort topologically: a node that is defined after its first reader moves up to just before
    it; the others keep their order.

    Raises VerifyError for a cycle.
    """
    maker = {v.name: i for i, n in enumerate(g.nodes) for v in n.outputs}
    done, started = set[int](), set[int]()
    out: list[Node] = []
    stack = [*range(len(g.nodes))][::-1]
    while stack:
        i = stack[-1]
        producers = {maker[v.name]: None for v in g.nodes[i].inputs if v.name in maker}
        needs = [j for j in producers if j not in done] if i not in done else []
        if needs and i in started:
            raise VerifyError(f"graph {g.name}: cycle at {g.nodes[i].outputs[0]}")
        if needs:
            started.add(i)
            stack += needs[::-1]
            continue
        stack.pop()
        if i not in done:
            done.add(i)
            out.append(g.nodes[i])
    return replace(g, nodes=tuple(out))


def rebuild(g: Graph, rename: Mapping[str, Value] | None = None) -> Graph:
    """Infer all types again from the sources, after replacing uses of values by `rename` (name ->
    value). Unchanged nodes stay the same objects, so that their inference stays cached. VerifyError
    if an op does not accept its inputs."""
    now = {v.name: v for v in g.sources()}
    rename = dict(rename or {})

    def look(v: Value) -> Value:
        v = rename.get(v.name, v)
        return now.get(v.name, v)

    nodes = []
    for n in g.nodes:
        inputs = tuple(map(look, n.inputs))
        n = n if inputs == n.inputs else replace(n, inputs=inputs)
        nodes.append(_retyped(n, g.name))
        now.update({v.name: v for v in nodes[-1].outputs})
    after = {name: look(v) for name, v in g.next.items()}
    return replace(g, nodes=tuple(nodes), outputs=tuple(map(look, g.outputs)), next=after)


def _retyped(n: Node, graph: str) -> Node:
    """Return the node with inferred result types; VerifyError names `graph`."""
    try:
        if n.is_typed:
            return n
    except VerifyError as e:
        raise VerifyError(f"graph {graph}: {e}") from e
    outputs = tuple(Value(v.name, t) for v, t in zip(n.outputs, n.inferred, strict=True))
    return replace(n, outputs=outputs)


def drop_dead(g: Graph) -> Graph:
    """Remove nodes and params that no result depends on, and caches that are neither updated nor
    read by the rest."""
    live = {v.name for v in g.results()}
    nodes: list[Node] = []
    for n in reversed(g.nodes):
        if any(v.name in live for v in n.outputs):
            nodes.append(n)
            live.update(v.name for v in n.inputs)
    return replace(
        g,
        nodes=tuple(reversed(nodes)),
        params=tuple(v for v in g.params if v.name in live),
        state=tuple(v for v in g.state if v.name in live or v.name in g.next),
    )


def pruned(g: Graph, values: Sequence[Value]) -> Graph:
    """Return the subgraph that computes `values` and the new contents (`next`) of the caches that
    they depend on; its `outputs` are empty."""
    read = {v.name for v in drop_dead(replace(g, outputs=tuple(values), next={})).state}
    updates = {k: v for k, v in g.next.items() if k in read}
    return replace(drop_dead(replace(g, outputs=tuple(values), next=updates)), outputs=())


def bind(g: Graph, **dims: int | str) -> Graph:
    """Replace named dims by ints or other names, and infer the types again (`rebuild`)."""
    inputs, params, state = (
        tuple(Value(v.name, v.type.bind(dims)) for v in values)
        for values in (g.inputs, g.params, g.state)
    )
    return rebuild(replace(g, inputs=inputs, params=params, state=state))


def split_prologue(g: Graph) -> tuple[Graph, Graph]:
    """Split into (prologue, main): the prologue has the nodes that depend on params alone,
    if their ops may `fold`; those of its results that main reads are params of main."""
    fixed = {v.name for v in g.params}
    early: list[Node] = []
    late: list[Node] = []
    for n in g.nodes:
        folds = n.definition.fold and n.inputs and all(v.name in fixed for v in n.inputs)
        (early if folds else late).append(n)
        fixed.update(v.name for v in n.outputs if folds)
    read = {v.name for n in late for v in n.inputs} | {v.name for v in g.results()}
    packed = tuple(v for n in early for v in n.outputs if v.name in read)
    params = tuple(v for v in g.params if v.name in read)
    prologue = Graph(f"{g.name}.prologue", (), g.params, (), tuple(early), packed)
    return drop_dead(prologue), replace(g, nodes=tuple(late), params=params + packed)
