"""Interprets a sharded graph on all ranks side by side, without processes or network: the oracle
of every engine of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from g4ir.ir.graph import Graph
from g4ir.ir.interpret import Tensors, run_node
from g4ir.ops.collective import COLLECTIVES
from g4ir.parallel.group import exchanged


def lockstep(
    g: Graph, inputs: Tensors, params: Sequence[Tensors], state: Sequence[Tensors]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Run `g` once for each rank, with the same inputs and params and caches of its own; returns
    each rank's (outputs, state), as `interpret` does."""
    envs = []
    for own, caches in zip(params, state, strict=True):
        given = {**inputs, **own, **caches}
        envs.append({v.name: given[v.name] for v in g.sources()})
    for i, n in enumerate(g.nodes):
        tensors = [[env[v.name] for v in n.inputs] for env in envs]
        results = (
            exchanged(n, tensors) if n.op in COLLECTIVES else [run_node(n, own) for own in tensors]
        )
        for env, made in zip(envs, results, strict=True):
            env.update({v.name: t for v, t in zip(n.outputs, made, strict=True)})
            for name in g.last_uses.get(i, ()):
                env.pop(name, None)
    return [
        (
            {v.name: env[v.name] for v in g.outputs},
            {v.name: env[g.next[v.name].name if v.name in g.next else v.name] for v in g.state},
        )
        for env in envs
    ]
