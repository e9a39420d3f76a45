"""State of a loaded engine that sessions and towers share."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from g4ir.artefact.directory import Manifest, engine_label
from g4ir.backends.base import Runtime
from g4ir.errors import InputError
from g4ir.ir.graph import Graph, Program, Value
from g4ir.ir.interpret import interpret
from g4ir.model.media import Media
from g4ir.model.text import build_program
from g4ir.ops.types import torch
from g4ir.parallel.table import Share
from g4ir.plan.engine_limits import Limits
from g4ir.plan.options import BuildConfig
from g4ir.spec.reader import did_you_mean
from g4ir.spec.record import Spec
from g4ir.weights.checkpoint import GENERATION
from g4ir.weights.pack import UnpackedWeights, params_of_rank

from .adapters import Adapters
from .prompts import Defaults, read_defaults

Parts = TypeVar("Parts", bound="EngineParts")


@dataclass(repr=False)
class EngineParts:
    """A program, its runtime and its embedding tables, in the process that loaded them."""

    path: Path
    #: manifest.json, typed
    facts: Manifest
    program: Program
    #: graph that packs the checkpoint's weights into the engine's params
    prologue: Graph = field(repr=False)
    runtime: Runtime
    tables: dict[str, Any] = field(repr=False)
    #: LoRA adapters, if the engine was loaded with slots for them
    adapters: Adapters | None = field(default=None, kw_only=True, repr=False)
    #: lock: one tower runs at a time
    towers: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _process: int = field(default_factory=os.getpid, init=False)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k} {v}" for k, v in asdict(self.limits).items())
        where = f"{self.config.backend} on {self.device}, {self.dtype}"
        return f"<Engine {str(self.path)!r}: {self.spec.name}, {where}, {sizes}>"

    @property
    def label(self) -> str:
        """Its name in messages: the model as the user named it, if the engine was built on first
        use, else the engine's path."""
        return engine_label(self.path)

    @property
    def name(self) -> str:
        """The last path component of its label, for tables."""
        return Path(self.label).resolve().name

    @property
    def config(self) -> BuildConfig:
        return self.facts.config

    def configured(self: Parts, **changes: Any) -> Parts:
        """Return the engine with other options that do not affect its graphs."""
        facts = replace(self.facts, config=replace(self.config, **changes))
        return replace(self, facts=facts)

    @property
    def spec(self) -> Spec:
        return self.config.spec

    @property
    def device(self) -> str:
        return self.config.device

    @property
    def dtype(self) -> str:
        return self.config.dtype

    @property
    def limits(self) -> Limits:
        return self.config.limits

    @property
    def media(self) -> Media:
        """Kinds of media that it takes, and the sizes of their towers."""
        return self.config.media

    @property
    def drafter(self) -> Spec | None:
        return self.config.drafter

    @property
    def draft_tokens(self) -> int:
        """Maximum draft tokens of a verification step; 0: no speculative decoding."""
        return self.config.draft_tokens

    @property
    def all_logits(self) -> bool:
        return self.config.all_logits

    @property
    def ranks(self) -> int:
        """Number of ranks (processes of tensor parallelism)."""
        return self.config.ranks

    @property
    def manifest(self) -> dict[str, Any]:
        """manifest.json as a dict."""
        return json.loads(self.facts.text())

    def param(self, name: str) -> torch.Tensor:
        """Return a weight of the model, such as `L0.mlp.w_gate`, as the engine computes with it:
        dequantised, joined from all ranks, on the host, in the engine's dtype. InputError for a
        name that the model does not have."""
        plain = plain_params(self.spec, self.dtype, self.media, self.drafter)
        if name not in plain:
            near = did_you_mean(name, plain)
            raise InputError(f"param {name!r}: {self.spec.name} has no such weight{near}")
        with torch.no_grad():
            weight = self.share.join_parts(
                plain[name], lambda rank, v: self.unpacked(rank).weight(v)
            )
            return weight.cpu()

    def unpacked(self, rank: int = 0) -> UnpackedWeights:
        """Return access to a rank's original weights, unpacked from its packed params; for those
        that cannot be recovered it raises EngineError."""
        params = self.runtime.source
        if rank:
            params = params_of_rank(params, self.path, rank)
        return UnpackedWeights(params, self.program.params(), self.prologue, self.path)

    def loaded_adapters(self, name: str) -> Adapters:
        """Return the engine's adapters; InputError, which names the requested adapter, if the
        engine was loaded without slots for adapters."""
        if self.adapters is None:
            fix = "load the engine with adapters={NAME: DIR}, or serve it with --adapter NAME=DIR"
            why = f"{self.label} was loaded without adapters"
            raise InputError(f"adapter {name[:40]!r}: {why}; {fix}")
        return self.adapters

    def check_process(self) -> None:
        """Raise InputError in a forked child, which would wait for threads of the parent."""
        if os.getpid() != self._process:
            why = f"loaded by process {self._process}, of which this is a fork"
            raise InputError(f"{self.label}: {why}; load the engine in the process that uses it")

    @property
    def share(self) -> Share:
        """Which shards of the weights rank 0 has."""
        return Share(self.config.sharding, 0)

    @cached_property
    def rings(self) -> tuple[tuple[int, int], ...]:
        """(window, slots) of every distinct ring cache."""
        rings: set[tuple[int, int]] = set()
        for g in self.program.graphs.values():
            caches = {*g.state, *g.next.values()}
            for n in (n for n in g.nodes if n.definition.cache_range):
                slots = {v.type.shape[0] for v in n.inputs if v in caches}
                window = n.integer("window")
                rings |= {(window, size) for size in slots if isinstance(size, int)}
        return tuple(sorted(rings))

    def defaults(self) -> Defaults:
        """Read the checkpoint's generation_config.json."""
        return read_defaults(self.path / GENERATION, self.spec.text.vocab_size)

    def stop_ids(self) -> tuple[int, ...]:
        """Return token ids that end an answer: generation_config's, else the spec's."""
        stop = self.defaults().stop
        return self.spec.tokens.eos if stop is None else stop

    def suppressed(self) -> tuple[int, ...]:
        """Return token ids that are never generated: the checkpoint's suppress_tokens, and those
        beyond a smaller per-layer embedding table."""
        text = self.spec.text
        return (*self.defaults().suppress, *range(text.readable_ids, text.vocab_size))

    @property
    def chooses_on_device(self) -> bool:
        """Whether a device step can embed the token that it has sampled."""
        text = self.spec.text
        return text.readable_ids == text.vocab_size and self.embeds_on_device

    @property
    def embeds_on_device(self) -> bool:
        """Whether the embedding tables are on the engine's device; for a CPU, memory-mapped files
        count."""
        if self.device == "cpu":
            return True
        devices = {getattr(t, "device", None) for t in self.tables.values()}
        return {d.type if d else "host" for d in devices} == {self.device}

    def embed_tokens(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Embed token ids i64[B, S]: return inputs of the text graphs by name, [B, S, ...], on the
        engine's device."""
        self.check_process()
        rows = self.runtime.embed(tokens, self.tables)
        if rows is None:
            rows = embed_rows(self.program.graphs["embed"], self.tables, tokens)
        return {k: t.to(self.device) for k, t in rows.items()}


@lru_cache(maxsize=8)
def plain_params(
    spec: Spec, dtype: str, media: Media, drafter: Spec | None = None
) -> Mapping[str, Value]:
    return build_program(spec, dtype=dtype, media=media, drafter=drafter).params()


def embed_rows(graph: Any, tables: dict[str, Any], tokens: torch.Tensor) -> dict[str, Any]:
    """Embed token ids by running the embed graph on rows of the tables."""
    outputs, _ = interpret(graph, {"tokens": tokens}, tables, {})
    return outputs
