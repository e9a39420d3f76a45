"""Counts parameters of a variant by part, and per decoder layer, as it runs and as published."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from g4ir.model.names import HEAD, PLE_TABLE, TOKEN_TABLE
from g4ir.model.tensors import (
    Tensors,
    dead_tensors,
    layer_tensors,
    numel,
    part_tensors,
    text_tensors,
)
from g4ir.spec.parts import Layer
from g4ir.spec.record import Spec

#: tensors outside the layers -> their part
TOP_PARTS = {
    TOKEN_TABLE: "embed",
    PLE_TABLE: "ple_table",
    "norm.weight": "final_norm",
    HEAD: "head",
}
#: part of a layer -> how its tensor names begin
LAYER_PARTS = {
    "attention": "self_attn.",
    "q": "self_attn.q_proj.",
    "k": "self_attn.k_proj.",
    "v": "self_attn.v_proj.",
    "o": "self_attn.o_proj.",
    "mlp": "mlp.",
    "router": "router.",
    "experts": "experts.",
    "ple": "per_layer_",
}
#: part of the per-layer embeddings -> how its tensor names end
PLE_PARTS = {
    "table": PLE_TABLE,
    "model_proj": "per_layer_model_projection.weight",
    "proj_norm": "per_layer_projection_norm.weight",
    "gates": ".per_layer_input_gate.weight",
    "projections": ".per_layer_projection.weight",
    "post_norms": ".post_per_layer_input_norm.weight",
}


@dataclass(frozen=True)
class ParameterCounts:
    """Elements of one variant by part. 0-d clip bounds are counted apart (`*_scalars`)."""

    embed: int = 0  # token table, also the head where it is tied
    head: int = 0  # 0 where it is tied
    ple_table: int = 0
    ple_other: int = 0  # projections, gates and norms of the per-layer embeddings
    layers: int = 0  # decoder layers without experts and per-layer embeddings
    experts: int = 0
    final_norm: int = 0
    vision: int = 0
    vision_scalars: int = 0
    audio: int = 0
    audio_scalars: int = 0
    embed_vision: int = 0
    embed_audio: int = 0
    dead: int = 0  # K and V of shared layers, in published files only
    dead_tensors: int = 0
    live_tensors: int = 0
    layer_scalars: int = 0  # within `layers`
    top_k: int = 0
    num_experts: int = 0

    @property
    def text(self) -> int:
        """The decoder as it runs."""
        tables = self.embed + self.head + self.ple_table + self.ple_other
        return tables + self.layers + self.experts + self.final_norm

    @property
    def loaded(self) -> int:
        """Every element that the reference keeps after loading."""
        towers = self.vision + self.vision_scalars + self.audio + self.audio_scalars
        return self.text + towers + self.embed_vision + self.embed_audio

    @property
    def hub(self) -> int:
        """Elements in the published files, 0-d tensors included."""
        return self.loaded + self.dead

    @property
    def hub_parameters(self) -> int:
        """Elements as the hub shows the parameter count: 0-d tensors count as nothing."""
        return self.hub - self.vision_scalars - self.audio_scalars

    @property
    def hub_tensors(self) -> int:
        return self.live_tensors + self.dead_tensors

    @property
    def active(self) -> int:
        """Weights that one token multiplies with, head included (the lookup tables are not)."""
        used = self.experts * self.top_k // max(self.num_experts, 1)
        return self.layers + self.ple_other - self.layer_scalars + used + (self.head or self.embed)


def counts(spec: Spec) -> ParameterCounts:
    """Count parameters of a variant, to the unit, from the tensor tables."""
    live, dead, towers = text_tensors(spec), dead_tensors(spec), part_tensors(spec)
    parts: Counter[str] = Counter()
    for name, shape in live.items():
        parts[_text_part(name)] += math.prod(shape)
    for part, tensors in towers.items():
        field = "embed_vision" if part == "vision_embedder" else part
        for shape in tensors.values():
            parts[field if shape else f"{field}_scalars"] += math.prod(shape)
    moe = spec.text.moe
    return ParameterCounts(
        **parts,
        dead=numel(dead),
        dead_tensors=len(dead),
        live_tensors=len(live) + sum(map(len, towers.values())),
        layer_scalars=sum(name.endswith(".layer_scalar") for name in live),
        top_k=moe.top_k_experts if moe else 0,
        num_experts=moe.num_experts if moe else 0,
    )


def _text_part(name: str) -> str:
    if name in TOP_PARTS:
        return TOP_PARTS[name]
    if "per_layer_" in name:
        return "ple_other"
    return "experts" if ".experts." in name else "layers"


@dataclass(frozen=True)
class Block:
    """Matrix parameters of one layer, or of each of the layers that are alike. Those of per-layer
    embeddings are apart (`ple`), so `total` is the block as block tables usually give it."""

    layers: tuple[int, ...]
    kind: str  # sliding or full
    donor: int | None  # the layer whose K and V it reads; it has no K and V weights of its own
    intermediate_size: int  # of the dense MLP
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int  # dims of a head that RoPE turns; the others keep their values
    k_eq_v: bool  # K's projection is V's too
    attention: int  # q + k + v + o
    q: int
    k: int
    v: int
    o: int
    mlp: int  # the dense one
    router: int
    experts: int
    experts_active: int  # those that one token uses
    ple: int  # gate and projection of the per-layer embedding
    vectors: int  # norm weights, scalars, per-expert scales
    dead: int  # K and V that only published files hold

    @property
    def total(self) -> int:
        return self.attention + self.mlp + self.router + self.experts

    @property
    def active(self) -> int:
        return self.total - self.experts + self.experts_active

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {
            "layers": list(self.layers),
            "ffn": self.total - self.attention,
            "ffn_active": self.active - self.attention,
            "total": self.total,
            "active": self.active,
            "published": self.total + self.dead,
        }


def layer_blocks(spec: Spec) -> tuple[Block, ...]:
    """Return one block for every layer, in order."""
    dead = dead_tensors(spec)
    return tuple(_block(spec, layer, dead) for layer in spec.layers())


def _block(spec: Spec, layer: Layer, dead: Tensors) -> Block:
    live, moe = layer_tensors(spec, layer), spec.text.moe
    parts = {part: _matrices(live, prefix) for part, prefix in LAYER_PARTS.items()}
    own = layer.attention
    return Block(
        (layer.index,),
        layer.kind,
        layer.donor,
        layer.intermediate_size,
        heads=spec.text.num_attention_heads,
        kv_heads=own.num_key_value_heads,
        head_dim=own.head_dim,
        rotated=2 * own.rope.pairs(own.head_dim),
        k_eq_v=own.k_eq_v,
        **parts,
        experts_active=parts["experts"] * moe.top_k_experts // moe.num_experts if moe else 0,
        vectors=numel(live) - _matrices(live),
        dead=_matrices(dead, f"layers.{layer.index}."),
    )


def _matrices(tensors: Tensors, prefix: str = "") -> int:
    return numel({k: v for k, v in tensors.items() if len(v) > 1 and k.startswith(prefix)})


def distinct_blocks(layers: tuple[Block, ...]) -> tuple[Block, ...]:
    """Join the blocks of layers that are alike."""
    groups: dict[Block, list[int]] = {}
    for b in layers:
        groups.setdefault(replace(b, layers=()), []).extend(b.layers)
    return tuple(replace(key, layers=tuple(found)) for key, found in groups.items())


def ple_parts(spec: Spec) -> dict[str, int]:
    """Count the parameters of the per-layer embeddings over all layers; zeros if there are none."""
    tensors = text_tensors(spec).items()
    parts = {
        part: numel({k: v for k, v in tensors if k.endswith(ending)})
        for part, ending in PLE_PARTS.items()
    }
    return {**parts, "total": sum(parts.values())}
