"""References for an engine: the interpreter on the same weights, or transformers; and their
rounding errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch

from g4ir.builder.module import need_transformers
from g4ir.engine.engine import Engine
from g4ir.engine.session import Session
from g4ir.ir.distance import Anchor, row_errors
from g4ir.ui.progress import Progress, no_progress

from .hf import (
    HfSession,
    cache_argument,
    encoder_with_towers,
    float64_model,
    hf_origin,
    other_attention,
    round_activations,
    rounding_caches,
    verified_model,
)
from .reference import coarse, float64_engine, float64_refusal, reference_engine
from .tokens import Turns, draft_rounds

Tensor = torch.Tensor
#: tokens of a chunk in the interpreter's other mode; not less, since every chunk dequantises all
#: weights
OTHER = 8


@dataclass(frozen=True)
class EnginePeer:
    """An engine as a reference, with batch size 1."""

    name: ClassVar = "reference"
    engine: Engine

    @property
    def device(self) -> str:
        return self.engine.device

    def logits(self, turns: Turns) -> Tensor:
        """Return the logits f32[N, vocab] after the tokens `turns.where`."""
        session = self.engine.session()
        parts = turns.ids.split([*turns.sizes])
        rows = [session.prefill(t[None], all_logits=turns.every)[0] for t in parts]
        return torch.cat(rows) if turns.every else torch.stack(rows)

    def in_rounds(self, turns: Turns) -> Tensor:
        """Return the logits after each decode step at the end of the turns, computed by
        verification steps in which about half of the draft tokens are right and the others are
        rejected."""
        session, prompts = self.engine.session(), len(turns.sizes) - turns.steps
        rows = [step(session) for step in self.round_steps(turns)]
        return torch.cat(rows[prompts:])

    def round_steps(self, turns: Turns) -> Iterator[Callable[[Session], Tensor]]:
        """Yield functions of a session for `in_rounds` that return logits: first the prefill of the
        longer turns, then each verification step."""
        start, limits = len(turns.ids) - turns.steps, self.engine.limits
        for t in turns.ids[:start].split([*turns.sizes[: len(turns.sizes) - turns.steps]]):
            yield methodcaller("prefill", t[None])
        width = self.engine.draft_tokens + 1
        for _, draft, right in draft_rounds(turns.ids, start, width, limits.max_seq):
            yield partial(_verify, draft, right)

    def in_float64(self, turns: Turns) -> Tensor:
        """Return `logits` in float64 on the same weights."""
        return EnginePeer(float64_engine(self.engine)).logits(turns)

    def other(self, turns: Turns) -> Tensor:
        """Return `logits` computed in another mode, which sums in another order: in chunks of OTHER
        tokens if every token's logits are compared, else token by token."""
        size = OTHER if turns.every else 1
        sizes = [len(t) for t in turns.ids.split(size)]
        return self.logits(Turns(turns.ids, sizes, turns.every))[turns.where]

    def greedy(self, prompt: Tensor, count: int, ids: Tensor) -> tuple[list[int], Tensor]:
        """Return (tokens, logits f32[count, N]) of greedy decoding over some ids i64[N]."""
        session = self.engine.session()
        return _greedy(session.prefill(prompt[None]), session.decode, count, ids)


