"""Counts parameters of a variant by part, as it runs and as published."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from g4ir.model.names import HEAD, PLE_TABLE, TOKEN_TABLE
from g4ir.model.tensors import dead_tensors, numel, part_tensors, text_tensors
from g4ir.spec.record import Spec

#: tensors outside the layers -> the field of ParameterCounts that counts them
TOP_PARTS = {
    TOKEN_TABLE: "embed",
    PLE_TABLE: "ple_table",
    "norm.weight": "final_norm",
    HEAD: "head",
}
#: parts of a checkpoint that are counted in another field
PARTS = {"vision_embedder": "embed_vision", "drafter": "layers"}


@dataclass(frozen=True)
class ParameterCounts:
    """Elements of one variant by part. 0-d clip bounds are counted separately (`*_scalars`).
    `top_k` of `num_experts` experts run per token, both 0 in a dense model. An encoder has no
    head."""

    embed: int = 0  # token table; also the head, if tied
    head: int = 0  # 0 if tied, or of an encoder
    ple_table: int = 0
    ple_other: int = 0  # projections, gates and norms of the per-layer embeddings
    #: decoder layers, minus experts and per-layer embeddings; of a draft model also its projections
    #: and clusters
    layers: int = 0
    experts: int = 0
    final_norm: int = 0
    vision: int = 0
    vision_scalars: int = 0
    audio: int = 0
    audio_scalars: int = 0
    embed_vision: int = 0
    embed_audio: int = 0
    dead: int = 0  # K and V of shared layers, in published files only
    layer_scalars: int = 0  # within `layers`
    top_k: int = 0
    num_experts: int = 0
    is_encoder: bool = False

    @property
    def text(self) -> int:
        """Elements of the text decoder."""
        tables = self.embed + self.head + self.ple_table + self.ple_other
        return tables + self.layers + self.experts + self.final_norm

    @property
    def loaded(self) -> int:
        """Elements that are loaded: all published ones except `dead`."""
        towers = self.vision + self.vision_scalars + self.audio + self.audio_scalars
        return self.text + towers + self.embed_vision + self.embed_audio

    @property
    def hub(self) -> int:
        """Elements in the published files, 0-d tensors included."""
        return self.loaded + self.dead

    @property
    def hub_parameters(self) -> int:
        """Parameter count as the hub shows it: without 0-d tensors."""
        return self.hub - self.vision_scalars - self.audio_scalars

    @property
    def active(self) -> int:
        """Weights that one token multiplies with, head included (the lookup tables are not)."""
        used = self.experts * self.top_k // max(self.num_experts, 1)
        head = 0 if self.is_encoder else self.head or self.embed
        return self.layers + self.ple_other - self.layer_scalars + used + head


def counts(spec: Spec) -> ParameterCounts:
    """Count the parameters of a variant exactly, from the tensor tables."""
    live, dead, towers = text_tensors(spec), dead_tensors(spec), part_tensors(spec)
    parts: Counter[str] = Counter()
    for name, shape in live.items():
        parts[_text_part(name)] += math.prod(shape)
    for part, tensors in towers.items():
        field = PARTS.get(part, part)
        for shape in tensors.values():
            parts[field if shape else f"{field}_scalars"] += math.prod(shape)
    moe = spec.text.moe
    return ParameterCounts(
        **parts,
        dead=numel(dead),
        layer_scalars=sum(name.endswith(".layer_scalar") for name in live),
        top_k=moe.top_k_experts if moe else 0,
        num_experts=moe.num_experts if moe else 0,
        is_encoder=spec.embedding is not None,
    )


def _text_part(name: str) -> str:
    in_layers = "experts" if ".experts." in name else "layers"
    return TOP_PARTS.get(name, "ple_other" if "per_layer_" in name else in_layers)
