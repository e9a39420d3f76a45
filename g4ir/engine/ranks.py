"""Tensor parallelism: runtime calls on rank 0 run on all ranks.

Sessions, the scheduler and sampling are on rank 0 alone. Its runtime (`Led`) sends each call
(graph, KV caches, inputs) to the other ranks, which execute it too (builder/rank_worker.py).
Embedding tables and towers are used on rank 0 alone: embedded rows are sent with the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from g4ir.backends.base import GraphRun, Runtime, Watch
from g4ir.backends.reference import interpreter
from g4ir.errors import EngineError, RankError
from g4ir.ir.interpret import Run
from g4ir.parallel.group import Group

from .parts import EngineParts

#: RPC that loads an engine; every other RPC has the name of the method it calls
LOAD = "load"
#: methods that run a graph
RUNS = ("run", "run_watched")
#: methods of runtimes and states that are called on every rank
CALLS = frozenset({"zero", "clear", "copy", "restore", "close", "watch_cache", *RUNS})
#: methods that return an object with one instance per rank
MAKERS = frozenset({"new_state", "snapshot", "interpreter"})

#: callback(rank, name, tensor); may modify the tensor in place
See = Callable[[int, str, torch.Tensor], None]


class Led:
    """Proxy on rank 0 for a runtime, KV cache or snapshot with one instance per rank; `local` is
    rank 0's, `number` names the instances in calls. Methods in CALLS and MAKERS run on every rank,
    `token_loop` returns None, everything else is local."""

    def __init__(self, group: Group, local: Any, number: int) -> None:
        self.group, self.local, self.number = group, local, number
        weakref.finalize(self, group.dropped.append, number)

    def __getattr__(self, name: str) -> Any:
        if name in CALLS:
            return partial(self._call, name)
        if name in MAKERS:
            return partial(self._make, name)
        # no device loop with several ranks: rank 0's host samples
        return (lambda *_: None) if name == "token_loop" else getattr(self.local, name)

    def _call(self, name: str, *args: Any, see: See | None = None) -> Any:
        if name == "close" and self.group.broken:
            return self.local.close()
        args, feeds, watch = _sent(name, args)
        named = [{"number": a.number} if isinstance(a, Led) else a for a in args]
        local = [a.local if isinstance(a, Led) else a for a in args]
        with self.group.together():
            self.group.send([self.number, name, named, None], feeds)
            return perform(self.group, self.local, name, local, feeds, see, watch)

    def _make(self, name: str, *args: Any) -> Led:
        # Run locally before sending: if this rank runs out of memory, the ranks stay in step.
        local = perform(self.group, self.local, name, args)
        with self.group.together():
            number = next(self.group.numbers)
            self.group.send([self.number, name, [*args], number], {})
        return Led(self.group, local, number)


def _sent(name: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any], Watch | None]:
    """Split a call: plain arguments, tensors to send, and the watch callback of this rank."""
    if name not in RUNS:
        return args, {}, None
    step, state = args
    return ([step.phase, step.context, step.logits], state), step.feeds, step.watch


def perform(
    group: Group,
    local: Any,
    name: str,
    args: Any,
    feeds: Mapping[str, torch.Tensor] | None = None,
    see: See | None = None,
    watch: Watch | None = None,
) -> Any:
    """Execute the call of method `name` on this rank's runtime, KV cache or snapshot. On rank 0
    `see` gets every rank's values; `watch` gets this rank's."""
    if name == "interpreter":
        (kind,) = args
        return interpreter(kind, local, local.program, local.limits, local.device, group.run_node)
    if name == "watch_cache":
        cache, start, stop = args
        return watch_slots(local, cache, range(start, stop), watch_for(group, see))
    if name in RUNS:
        (phase, context, logits), state = args
        placed = {key: t.to(local.device) for key, t in (feeds or {}).items()}
        watch = watch_for(group, see) if name == "run_watched" else watch
        return local.run(GraphRun(phase, placed, context, logits, watch), state)
    assert name in CALLS | MAKERS, name
    return getattr(local, name)(*args)


def watch_for(group: Group, see: See | None = None) -> Watch:
    """Return a callback that sends a rank's values to rank 0, which passes them to `see`."""
    return lambda name, t: group.share_with_leader(t, see and (lambda rank, x: see(rank, name, x)))


def watch_slots(state: Any, name: str, positions: range, watch: Watch) -> None:
    """Pass the cache slots of these positions to `watch`; its changes are written back."""
    cache = state.tensors[name]
    slots = slots_of(positions, cache)
    values = cache[slots]
    watch(name, values)
    cache[slots] = values


def slots_of(positions: range, cache: torch.Tensor) -> list[int]:
    """Return the slots of positions: p is in slot p mod the number of slots."""
    return [p % len(cache) for p in positions]


def interpreted(engine: EngineParts, kind: str, run: Run | None = None) -> Runtime:
    """Return a runtime that interprets an engine's text graphs, on all its ranks; `kind`: a key of
    INTERPRETERS (backends/reference.py). `run`: callback that executes a node, ignored with several
    ranks."""
    runtime: Any = engine.runtime
    if isinstance(runtime, Led):
        return runtime.interpreter(kind)
    return interpreter(kind, runtime, engine.program, engine.limits, engine.device, run)


def run_watched(runtime: Any, step: GraphRun, state: Any, see: See) -> None:
    """Run a graph; `see` gets each rank's values, in order of rank."""
    if isinstance(runtime, Led):
        runtime.run_watched(step, state, see=see)
    else:
        runtime.run(replace(step, watch=partial(see, 0)), state)


def watch_cache(state: Any, name: str, positions: range, see: See) -> None:
    """Pass each rank's KV cache at these positions to `see`."""
    if isinstance(state, Led):
        state.watch_cache(name, positions.start, positions.stop, see=see)
    else:
        watch_slots(state, name, positions, partial(see, 0))


def lead(
    group: Group, path: str, digest: str, options: Mapping[str, Any], opens: Callable[[], Runtime]
) -> Any:
    """Load an engine on every rank, on this one with `opens`; return the runtime over all of them.
    `digest`: of this rank's engine. EngineError if another rank cannot load it, or has another
    engine at that path."""
    with group.turn:
        number = next(group.numbers)
        group.send([None, LOAD, [path, dict(options)], number], {})
        local, replies = opened(group, lambda: (digest, opens()))
    for rank, (other, error) in enumerate(replies):
        if error:
            raise EngineError(f"rank {rank}: {error}")
        if other != digest:
            raise EngineError(
                f"{path}: rank {rank} has another engine there, of digest {other[:12]}..., rank 0 "
                f"{digest[:12]}...; copy the directory to all machines"
            )
    return Led(group, local, number)


def opened(group: Group, opens: Callable[[], tuple[str, Any]]) -> tuple[Any, list[Any]]:
    """Return this rank's runtime, if it opens, and for each rank the digest of its engine and its
    error. Rank 0 raises its own error, once the others know."""
    digest, runtime, error = "", None, None
    try:
        digest, runtime = opens()
    except RankError:
        raise
    except Exception as e:
        error = e
    replies = group.gather_values([digest, error and str(error)])
    if error is not None and group.rank == 0:
        raise error
    return runtime, replies