@dataclass(frozen=True)
class HfPeer:
    """A transformers text model: logits in one forward pass, greedy tokens with a KV cache.
    `caches`: constructor of a cache that rounds K and V, which both then use."""

    name: ClassVar = "hf"
    model: Any
    caches: Callable[[], Any] | None = None
    #: an encoder's model with its towers, or None
    with_towers: Any = None

    @property
    def device(self) -> str:
        return str(self.model.device.type)

    def logits(self, turns: Turns) -> Tensor:
        """As in EnginePeer."""
        device = self.model.device
        where = torch.tensor(turns.where, device=device)
        with torch.no_grad():
            ids = turns.ids[None].to(device)
            past = {cache_argument(self.model.forward): self.caches()} if self.caches else {}
            out = self.model(input_ids=ids, use_cache=False, logits_to_keep=where, **past)
        rows: Tensor = out.logits[0]
        return rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows

    def in_float64(self, turns: Turns) -> Tensor:
        """Return `logits` in float64 on the same weights."""
        with float64_model(self.model):
            return self.logits(turns)

    def other(self, turns: Turns) -> Tensor:
        """Return `logits` with the other attention: sdpa for eager, or the reverse."""
        with other_attention(self.model):
            return self.logits(turns)

    def greedy(self, prompt: Tensor, count: int, ids: Tensor) -> tuple[list[int], Tensor]:
        """As in EnginePeer."""
        from transformers import DynamicCache

        new_cache = self.caches or partial(DynamicCache, config=self.model.config)
        step = HfSession(self.model, new_cache).step
        return _greedy(step(prompt[None]), lambda t: step(t[:, None]), count, ids)


def _greedy(
    first: Tensor, step: Callable[[Tensor], Tensor], count: int, ids: Tensor
) -> tuple[list[int], Tensor]:
    """Decode `count` tokens greedily among `ids` i64[N], the first from a prompt's logits [1,
    vocab], the others by `step` (token -> logits). Return the tokens, and their logits f32[count,
    N]."""
    ids = ids.to(first.device)
    rows = [first[:, ids].float()]
    while len(rows) < count:
        rows.append(step(ids[rows[-1].argmax(-1)])[:, ids].float())
    logits = torch.cat(rows)
    return ids[logits.argmax(-1)].tolist(), logits


def _verify(draft: Tensor, right: int, session: Session) -> Tensor:
    """Verify draft tokens i64[n], truncate all but the first `right` again, and return the logits
    f32[right, vocab] after those."""
    at = int(session.length[0])
    logits = session.verify(draft[None])[0, :right]
    rows = logits.to("cpu", torch.float32, copy=True)
    session.truncate([at + right])
    return rows


Peer: TypeAlias = EnginePeer | HfPeer


def find_peer(
    engine: Engine, against: str, checkpoint: str | Path | None, progress: Progress
) -> Peer:
    """Return the reference of `verify --against`; MissingError if transformers is missing."""
    if against == "reference":
        return EnginePeer(reference_engine(engine))
    need_transformers("--against hf")
    model = verified_model(engine, checkpoint, progress)
    round_activations(engine, model)
    origin = hf_origin(engine, checkpoint, "verify --against hf")
    with_towers = encoder_with_towers(engine, origin, model)
    return HfPeer(model, rounding_caches(engine, model), with_towers)


def find_anchor(
    engine: Engine, peer: Peer, turns: Turns, want: Tensor, progress: Progress = no_progress
) -> Anchor | None:
    """Return the anchor from which distances are measured, the reference's logits in float64, and
    its logits in its other mode. If float64 does not fit in memory, the anchor is `want`, its
    logits; for the interpreter, whose modes round almost alike, None is returned then."""
    tokens, rows = len(turns.ids), len(turns.where)
    refusal = float64_refusal(engine, tokens, rows, peer.device)
    progress(f"{tokens} tokens through {peer.name} {'again' if refusal else 'in float64'}")
    if refusal and isinstance(peer, EnginePeer):
        return None
    other = peer.other(turns).cpu()
    if refusal:
        return Anchor("its other mode", want, [other], refusal)
    return Anchor("float64", peer.in_float64(turns.joined).cpu(), [other])


def rounding_error(engine: Engine, turns: Turns) -> float:
    """Return how far rounding alone moves this model's logits (relative to the row's rms): the
    interpreter in fp32 against the interpreter in float64. With random weights it may grow from
    layer to layer. If the engine rounds to a coarse grid, the interpreter's other mode is measured
    too, since the modes round values near the middle of two grid points differently."""
    reference = EnginePeer(reference_engine(engine))
    exact = reference.in_float64(turns.joined)
    modes = [reference.logits, *([reference.other] if coarse(engine) else [])]
    return max(float(row_errors(mode(turns), exact).relative.max()) for mode in modes)
