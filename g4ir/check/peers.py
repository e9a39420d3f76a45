"""Peers that an engine is compared with: the interpreter on the same weights, or transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch

from g4ir.builder.module import need_transformers
from g4ir.engine.engine import Engine
from g4ir.ui.progress import Progress

from .hf import (
    cache_argument,
    other_attention,
    round_activations,
    rounding_caches,
    rows_kept,
    verified_model,
    wide_model,
)
from .reference import reference_engine, wide_engine
from .tokens import Turns

Tensor = torch.Tensor


@dataclass(frozen=True)
class EnginePeer:
    """A peer that is any engine, one row at a time."""

    name: ClassVar = "reference"
    engine: Engine

    def logits(self, given: Turns) -> Tensor:
        """Return f32[N, vocab]."""
        session = self.engine.session()
        turns = given.ids.split([*given.sizes])
        rows = [session.prefill(t[None], all_logits=given.every)[0] for t in turns]
        return torch.cat(rows) if given.every else torch.stack(rows)

    def in_rounds(self, given: Turns) -> Tensor:
        """Return the logits after each single step at the end of the turns, where these are
        verified in rounds: half of each is right, the rest is wrong and rejected."""
        session, most = self.engine.session(), self.engine.draft_tokens + 1
        tokens, at, rows = given.ids, len(given.ids) - given.steps, list[Tensor]()
        for t in tokens[:at].split([*given.sizes[: len(given.sizes) - given.steps]]):
            session.prefill(t[None])
        wrong = tokens.flip(0).repeat(most)
        while at < len(tokens):
            right = tokens[at : at + (most + 1) // 2]
            draft = torch.cat((right, wrong))[: min(most, self.engine.limits.max_seq - at)]
            found = session.verify(draft[None])[0, : len(right)]
            rows.append(found.to("cpu", torch.float32, copy=True))
            at += len(right)
            session.truncate([at])
        return torch.cat(rows)

    def wide(self, given: Turns) -> Tensor:
        """Return `logits` in float64 on the same weights."""
        return EnginePeer(wide_engine(self.engine)).logits(given)

    def other(self, given: Turns) -> Tensor:
        """Return `logits` in another mode, the same sums in another order: token by token."""
        return self.logits(Turns(given.ids, [1] * len(given.ids)))[given.where]

    def greedy(self, prompt: Tensor, count: int, readable: int) -> tuple[list[int], Tensor]:
        """Return (tokens, the logits f32[count, readable] that chose them), of the ids below
        `readable` alone."""
        session = self.engine.session()
        rows = [session.prefill(prompt[None])[:, :readable]]
        while len(rows) < count:
            rows.append(session.decode(rows[-1].argmax(-1))[:, :readable])
        logits = torch.cat(rows)
        return logits.argmax(-1).tolist(), logits


@dataclass(frozen=True)
class HfPeer:
    """A transformers text model: one pass without a cache, greedy tokens with one. `caches` makes
    the cache of either where K and V are to be rounded."""

    name: ClassVar = "hf"
    model: Any
    caches: Callable[[], Any] | None = None

    def logits(self, given: Turns) -> Tensor:
        """Return as EnginePeer."""
        device = self.model.device
        where = torch.tensor(given.where, device=device)
        with torch.no_grad():
            ids = given.ids[None].to(device)
            past = {cache_argument(self.model.forward): self.caches()} if self.caches else {}
            out = self.model(input_ids=ids, use_cache=False, logits_to_keep=where, **past)
        rows: Tensor = out.logits[0]
        return rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows

    def wide(self, given: Turns) -> Tensor:
        """Return `logits` in float64 on the same weights."""
        with wide_model(self.model):
            return self.logits(given)

    def other(self, given: Turns) -> Tensor:
        """Return `logits` of the other attention: one product where eager has two, or the
        reverse."""
        with other_attention(self.model):
            return self.logits(given)

    def greedy(self, prompt: Tensor, count: int, readable: int) -> tuple[list[int], Tensor]:
        """Return as EnginePeer."""
        from transformers import DynamicCache

        cache = self.caches() if self.caches else DynamicCache(config=self.model.config)
        given = {cache_argument(self.model.forward): cache, "logits_to_keep": rows_kept(self.model)}
        column, rows = prompt[None], []
        with torch.no_grad():
            for _ in range(count):
                out = self.model(input_ids=column, use_cache=True, **given)
                rows.append(out.logits[0, -1, :readable].float())
                column = rows[-1].argmax()[None, None]
        logits = torch.stack(rows)
        return logits.argmax(-1).tolist(), logits


Peer: TypeAlias = EnginePeer | HfPeer


def find_peer(
    engine: Engine, against: str, checkpoint: str | Path | None, progress: Progress
) -> Peer:
    """Return the peer of `verify --against`."""
    if against == "reference":
        return EnginePeer(reference_engine(engine))
    need_transformers("--against hf")
    model = verified_model(engine, checkpoint, progress)
    round_activations(engine, model)
    return HfPeer(model, rounding_caches(engine, model))
