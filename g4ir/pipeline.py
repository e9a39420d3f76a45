"""The list of passes, run in order and verified in between."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .errors import G4Error, InputError, PassError
from .ir import RESULT, Graph, Node, Program, Value, verify

Dump = Callable[[str, Graph], None]
Note = Callable[[str, str], None]
#: pass -> its own keyword arguments
Options = Mapping[str, Mapping[str, Any]]

#: order matters: packing before the choice of rows, so that prefill and decode share weights; what
#: follows the caches' last form joins whole blocks of nodes into one op each
PASSES = (
    "share_rope_tables",
    "fuse_qkv",
    "fuse_gate_up",
    "fuse_norm_rope",
    "fuse_norm_residual",
    "plan_cache",
    "last_token_only",
    "latent_kv",
    "fuse_glu",
    "fuse_moe",
    "fuse_dual_norm",
    "fuse_cache_write",
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


def _separate_glu(g: Graph, n: Node) -> bool:
    product = _makes(g, n, 0, "linear") if n.op in ("glu", "glu_packed") else None
    return product is not None and g.users()[product.out.name] == [n] and (
        product.out not in n.inputs[1:]
    )  # fmt: skip


def _separate_experts(g: Graph, n: Node) -> bool:
    """Routed experts that have a packed MLP on the same residual beside them."""
    router = _makes(g, n, 1, "router") if n.op == "experts" else None
    if router is None or any(g.users().get(v.name) != [n] for v in router.outputs):
        return False
    routed = {_residual(g, m.inputs[0]) for m in (n, router)}
    return any(
        len(m.inputs) == 2 and m.attrs == n.attrs and {_residual(g, m.inputs[0])} == routed
        and [(u.op, [v.type for v in u.outputs]) for u in g.users()[m.out.name]] == [
            ("linear", [n.out.type])
        ]
        for m in g.find("linear_glu")
    )  # fmt: skip


def _residual(g: Graph, v: Value) -> Value:
    """The value that a pre-norm norms."""
    made = g.producers().get(v.name)
    if made is not None and made.op == "rms_norm":
        return made.inputs[0]
    fused = made is not None and made.op in ("norm_residual", "dual_norm_residual")
    return made.outputs[0] if made is not None and fused else v


def _separate_norms(g: Graph, n: Node) -> bool:
    """A residual's norm of the sum of two norms."""
    both = _makes(g, n, 0, "norm_residual") if n.op == "norm_residual" else None
    one = _makes(g, both, 1, "rms_norm") if both else None
    return bool(
        both and one and len(one.inputs) == 2 and len(both.inputs) == 3 and len(both.outputs) == 1
        and n.attrs["eps"] == both.attrs["eps"] == one.attrs["eps"]
        and [g.users()[v.name] for v in (one.out, both.out)] == [[both], [n]]
        and both.out != n.inputs[1] and one.out != both.inputs[0]
    )  # fmt: skip


#: attention over caches alone -> the first input that is one
_HELD = {"attention": 3, "attention_latent": 4}
#: ops between a packed projection of one token and the caches
_TO_CACHES = ("heads", "norm_rope", "rms_norm", "latent_row", "inverse_rms", "cache_write")


def _separate_writes(g: Graph, n: Node) -> bool:
    """One token's q, k and v, of which k and v go into the caches of an attention, and nowhere
    else."""
    if n.op != "split" or n.inputs[0].type.shape[1:2] != (1,):
        return False
    users = g.users()
    q = [u for v in n.outputs[:1] for u in users.get(v.name, [])]
    q += [u for m in q for v in m.outputs for u in users.get(v.name, [])]
    k, found = _after(g, n.outputs[1:2]), _after(g, n.outputs[1:])
    writes = [m for m in found if m.op == "cache_write"]
    return (
        bool(writes) and [m.op for m in q] == ["heads", "norm_rope"]
        and (len(n.outputs) == 2 or "rms_norm" not in {m.op for m in k})
        and all(m.op in _TO_CACHES for m in found)
        and len({w.inputs[1] for w in writes}) == len(writes)
        and len({m.attrs["eps"] for m in (*q, *found) if "eps" in m.attrs}) == 1
        and all(users[w.inputs[0].name] == [w] for w in writes)
        and any({w.out for w in writes} == {*u.inputs[_HELD[u.op] :]}
                for u in users.get(writes[0].out.name, []) if u.op in _HELD)
    )  # fmt: skip


def _after(g: Graph, values: Iterable[Value]) -> list[Node]:
    """The nodes that follow from values, up to cache writes."""
    found: dict[int, Node] = {}
    queue = [u for v in values for u in g.users().get(v.name, [])]
    while queue:
        n = queue.pop()
        if id(n) not in found:
            found[id(n)] = n
            after = n.outputs if n.op != "cache_write" else ()
            queue += [u for v in after for u in g.users().get(v.name, [])]
    return list(found.values())


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
    "fuse_glu": _separate_glu,
    "fuse_moe": _separate_experts,
    "fuse_dual_norm": _separate_norms,
    "fuse_cache_write": _separate_writes,
}
