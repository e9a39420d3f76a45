"""Counts parameters per decoder layer and per kind of layer, as the model runs and as published.

Matrices are counted by part; what has one dim (norm weights, scalars, per-expert scales) is
`vectors`. The matrices of per-layer embeddings are apart (`ple`): `total` is the block without
them, which is how block tables are usually given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from g4ir.model.names import PLE_TABLE
from g4ir.model.tensors import Tensors, dead_tensors, layer_tensors, numel, text_tensors
from g4ir.spec.parts import Layer
from g4ir.spec.record import Spec

#: part of a layer -> how its tensor names begin
PARTS = {
    "attention": "self_attn.",
    "mlp": "mlp.",
    "router": "router.",
    "experts": "experts.",
    "ple": "per_layer_",
}


@dataclass(frozen=True)
class Block:
    """Parameters of one layer, or of each of the layers that are alike."""

    layers: tuple[int, ...]
    kind: str  # sliding or full
    donor: int | None  # the layer whose K and V it reads; it has no K and V weights of its own
    intermediate_size: int  # of the dense MLP
    attention: int
    mlp: int  # the dense one
    router: int
    experts: int
    experts_active: int  # those that one token uses
    ple: int  # gate and projection of the per-layer embedding
    vectors: int
    dead: int  # matrices of K and V that only published files hold

    @property
    def ffn(self) -> int:
        return self.mlp + self.router + self.experts

    @property
    def ffn_active(self) -> int:
        return self.mlp + self.router + self.experts_active

    @property
    def total(self) -> int:
        return self.attention + self.ffn

    @property
    def active(self) -> int:
        return self.attention + self.ffn_active

    @property
    def published(self) -> int:
        return self.total + self.dead

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the sums."""
        sums = ("ffn", "ffn_active", "total", "active", "published")
        return {**vars(self), "layers": list(self.layers)} | {s: getattr(self, s) for s in sums}


def layer_blocks(spec: Spec) -> tuple[Block, ...]:
    """Return one block for every layer, in order."""
    dead = dead_tensors(spec)
    return tuple(_block(spec, layer, dead) for layer in spec.layers())


def _block(spec: Spec, layer: Layer, dead: Tensors) -> Block:
    live = layer_tensors(spec, layer)
    counts = {
        part: _matrices({k: v for k, v in live.items() if k.startswith(prefix)})
        for part, prefix in PARTS.items()
    }
    moe = spec.text.moe
    used = counts["experts"] * moe.top_k_experts // moe.num_experts if moe else 0
    mine = {k: v for k, v in dead.items() if k.startswith(f"layers.{layer.index}.")}
    return Block(
        (layer.index,),
        layer.kind,
        layer.donor,
        layer.intermediate_size,
        **counts,
        experts_active=used,
        vectors=numel(live) - _matrices(live),
        dead=_matrices(mine),
    )


def _matrices(tensors: Tensors) -> int:
    return numel({k: v for k, v in tensors.items() if len(v) > 1})


def blocks(spec: Spec) -> tuple[Block, ...]:
    """Return the distinct blocks; layers sharing K and V of different layers count as alike."""
    groups: dict[Block, list[Block]] = {}
    for b in layer_blocks(spec):
        groups.setdefault(replace(b, layers=()), []).append(b)
    return tuple(
        replace(key, layers=tuple(b.layers[0] for b in group)) for key, group in groups.items()
    )


@dataclass(frozen=True)
class PleParts:
    """Parameters of the per-layer embeddings over all layers; zeros where there are none."""

    table: int
    model_proj: int
    proj_norm: int
    gates: int
    projections: int
    post_norms: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


_PLE_ENDINGS = {
    "table": PLE_TABLE,
    "model_proj": "per_layer_model_projection.weight",
    "proj_norm": "per_layer_projection_norm.weight",
    "gates": ".per_layer_input_gate.weight",
    "projections": ".per_layer_projection.weight",
    "post_norms": ".post_per_layer_input_norm.weight",
}


def ple_parts(spec: Spec) -> PleParts:
    tensors = text_tensors(spec).items()
    return PleParts(
        **{
            part: numel({k: v for k, v in tensors if k.endswith(ending)})
            for part, ending in _PLE_ENDINGS.items()
        }
    )
