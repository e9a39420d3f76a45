"""Plans one of several ranks: bytes, collectives, and predicted decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from g4ir.errors import InputError
from g4ir.ir.graph import Graph
from g4ir.parallel.shard import collectives
from g4ir.parallel.table import can_share

from .footprint import Footprint, step_graph
from .options import Resolved
from .records import MemoryUse, RankRow, Ranks, RankStep

#: numbers of ranks that are compared
COUNTS = (1, 2, 4, 8)
#: a token of one row
ONE = {"B": 1, "S": 1, "M": 1}


@dataclass(frozen=True)
class StepModel:
    """Predicts steps on a GPU: from the decode graph of a rank, a context and a batch, by the way
    to exchange the least and the most microseconds."""

    gpu: str
    us: Callable[[Graph, int, int], Mapping[str, tuple[float, float]]]


def plan_ranks(rank: Footprint, rows: Sequence[MemoryUse], model: StepModel | None) -> Ranks:
    """Return what one rank needs at every context and batch of `rows`, from its measurement."""
    setup, g = rank.setup, rank.decode.graph
    sent = [v.type.bind(ONE).nbytes() for n in collectives(g) for v in n.inputs]
    return Ranks(
        count=setup.ranks,
        weights=rank.decode.param_bytes,
        drafter=rank.drafter_bytes,
        rows=tuple(RankRow(r.ctx, r.batch, r.built) for r in rows),
        messages=len(list(collectives(g))),
        message_bytes=sum(sent),
        gpu=model.gpu if model else None,
        steps=tuple(_steps(setup, rows, model)) if model else (),
    )


def _steps(setup: Resolved, rows: Sequence[MemoryUse], model: StepModel) -> Iterator[RankStep]:
    batches = {r.batch for r in rows}
    own = {setup.ranks} if setup.ranks <= COUNTS[-1] else set()
    for ranks in sorted({*COUNTS, *own}):
        if ranks not in own and not can_share(setup.spec, ranks, setup.ep):
            continue
        one = replace(setup, ranks=ranks, ep=setup.ep and ranks > 1)
        with suppress(InputError):  # the ranks would cut groups of quantised weights
            options = {b: replace(one.options, gpu_rows=b) for b in batches}
            graphs = {b: step_graph(replace(one, options=o), "decode") for b, o in options.items()}
            for r in rows:
                yield RankStep(ranks, r.ctx, r.batch, model.us(graphs[r.batch], r.ctx, r.batch))
