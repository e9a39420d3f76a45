"""Lists tensors of a checkpoint by the graphs that take them: the checkpoint's names, and shapes.

The graphs are the one table of tensors; the checkpoint reader, the random weights and the counts
all ask here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from g4ir.ir.graph import Graph
from g4ir.spec.record import Spec

from .draft import drafter_alone
from .media import AUDIO, PICTURES
from .names import OF_DRAFTER, checkpoint_name
from .text import build_graph
from .towers import PARTS, default_tower

Shape = tuple[int, ...]
Tensors = dict[str, Shape]

#: of a clipped linear: 0-d tensors
CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
#: of a layer, what is absent where it reads the keys and values of another
KEYS_VALUES = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")
#: parts that images and frames go through; the others are those of audio, or a drafter's
SIGHT = ("vision", "vision_embedder", "embed_vision")
#: the part of what a drafter has beside its layers
DRAFTER = "drafter"


def text_tensors(spec: Spec) -> Tensors:
    """Name -> shape of every live decoder tensor, in file order, without the text prefix.

    K and V of layers that share another layer's are not live (see `dead_tensors`). An untied
    head is `lm_head.weight`; it lies outside the text prefix (`spec.prefixes.head`).
    """
    return dict(_text(spec))


def dead_tensors(spec: Spec) -> Tensors:
    """Name -> shape of the K and V tensors that a checkpoint may hold for shared layers: those of
    the layer whose keys they read."""
    live = _text(spec)
    return {
        f"layers.{layer.index}.{name}": live[f"layers.{layer.donor}.{name}"]
        for layer in spec.layers()
        if layer.donor is not None
        for name in KEYS_VALUES
        if f"layers.{layer.donor}.{name}" in live
    }


def part_tensors(spec: Spec) -> dict[str, Tensors]:
    """Part (a field of Prefixes) -> name -> shape of its tensors, for all parts but the decoder.

    Names are the hub's, which for gemma4_unified differ from the reference's module names.
    """
    out: dict[str, Tensors] = {}
    for full, shape in _towers(spec).items():
        part, _, name = full.partition(".")
        out.setdefault(part, {})[name] = shape
    return out


def tower_tensors(spec: Spec) -> Tensors:
    """Name -> shape of every tensor outside the decoder, under its checkpoint name."""
    out: Tensors = {}
    for part, tensors in part_tensors(spec).items():
        prefix = getattr(spec.prefixes, part)[0]
        out |= {prefix + name: shape for name, shape in tensors.items()}
    return out


def media_tensors(spec: Spec, kinds: Iterable[str]) -> Tensors:
    """`PART.NAME` -> shape of the tensors that these kinds of media need; of a drafter, what it
    has beside its layers."""
    kinds = set(kinds)

    def needed(part: str) -> bool:
        return part == DRAFTER or bool(kinds.intersection(PICTURES if part in SIGHT else (AUDIO,)))

    return {n: shape for n, shape in _towers(spec).items() if needed(n.partition(".")[0])}


def numel(tensors: Tensors) -> int:
    """Count elements in all tensors; a 0-d tensor has one."""
    return sum(math.prod(shape) for shape in tensors.values())


@lru_cache(maxsize=32)
def _text(spec: Spec) -> Tensors:
    if spec.drafter:
        return _of_drafter(spec, beside=False)
    graphs = (build_graph(spec, phase, all_logits=True) for phase in ("embed", "prefill"))
    return _named(graphs)


@lru_cache(maxsize=32)
def _towers(spec: Spec) -> Tensors:
    if spec.drafter:
        return _of_drafter(spec, beside=True)
    return _named(default_tower(spec, part) for part in PARTS if getattr(spec, part) is not None)


def _of_drafter(spec: Spec, beside: bool) -> Tensors:
    """Return the tensors of its layers, or those beside them."""
    found = _named([drafter_alone(spec)])
    bare = {name.removeprefix(OF_DRAFTER): shape for name, shape in found.items()}
    return {n: shape for n, shape in bare.items() if (n.partition(".")[0] == DRAFTER) == beside}


def _named(graphs: Iterable[Graph]) -> Tensors:
    params = [v for g in graphs for v in g.params]
    return {checkpoint_name(v.name): tuple(int(d) for d in v.type.shape) for v in params}
