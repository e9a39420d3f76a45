"""Names and shapes of a checkpoint's tensors, from the params of the graphs.

Used by the checkpoint reader, random weights and parameter counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from g4ir.ir.graph import Graph
from g4ir.spec.record import Spec

from .draft import drafter_alone
from .media import AUDIO, PICTURES
from .names import DRAFTER_PREFIX, checkpoint_name
from .text import build_graph, complete_graphs
from .towers import PARTS, default_tower

Shape = tuple[int, ...]
Tensors = dict[str, Shape]

#: 0-d tensors of a clipped linear
CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
#: tensors that KV-shared layers do not use
KEYS_VALUES = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")
#: parts of a checkpoint for images and video; all others are for audio or of a draft model
SIGHT = ("vision", "vision_embedder", "embed_vision")
#: part of a draft model's tensors that no decoder has: projections from and to the target, clusters
DRAFTER = "drafter"


def text_tensors(spec: Spec) -> Tensors:
    """Return name -> shape of every used tensor of the text model, in the graphs' order, without
    the text prefix; of a draft model too, except those of part DRAFTER.

    K and V of KV-shared layers are not used (see `dead_tensors`). An untied head is
    `lm_head.weight`, whose full name is in `spec.prefixes.head`.
    """
    return dict(_text(spec))


def dead_tensors(spec: Spec) -> Tensors:
    """Return name -> shape of the unused K and V tensors that a checkpoint may have for KV-shared
    layers; shapes are those of the donor layer."""
    live = _text(spec)
    return {
        f"layers.{layer.index}.{name}": live[f"layers.{layer.donor}.{name}"]
        for layer in spec.layers()
        if layer.donor is not None
        for name in KEYS_VALUES
        if f"layers.{layer.donor}.{name}" in live
    }


def part_tensors(spec: Spec) -> dict[str, Tensors]:
    """Return part (a field of Prefixes) -> name -> shape, for all parts but the text model.

    Names are the hub's, which for gemma4_unified differ from the reference's module names.
    """
    out: dict[str, Tensors] = {}
    for full, shape in _towers(spec).items():
        part, _, name = full.partition(".")
        out.setdefault(part, {})[name] = shape
    return out


def tower_tensors(spec: Spec) -> Tensors:
    """Return checkpoint name -> shape of every tensor outside the text model."""
    out: Tensors = {}
    for part, tensors in part_tensors(spec).items():
        prefix = getattr(spec.prefixes, part)[0]
        out |= {prefix + name: shape for name, shape in tensors.items()}
    return out


def media_tensors(spec: Spec, kinds: Iterable[str]) -> Tensors:
    """Return `PART.NAME` -> shape of the tensors for these kinds of media; for a draft model, of
    the tensors of part DRAFTER, whatever the kinds."""
    kinds = set(kinds)

    def needed(part: str) -> bool:
        return part == DRAFTER or bool(kinds.intersection(PICTURES if part in SIGHT else (AUDIO,)))

    return {n: shape for n, shape in _towers(spec).items() if needed(n.partition(".")[0])}


def numel(tensors: Tensors) -> int:
    """Count the elements of all tensors; a 0-d tensor has one."""
    return sum(math.prod(shape) for shape in tensors.values())


@lru_cache(maxsize=32)
def _text(spec: Spec) -> Tensors:
    if spec.drafter:
        return _of_drafter(spec, outside_layers=False)
    graphs = (build_graph(spec, phase, all_logits=True) for phase in complete_graphs(spec))
    return _named(graphs)


@lru_cache(maxsize=32)
def _towers(spec: Spec) -> Tensors:
    if spec.drafter:
        return _of_drafter(spec, outside_layers=True)
    return _named(default_tower(spec, part) for part in PARTS if getattr(spec, part) is not None)


def _of_drafter(spec: Spec, outside_layers: bool) -> Tensors:
    """Return a draft model's tensors of part DRAFTER if `outside_layers`, else all others (layers,
    final norm, token table)."""
    tensors = _named([drafter_alone(spec)])
    bare = {name.removeprefix(DRAFTER_PREFIX): shape for name, shape in tensors.items()}
    return {
        n: shape for n, shape in bare.items() if (n.partition(".")[0] == DRAFTER) == outside_layers
    }


def _named(graphs: Iterable[Graph]) -> Tensors:
    params = [v for g in graphs for v in g.params]
    return {checkpoint_name(v.name): tuple(int(d) for d in v.type.shape) for v in params}
