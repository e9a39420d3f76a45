"""The list of passes, run in order and verified in between."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .errors import G4Error, InputError, PassError
from .ir import RESULT, Graph, Node, Program, verify

Dump = Callable[[str, Graph], None]
Note = Callable[[str, str], None]
#: pass -> its own keyword arguments
Options = Mapping[str, Mapping[str, Any]]

#: order matters: packing before the choice of rows, so that prefill and decode share weights
PASSES = (
    "share_rope_tables",
    "fuse_qkv",
    "fuse_gate_up",
    "fuse_norm_rope",
    "fuse_norm_residual",
    "plan_cache",
    "last_token_only",
    "latent_kv",
)
#: passes that may change what the caches look like
CHANGES_STATE = frozenset({"plan_cache", "latent_kv"})


def find_pass(name: str) -> Callable[[Graph, Note], Graph]:
    """The function of a pass; InputError lists the names."""
    if name not in PASSES:
        raise InputError(f"unknown pass {name!r}; one of {', '.join(PASSES)}")
    module = importlib.import_module(f"g4ir.passes.{name}")
    function: Callable[[Graph, Note], Graph] = getattr(module, name)
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
    p: Program, skip: Iterable[str] = (), dump: Dump | None = None,
    options: Options | None = None,
) -> Program:  # fmt: skip
    """`run_passes` on every graph; the caches they share must still agree."""
    p = p.map(lambda g: run_passes(g, skip=skip, dump=dump, options=options))
    p.state()
    p.params()
    return p


def _run_one(
    g: Graph, name: str, done: Sequence[str], note: Callable[[str, str, str], None] | None,
    options: Mapping[str, Any],
) -> Graph:  # fmt: skip
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
    """Same inputs and outputs; same state unless the pass is declared to change it."""
    if before.inputs != after.inputs or before.outputs != after.outputs:
        raise PassError("the pass changed the graph's inputs or outputs")
    if name not in CHANGES_STATE and before.state != after.state:
        raise PassError("the pass changed the state and is not declared to")


def _leaves(g: Graph, name: str, options: Mapping[str, Any]) -> None:
    """A fusion that quietly stops matching is an error, not a slow engine."""
    left = [n for n in g.nodes if name in LEAVES and LEAVES[name](g, n, **options)]
    if left:
        raise PassError(f"left {left[0].outputs[0]} = {left[0].op}, which it should have taken")


def _makes(g: Graph, n: Node, at: int, op: str) -> Node | None:
    made = g.producers().get(n.inputs[at].name)
    return made if made and made.op == op else None


def _separate_projection(g: Graph, n: Node) -> bool:
    source = _makes(g, n, 0, "linear") if n.op == "heads" else None
    if source is None or not _free_projection(g, source, "heads"):
        return False
    return any(
        m.op == "linear" and m is not source and m.inputs[0] == source.inputs[0]
        and _free_projection(g, m, "heads")
        for m in g.nodes
    )  # fmt: skip


def _free_projection(g: Graph, n: Node, user: str) -> bool:
    """A product with a parameter, read by one node of that op and nothing else."""
    return n.inputs[1] in g.params and [u.op for u in g.users().get(n.out.name, [])] == [user]


def _separate_halves(g: Graph, n: Node) -> bool:
    if n.op != "glu":
        return False
    gate, up = _makes(g, n, 0, "linear"), _makes(g, n, 1, "linear")
    return bool(
        gate and up and gate.inputs[0] == up.inputs[0]
        and all(_free_projection(g, m, "glu") for m in (gate, up))
    )  # fmt: skip


def _unfused_rope(g: Graph, n: Node) -> bool:
    norm = _makes(g, n, 0, "rms_norm") if n.op == "rope" else None
    return bool(norm and len(norm.inputs) == 2 and len(g.users()[norm.out.name]) == 1)


def _repeated_table(g: Graph, n: Node) -> bool:
    return n.op == "rope_table" and any(
        m is not n and m.op == n.op and m.inputs == n.inputs and m.attrs == n.attrs
        for m in g.nodes
    )


def _unfused_residual(g: Graph, n: Node) -> bool:
    branch = n.op == "add" and n.inputs[0] != n.inputs[1]
    norm = _makes(g, n, 1, "rms_norm") if branch else None
    return bool(norm and len(norm.inputs) == 2 and len(g.users()[norm.out.name]) == 1)


def _unplanned_cache(g: Graph, n: Node) -> bool:
    """A full-length cache behind a window, or a second cache of the same keys or values."""
    if n.op == "cache_write":
        return any(m.inputs[1:] == n.inputs[1:] and m is not n for m in g.find("cache_write"))
    caches = (*g.state, *g.next.values())
    return n.op == "attention" and bool(n.attrs["window"]) and any(
        v in caches and v.type.shape[0] == "C" for v in n.inputs[3:5]
    )  # fmt: skip


def _late_choice(g: Graph, n: Node) -> bool:
    """The last row of a result that is worked out row by row, for nothing else."""
    if n.op != "last_row" or n.out not in g.outputs:
        return False
    made = g.producers().get(n.inputs[0].name)
    return made is not None and bool(made.definition.rows) and len(made.outputs) == 1 and (
        g.users()[made.out.name] == [n]
    )  # fmt: skip


def _cached_twice(g: Graph, n: Node, form: str = "off") -> bool:
    """K and V of one projection, both in a cache, where one of this form could hold them."""
    v = _makes(g, n, 1, "rms_norm") if n.op == "cache_write" and form != "off" else None
    if v is None or len(v.inputs) != 1 or not _read_by_attention(g, n):
        return False
    return any(
        k is not None and k.inputs[:1] == v.inputs and k.attrs == v.attrs
        and _read_by_attention(g, m) and _rotated_at_its_slot(g, m, k, form)
        for m in g.find("cache_write") for k in [_makes(g, m, 1, "norm_rope")]
    )  # fmt: skip


def _read_by_attention(g: Graph, write: Node) -> bool:
    """And by nothing else."""
    users = g.users()
    readers = {n.op for v in (write.inputs[0], write.out) for n in users[v.name]}
    return "attention" in readers and readers <= {"attention", "cache_write", RESULT.op}


def _rotated_at_its_slot(g: Graph, write: Node, k: Node, form: str) -> bool:
    """By a table of the positions that it is written at; for `value` in part only."""
    table, start = _makes(g, k, 2, "rope_table"), _makes(g, write, 2, "row_start")
    if table is None or start is None or table.inputs != start.inputs:
        return False
    part = table.attrs["kind"] == "proportional" and table.attrs["fraction"] != 1
    return form == "raw" or part


#: pass -> whether a node should not be there after it; takes the pass's own options too
LEAVES: dict[str, Callable[..., bool]] = {
    "share_rope_tables": _repeated_table,
    "fuse_qkv": _separate_projection,
    "fuse_gate_up": _separate_halves,
    "fuse_norm_rope": _unfused_rope,
    "fuse_norm_residual": _unfused_residual,
    "plan_cache": _unplanned_cache,
    "last_token_only": _late_choice,
    "latent_kv": _cached_twice,
}
