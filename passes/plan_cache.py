"""A full-length cache per layer  ->  rings for sliding layers, one cache for layers that share

state [C,B,n,d] of a layer with a window of W keys   ->  state [W + slack,B,n,d]
state written with the keys of another layer's state ->  that layer's state, written once

With `slack`, that many of the newest tokens can be rejected: the tokens that they overwrote in the
ring are outside the window of the next token.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from g4ir.errors import InputError, PassError
from g4ir.ir.graph import Graph, Node, Value
from g4ir.ir.rewrite import drop_dead, rebuild

from .match import Note, cache_names, ignore

#: not required, but `latent_kv` must follow: this pass finds `attention`, not `attention_latent`
AFTER = "fuse_norm_residual"
CHANGES_STATE = True

#: max draft tokens verified in one step: beyond about 32 the step becomes compute-bound
MAX_SLACK = 32


@dataclass(frozen=True)
class RingOptions:
    """`slack`: slots of a ring beyond its window, the number of draft tokens that can be
    rejected."""

    slack: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.slack <= MAX_SLACK:
            raise InputError(f"plan_cache: slack {self.slack}: expected 0 to {MAX_SLACK} slots")


OPTIONS = RingOptions()


def plan_cache(g: Graph, note: Note = ignore, options: RingOptions = OPTIONS) -> Graph:
    """Size each cache by its attention window, and store shared ones once. PassError if a cache is
    read with different windows."""
    g = _alias(g, note)
    names = cache_names(g)
    windows: dict[str, set[int]] = defaultdict(set)
    for n in g.find("attention"):
        for v in n.caches:
            windows[names.get(v.name, "")].add(n.integer("window"))
    state = tuple(_resized(v, windows[v.name], options.slack, note) for v in g.state)
    return rebuild(replace(g, state=state))


def _alias(g: Graph, note: Note) -> Graph:
    """Replace each cache that is written with the same K or V as another cache by that one."""
    owners: dict[tuple[Value, ...], Node] = {}
    rename: dict[str, Value] = {}
    for n in g.find("cache_write"):
        owner = owners.setdefault(n.inputs[1:], n)
        if owner is not n:
            rename |= {n["cache"].name: owner["cache"], n.out.name: owner.out}
            note(n["cache"].name, f"stored once, as {owner['cache']}")
    if not rename:
        return g
    states = {name: v for name, v in g.next.items() if name not in rename}
    return drop_dead(rebuild(replace(g, next=states), rename))


def _resized(v: Value, windows: set[int], slack: int, note: Note) -> Value:
    if len(windows) > 1:
        raise PassError(f"plan_cache: {v} is read with windows {sorted(windows)}")
    window = next(iter(windows), 0)
    if v.type.shape[0] != "C":
        note(v.name, f"left: it has {v.type.shape[0]} slots already")
        return v
    if not window:
        note(v.name, "left: its readers have no window")
        return v
    note(v.name, f"ring of {window + slack} slots")
    return Value(v.name, v.type.with_shape(window + slack, *v.type.shape[1:]))
