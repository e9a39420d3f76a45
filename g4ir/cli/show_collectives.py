"""`g4ir show --tp N --collectives`: what the ranks of a model say to each other in a step."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from g4ir.ui.table import aligned
from g4ir.ui.units import size_text

from .common import emit
from .graphs import ranks_of

if TYPE_CHECKING:
    from g4ir.ir.graph import Graph

#: one token of one row
ONE = {"B": 1, "S": 1, "M": 1, "C": 1}


def show_collectives(args: argparse.Namespace, graph: Graph) -> int:
    """Print the messages of a graph, equal ones together: what a rank gives to each for one token
    of one row."""
    from g4ir.parallel.shard import collectives

    found = Counter((n.op, tuple(v.type.bind(ONE) for v in n.inputs)) for n in collectives(graph))
    rows = [
        {
            "op": op,
            "messages": count,
            "tensors": [str(t) for t in types],
            "bytes": sum(t.nbytes() for t in types),
        }
        for (op, types), count in found.items()
    ]
    total, ranks = sum(found.values()), ranks_of(args)
    if args.json:
        said = {"phase": graph.name, "ranks": ranks, "messages": total, "rows": rows}
        emit(said)
        return 0
    print(f"{graph.name} on {ranks} ranks: {total} messages a step")
    head = ("op", "messages", "tensors of a rank", "each")
    table = [
        (op, str(count), " ".join(map(str, types)), size_text(sum(t.nbytes() for t in types)))
        for (op, types), count in found.items()
    ]
    print(aligned([head, *table]), end="")
    return 0
