"""Lowers an IR graph into an emitter: one network for prefill and decode.

The network is the prefill graph, whose chunk may be a single token. Its caches have the layout [B,
n, slots, d], in which a chunk is contiguous for each head; chunks are written in place. Padding
tokens are never visible, and overwritten by the next chunk. A full-length cache has max_seq +
prefill_chunk slots. A ring has R slots, prefill_chunk more than in the graph, so that a chunk
overwrites nothing visible to its first token. Caches are inputs `NAME` and outputs `NAME.next`. In
addition to the graph's inputs the caller feeds

    slots   i64[C]  0, 1, ...: C is the number of slots of full-length caches that the step reads,
                    at least the length of the longest sequence after it
    turned  i64[B]  rotation of a sequence's rings: position p is in slot (p + turned) mod R. A
                    chunk must not be written across the end of a ring: if it would be, the caller
                    rotates the rings first (`turn`).

A tower is a separate network without caches, with static shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from g4ir.errors import LowerError
from g4ir.ir.graph import Graph, Node, Value
from g4ir.model.decoder import VERIFY
from g4ir.ops.base import as_tuple
from g4ir.ops.types import Type
from g4ir.plan.engine_limits import Limits

from .emitter import Emitter, Operand

#: name of the slots dim of full-length caches in the IR
FULL = "C"
SLOTS = "slots"
TURNED = "turned"
#: input i64[B,S] for bidirectional image attention: equal within an image, NO_BLOCK outside images
BLOCK_IDS, NO_BLOCK = "block_ids", -1
#: input i64[B,R] of a network that also serves verification steps: indices of the tokens in the
#: chunk whose logits are returned
ROWS = "rows"

Lowering = Callable[..., Any]
Result = TypeVar("Result")


@dataclass
class Network:
    """State of a lowering: operands by IR value name, and values that ops share."""

    e: Emitter
    graph: Graph
    limits: Limits
    lowerings: Mapping[str, Lowering]
    env: dict[str, Operand] = field(default_factory=dict)
    #: messages for the user about deviations from the requested settings
    notes: list[str] = field(default_factory=list)
    _shared: dict[Hashable, Any] = field(default_factory=dict)

    def emit(self) -> None:
        """Emit the network: its inputs, nodes, and outputs, among them the caches after the step as
        `NAME.next`."""
        g, e = self.graph, self.e
        for name, t in network_inputs(g, self.limits).items():
            self.env[name] = e.input(name, t)
        for n in g.nodes:
            self.node(n)
        for v in g.outputs:
            e.output(v.name, self.env[v.name])
        for name, v in g.next.items():
            e.output(f"{name}.next", self.env[v.name])

    def node(self, n: Node) -> None:
        """Emit a node by its op's lowering, else by its expansion; LowerError names the op and the
        value."""
        lower = self.lowerings.get(n.op)
        self.e.scope = n.outputs[0].name
        if lower is None and n.definition.expand is None:
            fix = "add one to backends/primitives/lowerings.py"
            raise LowerError(f"op {n.op} of {n.outputs[0]} has no lowering: {fix}")
        if lower is None:
            outputs: Sequence[Operand] = self.expanded(n)
        else:
            try:
                outputs = as_tuple(lower(self, n, *map(self.operand, n.inputs)))
            except ValueError as err:
                raise LowerError(f"op {n.op} of {n.outputs[0]}: {err}") from err
        self.env.update({v.name: x for v, x in zip(n.outputs, outputs, strict=True)})

    def expanded(self, n: Node) -> list[Operand]:
        """Emit a fused op's expansion; return its outputs."""
        inner, results = n.expanded
        for m in inner:
            self.node(m)
        return [self.env[v.name] for v in results]

    def operand(self, v: Value) -> Operand:
        if v.name not in self.env:
            self.env[v.name] = self.e.param(v)
        return self.env[v.name]

    def shared(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Return a value that several ops share, created on first use. Keys contain the operands,
        not their `id`s, which may be reused."""
        if key not in self._shared:
            with self.e.shared_scope():
                self._shared[key] = make()
        return self._shared[key]

    def once(self, kind: str, x: Operand, make: Callable[[], Result]) -> Result:
        """Return a value that the readers of tensor `x` share, created in the first reader's
        scope."""
        key = (kind, x)
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]


def logit_rows(phase: str, feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return i64[B,R]: indices of the tokens in the chunk whose logits are returned: all in a
    verification step, else the last valid one of each sequence."""
    if phase == VERIFY:
        positions = feeds["positions"]
        index = torch.arange(positions.shape[1], device=positions.device)
        return index.expand(len(positions), -1).contiguous()
    return (feeds["lengths"] - 1).clamp(min=0)[:, None]


def is_ring(cache: Type) -> bool:
    """Whether an IR cache [slots, B, n, d] is a ring."""
    return cache.shape[0] != FULL


def network_inputs(g: Graph, limits: Limits) -> dict[str, Type]:
    """Return the types of the inputs of a graph's network, by name: the graph's own inputs, `slots`
    if a cache has full length, `turned` if one is a ring, and the caches."""
    rings = [v for v in g.state if is_ring(v.type)]
    slots = {SLOTS: Type("i64", (FULL,))} if len(rings) < len(g.state) else {}
    turned = {TURNED: Type("i64", rings[0].type.shape[1:2])} if rings else {}
    caches = {v.name: stored_type(v.type, limits) for v in g.state}
    return {v.name: v.type for v in g.inputs} | slots | turned | caches


def stored_type(cache: Type, limits: Limits) -> Type:
    """Return the type of an IR cache in the network's layout."""
    slots, b, n, d = cache.shape
    slots_in_use = slots if isinstance(slots, int) else limits.max_seq
    return cache.with_shape(b, n, slots_in_use + limits.prefill_chunk, d)


def stored_bytes(g: Graph, limits: Limits) -> int:
    """Count the bytes of the KV caches of a session of max_batch sequences, if all are updated in
    place (one buffer each)."""
    dims = {"B": limits.max_batch}
    return sum(stored_type(v.type, limits).bind(dims).nbytes() for v in g.state)


def turn(positions: torch.Tensor, turned: torch.Tensor, rings: Sequence[torch.Tensor]) -> None:
    """Rotate ring caches [B,n,R,d], and update `turned` i64[B], so that the chunk at positions
    i64[B,S] does not cross the end of a ring. Single tokens never do. A rotation copies the rings
    once per about R tokens. Splitting the chunk instead would cost a second step, which reads all
    weights, and a bidirectional image cannot be split."""
    if not rings or positions.shape[1] == 1:
        return
    size, ends = positions.shape[1], {t.shape[2] for t in rings}
    ways = math.lcm(*ends)
    for row, (first, now) in enumerate(zip(positions[:, 0].tolist(), turned.tolist(), strict=True)):
        if all((first + now) % end + size <= end for end in ends):
            continue
        turned[row] = -first % ways
        for t in rings:
            t[row] = t[row].roll(-first % ways - now, 1)


def as_in_ir(
    caches: Mapping[str, torch.Tensor], rings: Collection[str], turned: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return writable views of a network's caches in the IR's layout, [R,B,n,d] with position p in
    slot p mod R. Rotated rings are rotated back."""
    for name in rings:
        for t, by in zip(caches[name], turned.tolist(), strict=True):
            t.copy_(t.roll(-by, 1))
    turned.zero_()
    return {name: t.permute(2, 0, 1, 3) for name, t in caches.items()}


def full_slots(limits: Limits) -> int:
    """Return the slots of a full-length cache: max_seq, and as many as the padding of a chunk may
    need."""
    return limits.max_seq + limits.prefill_chunk
