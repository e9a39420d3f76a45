"""Peers that an engine is compared with: the interpreter on the same weights, or transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch

from g4ir.builder.module import need_transformers
from g4ir.engine.engine import Engine
from g4ir.ir.distance import max_or, row_errors
from g4ir.ops.budgets import UNIT
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
from .reference import reference_engine, watched, wide_engine
from .report import LAYER_TYPICAL, LAYER_WORST, LocalError
from .tokens import Turns

Tensor = torch.Tensor
#: value -> index of a token -> the value's row there, f32[hidden]
Rows = dict[str, dict[int, Tensor]]
#: logits of a run, and the outputs of its layers
Shown = tuple[Tensor, Rows]
#: names of what is compared layer by layer
LAYER_OUT, FINAL = re.compile(r"L\d+\.out"), "final.norm"
#: units of the dtype by which the first expert left out lies behind the last one taken, relative
#: to it, where either may be taken
CLOSE_UNITS = 8


@dataclass(frozen=True)
class EnginePeer:
    """A peer that is any engine, one row at a time."""

    name: ClassVar = "reference"
    engine: Engine

    def logits(self, given: Turns, ends: Sequence[int] = (), layers: Rows | None = None) -> Tensor:
        """Return f32[N, vocab]. The outputs of the layers at the tokens `ends`, the ends of the
        chunks, go into `layers`."""
        wanted = set(ends)

        def keep(chunk: range, name: str, t: Tensor) -> None:
            if layers is not None and (name == FINAL or LAYER_OUT.fullmatch(name)):
                # After the last layer whose K and V are read later, a chunk goes on with its end.
                rows = t[0].to("cpu", torch.float32, copy=True)  # steps reuse the memory
                first = chunk.stop - t.shape[1]
                kept = {first + i: row for i, row in enumerate(rows) if first + i in wanted}
                layers.setdefault(name, {}).update(kept)

        session = (self.engine if layers is None else watched(self.engine, keep)).session()
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

    def logits(self, given: Turns, ends: Sequence[int] = (), layers: Rows | None = None) -> Tensor:
        """Return as EnginePeer."""
        device = self.model.device
        where = torch.tensor(given.where, device=device)
        with torch.no_grad(), _kept(self.model.get_decoder(), ends, layers):
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

    def local(self, given: Turns, own: Shown, theirs: Shown, dtype: str) -> tuple[LocalError, ...]:
        """Compare each layer, and the head, in float64 on what the engine gave it, beside the same
        of the peer in 16 bits: what a layer adds of its own, whatever the ones before it added.
        The head counts where its input is shown, or it would stand for all layers. A quarter of a
        unit is the least allowed: rounding once moves by up to half."""
        count = len(self.model.get_decoder().layers)
        at = {}
        for i in range(count):
            mine, others = (shown[1].get(f"L{i}.out", {}) for shown in (own, theirs))
            if both := sorted(mine.keys() & others.keys()):
                at[i] = both
        if not at:
            return ()  # the engine shows none of its layers
        if ends := [t for t in given.where if t in at.get(count - 1, ())]:
            at[count] = ends
        found, peers = (self._added(given, shown, at, dtype) for shown in (own, theirs))
        out = []
        for i, added in found.items():
            median, worst = map(float, added)
            peer_median, peer_worst = (max_or(t, UNIT[dtype] / 4) for t in peers[i])
            ok = median <= LAYER_TYPICAL * peer_median and worst <= LAYER_WORST * peer_worst
            label = "the head" if i == count else f"layer {i}"
            out.append(LocalError(label, median, worst, peer_median, peer_worst, ok))
        return tuple(out)

    def _added(
        self, given: Turns, shown: Shown, at: Mapping[int, Sequence[int]], dtype: str
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Return, by layer (the head after the last), the median distance to float64 on its own
        inputs at the tokens `at`, and the worst without near ties of a router. A layer of which
        none are shown counts as part of the next."""
        (logits, rows), count = shown, len(self.model.get_decoder().layers)
        inputs = {i + 1: {t: rows[f"L{i}.out"][t] for t in at[i]} for i in at if i < count}
        margins: dict[int, Tensor] = {}
        wide: Rows = {}
        with wide_model(self.model, inputs, margins):
            wide_logits = self.logits(given, range(len(given.ids)), wide)
        out, parts = {}, set[int]()
        for i in range(count + 1):
            parts.add(i)
            if i not in at:
                continue
            if i == count:
                found = [given.where.index(t) for t in at[i]]
                errors = row_errors(logits[found], wide_logits[found])
            else:
                outs = (x[f"L{i}.out"] for x in (rows, wide))
                errors = row_errors(*(torch.stack([x[j] for j in at[i]]) for x in outs))
            tied = torch.zeros(len(at[i]), dtype=torch.bool)
            for part in margins.keys() & parts:
                tied |= margins[part][at[i]] < CLOSE_UNITS * UNIT[dtype]
            median, clear = errors.distance.median(), errors.distance[~tied]
            out[i] = median, clear.max() if len(clear) else median
            parts.clear()
        return out

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


@contextmanager
def _kept(decoder: Any, ends: Sequence[int], layers: Rows | None) -> Iterator[None]:
    """Keep the rows `ends` of what the layers and the final norm of a transformers model make."""

    def keeper(name: str) -> Callable[..., None]:
        def keep(module: Any, given: Any, made: Any) -> None:
            out = made[0] if isinstance(made, tuple) else made
            if layers is not None:
                layers[name] = {at: out[0, at].float().cpu() for at in ends}

        return keep

    named = {f"L{i}.out": layer for i, layer in enumerate(decoder.layers)} | {FINAL: decoder.norm}
    with ExitStack() as hooks:
        for name, module in named.items():
            hooks.callback(module.register_forward_hook(keeper(name)).remove)
        yield


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
