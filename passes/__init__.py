"""Runs the passes in order and verifies in between.

Each is a file of this folder with
  a function of the same name, `Graph -> Graph`, whose second argument `note(value, reason)` hears
             what it did and why it left a candidate alone; `g4ir show --why PASS` prints that
  left       whether a node should not be there afterwards; a pass that stops matching is an error
  AFTER      the pass that it follows, with the reason; None: it is the first
  CHANGES_STATE  given and true where it may change what the caches look like
  CHANGES_MEANING  given and true where it may round what the graph before it does not, or change
             values that keep their names

Packing comes before the choice of rows, so that prefill and decode share weights; what follows the
caches' last form joins whole blocks of nodes into one op each.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from g4ir.errors import G4Error, InputError, PassError
from g4ir.ir.graph import Graph, Program, verify

from .match import Note

Dump = Callable[[str, Graph], None]

#: pass -> its own keyword arguments
Options = Mapping[str, Mapping[str, Any]]


def _ordered(modules: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """Return the passes in order, each behind the one that its AFTER names. PassError unless they
    are one chain."""
    follower: dict[str | None, str] = {}
    for name, module in modules.items():
        other = follower.setdefault(module.AFTER, name)
        if other != name:
            raise PassError(
                f"passes {other} and {name} both have AFTER = {module.AFTER!r}: change that of the "
                f"one to run later to the other's name"
            )
    names: list[str] = []
    while (after := names[-1] if names else None) in follower:
        names.append(follower.pop(after))
    if follower:
        after, name = next(iter(follower.items()))
        raise PassError(f"pass {name}: AFTER = {after!r} is no pass, or one that comes after it")
    return {name: modules[name] for name in names}


#: pass -> its module, in the order of the pipeline: every file of this folder but `match`
_BY_NAME = _ordered(
    {
        m.name: importlib.import_module(f"{__name__}.{m.name}")
        for m in pkgutil.iter_modules(__path__)
        if m.name != "match"
    }
)
PASSES = tuple(_BY_NAME)
CHANGES_STATE, CHANGES_MEANING = (
    frozenset(n for n, m in _BY_NAME.items() if getattr(m, what, False))
    for what in ("CHANGES_STATE", "CHANGES_MEANING")
)


def find_pass(name: str) -> Callable[[Graph, Note], Graph]:
    """Return the function of a pass; InputError lists the names."""
    if name not in PASSES:
        raise InputError(f"unknown pass {name!r}; one of {', '.join(PASSES)}")
    function: Callable[[Graph, Note], Graph] = getattr(_BY_NAME[name], name)
    return function


def run_passes(
    g: Graph,
    skip: Iterable[str] = (),
    until: str | None = None,
    dump: Dump | None = None,
    note: Callable[[str, str, str], None] | None = None,
    options: Options | None = None,
) -> Graph:
    """Run the pipeline without the passes in `skip`, up to and including `until`.

    `dump(pass, graph)` sees the graph after each pass, `note(pass, value, reason)` what each
    did; `options` gives a pass its own arguments, such as {"latent_kv": {"form": "raw"}}.
    Raises PassError with the passes that ran before.
    """
    skip = set(skip)
    options = options or {}
    for name in (*skip, *options, *([until] if until else [])):
        find_pass(name)
    verify(g)
    done: list[str] = []
    for name in PASSES:
        if name not in skip:
            g = _run_one(g, name, done, note, options.get(name, {}))
            done.append(name)
            if dump:
                dump(name, g)
        if name == until:
            break
    return g


def run_program(
    p: Program,
    skip: Iterable[str] = (),
    dump: Dump | None = None,
    options: Options | None = None,
) -> Program:
    """Apply `run_passes` to every graph; the caches they share must still agree."""
    p = p.map(lambda g: run_passes(g, skip=skip, dump=dump, options=options))
    p.state()
    p.params()
    return p


def _run_one(
    g: Graph,
    name: str,
    done: Sequence[str],
    note: Callable[[str, str, str], None] | None,
    options: Mapping[str, Any],
) -> Graph:
    def tell(value: str, reason: str) -> None:
        if note:
            note(name, value, reason)

    try:
        out = partial(find_pass(name), **options)(g, tell)
        verify(out)
        _keeps_interface(g, out, name)
        _leaves(out, name, options)
    except G4Error as e:
        after = f" (after {', '.join(done)})" if done else ""
        raise PassError(f"pass {name} on graph {g.name}{after}: {e}") from e
    return out


def _keeps_interface(before: Graph, after: Graph, name: str) -> None:
    """Check that inputs and outputs stay; state too unless the pass is declared to change it."""
    if before.inputs != after.inputs or before.outputs != after.outputs:
        raise PassError("the pass changed the graph's inputs or outputs")
    if name not in CHANGES_STATE and before.state != after.state:
        raise PassError("the pass changed the state and is not declared to")


def _leaves(g: Graph, name: str, options: Mapping[str, Any]) -> None:
    """Raise where a fusion quietly stopped matching: an error, not a slow engine."""
    left = [n for n in g.nodes if _BY_NAME[name].left(g, n, **options)]
    if left:
        found = f"{left[0].outputs[0]} = {left[0].op}"
        raise PassError(f"left {found}, which it should have taken; --skip {name} leaves it out")
