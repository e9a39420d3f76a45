"""Bytes that steps on a GPU need beyond the workspace of their graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from g4ir.backends.inductor.programs import phases
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Program
from g4ir.plan.engine_limits import Limits

from .schedule import dense_bytes, same_kernels, schedule
from .target import HOPPER


def scratch_bytes(program: Program) -> Callable[[Limits], int]:
    """Return limits -> bytes of the weights that matmuls of many rows dequantise, one node at a
    time."""

    @cache
    def of_rows(rows: int) -> int:
        target = Target("cuda", HOPPER, rows)
        graphs = (program.graphs[p] for p in phases(program))
        return max(dense_bytes(schedule(g, target)) for g in graphs)

    return lambda limits: of_rows(same_kernels(limits.max_batch))
