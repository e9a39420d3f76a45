"""Compares an encoder's engine with a reference: embeddings of texts and media, in one chunk and
alone, and the values of its graph.

Media are checked in texts with one medium each. Against the interpreter, both sides get the soft
tokens that the interpreter computes from the tower's graph; against transformers, each side runs
its towers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from g4ir.engine.embeddings import EncoderTokens, packed_inputs
from g4ir.engine.engine import Engine
from g4ir.ir.distance import Anchor, compare_rows, row_errors, tolerance_of
from g4ir.model.encoder import ENCODE
from g4ir.model.media import placeholders
from g4ir.ui.progress import Progress

from .compare import compare_stage
from .hf import float64_model, other_attention
from .items import run_tower, smallest_items
from .media import compare_tower
from .peers import EnginePeer, HfPeer, Peer
from .reference import coarse, float64_engine, reference_engine
from .report import VerifyReport, positions_of
from .stage_report import Difference, engine_name
from .stages import GraphStep, stored_stage
from .tokens import chosen_tokens, random_ids, window_of

Tensor = torch.Tensor
Texts = Sequence[Sequence[int]]
#: maximum total tokens of the random texts; some are longer than the window if the limits permit
MAX_TOKENS = 600
#: tokens of text before a medium, and after it
AROUND = 5


@dataclass(frozen=True)
class EmbeddingsReport(VerifyReport):
    """Report on an encoder's engine against a reference. `positions` has two entries per text, with
    `at` the text's index: embedded in one chunk with the others, and alone."""

    ROWS: ClassVar = ("embeddings", "text", "texts")
    #: kinds of media: the last texts have one medium each, in this order
    kinds: tuple[str, ...] = ()

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield from super()._rows()
        for i, kind in enumerate(self.kinds, len(self.turns) - len(self.kinds)):
            worst = max(p.relative for p in self.positions if p.at == i)
            yield kind, f"{worst:>12.2e}{i:>10}, relative"


@dataclass(frozen=True, eq=False)
class MediaText(EncoderTokens):
    """Token ids with placeholders of a medium, its soft tokens as computed by the interpreter, and
    the medium itself (an Item)."""

    item: Any = None


Input = Sequence[int] | MediaText
Embed = Callable[[Sequence[Input]], Tensor]


