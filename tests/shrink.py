"""Shrinks a spec to one of the same structure that runs in milliseconds, for tests.

It knows no variant: sizes are scaled and layers cut, every structural field is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from g4ir.spec.parts import (
    AttentionKind,
    Audio,
    Centroids,
    Moe,
    Ple,
    Text,
    Tokens,
    UnifiedAudio,
    UnifiedVision,
    Vision,
)
from g4ir.spec.record import Spec, load_spec
from g4ir.spec.rules import canonical, shortest_pattern

WINDOW = 8
VOCAB = 256
TOKENS = Tokens(bos=2, eos=(1,), pad=0)
#: ids of the same vocabulary for the tokens of media
_MEDIA = ("image", "video", "audio", "boi", "eoi", "boa", "eoa")
MEDIA_TOKENS = {name: 240 + i for i, name in enumerate(_MEDIA)}
BUDGET = 70


def check_spec(spec: Spec) -> Spec:
    """Return the spec, if a file of it says the same."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "spec.yaml")
        file.write_text(spec.to_yaml())
        assert load_spec(file) == canonical(spec)
    return spec


def shrink(spec: Spec, media: bool = False) -> Spec:
    """Return a spec of the same structure that runs in milliseconds; with `media` its towers too.

    Kept: pattern, which layers own and share K and V (at least two owners of each kind, if the
    spec has them), K=V, ratios of query to KV heads, number of KV heads if it is one, wide MLP,
    experts, per-layer embeddings, softcaps, rope, bidirectional attention, tying, norms. Legal for
    every legal spec, and never with more layers.
    """
    text = spec.text
    owners, sharers = _layers(text)
    layers = [*owners, *sharers]
    kinds = tuple(text.layer_types[i] for i in layers)
    heads = _head_divisor(text)
    small = replace(
        text,
        vocab_size=VOCAB,
        hidden_size=_size(text.hidden_size, 32),
        intermediate_size=_size(text.intermediate_size, 64),
        num_hidden_layers=len(layers),
        num_kv_shared_layers=len(sharers),
        num_attention_heads=text.num_attention_heads // heads,
        pattern=shortest_pattern(kinds),
        sliding=replace(_kind(text.sliding, heads), window=min(text.sliding.window or 1, WINDOW)),
        full=_kind(text.full, heads),
        max_position_embeddings=min(text.max_position_embeddings, 1024),
        query_pre_attn_scalar=_scalar(text),
        moe=text.moe and _moe(text.moe, layers),
        ple=text.ple and Ple(_size(text.ple.dim, 16), VOCAB),
    )
    media_ids = MEDIA_TOKENS.items()
    known: dict[str, Any] = {k: v for k, v in media_ids if getattr(spec.tokens, k) is not None}
    vision, audio = (_vision(spec.vision), _audio(spec.audio)) if media else (None, None)
    tokens = replace(TOKENS, **known) if media else TOKENS
    made = replace(spec, name=f"{spec.name}-small", hub=None, dtype="f32", text=small)
    return check_spec(replace(made, tokens=tokens, vision=vision, audio=audio))


def shrink_drafter(drafter: Spec, model: Spec) -> Spec:
    """Return a drafter of the same structure for a small model: as many query heads for each of the
    model's KV heads, clusters of a head of clusters."""
    text, part = drafter.text, drafter.drafter
    assert part
    group = text.num_attention_heads // text.sliding.num_key_value_heads
    small = replace(
        text,
        vocab_size=model.text.vocab_size,
        hidden_size=_size(text.hidden_size, 32),
        intermediate_size=_size(text.intermediate_size, 64),
        num_attention_heads=group * model.text.sliding.num_key_value_heads,
        sliding=replace(model.text.sliding, k_eq_v=False),
        full=model.text.full,
        max_position_embeddings=model.text.max_position_embeddings,
    )
    centroids = part.centroids and Centroids(32, 4)
    part = replace(part, backbone_hidden_size=model.text.hidden_size, centroids=centroids)
    name = f"{drafter.name}-small"
    small_spec = replace(drafter, name=name, hub=None, dtype="f32", text=small, drafter=part)
    return check_spec(replace(small_spec, tokens=TOKENS))


