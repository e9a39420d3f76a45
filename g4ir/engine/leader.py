"""Runs an engine of several ranks: what the first asks of its runtime, the others do too.

Sessions, slots and whatever chooses tokens are on the first rank alone, as for one. Its runtime
tells each call to the others (worker.py) before it makes it: which graph, over which caches, with
which rows. So they stay together whatever is asked, and draw nothing. Tables and towers, too, are
used on the first alone: rows come with the call.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from g4ir.backends.base import Runtime, Tensors, Watch
from g4ir.backends.reference import interpreter
from g4ir.errors import EngineError, RankError
from g4ir.parallel.group import Group
from g4ir.ui.console import put_off

from .parts import EngineParts
from .trace import See, shown, watch_slots

#: the call by which a rank opens its part of an engine; others are called as what they call is
LOAD = "load"


class Leader:
    """Numbers what ranks have in common, and tells calls to it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        #: numbers of what is gone on this rank, for others to drop
        self._gone: deque[int] = deque()

    def number(self, thing: Any) -> int:
        """Return a number for a thing that every rank has, until it is gone here."""
        number = next(self.group.numbers)
        weakref.finalize(thing, self._gone.append, number)
        return number

    def tell(
        self,
        of: int | None,
        name: str,
        args: Sequence[Any] = (),
        makes: int | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Have the others call `name` of a thing, and keep under a number what that makes."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        self.group.tell([of, name, [*args], makes, gone], tensors or {})

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for a call that all make: one at a time. An error of this rank's own leaves the
        others in the middle of it, so that nothing can follow."""
        with put_off(), self.group.turn:
            try:
                yield
            except BaseException:
                self.group.broken = True
                raise


def thing(number: int) -> dict[str, int]:
    """Return how an argument of a call is named that every rank has."""
    return {"thing": number}


@dataclass(eq=False)
class LedKept:
    """A copy of parts of caches, of which each rank keeps its own."""

    own: Any
    number: int = 0


class LedState:
    """The caches of a session: each rank has those of its heads."""

    def __init__(self, leader: Leader, own: Any) -> None:
        self.leader, self.own = leader, own
        self.number = leader.number(self)

    def views(self, context: int) -> Tensors:
        found: Tensors = self.own.views(context)
        return found

    def row(self, index: int, context: int) -> Tensors:
        found: Tensors = self.own.row(index, context)
        return found

    def nbytes(self) -> int:
        """Count the bytes of this rank's."""
        return int(self.own.nbytes())

    def zero(self) -> None:
        with self.leader.together():
            self.leader.tell(self.number, "zero")
            self.own.zero()

    def clear(self, row: int, context: int) -> None:
        with self.leader.together():
            self.leader.tell(self.number, "clear", [row, context])
            self.own.clear(row, context)

    def copy(self, source: LedState, start: int, row: int, context: int) -> None:
        with self.leader.together():
            self.leader.tell(self.number, "copy", [thing(source.number), start, row, context])
            self.own.copy(source.own, start, row, context)

    def watch_held(self, name: str, held: range, see: See) -> None:
        """Show what each rank's cache has at these positions."""
        with self.leader.together():
            self.leader.tell(self.number, "watch_held", [name, held.start, held.stop])
            watch_slots(self.own, name, held, shown(self.leader.group, see))

    def kept(self, context: int) -> LedKept:
        made = LedKept(self.own.kept(context))
        with self.leader.together():
            made.number = self.leader.number(made)
            self.leader.tell(self.number, "kept", [context], made.number)
        return made

    def put(self, kept: LedKept) -> None:
        with self.leader.together():
            self.leader.tell(self.number, "put", [thing(kept.number)])
            self.own.put(kept.own)


class LedRuntime:
    """Rank 0's runtime: all ranks run what it runs."""

    def __init__(self, leader: Leader, own: Any, number: int) -> None:
        self.leader, self.own, self.number = leader, own, number
        self.source = own.source

    def new_state(self, batch: int) -> LedState:
        own = self.own.new_state(batch)  # there may be no room for it, which ends nothing
        with self.leader.together():
            state = LedState(self.leader, own)
            self.leader.tell(self.number, "new_state", [batch], state.number)
        return state

    def run(
        self,
        phase: str,
        feeds: dict[str, torch.Tensor],
        state: LedState,
        context: int,
        logits: bool,
        watch: Watch | None = None,
    ) -> Tensors | None:
        with self.leader.together():
            args = [phase, thing(state.number), context, logits]
            self.leader.tell(self.number, "run", args, tensors=feeds)
            made: Tensors | None = self.own.run(phase, feeds, state.own, context, logits, watch)
        return made

    def run_watched(
        self,
        phase: str,
        feeds: dict[str, torch.Tensor],
        state: LedState,
        context: int,
        see: See,
    ) -> None:
        """Run a graph for its values: `see` is shown what each rank makes."""
        with self.leader.together():
            args = [phase, thing(state.number), context]
            self.leader.tell(self.number, "run_watched", args, tensors=feeds)
            watch = shown(self.leader.group, see)
            self.own.run(phase, feeds, state.own, context, True, watch)

    def interpreter(self, kind: str) -> LedRuntime:
        """Return one whose ranks interpret the text graphs on the params that they have."""
        with self.leader.together():
            number = next(self.leader.group.numbers)
            self.leader.tell(self.number, "interpreter", [kind], number)
            return LedRuntime(self.leader, beside(kind, self.own, self.leader.group), number)

    def encode(self, tower: str, feeds: Tensors) -> torch.Tensor:
        """Run a tower, which needs no other rank."""
        soft: torch.Tensor = self.own.encode(tower, feeds)
        return soft

    def token_loop(self, *_: Any) -> None:
        """Return None: the host of this rank chooses, and tells the others."""

    def round_loop(self, *_: Any) -> None:
        """Return None: the host of this rank drafts."""

    def resident(self, param: str) -> torch.Tensor | None:
        found: torch.Tensor | None = self.own.resident(param)
        return found

    def close(self) -> None:
        if not self.leader.group.broken:
            with self.leader.together():
                self.leader.tell(self.number, "close")
        self.own.close()


def interpreted(engine: EngineParts, kind: str) -> Runtime:
    """Return a runtime that interprets an engine's text graphs, on all its ranks; `kind` is one of
    backends/reference.py's."""
    runtime: Any = engine.runtime
    if isinstance(runtime, LedRuntime):
        return runtime.interpreter(kind)
    return interpreter(kind, runtime, engine.program, engine.limits, engine.device)


def run_watched(
    runtime: Runtime, phase: str, feeds: dict[str, torch.Tensor], state: Any, context: int, see: See
) -> None:
    """Run a graph and show what each rank makes of it, in order."""
    if isinstance(runtime, LedRuntime):
        runtime.run_watched(phase, feeds, state, context, see)
    else:
        runtime.run(phase, feeds, state, context, True, partial(see, 0))


def watch_held(state: Any, name: str, held: range, see: See) -> None:
    """Show what each rank's cache has at these positions."""
    if isinstance(state, LedState):
        state.watch_held(name, held, see)
    else:
        watch_slots(state, name, held, partial(see, 0))


def beside(kind: str, own: Any, group: Group) -> Runtime:
    """Return what interprets the text graphs of a rank's own runtime."""
    return interpreter(kind, own, own.program, own.limits, own.device, group)


def lead(
    group: Group, path: str, digest: str, options: Mapping[str, Any], opens: Callable[[], Runtime]
) -> LedRuntime:
    """Have every rank open its part of an engine, and return the runtime of all. EngineError where
    one cannot, or has another engine at that path."""
    leader = Leader(group)
    with group.turn:
        number = next(group.numbers)
        leader.tell(None, LOAD, [path, dict(options)], number)
        own, said = opened(group, lambda: (digest, opens()))
    for rank, (other, error) in enumerate(said):
        if error:
            raise EngineError(f"rank {rank}: {error}")
        if other != digest:
            raise EngineError(
                f"{path}: rank {rank} has another engine there, of digest {other[:12]}..., rank 0 "
                f"{digest[:12]}...; copy the directory to all machines"
            )
    return LedRuntime(leader, own, number)


def opened(group: Group, opens: Callable[[], tuple[str, Any]]) -> tuple[Any, list[Any]]:
    """Return what this rank opens, if it can, and of each rank the digest of its engine and what
    went wrong. On the first rank its own error is raised, once the others know."""
    digest, made, error = "", None, None
    try:
        digest, made = opens()
    except RankError:
        raise
    except Exception as e:
        error = e
    said = group.gathered([digest, error and str(error)])
    if error is not None and group.rank == 0:
        raise error
    return made, said
