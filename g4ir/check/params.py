"""Params of any stage of an engine's pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from g4ir.engine.load import open_weights
from g4ir.ir.graph import Graph, Value
from g4ir.ir.interpret import interpret
from g4ir.ir.rewrite import drop_dead
from g4ir.model.names import checkpoint_name
from g4ir.ops.types import torch_dtype
from g4ir.parallel.table import Share
from g4ir.parallel.unroll import split_name
from g4ir.weights.checkpoint import WeightSource
from g4ir.weights.drafter import random_weights
from g4ir.weights.origin import find_origin
from g4ir.weights.pack import MadeParams, Packing
from g4ir.weights.unpack import UnpackedWeights

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine

#: a param of the graph before all passes -> its tensor
Plain = Callable[[Value], torch.Tensor]


def plain_params(engine: Engine, checkpoint: str | Path | None = None) -> Plain:
    """Return params by value, in the engine's dtype: from `checkpoint`, else from the engine.

    Raises WeightsError where the checkpoint does not fit the engine's spec; the function that is
    returned raises EngineError for what a packed engine no longer holds.
    """
    whole = _whole_params(engine, checkpoint)
    if engine.ranks == 1:
        return whole
    held = [engine.unpacked(rank) for rank in range(engine.ranks)]
    return RankParams(engine.share, whole, held if isinstance(whole, UnpackedWeights) else ())


def _whole_params(engine: Engine, checkpoint: str | Path | None) -> Plain:
    source = original_weights(engine, checkpoint)
    return _named(source) if source else engine.unpacked()


def original_weights(engine: Engine, checkpoint: str | Path | None) -> WeightSource | None:
    """Return the weights that an engine was built from: those of `checkpoint`, else the engine's
    own source, else those of its seed; None if nothing says what they were."""
    if checkpoint is not None:
        return open_weights(engine, find_origin(checkpoint), engine.media.kinds)
    held = engine.runtime.source
    if isinstance(held, MadeParams):
        return held.source
    seed = engine.facts.seed
    if seed is None:
        return None
    return random_weights(engine.spec, engine.drafter, seed, torch_dtype(engine.dtype))


@dataclass(frozen=True)
class RankParams:
    """Params of the graph of all ranks (parallel/unroll.py), and of the whole model: from `whole`,
    which has them whole, or joined of what each rank holds."""

    share: Share
    whole: Plain
    held: Sequence[UnpackedWeights]

    def __call__(self, v: Value) -> torch.Tensor:
        """Return the tensor of a param, of a rank's own or of the model's."""
        rank, name = split_name(v.name)
        if rank is not None:
            return self._own(rank, replace(v, name=name))
        made: torch.Tensor = self.share.joined(v, self._own) if self.held else self.whole(v)
        return made

    def _own(self, rank: int, v: Value) -> torch.Tensor:
        if self.held:
            return self.held[rank](v)
        share = replace(self.share, rank=rank)
        made: torch.Tensor = share.own(v.name, lambda name: self.whole(replace(v, name=name)))
        return made


def unpacked(plain: Plain) -> UnpackedWeights | None:
    """Return what undoes the packing, where params come from that."""
    whole = plain.whole if isinstance(plain, RankParams) else plain
    return whole if isinstance(whole, UnpackedWeights) else None


def _named(source: WeightSource) -> Plain:
    def tensor(v: Value) -> torch.Tensor:
        return source.tensor(checkpoint_name(v.name)).to(torch_dtype(v.type.dtype))

    return tensor


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
