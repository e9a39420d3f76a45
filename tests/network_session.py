"""Samples of ops as networks of tensor primitives take them, whose caches are of their own."""

from __future__ import annotations

import torch

from g4ir.ir.graph import Node, Value
from g4ir.ops import OPS
from g4ir.ops.attention import slot_positions, split_chunk


def in_network(case: tuple[str, int]) -> bool:
    """Whether a network may have a sample of an op: attention reads caches alone, which have the
    chunk already."""
    s = OPS[case[0]].samples[case[1]]
    inputs = tuple(Value(f"x{i}", t) for i, t in enumerate(s.types()))
    n = Node(case[0], inputs, (), s.attrs)
    return not n.definition.held or not split_chunk(n.chunk, len(n.caches))[0]


def cache_inputs(n: Node) -> list[int]:
    """Which inputs of a node are caches, that it reads or writes."""
    read = range(*n.definition.held(**n.attrs)) if n.definition.held else ()
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
