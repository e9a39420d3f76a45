"""Compares an encoder's engine with a reference: embeddings of texts, in one chunk and alone, and
the values of its graph, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from g4ir.engine.embeddings import packed_inputs
from g4ir.engine.engine import Engine
from g4ir.ir.distance import Anchor, compare_rows, row_errors, tolerance_of
from g4ir.model.encoder import ENCODE
from g4ir.ui.progress import Progress

from .compare import compare_stage
from .hf import float64_model, other_attention
from .peers import EnginePeer, Peer
from .reference import coarse, float64_engine, reference_engine
from .report import VerifyReport, positions_of
from .stage_report import engine_name
from .stages import GraphStep, stored_stage
from .tokens import chosen_tokens, random_ids, window_of

Tensor = torch.Tensor
Texts = Sequence[Sequence[int]]
#: tokens of random texts, at most; the longest are a little longer than the window
MAX_TOKENS = 600


@dataclass(frozen=True)
class EmbeddingsReport(VerifyReport):
    """An encoder's engine against a reference; positions are texts, each computed in a chunk with
    others and alone."""

    ROWS: ClassVar = ("embeddings", "text", "texts")


def chosen_texts(engine: Engine, tokens: Sequence[int] | None) -> list[list[int]]:
    """Return the tokens as one text; for None random texts of several lengths up to the limits."""
    if tokens is not None:
        return [chosen_tokens(engine, tokens, 0).tolist()]
    window, limits = window_of(engine), engine.limits
    lengths, left = list[int](), min(limits.prefill_chunk, MAX_TOKENS)
    for n in (1, window + 2, 7, window // 2 + 1, 2 * window + 3, 17, 2, 40):
        n = min(n, limits.max_seq, left)
        if n and len(lengths) < limits.max_batch:
            lengths.append(n)
            left -= n
    ids = random_ids(engine, (sum(lengths),))
    return [t.tolist() for t in ids.split(lengths)]


def verify_texts(engine: Engine, peer: Peer, texts: Texts, progress: Progress) -> VerifyReport:
    """Compare the embeddings of texts with a peer's, and the values inside with the interpreter's;
    in 16 bits against transformers also the graphs with it in float64."""
    embed, *other_modes = _peer_modes(peer)
    got, alone = (_embeddings(engine, company)(texts) for company in (True, False))
    progress(f"{len(texts)} texts through {peer.name}")
    want, graphs = embed(texts), list[float]()

    def anchor() -> Anchor:
        progress(f"{len(texts)} texts through {peer.name} in float64")
        other, exact = (mode(texts) for mode in other_modes)
        if not isinstance(peer, EnginePeer):
            same = row_errors(_embeddings(float64_engine(engine))(texts), exact)
            limit = tolerance_of("f32", peer.name, *coarse(engine)).relative or 0.0
            graphs.extend((float(same.relative.max()), limit))
        return Anchor("float64", exact, [other])

    def rounding() -> float:
        plain, exact = (f(engine) for f in (reference_engine, float64_engine))
        errors = row_errors(_embeddings(plain)(texts), _embeddings(exact)(texts))
        return float(errors.relative.max())

    tolerance = tolerance_of(engine.dtype, peer.name, *coarse(engine))
    sides = compare_rows(
        tolerance, engine.dtype, [got, alone], want, anchor=anchor, rounding=rounding
    )
    reference = peer.engine if isinstance(peer, EnginePeer) else reference_engine(engine)
    progress("values inside beside the interpreter's")
    step = encode_step(engine, texts, embedded=True)
    first = compare_stage(stored_stage(engine, reference), None, [[step]], engine).first
    return EmbeddingsReport(
        engine_name(engine),
        peer.name,
        sides[0].tolerance,
        tuple(map(len, texts)),
        tuple(p for side in sides for p in positions_of(range(len(texts)), side)),
        float64=(graphs[0], graphs[1]) if graphs else None,
        first_difference=first.line() if first else None,
    )


def _embeddings(engine: Engine, company: bool = True) -> Callable[[Texts], Tensor]:
    """Return a function that embeds texts, in one chunk or each alone."""
    embedder = engine.embedder
    return (
        embedder.embed if company else lambda texts: torch.cat([embedder.embed([t]) for t in texts])
    )


def _peer_modes(peer: Peer) -> tuple[Callable[[Texts], Tensor], ...]:
    """Return a peer's embeddings of texts, those of its other mode, and those in float64."""
    if isinstance(peer, EnginePeer):
        engine = peer.engine
        return _embeddings(engine), _embeddings(engine, False), _embeddings(float64_engine(engine))
    model = peer.model

    @torch.no_grad()
    def embed(texts: Texts) -> Tensor:
        ids = [torch.tensor([t], device=model.model.device) for t in texts]
        return torch.cat([model(x).cpu() for x in ids])

    def other(texts: Texts) -> Tensor:
        with other_attention(model.model):
            return embed(texts)

    def exact(texts: Texts) -> Tensor:
        with float64_model(model.model):
            return embed(texts)

    return embed, other, exact


def encode_step(engine: Engine, texts: Texts, embedded: bool = False) -> GraphStep:
    """Return the step of the encode graph on a chunk of texts; embedded: on their embeddings, not
    on tokens."""
    inputs = packed_inputs(texts, engine.limits.max_batch)
    count = inputs["tokens"].shape[1]
    if embedded:
        inputs |= engine.embed_tokens(inputs.pop("tokens"))
    return GraphStep(ENCODE, 0, count, inputs, count)
