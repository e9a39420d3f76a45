"""Makes a model's own weights again from what an engine holds: undoes the weight prologue.

An engine that refers to a checkpoint or to a seed still has them; a packed one has slices of what
its prologue joined or turned. Of a quantised weight it has codes and scales, or what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from g4ir.errors import EngineError
from g4ir.ir.graph import Graph, Node, Value
from g4ir.ir.interpret import run_node
from g4ir.model.names import CODES, SCALES
from g4ir.ops.codecs import by_rows, from_tiles

from .pack import MadeParams, ParamSource

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class UnpackedWeights:
    """The inputs of a prologue from its results: `concat` is undone by slices, without a copy."""

    held: ParamSource
    params: Mapping[str, Value]
    prologue: Graph
    path: Path

    def holds(self, v: Value) -> bool:
        after = (n for n in self.prologue.find(*UNDONE) if v in n.inputs)
        return v.name in self.params or any(self.holds(n.out) for n in after)

    def __call__(self, v: Value) -> torch.Tensor:
        """Return the tensor of a param; EngineError where what is held does not say what it was."""
        if isinstance(self.held, MadeParams):
            return self.held.given(v)
        if v.name in self.params:
            return self.held.tensor(v.name)
        for n in self.prologue.find(*UNDONE):
            if v in n.inputs and self.holds(n.out):
                return UNDONE[n.op](n, v, self(n.out))
        raise EngineError(
            f"{self.path} no longer holds %{v.name}, only what was made of it: give --checkpoint "
            f"DIR"
        )

    def weight(self, v: Value) -> torch.Tensor:
        """Return a weight as the engine computes with it: dequantised if it is quantised."""
        parts = self._parts(v)
        if not parts:
            return self(v)
        made = self._codes_of(parts)
        if made is None:
            return self._dense(v, parts[0])
        dequantize = Node("dequantize", parts, (v,), {"to": v.type.dtype})
        (dense,) = run_node(dequantize, list(made))
        return dense

    def _parts(self, v: Value) -> tuple[Value, ...]:
        made = (x for n in self.prologue.nodes for x in n.outputs)
        known = dict(self.params) | {x.name: x for x in (*self.prologue.params, *made)}
        names = (f"{v.name}{CODES}", f"{v.name}{SCALES}")
        return tuple(known[name] for name in names if name in known)

    def _codes_of(self, parts: tuple[Value, ...]) -> tuple[torch.Tensor, ...] | None:
        """Return codes and scales; None where the engine holds what was made of them."""
        quantize = self.prologue.producers().get(parts[0].name)
        if isinstance(self.held, MadeParams):
            if quantize:
                return run_node(quantize, [self.held.given(quantize["w"])])
            return tuple(map(self.held.given, parts))
        if all(map(self.holds, parts)):
            return tuple(map(self, parts))
        for n in self.prologue.find("as_bytes"):
            if (cut := self._cut(n, parts[0])) and all(map(self.holds, n.outputs)):
                return tuple(cut(self(made)) for made in n.outputs)
        return None

    def _dense(self, v: Value, codes: Value) -> torch.Tensor:
        for n in self.prologue.find("dense"):
            if cut := self._cut(n, codes):
                return cut(self(n.out))
        raise EngineError(f"{self.path} holds nothing that was made of %{v.name}")

    def _cut(self, n: Node, codes: Value) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function that slices a weight out of a packed one; None if it is elsewhere."""
        joined = self.prologue.producers().get(n["codes"].name)
        if n["codes"] == codes:
            return lambda t: t
        if joined and joined.op == "concat" and codes in joined.inputs:
            return partial(_slice, joined, codes)
        return None


def _slice(join: Node, v: Value, joined: torch.Tensor) -> torch.Tensor:
    axis = join.whole("axis")
    sizes = [int(x.type.shape[axis]) for x in join.inputs]
    return joined.split(sizes, axis)[join.inputs.index(v)]


#: op of a prologue -> what makes one of its inputs from its result
UNDONE: dict[str, Callable[[Node, Value, torch.Tensor], torch.Tensor]] = {
    "concat": _slice,
    "columns": lambda n, v, made: by_rows(made),
    "tiles": lambda n, v, made: from_tiles(made),
    "scale": lambda n, v, made: made / n.number("value"),
}
