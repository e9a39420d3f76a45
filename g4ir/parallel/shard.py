"""linear(x, w_down)  ->  all_reduce(linear(x, shard of w_down)), and likewise for other weights

Turns a model's graph, before any pass, into the graph of one rank, the same for each: weights are
shards (table.py), logits are all-gathered, caches have the rank's KV heads. A collective's results
have the names and types of the values that it replaces, so that the nodes after it do not change.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce

from g4ir.errors import InputError
from g4ir.ir.graph import Builder, Graph, Node, Program, Value
from g4ir.ir.rewrite import drop_dead, order, rebuild
from g4ir.ir.verify import verify
from g4ir.model.names import CODES
from g4ir.ops.collective import COLLECTIVES
from g4ir.ops.types import Type

from .table import FIRST, HEAD, TABLE, AxisShard, Sharding

#: values that are all-reduced; of a draft model only attention's
_SUMS = re.compile(r"(draft\.)?L\d+\.attn\.o|L\d+\.(mlp\.down|moe\.out)")
_HEADS = re.compile(r"(draft\.)?L(\d+)\.attn\.([qkv])\.heads")
_FIRST = Value(FIRST, Type("i64", (1,)))
_CACHE = re.compile(r"L(\d+)\.[kv]")
#: name of a rank's value in the graph of all ranks
_RANK_NAME = re.compile(r"r(\d+)\.(.+)")


def shard_program(p: Program, to: Sharding) -> Program:
    """Apply `shard` to the graphs with caches (those of the text and draft model); embedding tables
    and towers are not sharded. InputError if the model cannot be sharded."""
    to.check()
    if to.ranks == 1:
        return p
    return p.map(lambda g: shard(g, to) if g.state else g)


def shard(g: Graph, to: Sharding) -> Graph:
    """Return the graph of one rank, the same for each; see the module. InputError if the model, a
    quantised group or a draft model's heads cannot be divided among the ranks."""
    to.check()
    if to.ranks == 1:
        return g
    for n in g.find("dequantize"):
        _check_groups(n, to)
    params = {v.name: _param(v, to) for v in g.params}
    state = {v.name: _cache(v, to) for v in g.state}
    sums = _sums(g)
    nodes: list[Node] = []
    for n in g.nodes:
        inputs = (state.get(v.name, params.get(v.name, _named(v))) for v in n.inputs)
        n = replace(n, inputs=tuple(inputs), outputs=tuple(map(_named, n.outputs)))
        if n.op == "heads":
            n = _heads(n, to)
        elif n.outputs[0].name in sums or _is_head(n):
            n = replace(n, outputs=(_part(n.outputs[0]),))
        nodes.append(_local_experts(n, to) if to.ep and n.op == "experts" else n)
    first = (_FIRST,) if any(_FIRST in n.inputs for n in nodes) else ()
    cut = replace(
        g,
        params=(*params.values(), *first),
        state=tuple(state.values()),
        nodes=(*nodes, *_collectives(g, sums, to.ranks)),
    )
    out = drop_dead(rebuild(order(cut)))
    verify(out)
    return out


def collectives(g: Graph) -> Iterator[Node]:
    """Yield the collectives of a graph, in order."""
    return g.find(*COLLECTIVES)


def ranks_of(g: Graph) -> int:
    """Return the number of ranks of a graph; 1 without collectives."""
    return next((n.integer("ranks") for n in collectives(g)), 1)


def _param(v: Value, to: Sharding) -> Value:
    """Return the shard of a param, or the param if it is replicated. A tied head's shard has the
    head's name, since the embedding table itself is not sharded."""
    name = _named(v).name
    part = to.part(name)
    return Value(name, part.cut_type(v.type, to.ranks)) if part else v


def _named(v: Value) -> Value:
    """Return a value of a tied head under the head's name."""
    return Value(v.name.replace(TABLE, HEAD, 1), v.type) if v.name.startswith(TABLE) else v


def _check_groups(n: Node, to: Sharding) -> None:
    """Raise InputError if a group of quantised values, or a packed element, would be split."""
    weight = n["codes"].name.removesuffix(CODES)
    part = to.part(HEAD if weight == TABLE else weight)
    if part is None or _divides(n, part, to.ranks):
        return
    size = int(n.out.type.shape[-1])
    each = size // int(n["scales"].type.shape[-1])
    problem = f"{weight} has rows of {size} values in groups or blocks of {each} or more"
    fix = "or a quantisation config that leaves the weight out or has a scale for each row"
    cannot = f"which {to.ranks} ranks cannot share; take another number of ranks"
    raise InputError(f"--tp {to.ranks}: {problem}, {cannot}, {fix}")


def _divides(n: Node, part: AxisShard, ranks: int) -> bool:
    part_types = tuple(part.cut_type(v.type, ranks) for v in n.inputs)
    axes_divide = all(part.divides(int(v.type.shape[part.axis]), ranks) for v in n.inputs)
    try:
        types = n.definition.infer_types(part_types, n.attrs)
    except ValueError:
        return False  # a group or a packed element would be split
    return axes_divide and types == (part.cut_type(n.out.type, ranks),)


def _cache(v: Value, to: Sharding) -> Value:
    slots, rows, _, dim = v.type.shape
    heads = to.key_heads(int(_CACHE.sub(r"\1", v.name)))
    return Value(v.name, v.type.with_shape(slots, rows, heads, dim))


