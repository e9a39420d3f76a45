"""The pass pipeline: runs the passes in order and verifies the graph in between.

A pass is a file of this folder with
  a function of the same name, `Graph -> Graph`, whose argument `note(value, reason)` is called with
      what it did, or why a candidate does not match; or JOINS, fused ops: join.py derives the pass
  AFTER  the previous pass, with the reason as a comment; None: it is the first
and optionally
  OPTIONS  default options, an instance of a frozen dataclass that checks its fields; the function
      also has an argument `options`
  CHANGES_STATE  True: it may change the caches, in number or type
  CHANGES_MEANING  True: it may change what a graph computes, such as by rounding; `check` does not
      compare its graph with that of the pass before

Weights are packed before `last_token_only`, so that prefill and decode share them, and
`fuse_cache_write` runs after the passes that change caches.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from g4ir.errors import G4Error, InputError, PassError
from g4ir.ir.graph import Graph, Program
from g4ir.ir.verify import verify

from .join import join
from .match import ignore

#: callback(pass, graph)
Dump = Callable[[str, Graph], None]
#: callback(pass, value name, what the pass did or why it did nothing)
PassNote = Callable[[str, str, str], None]
Record = TypeVar("Record")

#: files that are not passes
SHARED = ("join", "match")


def _ordered(modules: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """Sort the passes by AFTER. PassError unless they form one chain."""
    names: list[str | None] = [None]
    while followers := [name for name, module in modules.items() if names[-1] == module.AFTER]:
        if len(followers) > 1:
            raise PassError(
                f"passes {' and '.join(followers)} both have AFTER = {names[-1]!r}: change that of "
                f"the later pass to the name of the other"
            )
        names += followers
    for name in modules:
        if name not in names:
            after = f"AFTER = {modules[name].AFTER!r} names no pass"
            raise PassError(f"pass {name}: {after}, or leads to none with AFTER = None")
    return {name: modules[name] for name in names if name}


#: pass -> its module, in the order of the pipeline
_BY_NAME = _ordered(
    {
        m.name: importlib.import_module(f"{__name__}.{m.name}")
        for m in pkgutil.iter_modules(__path__)
        if m.name not in SHARED
    }
)
PASSES = tuple(_BY_NAME)


def _with(attribute: str) -> dict[str, Any]:
    return {n: vars(m)[attribute] for n, m in _BY_NAME.items() if attribute in vars(m)}


CHANGES_STATE = frozenset(_with("CHANGES_STATE"))
CHANGES_MEANING = frozenset(_with("CHANGES_MEANING"))
#: pass -> its default options
OPTIONS: Mapping[str, Any] = _with("OPTIONS")


@dataclass(frozen=True)
class PassOptions:
    """The options of all passes of a pipeline."""

    #: at most one record per pass, of the type of its OPTIONS; other passes have the defaults
    records: tuple[Any, ...] = ()

    def of(self, kind: type[Record]) -> Record:
        """Return the record of this type; the type's defaults if there is none."""
        return next((r for r in self.records if isinstance(r, kind)), None) or kind()

    def changed(self, record: Any) -> PassOptions:
        """Return a copy with this record, which replaces one of the same type."""
        records = (r for r in self.records if type(r) is not type(record))
        return replace(self, records=(*records, record))

    def to_dict(self) -> dict[str, Any]:
        """Return pass -> all of its options."""
        return {name: asdict(self.of(type(default))) for name, default in OPTIONS.items()}


PLAIN = PassOptions()


class PassCounts:
    """Counts the edits of each pass by graph: notes that do not start with `left: `."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}

    def note(self, graph: str) -> PassNote:
        counts = self.counts.setdefault(graph, Counter())

        def note(name: str, value: str, reason: str) -> None:
            counts[name] += not reason.startswith("left: ")

        return note

    def text(self, graph: str) -> str:
        """Return a graph's counts, such as `fuse_qkv 15, fuse_gate_up 35`, in the order of the
        pipeline, without passes that made no edit."""
        counts = self.counts[graph]
        return ", ".join(f"{name} {counts[name]}" for name in PASSES if counts[name])


def find_pass(name: str) -> Callable[..., Graph]:
    """Return the function of a pass; InputError lists the names."""
    if name not in PASSES:
        raise InputError(f"unknown pass {name!r}; one of {', '.join(PASSES)}")
    parts = vars(_BY_NAME[name])
    return parts[name] if name in parts else partial(join, ops=parts["JOINS"])


def run_passes(
    g: Graph,
    skip: Iterable[str] = (),
    until: str | None = None,
    dump: Dump | None = None,
    note: PassNote | None = None,
    options: PassOptions = PLAIN,
) -> Graph:
    """Run the pipeline without the passes in `skip`, up to and including `until`.

    `dump(pass, graph)` is called after each pass, `note(pass, value, reason)` for each candidate.
    Raises InputError for an unknown pass in `skip` or `until`, VerifyError if `g` itself is
    invalid, and PassError, which names the passes that ran before, for a failed pass.
    """
    skip = set(skip)
    for name in skip | ({until} if until else set()):
        find_pass(name)
    verify(g)
    done: list[str] = []
    for name in PASSES:
        if name not in skip:
            g = _run_one(g, name, done, note, options)
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
    options: PassOptions = PLAIN,
    acted: PassCounts | None = None,
) -> Program:
    """Apply `run_passes` to every graph, counting edits in `acted`; VerifyError if shared caches
    or params then differ in type."""
    run = partial(run_passes, skip=skip, dump=dump, options=options)
    p = p.map(lambda g: run(g, note=acted.note(g.name) if acted else None))
    p.state()
    p.params()
    return p


def _run_one(
    g: Graph, name: str, done: Sequence[str], note: PassNote | None, options: PassOptions
) -> Graph:
    """Run a pass, verify its graph, and check that inputs, outputs and, unless declared, the state
    are unchanged."""
    run = find_pass(name)
    if name in OPTIONS:
        run = partial(run, options=options.of(type(OPTIONS[name])))
    try:
        out = run(g, partial(note, name) if note else ignore)
        if out is g:  # verified before
            return g
        verify(out)
        if g.inputs != out.inputs or g.outputs != out.outputs:
            raise PassError("the pass changed the graph's inputs or outputs")
        if name not in CHANGES_STATE and g.state != out.state:
            raise PassError("the pass changed the state, but does not set CHANGES_STATE")
    except G4Error as e:
        after = f" (after {', '.join(done)})" if done else ""
        raise PassError(f"pass {name} on graph {g.name}{after}: {e}") from e
    return out
