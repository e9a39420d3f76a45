"""Gemma 4, written once: Spec -> Graph."""

from __future__ import annotations

from g4ir.errors import InputError
from g4ir.ir.graph import Builder, Graph, Program
from g4ir.ops.types import Type
from g4ir.spec.parts import SLIDING
from g4ir.spec.record import Spec

from .decoder import BLOCKS, VERIFY, Decoder
from .draft import DRAFT, build_draft
from .media import PICTURES, Media, placeholders

#: graphs that a step of the text model runs, and all of them
TEXT_GRAPHS = ("prefill", "decode")
PHASES = ("embed", *TEXT_GRAPHS)
#: the table of per-layer embeddings, gathered from and never multiplied with
PLE_PARAM = "ple.table"


def build_program(
    spec: Spec,
    all_logits: bool = False,
    dtype: str | None = None,
    media: Media | None = None,
    verifies: bool = False,
    drafter: Spec | None = None,
) -> Program:
    """Return the graphs of one engine: `embed` (token ids to rows), `prefill` and `decode`; for one
    that `verifies` drafted tokens also `verify`, and `draft` for one with a drafter; for one that
    takes media also `prefill_media`, where pictures are seen both ways, and its towers."""
    kind, hidden = dtype or spec.dtype, drafter is not None
    phases = (*PHASES, VERIFY) if verifies else PHASES
    graphs = {p: build_graph(spec, p, all_logits, kind, media, hidden) for p in phases}
    if drafter:
        graphs[DRAFT] = build_draft(spec, drafter, kind)
    if media is None or not media.kinds:
        return Program(graphs)
    from .towers import build_towers

    if has_blocks(spec) and set(PICTURES) & set(media.kinds):
        graphs[BLOCKS] = build_graph(spec, BLOCKS, all_logits, kind, hidden=hidden)
    return Program(graphs | build_towers(spec, media, kind))


def has_blocks(spec: Spec) -> bool:
    """Whether soft tokens of a picture see each other on some layers."""
    return spec.text.use_bidirectional_attention is not None and SLIDING in spec.text.layer_types


def build_graph(
    spec: Spec,
    phase: str = "decode",
    all_logits: bool = False,
    dtype: str | None = None,
    media: Media | None = None,
    hidden: bool = False,
) -> Graph:
    """Return the graph of one phase of a model.

    Dims: B rows, S tokens of the chunk (1 in decode, M in verify), C slots of a full-length cache.
    prefill and decode take `embeds` [B,S,hidden] (scaled), `ple_rows` [B,S,layers*dim] where
    the spec has per-layer embeddings, `positions` i64[B,S] and `lengths` i64[B], the valid
    tokens of each row. They yield `logits`, [B,1,vocab] at each row's last valid token, or
    [B,S,vocab] with all_logits. `verify` is decode of several tokens: they are written first, each
    sees the caches alone, and every one has its logits. `prefill_media` also takes `block_ids`
    i64[B,S], -1 outside of pictures (see the op `attention`). With `hidden` they also yield the
    state that logits are made of, of the tokens of `decode` and `verify`, else of each row's last
    valid one. `embed` takes `tokens` i64[B,S]; with
    media, placeholders get the rows of the padding token.
    """
    known = (*PHASES, VERIFY, BLOCKS)
    if phase not in known:
        raise InputError(f"unknown phase {phase!r}; one of {', '.join(known)}")
    if spec.drafter:
        raise InputError(f"{spec.name} is a drafter: it drafts for a model, and is none")
    if phase == BLOCKS and not has_blocks(spec):
        raise InputError(f"{spec.name} has no {BLOCKS}: its soft tokens see the past alone")
    if phase == "embed":
        ids = placeholders(spec.tokens, media.kinds if media else ())
        return _Embed(spec, dtype or spec.dtype, ids).build()
    return Decoder(spec, phase, all_logits, dtype or spec.dtype, hidden).build()


class _Embed:
    """Rows of the token table and of the per-layer table, scaled (rules 1, 2); placeholders of
    media get those of the padding token (rule 38)."""

    def __init__(self, spec: Spec, dtype: str, media: dict[str, int]) -> None:
        self.spec, self.dtype, self.media = spec, dtype, media

    def build(self) -> Graph:
        b, text = Builder("embed"), self.spec.text
        tokens = b.input("tokens", Type("i64", ("B", "S")))
        if self.media:
            ids, pad = tuple(self.media.values()), self.spec.tokens.pad or 0
            tokens = b.emit("mask_ids", tokens, ids=ids, pad=pad, name="tokens.text")
        table = b.param("embed.table", Type(self.dtype, (text.vocab_size, text.hidden_size)))
        outs = [b.emit("embedding", table, tokens, scale=text.hidden_size**0.5, name="embeds")]
        if text.ple:
            shape = (text.ple.vocab_size, text.num_hidden_layers * text.ple.dim)
            table = b.param(PLE_PARAM, Type(self.dtype, shape))
            rows = b.emit("embedding", table, tokens, scale=text.ple.dim**0.5, name="ple_rows")
            outs.append(rows)
        return b.graph(*outs)
