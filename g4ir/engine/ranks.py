"""Runs an engine on several ranks: every call to the runtime of rank 0 is made on all ranks.

Sessions, the scheduler and sampling are on rank 0 alone. Its runtime sends each call to the others
(worker.py) before it makes it: which graph, over which caches, with which inputs. Embedding tables
and towers are used on rank 0 alone: embedded rows come with the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from g4ir.backends.base import Runtime, Watch
from g4ir.backends.reference import interpreter
from g4ir.errors import EngineError, RankError
from g4ir.parallel.group import Group

from .parts import EngineParts

#: RPC that loads an engine; every other RPC has the name of the method it calls
LOAD = "load"
#: methods of runtimes and states that are called on every rank
CALLS = frozenset({"zero", "clear", "copy", "put", "close", "run", "run_watched", "watch_held"})
#: those that return an object of which each rank keeps its own
MAKERS = frozenset({"new_state", "kept", "interpreter"})

#: is shown a rank's tensor by its name, and may write over it
See = Callable[[int, str, torch.Tensor], None]


class Led:
    """A runtime, a session's caches or a copy of them, of which each rank has its own. Methods in
    CALLS and MAKERS run on every rank; all else is this rank's."""

    def __init__(self, group: Group, own: Any, number: int) -> None:
        self.group, self.own, self.number = group, own, number
        weakref.finalize(self, group.dropped.append, number)

    def __getattr__(self, name: str) -> Any:
        if name in CALLS:
            return partial(self._call, name)
        if name in MAKERS:
            return partial(self._make, name)
        # The host of rank 0 chooses tokens.
        return _no_loop if name == "token_loop" else getattr(self.own, name)

    def _call(self, name: str, *args: Any, see: See | None = None) -> Any:
        if name == "close" and self.group.broken:
            return self.own.close()
        args, feeds, watch = _sent(name, args)
        named = [{"number": a.number} if isinstance(a, Led) else a for a in args]
        own = [a.own if isinstance(a, Led) else a for a in args]
        with self.group.together():
            self.group.send([self.number, name, named, None], feeds)
            return perform(self.group, self.own, name, own, feeds, see, watch)

    def _make(self, name: str, *args: Any) -> Led:
        # Before the others are told: if there is no memory for it here, no rank is out of step.
        own = perform(self.group, self.own, name, args)
        with self.group.together():
            number = next(self.group.numbers)
            self.group.send([self.number, name, [*args], number], {})
        return Led(self.group, own, number)


def _no_loop(*_: Any) -> None:
    """Return None: a rank has no loop on the device."""


def _sent(name: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any], Watch | None]:
    """Return the plain arguments of a call, the tensors to send with it, and what watches it on
    this rank alone."""
    if name not in ("run", "run_watched"):
        return args, {}, None
    phase, feeds, *rest = args
    return (phase, *rest[:3]), feeds, next(iter(rest[3:]), None)


def perform(
    group: Group,
    own: Any,
    name: str,
    args: Any,
    feeds: Mapping[str, torch.Tensor] | None = None,
    see: See | None = None,
    watch: Watch | None = None,
) -> Any:
    """Make a call on a rank's own runtime or state. On rank 0 `see` is shown every rank's values,
    and `watch` this rank's."""
    if name == "interpreter":
        (kind,) = args
        return interpreter(kind, own, own.program, own.limits, own.device, group)
    if name == "watch_held":
        cache, start, stop = args
        return watch_slots(own, cache, range(start, stop), shown(group, see))
    if name in ("run", "run_watched"):
        phase, *rest = args
        placed = {key: t.to(own.device) for key, t in (feeds or {}).items()}
        return own.run(phase, placed, *rest, shown(group, see) if name == "run_watched" else watch)
    assert name in CALLS | MAKERS, name
    return getattr(own, name)(*args)


def shown(group: Group, see: See | None = None) -> Watch:
    """Return a callback that shows a rank's values to rank 0, which has `see`."""
    return lambda name, t: group.share_with_leader(t, see and (lambda rank, x: see(rank, name, x)))


def watch_slots(state: Any, name: str, held: range, watch: Watch) -> None:
    """Show the slots of a rank's cache that hold these positions."""
    cache = state.tensors[name]
    slots = slots_of(held, cache)
    seen = cache[slots]
    watch(name, seen)
    cache[slots] = seen


def slots_of(held: range, cache: torch.Tensor) -> list[int]:
    """Return the slots of positions: p is in slot p mod the number of slots."""
    return [p % len(cache) for p in held]


def interpreted(engine: EngineParts, kind: str) -> Runtime:
    """Return a runtime that interprets an engine's text graphs, on all its ranks; `kind` is one of
    backends/reference.py's."""
    runtime: Any = engine.runtime
    if isinstance(runtime, Led):
        made: Runtime = runtime.interpreter(kind)
        return made
    return interpreter(kind, runtime, engine.program, engine.limits, engine.device)


def run_watched(
    runtime: Any, phase: str, feeds: dict[str, torch.Tensor], state: Any, context: int, see: See
) -> None:
    """Run a graph and show the values of each rank, in order."""
    if isinstance(runtime, Led):
        runtime.run_watched(phase, feeds, state, context, True, see=see)
    else:
        runtime.run(phase, feeds, state, context, True, partial(see, 0))


def watch_held(state: Any, name: str, held: range, see: See) -> None:
    """Show each rank's cache at these positions."""
    if isinstance(state, Led):
        state.watch_held(name, held.start, held.stop, see=see)
    else:
        watch_slots(state, name, held, partial(see, 0))


def lead(
    group: Group, path: str, digest: str, options: Mapping[str, Any], opens: Callable[[], Runtime]
) -> Any:
    """Have every rank open its part of an engine, and return the runtime of all. EngineError if one
    cannot, or has another engine at that path."""
    with group.turn:
        number = next(group.numbers)
        group.send([None, LOAD, [path, dict(options)], number], {})
        own, said = opened(group, lambda: (digest, opens()))
    for rank, (other, error) in enumerate(said):
        if error:
            raise EngineError(f"rank {rank}: {error}")
        if other != digest:
            raise EngineError(
                f"{path}: rank {rank} has another engine there, of digest {other[:12]}..., rank 0 "
                f"{digest[:12]}...; copy the directory to all machines"
            )
    return Led(group, own, number)


def opened(group: Group, opens: Callable[[], tuple[str, Any]]) -> tuple[Any, list[Any]]:
    """Return this rank's runtime, if it opens, and for each rank the digest of its engine and its
    error. Rank 0 raises its own error, once the others know."""
    digest, made, error = "", None, None
    try:
        digest, made = opens()
    except RankError:
        raise
    except Exception as e:
        error = e
    said = group.gather_values([digest, error and str(error)])
    if error is not None and group.rank == 0:
        raise error
    return made, said
