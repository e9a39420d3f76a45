"""Splits a graph into steps: segments, each compiled into one program, and nodes that run eagerly.

The nodes of one layer, up to an eager node, form a segment. Segments of the same text share a
program, so that compile cost follows the number of distinct layer kinds. Views, row gathers and
collectives (`glue` ops) run between segments. Caches are written in place, so a write follows every
read of the old contents. An op declares its writes (`updates`, g4ir/ops/base.py) and may have other
outputs too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from g4ir.errors import LowerError
from g4ir.ir.graph import RESULT, Graph, Node, Value
from g4ir.ir.names import split_name
from g4ir.ir.text import print_graph

#: key of a group of nodes: (stage, level), or (ALONE, index of the node)
Key = tuple[str, int]
#: first part of the key of a node that is a step of its own
ALONE = "alone"


@dataclass(frozen=True)
class Step:
    """One call of a program: the text of its segment, and the names of its operands, its outputs
    and the caches that it writes; or, with an empty text, a `node` that runs eagerly."""

    text: str
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    state: tuple[str, ...]
    outputs: tuple[str, ...]
    writes: tuple[str, ...]
    node: Node | None = None


def graph_steps(g: Graph) -> list[Step]:
    """Return the steps of a graph, ordered so that in-place cache writes are safe."""
    keys = _group(g)
    groups: dict[Key, list[Node]] = {}
    for n in g.nodes:
        groups.setdefault(keys[n.outputs[0].name], []).append(n)
    ordered = _order_groups(g, groups, keys)
    return [_step(g, groups[k], keys, k) for k in ordered]


def state_steps(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that write caches, and those that they depend on, for a chunk without
    logits."""
    live: set[str] = set()
    out: list[Step] = []
    for s in reversed(steps):
        if s.writes or live.intersection(s.outputs):
            out.append(s)
            live.update(s.inputs)
    return out[::-1]


def _group(g: Graph) -> dict[str, Key]:
    """Map each node (by its first output) to its key. A stage is a layer, "pre" or "post" for nodes
    before or after all layers, or "write CACHE" for late writes. Eager (`glue`) nodes have keys of
    their own; a node that depends on one is a level higher within each stage."""
    producers = g.producers
    stage: dict[str, str] = {}
    after_layers: set[str] = set()
    level: dict[str, dict[str, int]] = {}  # node -> stage -> level reached in that stage
    keys: dict[str, Key] = {}
    late = _late_writes(g)
    for i, n in enumerate(g.nodes):
        name = n.outputs[0].name
        before = [producers[v.name].outputs[0].name for v in n.inputs if v.name in producers]
        layer, after = _layer(n), after_layers.intersection(before)
        stage[name] = layer or ("post" if after else "pre")
        if layer or after:
            after_layers.add(name)
        level[name] = reached = _highest(level[b] for b in before)
        if n.definition.glue:
            level[name] = {s: at + 1 for s, at in reached.items()}
            keys[name] = (ALONE, i)
        else:
            here = reached.setdefault(stage[name], 0)
            keys[name] = (f"write {late[name]}" if name in late else stage[name], here)
    return keys | _first_uses(g, keys)


def _first_uses(g: Graph, keys: dict[str, Key]) -> dict[str, Key]:
    """Map nodes with only params as inputs (`dequantize`) to the group of their first use; else
    their segment would return the dequantised weight."""
    params, users = {v.name for v in g.params}, g.users
    alone = [n for n in g.nodes if n.inputs and params.issuperset(v.name for v in n.inputs)]
    first = {n.outputs[0].name: users.get(n.outputs[0].name, [RESULT])[0] for n in alone}
    return {name: keys[n.outputs[0].name] for name, n in first.items() if n is not RESULT}