def chosen_texts(engine: Engine, tokens: Sequence[int] | None) -> list[list[int]]:
    """Return the tokens as one text; for None random texts of several lengths up to the limits."""
    if tokens is not None:
        return [chosen_tokens(engine, tokens, 0).tolist()]
    window, limits = window_of(engine), engine.limits
    lengths, remaining = list[int](), min(limits.prefill_chunk, MAX_TOKENS)
    for n in (1, window + 2, 7, window // 2 + 1, 2 * window + 3, 17, 2, 40):
        n = min(n, limits.max_seq, remaining)
        if n and len(lengths) < limits.max_batch:
            lengths.append(n)
            remaining -= n
    ids = random_ids(engine, (sum(lengths),))
    return [t.tolist() for t in ids.split(lengths)]


def media_texts(engine: Engine) -> tuple[list[MediaText], list[Difference]]:
    """Return a text for each kind of media, with one medium, unless it is longer than max_seq; and
    the first difference from the interpreter of each compared tower that has one."""
    texts, first, ids = list[MediaText](), list[Difference](), placeholders(engine.spec.tokens)
    for item in smallest_items(engine, every=True):
        part, soft = compare_tower(engine, item)
        around = random_ids(engine, (2 * AROUND,)).tolist()
        ids_with_media = [*around[:AROUND], *[ids[item.kind]] * item.rows, *around[AROUND:]]
        texts.append(MediaText(ids_with_media, (soft,), item))
        first += [part.report.first] if part.report.first else []
    return [text for text in texts if len(text) <= engine.limits.max_seq], first


def verify_texts(
    engine: Engine, peer: Peer, texts: Texts, progress: Progress, with_media: bool = False
) -> VerifyReport:
    """Compare the embeddings of texts and media with a reference's, and intermediate values with
    the interpreter's; in 16 bits against transformers, also compare the text graphs in float64."""
    towered = not isinstance(peer, EnginePeer)
    progress("towers against the interpreter's")
    media, wrong = media_texts(engine) if with_media else ([], [])
    media = [] if isinstance(peer, HfPeer) and not peer.with_towers else media
    embed, *other_modes = _peer_modes(peer)
    inputs: list[Input] = [*texts, *media]
    got, alone = (_embeddings(engine, company, towered)(inputs) for company in (True, False))
    progress(f"{len(inputs)} texts through {peer.name}")
    want, graphs = embed(inputs), list[float]()

    def anchor() -> Anchor:
        progress(f"{len(inputs)} texts through {peer.name} in float64")
        other, exact = (mode(inputs) for mode in other_modes)
        if not isinstance(peer, EnginePeer):
            rows = _embeddings(float64_engine(engine))(texts)
            same = row_errors(rows, exact[: len(texts)])
            limit = tolerance_of("f32", peer.name, *coarse(engine)).relative or 0.0
            graphs.extend((float(same.relative.max()), limit))
        return Anchor("float64", exact, [other])

    def rounding() -> float:
        plain, exact = (f(engine) for f in (reference_engine, float64_engine))
        errors = row_errors(_embeddings(plain)(inputs), _embeddings(exact)(inputs))
        return float(errors.relative.max())

    tolerance = tolerance_of(engine.dtype, peer.name, *coarse(engine))
    sides = compare_rows(
        tolerance, engine.dtype, [got, alone], want, anchor=anchor, rounding=rounding
    )
    reference = peer.engine if isinstance(peer, EnginePeer) else reference_engine(engine)
    progress("intermediate values against the interpreter's")
    step = encode_step(engine, texts, embedded=True)
    first = compare_stage(stored_stage(engine, reference), None, [[step]], engine).first
    wrong += [first] if first else []
    return EmbeddingsReport(
        engine_name(engine),
        peer.name,
        sides[0].tolerance,
        tuple(map(len, inputs)),
        tuple(p for side in sides for p in positions_of(range(len(inputs)), side)),
        float64=(graphs[0], graphs[1]) if graphs else None,
        first_difference=wrong[0].line() if wrong else None,
        kinds=tuple(text.item.kind for text in media),
    )


def _embeddings(engine: Engine, company: bool = True, towered: bool = False) -> Embed:
    """Return a function that embeds texts, in one chunk (`company`) or each alone; `towered`: media
    through the engine's towers, not by the soft tokens of MediaText."""

    def tokens(text: Input) -> EncoderTokens:
        if not isinstance(text, MediaText):
            return EncoderTokens([*text])
        return replace(text, soft=(run_tower(engine, text.item),)) if towered else text

    def embed(texts: Sequence[Input]) -> Tensor:
        out = torch.empty(len(texts), engine.spec.embedding_size)
        for rows, vectors in engine.embedder.encode([*map(tokens, texts)]):
            out[rows] = vectors
        return out

    return embed if company else lambda texts: torch.cat([embed([t]) for t in texts])


def _peer_modes(peer: Peer) -> tuple[Embed, ...]:
    """Return functions that embed texts by the reference, by the reference in another mode (each
    text alone; for transformers another attention), and by the reference in float64."""
    if isinstance(peer, EnginePeer):
        engine = peer.engine
        return _embeddings(engine), _embeddings(engine, False), _embeddings(float64_engine(engine))
    model = peer.model

    @torch.no_grad()
    def embedding(text: Input, with_towers: Any = peer.with_towers) -> Tensor:
        if not isinstance(text, MediaText):
            row: Tensor = model(torch.tensor([text], device=model.model.device))
        else:
            row = model.with_media(
                with_towers, torch.tensor([text.ids]), text.item.kind, text.item.feeds
            )
        return row.cpu()

    def embed(texts: Sequence[Input]) -> Tensor:
        return torch.cat([*map(embedding, texts)])

    def other(texts: Sequence[Input]) -> Tensor:
        with other_attention(model.model):
            return embed(texts)

    def exact(texts: Sequence[Input]) -> Tensor:
        with float64_model(model.model):
            rows = [embedding(text) for text in texts if not isinstance(text, MediaText)]
        # towers mix dtypes in float64: they run in float32
        with_towers = peer.with_towers and deepcopy(peer.with_towers).float()
        return torch.cat(
            [*rows, *(embedding(text, with_towers).double() for text in texts[len(rows) :])]
        )

    return embed, other, exact


def encode_step(engine: Engine, texts: Texts, embedded: bool = False) -> GraphStep:
    """Return the step of the encode graph on a chunk of texts; `embedded`: its inputs are
    embeddings instead of token ids."""
    inputs = packed_inputs(texts, engine.limits.max_batch)
    count = inputs["tokens"].shape[1]
    if embedded:
        inputs |= engine.embed_tokens(inputs.pop("tokens"))
    return GraphStep(ENCODE, 0, count, inputs, count)
