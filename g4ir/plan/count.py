"""ParameterCounts elements of a variant by part."""

from __future__ import annotations

from dataclasses import dataclass, fields

from g4ir.model.names import HEAD, PLE_TABLE, TOKEN_TABLE
from g4ir.model.tensors import (
    Shape,
    Tensors,
    dead_tensors,
    numel,
    text_tensors,
    tower_tensors,
)
from g4ir.spec.record import Spec


@dataclass(frozen=True)
class ParameterCounts:
    """Elements of one variant by part. 0-d clip bounds are counted apart (`*_scalars`)."""

    embed: int  # token table, also the head where it is tied
    head: int  # 0 where it is tied
    ple_table: int
    ple_other: int  # projections, gates and norms of the per-layer embeddings
    layers: int  # decoder layers without experts and per-layer embeddings
    experts: int
    final_norm: int
    vision: int
    vision_scalars: int
    audio: int
    audio_scalars: int
    embed_vision: int
    embed_audio: int
    dead: int  # K and V of shared layers, in published files only
    dead_tensors: int
    live_tensors: int
    layer_scalars: int  # within `layers`
    top_k: int
    num_experts: int

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
        """Tensors in the published files."""
        return self.live_tensors + self.dead_tensors

    @property
    def active(self) -> int:
        """Weights that one token multiplies with, head included (the lookup tables are not)."""
        used = self.experts * self.top_k // max(self.num_experts, 1)
        return self.layers + self.ple_other - self.layer_scalars + used + (self.head or self.embed)


def counts(spec: Spec) -> ParameterCounts:
    """Count parameters of a variant, to the unit, from the tensor tables."""
    live, dead, towers = text_tensors(spec), dead_tensors(spec), tower_tensors(spec)
    by_part: dict[str, Tensors] = {}
    for name, shape in live.items():
        by_part.setdefault(_text_part(name), {})[name] = shape
    for name, shape in towers.items():
        by_part.setdefault(_tower_part(spec, name, shape), {})[name] = shape
    scalars = sum(name.endswith(".layer_scalar") for name in live)
    moe = spec.text.moe
    return ParameterCounts(
        **{part: numel(by_part.get(part, {})) for part in PARTS},
        dead=numel(dead),
        dead_tensors=len(dead),
        live_tensors=len(live) + len(towers),
        layer_scalars=scalars,
        top_k=moe.top_k_experts if moe else 0,
        num_experts=moe.num_experts if moe else 0,
    )


PARTS = tuple(
    f.name
    for f in fields(ParameterCounts)
    if f.name
    not in ("dead", "dead_tensors", "live_tensors", "layer_scalars", "top_k", "num_experts")
)


def _text_part(name: str) -> str:
    if name in TOP_PARTS:
        return TOP_PARTS[name]
    if "per_layer_" in name:
        return "ple_other"
    return "experts" if ".experts." in name else "layers"


TOP_PARTS = {
    TOKEN_TABLE: "embed",
    PLE_TABLE: "ple_table",
    "norm.weight": "final_norm",
    HEAD: "head",
}


def _tower_part(spec: Spec, name: str, shape: Shape) -> str:
    if name.startswith(spec.prefixes.embed_audio[0]):
        return "embed_audio"
    if name.startswith((spec.prefixes.embed_vision[0], spec.prefixes.vision_embedder[0])):
        return "embed_vision"
    tower = "audio" if name.startswith(spec.prefixes.audio[0]) else "vision"
    return tower if shape else f"{tower}_scalars"
