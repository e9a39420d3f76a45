"""A session over a network of tensor primitives: feeds and caches as a runtime has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from g4ir.backends.primitives.network import SLOTS, TURNED, is_ring, stored_type, turn
from g4ir.ir.graph import Graph, Node, Value
from g4ir.ir.interpret import interpret
from g4ir.ops import OPS
from g4ir.ops.attention import slot_positions, split_chunk
from g4ir.ops.types import torch_dtype
from g4ir.plan.engine_limits import Limits
from g4ir.plan.formats import context_slots
from tests.runner import ChunkedSession

Feeds = Mapping[str, torch.Tensor]


@dataclass
class NetworkSession(ChunkedSession):
    """`made(feeds)` makes outputs by name, NAME.next among them."""

    graph: Graph
    embed: Callable[[torch.Tensor], Feeds]
    made: Callable[[Feeds], Feeds]
    limits: Limits
    batch: int
    chunk: int
    all_logits: bool

    def __post_init__(self) -> None:
        kinds = {v.name: stored_type(v.type, self.limits) for v in self.graph.state}
        self.caches = {
            name: torch.zeros(
                [int(d) for d in t.bind({"B": self.batch}).shape], dtype=torch_dtype(t.dtype)
            )
            for name, t in kinds.items()
        }
        self.length = torch.zeros(self.batch, dtype=torch.int64)
        self.rings = [v.name for v in self.graph.state if is_ring(v.type)]
        self.turned = torch.zeros(self.batch, dtype=torch.int64)

    def _run(self, phase: str, tokens: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        after = self.length + valid
        slots = context_slots(int(after.max()), self.limits.max_seq)
        positions = self.length[:, None] + torch.arange(tokens.shape[1])
        turn(positions, self.turned, [self.caches[name] for name in self.rings])
        feeds = {
            **self.embed(tokens),
            **self.caches,
            "positions": positions,
            "lengths": valid,
            SLOTS: torch.arange(slots),
            TURNED: self.turned,
        }
        out = self.made(feeds)
        self.caches = {name: out[f"{name}.next"] for name in self.caches}
        self.length = after
        return out["logits"]


def embed_with(graph: Graph, params: Feeds) -> Callable[[torch.Tensor], Feeds]:
    """Token ids -> rows, through the embed graph."""
    return lambda tokens: interpret(graph, {"tokens": tokens}, params, {})[0]


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
