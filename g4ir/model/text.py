"""Builds the graphs of a variant from its spec: embeddings, phases of the decoder or encoder, draft
model, towers."""

from __future__ import annotations

from functools import lru_cache

from g4ir.errors import InputError
from g4ir.ir.graph import Builder, Graph, Program
from g4ir.ops.types import Type
from g4ir.spec.parts import SLIDING
from g4ir.spec.record import Spec, need_model

from .decoder import BLOCKS, VERIFY, Decoder
from .draft import DRAFT, build_draft
from .encoder import ENCODE, Encoder
from .media import PICTURES, Media, placeholders, supported_media
from .towers import build_towers

#: graphs of a decoder's steps
TEXT_GRAPHS = ("prefill", "decode")
#: graphs that every engine of a decoder has
PHASES = ("embed", *TEXT_GRAPHS)
#: name of the table of per-layer embeddings, whose rows are only looked up
PLE_PARAM = "ple.table"


def build_program(
    spec: Spec,
    all_logits: bool = False,
    dtype: str | None = None,
    media: Media | None = None,
    verifies: bool = False,
    drafter: Spec | None = None,
) -> Program:
    """Return the graphs of one engine: `embed` (token ids to embeddings), `prefill` and `decode`,
    or `encode` for an encoder; with `verifies` also `verify`, for draft tokens, and with a drafter
    `draft`; with media also their towers, and for images or video `prefill_media` if their tokens
    attend to each other (`has_blocks`)."""
    kind, hidden = dtype or spec.dtype, drafter is not None
    phases = (*complete_graphs(spec), *(p for p in PHASES[2:] if not spec.embedding))
    phases = (*phases, VERIFY) if verifies else phases
    graphs = {p: build_graph(spec, p, all_logits, kind, media, hidden) for p in phases}
    if drafter:
        graphs[DRAFT] = build_draft(spec, drafter, kind)
    if media is None or not media.kinds:
        return Program(graphs)
    if has_blocks(spec) and set(PICTURES) & set(media.kinds):
        graphs[BLOCKS] = build_graph(spec, BLOCKS, all_logits, kind, hidden=hidden)
    return Program(graphs | build_towers(spec, media, kind))


def complete_graphs(spec: Spec) -> tuple[str, str]:
    """Return the names of two graphs that together read every weight of the text model."""
    return PHASES[0], ENCODE if spec.embedding else TEXT_GRAPHS[0]


def text_graphs(spec: Spec) -> tuple[str, ...]:
    """Return the names of the graphs that process a text: those of a decoder, or `encode`."""
    return (ENCODE,) if spec.embedding else TEXT_GRAPHS


def has_blocks(spec: Spec) -> bool:
    """Whether soft tokens of an image attend to each other in some layers."""
    return spec.text.use_bidirectional_attention is not None and SLIDING in spec.text.layer_types


@lru_cache(maxsize=16)  # all formats of a model share the same graphs
def build_graph(
    spec: Spec,
    phase: str = "decode",
    all_logits: bool = False,
    dtype: str | None = None,
    media: Media | None = None,
    hidden: bool = False,
) -> Graph:
    """Return the graph of one phase of a model.

    Dims: B sequences, S tokens of the chunk (1 in decode, M in verify), C slots of a full-length
    KV cache. prefill and decode take `embeds` [B,S,hidden] (scaled), `ple_rows` [B,S,layers*dim] if
    the spec has per-layer embeddings, `positions` i64[B,S] and `lengths` i64[B], the valid tokens
    of each sequence. They return `logits`, [B,1,vocab] at each sequence's last valid token, or
    [B,S,vocab] with all_logits. `verify` is decode of several tokens: they are written to the KV
    cache first, attention reads only the cache, and every token has logits. `prefill_media` also
    takes `block_ids` i64[B,S], -1 outside of images (see the op `attention`). With `hidden` they
    also return the last hidden state: of the tokens of `decode` and `verify`, else of each last
    valid token. An encoder has `encode` instead (model/encoder.py). `embed` takes `tokens` i64[B,S]
    and returns `embeds` and, if the spec has a per-layer table, `ple_rows`; with media, rows of
    placeholders are the padding token's. InputError for a phase that the spec does not have.
    """
    phases = (*PHASES, VERIFY, BLOCKS, ENCODE)
    if phase not in phases:
        raise InputError(f"unknown phase {phase!r}; one of {', '.join(phases)}")
    need_model(spec)
    if phase != "embed" and (phase == ENCODE) != bool(spec.embedding):
        kind = "an encoder, and has" if spec.embedding else "no encoder, and has"
        raise InputError(
            f"{spec.name} is {kind} no {phase}; its graphs: embed, {', '.join(text_graphs(spec))}"
        )
    if phase == BLOCKS and not has_blocks(spec):
        why = (
            "its soft tokens attend to earlier tokens only"
            if supported_media(spec)
            else "it takes text alone"
        )
        raise InputError(f"{spec.name} has no {BLOCKS}: {why}")
    if phase == "embed":
        ids = placeholders(spec.tokens, media.kinds if media else ())
        return _embed(spec, dtype or spec.dtype, tuple(ids.values()))
    if phase == ENCODE:
        return Encoder(spec, phase, True, dtype or spec.dtype).build()
    return Decoder(spec, phase, all_logits, dtype or spec.dtype, hidden).build()


def _embed(spec: Spec, dtype: str, ids: tuple[int, ...]) -> Graph:
    """Build the graph that looks up rows of the token table and of the per-layer table, scaled
    (rules 1, 2); placeholders `ids` get those of the padding token (rule 38)."""
    b, text = Builder("embed"), spec.text
    tokens = b.input("tokens", Type("i64", ("B", "S")))
    if ids:
        pad = spec.tokens.pad or 0
        tokens = b.emit("mask_ids", tokens, ids=ids, pad=pad, name="tokens.text")
    table = b.param("embed.table", Type(dtype, (text.vocab_size, text.hidden_size)))
    outs = [b.emit("embedding", table, tokens, scale=text.hidden_size**0.5, name="embeds")]
    if text.ple and text.ple.vocab_size:
        shape = (text.ple.vocab_size, text.num_hidden_layers * text.ple.dim)
        table = b.param(PLE_PARAM, Type(dtype, shape))
        outs.append(b.emit("embedding", table, tokens, scale=text.ple.dim**0.5, name="ple_rows"))
    return b.graph(*outs)