def _heads(n: Node, to: Sharding) -> Node:
    """Return the `heads` node of a projection with the rank's number of heads."""
    match, total = _HEADS.fullmatch(n.out.name), n.integer("n")
    if not match:
        return n  # of per-layer embeddings, which are replicated
    if match[3] == "q" and total % to.ranks:
        problem = f"the drafter of {to.spec.name} has num_attention_heads {total}"
        fix = f"take a divisor of {total}, or leave the drafter out"
        raise InputError(f"--tp {to.ranks}: {problem}, which {to.ranks} ranks cannot share; {fix}")
    count = total // to.ranks if match[3] == "q" else to.key_heads(int(match[2]))
    return replace(n, attrs={**n.attrs, "n": count})


def _local_experts(n: Node, to: Sharding) -> Node:
    """Return the node for one rank's experts. The index of the first one is an operand, so that all
    ranks share a graph."""
    assert to.spec.text.moe
    attrs = {**n.attrs, "total": to.spec.text.moe.num_experts}
    return replace(n, inputs=(*n.inputs, _FIRST), attrs=attrs)


def _sums(g: Graph) -> Mapping[str, tuple[str, ...]]:
    """Return name of a value -> names of all values in its all-reduce; the MLP and experts of a
    layer share one."""
    groups: dict[str, list[str]] = {}
    for name in (v.name for n in g.nodes for v in n.outputs if _SUMS.fullmatch(v.name)):
        key = name if name.endswith(".attn.o") else name.partition(".")[0]
        groups.setdefault(key, []).append(name)
    return {name: tuple(group) for group in groups.values() for name in group}


def _is_head(n: Node) -> bool:
    return n.op == "linear" and n["w"].name.startswith((HEAD, TABLE))


def _part(v: Value) -> Value:
    return Value(f"{v.name}.part", v.type)


def _collectives(g: Graph, sums: Mapping[str, tuple[str, ...]], ranks: int) -> tuple[Node, ...]:
    b, values = Builder(), {v.name: v for n in g.nodes for v in n.outputs}
    for names in dict.fromkeys(sums.values()):
        parts = [_part(values[name]) for name in names]
        b.emit_all("all_reduce", *parts, ranks=ranks, name=names)
    for n in g.find("linear"):
        if _is_head(n):
            *rows, vocab = n.out.type.shape
            assert isinstance(vocab, int)
            local = Value(n.out.name, n.out.type.with_shape(*rows, vocab // ranks))
            b.emit("all_gather", _part(local), ranks=ranks, name=n.out.name)
    return tuple(b.nodes)


# --- all ranks in one graph ---------------------------------------------------------------------


def rank_name(name: str, rank: int) -> str:
    """Return the name of a rank's value in the graph of all ranks."""
    return f"r{rank}.{name}"


def split_name(name: str) -> tuple[int | None, str]:
    """Return (rank, name) of a value in the graph of all ranks; rank None: shared by all."""
    match = _RANK_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def unroll(g: Graph, sharded: Collection[str], ranks: int) -> Graph:
    """%x of a rank, all_reduce(%x)  ->  %r0.x, %r1.x, their sum (all_gather: concatenation)

    Return the graph of all ranks. Values that depend on `sharded` params (names) or on caches are
    duplicated per rank; values that depend only on results of collectives and replicated weights
    keep their names."""
    local_names, b = {*sharded, *(v.name for v in g.state)}, Builder()
    for n in g.nodes:
        if n.op in COLLECTIVES:
            _exchange(b, n, ranks)
        elif local_names.isdisjoint(v.name for v in n.inputs):
            b.nodes.append(n)
        else:
            local_names |= {v.name for v in n.outputs}
            b.nodes += [_of_rank(n, local_names, rank) for rank in range(ranks)]
    each = partial(_each, sharded=local_names, ranks=ranks)
    return replace(
        g,
        params=each(g.params),
        state=each(g.state),
        nodes=tuple(b.nodes),
        outputs=each(g.outputs),
        next={
            rank_name(name, rank): _on_rank(v, local_names, rank)
            for name, v in g.next.items()
            for rank in range(ranks)
        },
    )


def _on_rank(v: Value, sharded: Collection[str], rank: int) -> Value:
    return Value(rank_name(v.name, rank), v.type) if v.name in sharded else v


def _each(values: Sequence[Value], sharded: Collection[str], ranks: int) -> tuple[Value, ...]:
    counted = ((v, rank) for v in values for rank in range(ranks if v.name in sharded else 1))
    return tuple(_on_rank(v, sharded, rank) for v, rank in counted)


def _of_rank(n: Node, sharded: Collection[str], rank: int) -> Node:
    inputs, outputs = (
        tuple(_on_rank(v, sharded, rank) for v in vs) for vs in (n.inputs, n.outputs)
    )
    return replace(n, inputs=inputs, outputs=outputs)


def _exchange(b: Builder, n: Node, ranks: int) -> None:
    for x, y in zip(n.inputs, n.outputs, strict=True):
        parts = [Value(rank_name(x.name, rank), x.type) for rank in range(ranks)]
        if n.op == "all_gather":
            b.emit("concat", *parts, axis=x.type.rank - 1, name=y.name)
            continue
        rounded = y.type.dtype in ("bf16", "f16")  # summed in fp32
        if rounded:
            parts = [b.emit("cast", x, dtype="f32", name=f"{x.name}.wide") for x in parts]
        *first, last = parts
        total = reduce(lambda a, x: b.emit("add", a, x, name=f"{x.name}.sum"), first)
        result = b.emit("add", total, last, name=f"{y.name}.wide" if rounded else y.name)
        if rounded:
            b.emit("cast", result, dtype=y.type.dtype, name=y.name)