def _vision(v: Vision | UnifiedVision | None) -> Vision | UnifiedVision | None:
    """Keep two layers of the same proportions, clipping and standardizing as before."""
    if isinstance(v, UnifiedVision):
        small = {"mm_embed_dim": 48, "output_proj_dims": 48, "mm_posemb_size": 128, "patch_size": 4}
        return replace(v, num_soft_tokens=BUDGET, **small)
    if v is None:
        return None
    return replace(
        v,
        hidden_size=_size(v.hidden_size, 24),
        intermediate_size=_size(v.intermediate_size, 48),
        num_hidden_layers=min(v.num_hidden_layers, 2),
        num_attention_heads=2,
        num_key_value_heads=1 if v.num_key_value_heads < v.num_attention_heads else 2,
        head_dim=4 * -(-v.head_dim // 16),
        patch_size=4,
        position_embedding_size=512,
        default_output_length=BUDGET,
    )


def _audio(a: Audio | UnifiedAudio | None) -> Audio | UnifiedAudio | None:
    if isinstance(a, UnifiedAudio):
        return replace(a, audio_embed_dim=40)
    return a and replace(
        a,
        hidden_size=_size(a.hidden_size, 32),
        num_hidden_layers=min(a.num_hidden_layers, 2),
        num_attention_heads=2,
        output_proj_dims=_size(a.output_proj_dims, 32),
        subsampling_conv_channels=(16, 8),
    )


def _moe(moe: Moe, layers: Sequence[int]) -> Moe:
    """Keep eight experts, two a token; if only some layers have them, both sorts of layers."""
    some = moe.layers and tuple(i for i, old in enumerate(layers) if old in moe.layers)
    if some is not None and not 0 < len(some) < len(layers):
        some = (0,)
    return replace(
        moe,
        num_experts=min(moe.num_experts, 8),
        top_k_experts=min(moe.top_k_experts, 2),
        layers=some,
        intermediate_size=_size(moe.intermediate_size, 32),
    )


def _size(value: int, by: int) -> int:
    return max(16, round(value / by / 8) * 8)


def _kind(kind: AttentionKind, heads: int) -> AttentionKind:
    """Shrink head_dim to an eighth (256 -> 32), rounded up to the least multiple of the old size's
    alignment that has two pairs and rotates one."""
    step = gcd(kind.head_dim, 8)
    sizes = range(step, kind.head_dim, step)
    fits = (n for n in sizes if n >= max(kind.head_dim // 8, 4) and kind.rope.pairs(n))
    count = kind.num_key_value_heads // heads
    return replace(kind, head_dim=next(fits, kind.head_dim), num_key_value_heads=count)


def _scalar(text: Text) -> int | None:
    """Return the divisor of the scores in proportion to the head."""
    small, dim = _kind(text.full, 1).head_dim, text.full.head_dim
    return text.query_pre_attn_scalar and max(1, text.query_pre_attn_scalar * small // dim)


def _head_divisor(text: Text) -> int:
    """Return the largest divisor of all head counts that leaves two where there were several."""
    counts = [k.num_key_value_heads for k in (text.sliding, text.full)]
    common = gcd(text.num_attention_heads, *counts)
    fits = (d for d in range(common, 0, -1) if common % d == 0)
    return next(d for d in fits if all(n == 1 or n // d > 1 for n in counts))


def _layers(text: Text) -> tuple[Sequence[int], Sequence[int]]:
    """Return the layers to keep: those that own K and V, and those that share them.

    Whole repeats of the pattern in the spec's proportion, of which two own K and V; if the spec has
    no such, the last layers of either in which each kind occurs twice.
    """
    count, first, kinds = text.num_hidden_layers, text.first_kv_shared_layer, text.layer_types
    period = len(shortest_pattern(kinds))
    for repeats in range(2, count // period + 1):
        shared = (round(repeats * (count - first) / count) or int(first < count)) * period
        own = repeats * period - shared
        if 2 * period <= own <= first and shared <= count - first:
            return range(first - own, first), range(count - shared, count)
    return _last_twice(kinds, range(first)), _last_twice(kinds, range(first, count))


def _last_twice(kinds: Sequence[str], layers: range) -> range:
    """Return the last of these layers in which each of their kinds occurs twice, or as often as it
    does at all."""
    of_kind = ([i for i in layers if kinds[i] == kind] for kind in {*kinds})
    start = min((at[-2:][0] for at in of_kind if at), default=layers.stop)
    return range(start, layers.stop)
