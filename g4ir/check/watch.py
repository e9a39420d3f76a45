"""Finds the first value inside that differs, in the order in which values are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from g4ir.backends.base import Runtime, Tensors
from g4ir.engine.engine import Engine
from g4ir.engine.session import Session
from g4ir.ir.distance import Tolerance, row_errors
from g4ir.ir.names import layer_of
from g4ir.ops.finite import advice
from g4ir.ops.kv_quant import comparable

from .reference import reference_engine
from .tokens import Turns


@dataclass(frozen=True)
class ChunkPosition:
    """A chunk of a session: the graph that runs it, the index of its first and last token."""

    phase: str
    start: int
    end: int


#: sees a chunk, the name of a value in it and the value
ChunkWatch = Callable[[ChunkPosition, str, torch.Tensor], None]
#: what a session is asked for
Step = Callable[[Session], Any]


@dataclass(frozen=True)
class Watched:
    """A runtime that shows its values to `watch` (sequences of one length); phases of `hidden` show
    nothing."""

    runtime: Runtime
    watch: ChunkWatch
    hidden: tuple[str, ...] = ()

    def new_state(self, batch: int) -> Any:
        return self.runtime.new_state(batch)

    def embed(self, tokens: torch.Tensor, tables: Mapping[str, Any]) -> Tensors | None:
        return self.runtime.embed(tokens, tables)

    def run(
        self, phase: str, feeds: dict[str, torch.Tensor], state: Any, context: int, logits: bool
    ) -> Tensors | None:
        if phase in self.hidden:
            return self.runtime.run(phase, feeds, state, context, logits)
        start, end = (int(feeds["positions"][0, i]) for i in (0, -1))
        watch = partial(self.watch, ChunkPosition(phase, start, end))
        return self.runtime.run(phase, feeds, state, context, logits, watch)


def first_difference(engine: Engine, peer: Engine, given: Turns, budget: Tolerance) -> str | None:
    """Run both chunk by chunk; name the first value that both make and that is out of tolerance."""
    chunks = given.chunks(engine.limits.prefill_chunk)
    steps = (methodcaller("prefill", piece[None]) for piece in chunks)
    found = first_value(engine, peer, steps, budget)
    return found[1] if found else None


def first_value(
    engine: Engine, peer: Engine, steps: Iterable[Step], budget: Tolerance
) -> tuple[ChunkPosition, str] | None:
    """Take both through the steps, one row without padding; return where the first value lies that
    both make and that is out of tolerance, and what is to be said of it."""
    made: dict[tuple[ChunkPosition, str], torch.Tensor] = {}
    found: list[tuple[ChunkPosition, str]] = []

    def keep(place: ChunkPosition, name: str, value: torch.Tensor) -> None:
        # A copy: the next chunk of the step may be made in the same memory.
        made[place, name] = value.clone()

    def compare(place: ChunkPosition, name: str, want: torch.Tensor) -> None:
        got = made.get((place, name))
        # Of rows in 8 bits one step apart is no fault: those who read them show what it is worth.
        if found or got is None or not want.is_floating_point() or want.element_size() == 1:
            return
        errors = row_errors(got, want)
        if not bool(budget.holds(errors).all()):
            apart = f"relative error {float(errors.relative.max()):.1e}"
            cosine = f"cosine {float(errors.cosine.min()):.6f}"
            found.append((place, f"{_placed(name, place)}: {apart}, {cosine}"))

    one, two = watched(engine, keep, deep=True), watched(peer, compare, deep=True)
    for step in steps:
        made.clear()
        step(one)
        step(two)
        if found:
            return found[0]
    return None


def first_not_finite(engine: Engine, given: Turns) -> str | None:
    """Return the first value that is NaN or infinite as the interpreter runs the engine's
    graphs."""
    found: list[str] = []

    def look(place: ChunkPosition, name: str, value: torch.Tensor) -> None:
        if not found and not bool(comparable(value).isfinite().all()):
            found.append(f"{_placed(name, place)}: NaN or infinite; {advice(engine.dtype)}")

    session = watched(reference_engine(engine), look, deep=True)
    for piece in given.chunks(engine.limits.prefill_chunk):
        session.prefill(piece[None])
        if found:
            return found[0]
    return None


def watched(engine: Engine, watch: ChunkWatch, deep: bool = False) -> Session:
    """One row, whose values are shown. On a GPU decode steps stay what they are for users, one
    replayed graph, of which nothing shows; `deep` runs them step by step."""
    hidden = ("decode",) if engine.device == "cuda" and not deep else ()
    return watching(engine, watch, hidden=hidden).session()


def watching(engine: Engine, watch: ChunkWatch, **more: Any) -> Engine:
    """The same engine, whose values are shown to `watch`; see Watched for what more there is."""
    return replace(engine, runtime=Watched(engine.runtime, watch, **more))  # type: ignore[arg-type]


def _placed(name: str, place: ChunkPosition) -> str:
    layer = layer_of(name)
    where = "outside the layers" if layer is None else f"layer {layer}"
    return f"%{name} ({where}) in the chunk at token {place.start}"
