"""Defines the meaning of a sharded graph: the ranks interpret it node by node, side by side.

The definition of the collectives, and the oracle of every engine of several ranks: no processes and
no network are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from g4ir.errors import InputError
from g4ir.ir.flatten import with_messages
from g4ir.ir.graph import Graph, Node
from g4ir.ir.interpret import Tensors, run_node
from g4ir.ops.collective import COLLECTIVES

from .group import rank_sum


def lockstep(
    g: Graph, inputs: Tensors, params: Sequence[Tensors], state: Sequence[Tensors]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Run `g` once for each rank, with the same inputs and params and caches of its own; returns
    each rank's (outputs, state), as `interpret` does. InputError if a collective is of another
    number of ranks."""
    g = with_messages(g)
    envs = [
        {v.name: given[v.name] for v in g.sources()}
        for given in (
            {**inputs, **own, **caches} for own, caches in zip(params, state, strict=True)
        )
    ]
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


def exchanged(n: Node, tensors: list[list[Any]]) -> list[list[Any]]:
    """Return each rank's results of a collective, from the inputs of each. InputError if it is of
    another number of ranks."""
    import torch

    ranks = len(tensors)
    if n.whole("ranks") != ranks:
        raise InputError(
            f"{n.result_names()} = {n.op} is of {n.attrs['ranks']} ranks, {ranks} run; shard the "
            f"graph for {ranks}"
        )
    if n.op == "all_gather":
        return [[torch.cat([x for (x,) in tensors], -1)]] * ranks
    return [[rank_sum(parts) for parts in zip(*tensors, strict=True)]] * ranks
