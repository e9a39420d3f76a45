"""Plans a model on several ranks: the bytes that each has, what they say to each other, and how
long a step is expected to take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from g4ir.errors import InputError
from g4ir.ir.graph import Graph, Program
from g4ir.ir.rewrite import split_prologue
from g4ir.model.draft import build_draft
from g4ir.model.text import build_graph
from g4ir.parallel.shard import collectives, shard
from g4ir.parallel.table import can_share, check_ranks
from g4ir.passes import PassOptions, run_passes
from g4ir.quant.recipe import Recipe
from g4ir.quant.rewrite import quantised
from g4ir.spec.record import Spec

from .formats import capacity

#: numbers of ranks that are compared
COUNTS = (1, 2, 4, 8)
#: a token of one row
ONE = {"B": 1, "S": 1, "M": 1}


@dataclass(frozen=True)
class RankRow:
    """Bytes of the caches of a rank at one context and batch."""

    ctx: int
    batch: int
    cache: int


@dataclass(frozen=True)
class StepModel:
    """Predicts steps on a GPU: from the decode graph of a rank, a context and a batch, by the way
    to exchange the least and the most microseconds."""

    gpu: str
    us: Callable[[Graph, int, int], Mapping[str, tuple[float, float]]]


@dataclass(frozen=True)
class RankStep:
    """A decode step on so many ranks: the least and the most microseconds by how they exchange."""

    ranks: int
    ctx: int
    batch: int
    us: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Ranks:
    """One rank of `count`, all of which are alike: bytes of its weights, without the tables that
    are only gathered from, and of its drafter's; messages of a decode step, and the bytes that a
    rank gives for a row; on a GPU predicted steps, on other numbers of ranks too."""

    count: int
    weights: int
    drafter: int
    rows: tuple[RankRow, ...]
    messages: int
    message_bytes: int
    gpu: str | None = None
    steps: tuple[RankStep, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def plan_ranks(
    spec: Spec,
    count: int,
    dtype: str,
    shape: Sequence[tuple[int, int]],
    skip: Sequence[str],
    options: PassOptions,
    recipe: Recipe | None = None,
    ep: bool = False,
    model: StepModel | None = None,
    drafter: Spec | None = None,
) -> Ranks:
    """Return what each of `count` ranks needs at every (context, batch) of `shape`, by the graph
    that it runs. InputError where they cannot share the model."""
    check_ranks(spec, count, ep)

    plain = Program({"decode": build_graph(spec, "decode", dtype=dtype)})
    held = quantised(plain, spec, recipe, dtype).graphs["decode"]

    def of(ranks: int, g: Graph = held) -> Graph:
        return shard(g, spec, ranks, ep and ranks > 1)

    def passed(own: Graph, gpu_rows: int = 0) -> Graph:
        return run_passes(own, skip=skip, options=replace(options, gpu_rows=gpu_rows))

    whole = of(count)
    g = split_prologue(passed(whole))[1]
    draft = (passed(of(count, build_draft(spec, drafter, dtype))),) if drafter else ()
    sent = [v.type.bind(ONE).nbytes() for n in collectives(g) for v in n.inputs]
    return Ranks(
        count,
        sum(v.type.nbytes() for v in g.params),
        sum(v.type.nbytes() for d in draft for v in split_prologue(d)[1].params),
        tuple(RankRow(ctx, batch, _cache(g, ctx, batch)) for ctx, batch in shape),
        len(list(collectives(g))),
        sum(sent),
        model.gpu if model else None,
        tuple(_steps(_compared(spec, {count: whole}, of, ep), passed, shape, model))
        if model
        else (),
    )


def _compared(
    spec: Spec, made: Mapping[int, Graph], of: Callable[[int], Graph], ep: bool
) -> dict[int, Graph]:
    """Return the graph of each number of ranks that can share the model, as far as it is known how
    long they exchange."""
    found = {n: g for n, g in made.items() if n <= COUNTS[-1]}
    for ranks in COUNTS:
        if ranks not in found and can_share(spec, ranks, ep):
            with suppress(InputError):  # groups of a recipe that so many would cut
                found[ranks] = of(ranks)
    return dict(sorted(found.items()))


def _steps(
    graphs: Mapping[int, Graph],
    passed: Callable[[Graph, int], Graph],
    shape: Sequence[tuple[int, int]],
    model: StepModel,
) -> Iterator[RankStep]:
    """Predict each number of ranks by the passes for steps of so many rows on a GPU."""
    for ranks, own in graphs.items():
        by_rows = {batch: passed(own, batch) for batch in {b for _, b in shape}}
        for ctx, batch in shape:
            yield RankStep(ranks, ctx, batch, model.us(by_rows[batch], ctx, batch))


def _cache(g: Graph, ctx: int, batch: int) -> int:
    dims = {"B": batch, "C": capacity(ctx)}
    return sum(v.type.bind(dims).nbytes() for v in g.state)