def _highest(levels: Iterable[dict[str, int]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for level in levels:
        for s, at in level.items():
            out[s] = max(out.get(s, 0), at)
    return out


def _updates(n: Node) -> tuple[tuple[Value, Value], ...]:
    """Return (old, new) contents of the caches that a node writes."""
    return n.definition.updated(n.inputs, n.outputs)


def _late_writes(g: Graph) -> dict[str, str]:
    """Map cache writes (by first output) to their cache, if another layer reads its old contents:
    such a write must wait for that layer."""
    users = g.users
    return {
        n.outputs[0].name: old.name
        for n in g.nodes
        for old, _ in _updates(n)
        if {_layer(m) for m in users[old.name]} != {_layer(n)}
    }


def _layer(n: Node) -> str:
    """Return a node's layer: `L3`, `vision.L3`; empty outside the layers."""
    tower, layer, _ = split_name(n.outputs[0].name)
    return "" if layer is None else f"{tower}.L{layer}".lstrip(".")


def _order_groups(g: Graph, groups: dict[Key, list[Node]], keys: dict[str, Key]) -> list[Key]:
    """Return groups in topological order, stable by first node; reads of a cache before writes."""
    producers = g.producers
    needs: dict[Key, set[Key]] = {}
    for k, nodes in groups.items():
        before = [producers[v.name] for n in nodes for v in n.inputs if v.name in producers]
        for n in nodes:
            read = (m for old, _ in _updates(n) for m in g.users[old.name])
            before += [m for m in read if m is not n and m is not RESULT]
        needs[k] = {keys[m.outputs[0].name] for m in before} - {k}
    done: dict[Key, None] = {}
    while len(done) < len(groups):
        ready = next((k for k in groups if k not in done and needs[k] <= done.keys()), None)
        if ready is None:
            stuck = [k for k in groups if k not in done]
            raise LowerError(f"torch: graph {g.name}: groups {stuck} depend on each other")
        done[ready] = None
    return list(done)


def _step(g: Graph, nodes: list[Node], keys: dict[str, Key], key: Key) -> Step:
    n = nodes[0]
    if len(nodes) == 1 and n.definition.glue:
        return Step("", _names(n.inputs), (), (), _names(n.outputs), (), n)
    nodes = writes_last(g, nodes)
    outside = {v.name for n in g.nodes if keys[n.outputs[0].name] != key for v in n.inputs}
    outside |= {v.name for v in g.outputs}
    outputs = [v for n in nodes for v in _returned(n, outside)]
    sub = part(g, "segment", nodes, outputs)
    return Step(
        text=print_graph(canonical(sub)),
        inputs=_names(sub.inputs),
        params=_names(sub.params),
        state=_names(sub.state),
        outputs=_names(sub.outputs),
        writes=tuple(sub.next),
    )


def part(g: Graph, name: str, nodes: Sequence[Node], outputs: Iterable[Value]) -> Graph:
    """Return nodes of a graph as a graph of this name, with their inputs and the caches that they
    read or write."""
    produced = {v.name for n in nodes for v in n.outputs}
    read = dict.fromkeys(v for n in nodes for v in n.inputs if v.name not in produced)
    params, state = ({v.name for v in values} for values in (g.params, g.state))
    return Graph(
        name,
        tuple(v for v in read if v.name not in params | state),
        tuple(v for v in read if v.name in params),
        tuple(v for v in read if v.name in state),
        tuple(nodes),
        tuple(outputs),
        {old.name: new for n in nodes for old, new in _updates(n)},
    )


def _returned(n: Node, outside: set[str]) -> list[Value]:
    """Return a node's outputs except caches, if any is used outside of the segment."""
    written = {new.name for _, new in _updates(n)}
    results = [v for v in n.outputs if v.name not in written]
    return results if any(v.name in outside for v in results) else []


def _names(values: Iterable[Value]) -> tuple[str, ...]:
    return tuple(v.name for v in values)


def writes_last(g: Graph, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with each cache write after the last read of the old contents. LowerError if
    a node uses outputs of a write that still waits for such a read."""
    writes = {old.name: n.outputs[0].name for n in nodes for old, _ in _updates(n)}
    pending = dict.fromkeys(writes.values(), 0)  # reads that a write waits for
    read = {
        n.outputs[0].name: {writes[v.name] for v in n.inputs if v.name in writes} for n in nodes
    }
    for name, waiting in read.items():
        waiting.discard(name)
        for write in waiting:
            pending[write] += 1
    out: list[Node] = []
    deferred: dict[str, Node] = {}  # writes that wait, by their first output

    def put(n: Node) -> None:
        out.append(n)
        for write in read[n.outputs[0].name]:
            pending[write] -= 1

    for n in nodes:
        for w in deferred.values():
            if set(w.outputs) & set(n.inputs):
                (old, new), *_ = _updates(w)
                raise LowerError(f"torch: graph {g.name}: {old} is read after {new} replaced it")
        if pending.get(name := n.outputs[0].name):
            deferred[name] = n
        else:
            put(n)
        for name in [name for name in deferred if not pending[name]]:
            put(deferred.pop(name))
    return out


def canonical(g: Graph) -> Graph:
    """Return the graph with values named by order of appearance, so that equal layers have equal
    text."""
    outputs = [v for n in g.nodes for v in n.outputs]
    groups = (("x", g.inputs), ("w", g.params), ("c", g.state), ("v", outputs))
    now = {
        v.name: Value(f"{prefix}{i}", v.type)
        for prefix, values in groups
        for i, v in enumerate(values)
    }

    def named(values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(now[v.name] for v in values)

    return Graph(
        g.name,
        named(g.inputs),
        named(g.params),
        named(g.state),
        tuple(replace(n, inputs=named(n.inputs), outputs=named(n.outputs)) for n in g.nodes),
        named(g.outputs),
        {now[old].name: now[new.name] for old, new in g.next.items()},
    )
