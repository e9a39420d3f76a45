"""The parts of a loaded engine: all that sessions and towers need."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.backends.base import Runtime
from g4ir.errors import InputError
from g4ir.ir.graph import Graph, Program, Value
from g4ir.ir.interpret import interpret
from g4ir.model.media import Media
from g4ir.model.text import build_program
from g4ir.parallel.table import Share
from g4ir.passes.plan_cache import RingOptions
from g4ir.plan.engine_limits import Limits
from g4ir.quant.recipe import Recipe
from g4ir.spec.reader import did_you_mean
from g4ir.spec.record import Spec
from g4ir.weights.checkpoint import GENERATION
from g4ir.weights.pack import params_of_rank
from g4ir.weights.unpack import UnpackedWeights

from .artefact import Manifest
from .prompts import Defaults, read_defaults

if TYPE_CHECKING:
    import torch

#: made no params
NOTHING = Graph("prologue", (), (), (), (), ())


@dataclass(repr=False)
class EngineParts:
    """A program, its runtime, and the tables that tokens are looked up in. They belong to the
    process that loaded them."""

    path: Path
    #: manifest.json, typed
    facts: Manifest
    spec: Spec
    limits: Limits
    all_logits: bool
    device: str
    dtype: str
    program: Program
    runtime: Runtime
    tables: dict[str, Any] = field(repr=False)
    #: what its towers were compiled for
    media: Media = field(default_factory=Media)
    #: how its weights are held, and the graph that made its params of the model's
    recipe: Recipe | None = None
    prologue: Graph = field(default=NOTHING, repr=False)
    #: the spec of a model that drafts tokens
    drafter: Spec | None = None
    _process: int = field(default_factory=os.getpid, init=False)

    def __repr__(self) -> str:
        backend = self.facts.backend
        sizes = ", ".join(f"{k} {v}" for k, v in asdict(self.limits).items())
        return (
            f"<Engine {str(self.path)!r}: {self.spec.name}, {backend} on {self.device}, "
            f"{self.dtype}, {sizes}>"
        )

    @property
    def manifest(self) -> dict[str, Any]:
        """The values of manifest.json."""
        values: dict[str, Any] = json.loads(self.facts.text())
        return values

    def param(self, name: str) -> torch.Tensor:
        """Return a weight of the model as the engine computes with it, on the host and in its
        dtype: `L0.mlp.w_gate`, of a quantised one what its codes and scales mean, of several ranks
        what all have together. InputError for a name that the model does not have."""
        import torch

        plain = _plain_params(self.spec, self.dtype, self.media)
        if name not in plain:
            near = did_you_mean(name, plain)
            raise InputError(f"param {name!r}: {self.spec.name} has no such weight{near}")
        with torch.no_grad():
            weight = self.share.joined(plain[name], lambda rank, v: self.unpacked(rank).weight(v))
            return weight.cpu()

    def unpacked(self, rank: int = 0) -> UnpackedWeights:
        """Return a rank's params of the model, as far as they follow from what it holds."""
        held = self.runtime.source
        if rank:
            held = params_of_rank(held, self.path, rank)
        return UnpackedWeights(held, self.program.params(), self.prologue, self.path)

    def check_process(self) -> None:
        """Raise InputError in a forked child: the runtime would wait for threads of the parent."""
        if os.getpid() != self._process:
            raise InputError(
                f"{self.path}: loaded by process {self._process}, of which this is a fork; load "
                f"the engine in the process that uses it"
            )

    @property
    def ranks(self) -> int:
        """How many processes run it together, each on weights of its own."""
        return self.facts.ranks

    @property
    def share(self) -> Share:
        """The weights that the first of its ranks has."""
        return Share(self.spec, 0, self.ranks, self.facts.ep)

    @property
    def rings(self) -> tuple[tuple[int, int], ...]:
        """(window, slots) of every distinct ring cache."""
        found: set[tuple[int, int]] = set()
        for g in self.program.graphs.values():
            caches = {*g.state, *g.next.values()}
            for n in (n for n in g.nodes if n.definition.held):
                slots = {v.type.shape[0] for v in n.inputs if v in caches}
                window = n.whole("window")
                found |= {(window, size) for size in slots if isinstance(size, int)}
        return tuple(sorted(found))

    @property
    def draft_tokens(self) -> int:
        """How many drafted tokens a step verifies at most; 0: it was not built for that."""
        return self.facts.options.of(RingOptions).slack

    def defaults(self) -> Defaults:
        """Read the checkpoint's generation_config.json."""
        return read_defaults(self.path / GENERATION, self.spec.text.vocab_size)

    def stop_ids(self) -> tuple[int, ...]:
        """Return token ids that end an answer: generation_config's, else the spec's."""
        stop = self.defaults().stop
        return self.spec.tokens.eos if stop is None else stop

    def suppressed(self) -> tuple[int, ...]:
        """Return ids never generated (matters for greedy decoding too): the checkpoint's, and those
        that a smaller per-layer table has no row for, which no step could read."""
        text = self.spec.text
        return (*self.defaults().suppress, *range(text.readable_ids, text.vocab_size))

    @property
    def chooses_on_device(self) -> bool:
        """Whether a step that chooses its own token could also look it up."""
        text = self.spec.text
        return text.readable_ids == text.vocab_size and self.embeds_on_device

    @property
    def embeds_on_device(self) -> bool:
        """Whether the rows of the tables are gathered where the engine runs."""
        devices = {getattr(t, "device", None) for t in self.tables.values()}
        return {d.type if d else "host" for d in devices} == {self.device}

    def embed(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Token ids -> the rows that the text graphs take, on the engine's device."""
        self.check_process()
        rows = embed_rows(self.program.graphs["embed"], self.tables, tokens)
        return {k: t.to(self.device) for k, t in rows.items()}


@lru_cache(maxsize=8)
def _plain_params(spec: Spec, dtype: str, media: Media) -> Mapping[str, Value]:
    return build_program(spec, dtype=dtype, media=media).params()


def embed_rows(graph: Any, tables: dict[str, Any], tokens: torch.Tensor) -> dict[str, Any]:
    """Token ids -> the feeds of the text graphs, through the embed graph."""
    outputs, _ = interpret(graph, {"tokens": tokens}, tables, {})
    return outputs
