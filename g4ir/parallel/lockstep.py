"""Defines the meaning of a sharded graph: the ranks interpret it node by node, side by side.

The definition of the collectives, and the oracle of every engine of several ranks: no processes and
no network are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from g4ir.errors import InputError
from g4ir.ir.flatten import with_messages
from g4ir.ir.graph import Graph, Node
from g4ir.ir.interpret import Tensors, run_node
from g4ir.ops.base import wide
from g4ir.spec.record import Spec

from .share import Share
from .table import FIRST

#: a tensor of each rank, in order of rank
Ranks = tuple[Any, ...]


def rank_params(
    g: Graph, spec: Spec, params: Mapping[str, Any], rank: int, ranks: int
) -> dict[str, Any]:
    """Return a rank's params of a sharded graph, cut from those of the whole model."""
    share = Share(spec, rank, ranks, any(v.name == FIRST for v in g.params))
    return {v.name: share.own(v.name, params.__getitem__) for v in g.params}


def lockstep(
    g: Graph, inputs: Tensors, params: Sequence[Tensors], state: Sequence[Tensors]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Run `g` once for each rank, with the same inputs and params and caches of its own; returns
    each rank's (outputs, state), as `interpret` does. InputError where a collective is of another
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
            exchanged(n, tensors) if n.op in _COLLECTIVES else [run_node(n, own) for own in tensors]
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
    """Return what each rank has of a message, of what each gives. InputError where it is of another
    number of ranks."""
    _check(n, len(tensors))
    return _COLLECTIVES[n.op](n, tensors)


def _all_reduce(n: Node, tensors: list[list[Any]]) -> list[list[Any]]:
    """Return every rank's sums. In order of rank, so that all have the same bits."""
    sums = []
    for parts in zip(*tensors, strict=True):
        total = wide(parts[0])
        for part in parts[1:]:
            total = total + part
        sums.append(total.to(parts[0].dtype))
    return [sums] * len(tensors)


def _all_gather(n: Node, tensors: list[list[Any]]) -> list[list[Any]]:
    import torch

    return [[torch.cat([x for (x,) in tensors], -1)]] * len(tensors)


def _check(n: Node, ranks: int) -> None:
    if n.whole("ranks") != ranks:
        raise InputError(
            f"{n.result_names()} = {n.op} is of {n.attrs['ranks']} ranks, {ranks} run; shard the "
            f"graph for {ranks}"
        )


_COLLECTIVES: dict[str, Callable[[Node, list[list[Any]]], list[list[Any]]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
}
