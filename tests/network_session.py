"""Samples of ops as networks of tensor primitives take them, whose caches are of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from g4ir.backends.primitives.network import TURNED, Network, stored_type
from g4ir.ir.graph import Graph, Node, Value
from g4ir.ir.interpret import interpret
from g4ir.ops import OPS
from g4ir.ops.attention import slot_positions, split_chunk
from g4ir.plan.engine_limits import Limits
from tests.test_ops import node, sample, tensors

#: tokens of the largest chunk: no chunk of a sample then crosses the end of a ring
ROOM = 16


def in_network(case: tuple[str, int]) -> bool:
    """Whether a network may have a sample of an op: attention reads caches alone, which have the
    chunk already."""
    s = OPS[case[0]].samples[case[1]]
    inputs = tuple(Value(f"x{i}", t) for i, t in enumerate(s.types()))
    n = Node(case[0], inputs, (), s.attrs)
    return not n.definition.cache_range or not split_chunk(n.chunk, len(n.caches))[0]


def cache_inputs(n: Node) -> list[int]:
    """Which inputs of a node are caches, that it reads or writes."""
    read = range(*n.definition.cache_range(**n.attrs)) if n.definition.cache_range else ()
    return sorted({*read, *(i for o, i in n.definition.updates if o < len(n.outputs))})


def tokens_held(n: Node, given: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """i64[B]: how many tokens the caches of a node hold before and after it."""
    named = dict(zip(n.definition.operands, given))
    if "start" in named:
        return named["start"], named["start"] + named["lengths"]
    held = named.get("written", torch.zeros(1, dtype=torch.int64))
    return held, held


def as_stored(cache: torch.Tensor, tokens: torch.Tensor, slots: int) -> torch.Tensor:
    """A ring [C,B,n,d] that holds i64[B] tokens as a network keeps it, with so many slots."""
    at = slot_positions(tokens, len(cache))
    out = torch.zeros(slots, *cache.shape[1:], dtype=cache.dtype)
    rows = torch.arange(cache.shape[1]).expand_as(at)
    out[at[at >= 0] % slots, rows[at >= 0]] = cache[at >= 0]
    return out.permute(1, 2, 0, 3).contiguous()


def as_declared(stored: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The ring back, as it was before where a slot holds nothing."""
    at = slot_positions(tokens, len(before))
    rows = torch.arange(at.shape[1]).expand_as(at)
    held = stored.permute(2, 0, 1, 3)[at % stored.shape[2], rows]
    return torch.where((at >= 0)[:, :, None, None], held, before)


def in_range(op: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs of an op as networks take them: a picture of P patches is at most P wide."""
    if op == "axial_rope_table":
        return [given[0].clamp(max=given[0].shape[1] - 1)]
    return given


def check_op(
    case: tuple[str, int],
    e: Any,
    lowerings: Mapping[str, Any],
    outputs_of: Callable[[Any, dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    budget: float,
) -> None:
    """A sample of an op as a network of its own, whose caches are rings, against its reference.
    `outputs_of` computes what an emitter has, `budget` is relative to a result's largest value."""
    s = sample(case)
    s = replace(s, attrs={k: "f32" if v == "f64" else v for k, v in s.attrs.items()})
    n = node(case[0], s.types(), s.attrs)
    state = tuple(n.inputs[i] for i in cache_inputs(n))
    following = dict(n.definition.updated(n.inputs, n.outputs))
    graph = Graph(
        "prefill",
        tuple(v for v in n.inputs if v not in state),
        (),
        state,
        (n,),
        tuple(v for v in n.outputs if v not in following.values()),
        {old.name: new for old, new in following.items()},
    )
    given = in_range(case[0], tensors(s.types(), s))
    longest = max([int(t.max()) for t in given if not t.is_floating_point()], default=0)
    limits = Limits(4, longest + 1, ROOM)
    Network(e, graph, limits, lowerings).emit()
    plain = {v.name: t for v, t in zip(n.inputs, given, strict=True)}
    kinds = {v.name: stored_type(v.type, limits) for v in state}
    before, tokens = tokens_held(n, given)
    rings = {k: as_stored(plain[k], before, int(t.shape[2])) for k, t in kinds.items()}
    turned = {TURNED: torch.zeros_like(before)} if state else {}
    out = outputs_of(e, plain | rings | turned)
    want, after = interpret(graph, plain, {}, plain)
    made = {v.name: out[v.name] for v in graph.outputs}
    for name in graph.next:
        made[f"{name}.next"] = as_declared(out[f"{name}.next"], tokens, plain[name])
        want[f"{name}.next"] = after[name]
    for name, got in made.items():
        assert got.dtype == want[name].dtype and got.shape == want[name].shape, name
        if not got.is_floating_point():
            assert torch.equal(got, want[name]), name
        else:
            error = (got.double() - want[name].double()).abs().max()
            assert error <= budget * want[name].double().abs().max(), f"{name}: {float(error):.1e}"
