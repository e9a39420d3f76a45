"""Bytes that steps on a GPU need beyond the workspace of their graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from g4ir.backends.inductor.programs import phases
from g4ir.backends.inductor.target import Target
from g4ir.ir.graph import Program
from g4ir.ir.rewrite import split_prologue
from g4ir.plan.engine_limits import Limits
from g4ir.plan.memory import Needs

from .schedule import any_length, dense_bytes, same_kernels, schedule
from .target import HOPPER


@dataclass(frozen=True)
class Scratch:
    """Bytes of weights that products of many rows take dense, a node at a time, and of what a
    recorded chunk of a prompt holds of its own, by limits."""

    program: Program

    def at(self, limits: Limits) -> int:
        dense, recorded = self._of_rows(same_kernels(limits.max_batch))
        if not recorded:
            return max(dense.values())
        sizes = limits.max_batch, limits.max_seq, limits.prefill_chunk
        chunk = dense["prefill"] + self._prefill.without_attention(*sizes)
        return max(dense.values()) + chunk

    @cached_property
    def _prefill(self) -> Needs:
        return Needs((split_prologue(self.program.graphs["prefill"])[1],))

    @cached_property
    def _of_rows(self) -> Callable[[int], tuple[dict[str, int], bool]]:
        """Function of a batch size: phase -> bytes of weights that are dequantised for one node,
        and whether chunks of prompts are recorded, which hold such weights again."""
        graphs = self.program.graphs

        @cache
        def of_rows(rows: int) -> tuple[dict[str, int], bool]:
            target = Target("cuda", HOPPER, rows)
            made = {p: schedule(graphs[p], target) for p in phases(self.program)}
            return {p: dense_bytes(s) for p, s in made.items()}, any_length(made["prefill"])

        return of_rows
