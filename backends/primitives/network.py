"""A graph of the IR, written into an emitter: one network for prefill and decode.

The network is made of the prefill graph, whose chunk may be a single token. Its caches have layouts
of their own: a full-length cache is [B, n, M, d] with M = max_seq + prefill_chunk slots, so that a
chunk is appended whole (what padding writes beyond a row's end is never visible, and overwritten
by the next chunk); a ring of W slots is [B, W, n, d]. Both come in as `NAME` and go out as
`NAME.next`.

Beside the graph's own inputs the caller feeds `slots` i64[C] = 0, 1, ...: C is how many slots of
the full-length caches the step looks at, at least as many as rows hold tokens afterwards.

A tower is a network of its own, without caches and with every size fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from g4ir.errors import LowerError
from g4ir.ir.graph import Graph, Node, Value
from g4ir.model.decoder import VERIFY
from g4ir.ops.base import as_tuple
from g4ir.ops.types import Type
from g4ir.plan.limits import Limits

from .emitter import Emitter, Operand

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

#: the dim of full-length caches in the IR
FULL = "C"
SLOTS = "slots"
#: i64[B,S], where the variant sees pictures both ways: equal within a picture, else NO_BLOCK
BLOCK_IDS, NO_BLOCK = "block_ids", -1
#: i64[B,R], where drafted tokens are verified: the rows of the chunk that logits are asked for
ROWS = "rows"
#: how routed experts are computed: weights of the chosen ones gathered, all of them multiplied, or
#: gathered for single tokens only
EXPERTS = ("auto", "gather", "all")

Lowering = Callable[..., Any]
Made = TypeVar("Made")


@dataclass
class Network:
    """One emission: operands by the name of the IR value, and what several ops share."""

    e: Emitter
    graph: Graph
    limits: Limits
    lowerings: Mapping[str, Lowering]
    experts: str = "auto"
    env: dict[str, Operand] = field(default_factory=dict)
    _shared: dict[Hashable, Any] = field(default_factory=dict)

    def emit(self) -> None:
        """Write inputs, nodes and outputs."""
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
        """Write a node by the target's lowering of the op, or that of its expansion."""
        lower = self.lowerings.get(n.op)
        self.e.scope = n.outputs[0].name
        if lower is None and n.definition.expand is None:
            raise LowerError(
                f"op {n.op} of {n.outputs[0]} has no lowering: add one to "
                f"backends/primitives/lowerings.py"
            )
        if lower is None:
            inner, results = n.expanded
            for m in inner:
                self.node(m)
            made: Sequence[Operand] = [self.env[v.name] for v in results]
        else:
            try:
                made = as_tuple(lower(self, n, *map(self.operand, n.inputs)))
            except ValueError as err:
                raise LowerError(f"op {n.op} of {n.outputs[0]}: {err}") from err
        self.env.update({v.name: x for v, x in zip(n.outputs, made, strict=True)})

    def operand(self, v: Value) -> Operand:
        if v.name not in self.env:
            self.env[v.name] = self.e.param(v)
        return self.env[v.name]

    def shared(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return a thing that several ops need, made for the first of them."""
        if key not in self._shared:
            with self.e.apart():
                self._shared[key] = make()
        made: Made = self._shared[key]
        return made


def asked_rows(phase: str, feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return i64[B,R]: the rows of a chunk that logits are asked for, all of what is verified, else
    each row's last valid one."""
    if phase == VERIFY:
        import torch

        positions = feeds["positions"]
        places = torch.arange(positions.shape[1], device=positions.device)
        return places.expand(len(positions), -1).contiguous()
    return (feeds["lengths"] - 1).clamp(min=0)[:, None]


def is_ring(cache: Type) -> bool:
    """Whether an IR cache [slots, B, n, d] is a ring."""
    return cache.shape[0] != FULL


def network_inputs(g: Graph, limits: Limits) -> dict[str, Type]:
    """Return the inputs of the network of a graph, with its slots and caches, by name."""
    slots = {SLOTS: Type("i64", (FULL,))} if any(not is_ring(v.type) for v in g.state) else {}
    caches = {v.name: stored_type(v.type, limits) for v in g.state}
    return {v.name: v.type for v in g.inputs} | slots | caches


def stored_type(cache: Type, limits: Limits) -> Type:
    """Return the layout that the network keeps an IR cache in."""
    slots, b, n, d = cache.shape
    if is_ring(cache):
        return cache.with_shape(b, slots, n, d)
    return cache.with_shape(b, n, full_slots(limits), d)


def stored_bytes(g: Graph, limits: Limits) -> int:
    """Count the bytes of the caches of a session: rings twice, since a step reads one and writes
    another; full-length caches are written in place."""
    dims = {"B": limits.max_batch}
    return sum(
        stored_type(v.type, limits).bind(dims).nbytes() * (1 + is_ring(v.type)) for v in g.state
    )


def full_slots(limits: Limits) -> int:
    """Count the slots of a full-length cache: what a row may hold and room for chunk padding."""
    return limits.max_seq + limits.prefill_chunk
