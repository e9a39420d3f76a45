"""Plans a model on several ranks: the bytes that each has, and what they say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from g4ir.errors import InputError
from g4ir.ir.graph import Graph, split_prologue
from g4ir.model.text import build_graph
from g4ir.parallel.shard import collectives, shard
from g4ir.passes import run_passes
from g4ir.quant.recipe import Recipe
from g4ir.spec.record import Spec

from .formats import capacity

#: a token of one row
ONE = {"B": 1, "S": 1, "M": 1}


@dataclass(frozen=True)
class RankRow:
    """Bytes of the caches of a rank at one context and batch."""

    ctx: int
    batch: int
    cache: int


@dataclass(frozen=True)
class Ranks:
    """One rank of `count`, all of which are alike: bytes of its weights, without the tables that
    are only gathered from; messages of a decode step, and the bytes that a rank gives for a row."""

    count: int
    weights: int
    rows: tuple[RankRow, ...]
    messages: int
    message_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def plan_ranks(
    spec: Spec,
    count: int,
    dtype: str,
    shape: Sequence[tuple[int, int]],
    skip: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    recipe: Recipe | None = None,
    ep: bool = False,
) -> Ranks:
    """Return what each of `count` ranks needs at every (context, batch) of `shape`, by the graph
    that it runs. InputError where they cannot share the model, or for weights in codes, which are
    not cut yet."""
    if recipe:
        raise InputError(f"--tp {count}: weights of {recipe.name} are not cut yet; plan it without")
    plain = shard(build_graph(spec, "decode", dtype=dtype), spec, count, ep)
    g = split_prologue(run_passes(plain, skip=skip, options=options))[1]
    sent = [v.type.bind(ONE).nbytes() for n in collectives(g) for v in n.inputs]
    return Ranks(
        count,
        sum(v.type.nbytes() for v in g.params),
        tuple(RankRow(ctx, batch, _cache(g, ctx, batch)) for ctx, batch in shape),
        len(list(collectives(g))),
        sum(sent),
    )


def _cache(g: Graph, ctx: int, batch: int) -> int:
    dims = {"B": batch, "C": capacity(ctx)}
    return sum(v.type.bind(dims).nbytes() for v in g.state)
