"""Rules across fields of a variant, and its canonical form."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import NamedTuple, TypeVar

from .parts import (
    ASSISTANT,
    FAMILIES,
    FULL,
    SLIDING,
    TOWERS,
    AttentionKind,
    Audio,
    Text,
    Tokens,
    UnifiedVision,
    Variant,
    Vision,
)

log = logging.getLogger(__name__)
V = TypeVar("V", bound=Variant)


class Problem(NamedTuple):
    """A violated rule: key path, message with the fix."""

    path: str
    message: str


def _family_problems(spec: Variant) -> Iterator[Problem]:
    """Yield fields that differ from the fixed values of the model_type (model_types.yaml)."""
    family = FAMILIES[spec.model_type]
    stated = {("chat", spec.chat): family.get("chat", spec.chat)}
    stated |= {(f"text.{n}", getattr(spec.text, n)): v for n, v in family.get("text", {}).items()}
    for (path, value), required in stated.items():
        if value != required:
            text = str(required).lower() if isinstance(required, bool) else required
            yield Problem(path, f"must be {text} for {spec.model_type} models; give {text}")


def _no_divisor(path: str, value: int, total_name: str, total: int) -> Problem:
    return Problem(path, f"{value} does not divide {total_name} {total}; use a divisor")


def problems(spec: Variant) -> Iterator[Problem]:
    """Yield the violated rules of a spec whose fields are each in range; a wrong `drafter` alone,
    since the other rules depend on it."""
    if spec.model_type.endswith(ASSISTANT) != (spec.drafter is not None):
        yield Problem(
            "drafter",
            f"belongs to a model_type that ends in {ASSISTANT}, which needs it; give both "
            f"or neither",
        )
        return
    yield from _family_problems(spec)
    yield from (_drafter_problems(spec) if spec.drafter else _pattern_problems(spec.text))
    for name in (SLIDING, FULL):
        yield from _kind_problems(spec.text, name)
    yield from _feed_forward_problems(spec.text)
    yield from _token_problems(spec)
    yield from _tower_problems(spec)
    yield from _embedding_problems(spec)


def _pattern_problems(text: Text) -> Iterator[Problem]:
    shared, layers = text.num_kv_shared_layers, text.num_hidden_layers
    if shared >= layers:
        yield Problem(
            "text.num_kv_shared_layers",
            f"{shared} of {layers} layers share K and V, so none owns them; at most {layers - 1}",
        )
        return
    kinds, first = text.layer_types, text.first_kv_shared_layer
    for kind in sorted(set(kinds[first:]) - set(kinds[:first])):
        yield Problem(
            "text.num_kv_shared_layers",
            f"layers {first}..{layers - 1} share K and V but no {kind} layer below {first} owns "
            f"them (layer {first + kinds[first:].index(kind)} needs one); share fewer layers",
        )


def _drafter_problems(spec: Variant) -> Iterator[Problem]:
    text, shared = spec.text, spec.text.num_kv_shared_layers
    if shared != text.num_hidden_layers:
        yield Problem(
            "text.num_kv_shared_layers",
            f"is {shared}, expected {text.num_hidden_layers}: all layers of a drafter read the "
            f"target's K and V",
        )
    for name in ("moe", "ple"):
        if getattr(text, name) is not None:
            yield Problem(f"text.{name}", "a drafter has none; leave it out")
    if text.use_double_wide_mlp:
        yield Problem("text.use_double_wide_mlp", "a drafter's MLPs have one size; leave it out")
    centroids = spec.drafter.centroids if spec.drafter else None
    if centroids and text.vocab_size % centroids.count:
        vocab = ("text.vocab_size", text.vocab_size)
        yield _no_divisor("drafter.centroids.count", centroids.count, *vocab)
    if centroids and centroids.top_k > centroids.count:
        message = f"{centroids.top_k} is more than the count of clusters, {centroids.count}"
        yield Problem("drafter.centroids.top_k", message)


def _kind_problems(text: Text, name: str) -> Iterator[Problem]:
    kind: AttentionKind = getattr(text, name)
    path, heads, kv = f"text.{name}", text.num_attention_heads, kind.num_key_value_heads
    if name in text.layer_types and heads % kv:
        yield _no_divisor(f"{path}.num_key_value_heads", kv, "text.num_attention_heads", heads)
    if kind.head_dim % 2:
        yield Problem(
            f"{path}.head_dim", f"{kind.head_dim} is odd, rotary needs pairs; use an even number"
        )
    if name == SLIDING and kind.window is None:
        yield Problem(
            f"{path}.window", "is missing; a sliding layer needs the number of keys it sees"
        )
    if name == FULL and kind.window is not None:
        yield Problem(f"{path}.window", "a full layer has no window; leave it out")
    yield from _rope_problems(kind, f"{path}.rope")


def _rope_problems(kind: AttentionKind, path: str) -> Iterator[Problem]:
    rope = kind.rope
    idle = "has no effect on kind default; use kind proportional"
    if rope.kind == "default" and rope.rotary_fraction != 1.0:
        yield Problem(f"{path}.rotary_fraction", f"{rope.rotary_fraction:g} {idle}")
    if rope.kind == "default" and rope.factor is not None:
        yield Problem(f"{path}.factor", idle)
    if rope.kind == "proportional" and rope.pairs(kind.head_dim) < 1:
        yield Problem(
            f"{path}.rotary_fraction",
            f"{rope.rotary_fraction:g} of head_dim {kind.head_dim} rotates no pair; raise it",
        )


def _feed_forward_problems(text: Text) -> Iterator[Problem]:
    moe = text.moe
    if moe is None:
        return
    if moe.top_k_experts > moe.num_experts:
        message = f"{moe.top_k_experts} is more than num_experts, {moe.num_experts}"
        yield Problem("text.moe.top_k_experts", message)
    if moe.layers is None:
        return
    outside = [i for i in moe.layers if i >= text.num_hidden_layers]
    if outside:
        message = f"{outside[0]} is not a layer; expected 0..{text.num_hidden_layers - 1}"
        yield Problem("text.moe.layers", message)
    if not moe.layers or list(moe.layers) != sorted(set(moe.layers)):
        yield Problem(
            "text.moe.layers", "must be ascending, without repeats, not empty; or leave moe out"
        )


def _token_problems(spec: Variant) -> Iterator[Problem]:
    vocab = spec.text.vocab_size
    for f in fields(Tokens):
        value = getattr(spec.tokens, f.name)
        ids = value if isinstance(value, tuple) else () if value is None else (value,)
        for i in (i for i in ids if i >= vocab):
            message = f"{i} is outside the vocabulary; expected 0..{vocab - 1}"
            yield Problem(f"tokens.{f.name}", message)


def _tower_problems(spec: Variant) -> Iterator[Problem]:
    for name in ("vision", "audio"):
        part = getattr(spec, name)
        if part is not None and not isinstance(part, TOWERS.get(spec.model_type, {}).get(name, ())):
            message = f"a {spec.model_type} spec has no {type(part).__name__}"
            yield Problem(name, f"{message}; use the keys of its model_type")
    if isinstance(spec.vision, Vision):
        yield from _vision_problems(spec.vision)
    if isinstance(spec.vision, UnifiedVision):
        out, width = spec.vision.output_proj_dims, spec.vision.mm_embed_dim
        if out != width:
            message = f"{out} is not vision.mm_embed_dim {width}; make them equal"
            yield Problem("vision.output_proj_dims", message)
    if isinstance(spec.audio, Audio) and spec.audio.hidden_size % spec.audio.num_attention_heads:
        total = ("audio.hidden_size", spec.audio.hidden_size)
        yield _no_divisor("audio.num_attention_heads", spec.audio.num_attention_heads, *total)


def _embedding_problems(spec: Variant) -> Iterator[Problem]:
    rule, head = FAMILIES[spec.model_type.removesuffix(ASSISTANT)].get("embedding"), spec.embedding
    if (head is None) != (rule is None):
        verb = "an encoder and needs one" if rule else "no encoder and has none; leave it out"
        yield Problem("embedding", f"{spec.model_type} is {verb}")
    if not head or not rule:
        return
    size = spec.embedding_size
    if head.dims[0] != size or list(head.dims) != sorted({*head.dims}, reverse=True):
        message = (
            f"{list(head.dims)}: expected descending sizes that start with the full one, {size}"
        )
        yield Problem("embedding.dims", message)
    if (head.projection is not None) != ("projection" in rule):
        need = "is missing; {} needs it" if "projection" in rule else "{} has none; leave it out"
        yield Problem("embedding.projection", need.format(spec.model_type))
    for name in ("num_kv_shared_layers", "final_logit_softcapping", "moe"):
        if getattr(spec.text, name):
            yield Problem(f"text.{name}", "an encoder has none; leave it out")
    if spec.text.ple and spec.text.ple.vocab_size is not None:
        yield Problem("text.ple.vocab_size", "an encoder has no such table; give null")


def _vision_problems(vision: Vision) -> Iterator[Problem]:
    if vision.num_attention_heads % vision.num_key_value_heads:
        total = ("vision.num_attention_heads", vision.num_attention_heads)
        yield _no_divisor("vision.num_key_value_heads", vision.num_key_value_heads, *total)
    if vision.head_dim % 4:
        yield Problem(
            "vision.head_dim",
            f"{vision.head_dim} is not a multiple of 4, and rotary splits it into pairs per axis",
        )


def canonical(spec: V) -> V:
    """Return the spec with the shortest `pattern`, and with `moe.layers` None if every layer has
    experts, so that equal variants compare equal.

    Logs a warning if the pattern's last layer is sliding and `last_layer_full` makes it full, as
    the reference does.
    """
    text = spec.text
    moe = text.moe
    if moe is not None and moe.layers == tuple(range(text.num_hidden_layers)):
        moe = replace(moe, layers=None)
    last = text.pattern[(text.num_hidden_layers - 1) % len(text.pattern)]
    if last != FULL and text.last_layer_full:
        log.warning(
            "%s: the last of %d layers is %s in the pattern; it gets full attention, as in the "
            "reference",
            spec.name,
            text.num_hidden_layers,
            last,
        )
    return replace(spec, text=replace(text, pattern=shortest_pattern(text.layer_types), moe=moe))


def shortest_pattern(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the shortest tuple that, repeated and cut, gives `kinds`."""
    for period in range(1, len(kinds)):
        if kinds[period:] == kinds[:-period]:
            return kinds[:period]
    return kinds
