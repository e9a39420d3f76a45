"""Makes a model's own params again from what an engine holds: undoes the weight prologue.

The graphs before all passes take the checkpoint's tensors. An engine that refers to a checkpoint
or to a seed still has them; a packed one has slices of what its prologue joined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from g4ir.errors import EngineError
from g4ir.ir.graph import Graph, Node, Value, drop_dead
from g4ir.ir.interpret import interpret
from g4ir.ir.text import parse_graph
from g4ir.model.names import checkpoint_name
from g4ir.ops.types import torch_dtype
from g4ir.weights.checkpoint import Checkpoint, WeightSource
from g4ir.weights.pack import MadeParams, Packing, ParamSource

if TYPE_CHECKING:
    import torch

    from g4ir.engine.engine import Engine

#: a param of the graph before all passes -> its tensor
Plain = Callable[[Value], "torch.Tensor"]


def plain_params(engine: Engine, checkpoint: str | Path | None = None) -> Plain:
    """Return params by value, in the engine's dtype: from `checkpoint`, else from the engine.

    Raises WeightsError where the checkpoint does not fit the engine's spec; the function that is
    returned raises EngineError for what a packed engine no longer holds.
    """
    if checkpoint is not None:
        return _named(Checkpoint.open(checkpoint, engine.spec, engine.media.kinds))
    held = engine.runtime.source
    if isinstance(held, MadeParams):
        return _named(held.source)
    prologue = parse_graph((engine.path / "prologue.g4ir").read_text())
    return Unpacked(held, frozenset(engine.program.params()), prologue, engine.path)


def _named(source: WeightSource) -> Plain:
    def tensor(v: Value) -> torch.Tensor:
        return source.tensor(checkpoint_name(v.name)).to(torch_dtype(v.type.dtype))

    return tensor


@dataclass(frozen=True)
class Unpacked:
    """The inputs of a prologue from its results: `concat` is undone by slices, without a copy."""

    held: ParamSource
    names: frozenset[str]
    prologue: Graph
    path: Path

    def holds(self, v: Value) -> bool:
        """Whether the tensor of a param follows from what is held."""
        joins = (n for n in self.prologue.find("concat") if v in n.inputs)
        return v.name in self.names or any(self.holds(n.out) for n in joins)

    def __call__(self, v: Value) -> torch.Tensor:
        """Return the tensor of a param; EngineError where what is held does not say what it was."""
        if v.name in self.names:
            return self.held.tensor(v.name)
        for n in self.prologue.find("concat"):
            if v in n.inputs:
                return _slice(n, v, self(n.out))
        raise EngineError(
            f"{self.path} no longer holds %{v.name}, only what was made of it: give --checkpoint "
            f"DIR"
        )


def _slice(join: Node, v: Value, joined: torch.Tensor) -> torch.Tensor:
    axis = join.attrs["axis"]
    assert isinstance(axis, int)
    sizes = [int(x.type.shape[axis]) for x in join.inputs]
    return joined.split(sizes, axis)[join.inputs.index(v)]


@dataclass
class StageWeights:
    """Params of any stage of the pipeline on one device. One tensor serves all stages that make it
    in the same way."""

    plain: Plain
    device: str
    _made: dict[str, tuple[Graph, torch.Tensor]] = field(default_factory=dict)
    _plain: dict[str, torch.Tensor] = field(default_factory=dict)

    def params(self, packing: Packing, graph: Graph) -> dict[str, torch.Tensor]:
        """Return the params of one of the packing's main graphs."""
        made = packing.prologue.producers()
        return {
            v.name: self._param(packing.prologue, v) if v.name in made else self._held(v)
            for v in graph.params
        }

    def _param(self, prologue: Graph, v: Value) -> torch.Tensor:
        recipe = drop_dead(replace(prologue, outputs=(v,)))
        if v.name not in self._made or self._made[v.name][0] != recipe:
            given = {x.name: self._held(x) for x in recipe.params}
            self._made[v.name] = recipe, interpret(recipe, {}, given, {})[0][v.name]
        return self._made[v.name][1]

    def _held(self, v: Value) -> torch.Tensor:
        if v.name not in self._plain:
            self._plain[v.name] = self.plain(v).to(self.device)
        return self._plain[v.name]
