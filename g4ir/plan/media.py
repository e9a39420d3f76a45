"""The cost of media for a variant: weights of towers, soft tokens, and work before the prompt.

    for part in media_plan(spec): print(part.name, part.params, part.sizes)

FLOPs are those of a tower's graph, padding included: its size is fixed. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from g4ir.ir.graph import Graph
from g4ir.model.audio import audio_settings
from g4ir.model.images import BUDGETS, image_settings
from g4ir.model.media import AUDIO, IMAGE, PART_SECONDS, SECONDS, VIDEO, offered
from g4ir.model.tensors import SIGHT, numel, part_tensors
from g4ir.model.towers import STRIDE, build_audio, build_vision
from g4ir.plan.cost import graph_costs, total
from g4ir.spec.parts import Audio
from g4ir.spec.record import Spec


@dataclass(frozen=True)
class MediaSize:
    """One size that a tower may be compiled for."""

    label: str  # a budget, or seconds
    soft_tokens: int  # at most
    rows: int  # of the tower's input
    flops: int  # of one run


@dataclass(frozen=True)
class MediaPart:
    """The towers of pictures, or of sound."""

    name: str  # images and frames, or sound
    params: int
    sizes: tuple[MediaSize, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def media_plan(spec: Spec) -> tuple[MediaPart, ...]:
    """Return every part of a variant; none for one that takes text alone."""
    can, parts = offered(spec), []
    if IMAGE in can or VIDEO in can:
        parts.append(MediaPart("vision", _params(spec, True), tuple(_pictures(spec))))
    if AUDIO in can:
        parts.append(MediaPart("audio", _params(spec, False), tuple(_sounds(spec))))
    return tuple(parts)


def _params(spec: Spec, sight: bool) -> int:
    parts = part_tensors(spec).items()
    return sum(numel(t) for part, t in parts if (part in SIGHT) == sight)


def _pictures(spec: Spec) -> list[MediaSize]:
    own = image_settings(spec).budget
    return [_picture(spec, n) for n in sorted({*BUDGETS, own})]


def _picture(spec: Spec, budget: int) -> MediaSize:
    flops = _flops(spec, "vision", lambda s: build_vision(s, budget, s.dtype))
    return MediaSize(str(budget), budget, image_settings(spec, budget).rows, flops)


def _flops(spec: Spec, part: str, build: Callable[[Spec], Graph]) -> int:
    """Return FLOPs of a tower, whose layers are alike: two are counted, the others follow."""
    layers = getattr(getattr(spec, part), "num_hidden_layers", None)
    if layers is None:
        return total(graph_costs(build(spec))).flops

    def count(n: int) -> int:
        tower = replace(getattr(spec, part), num_hidden_layers=n)
        return total(graph_costs(build(replace(spec, **{part: tower})))).flops

    return count(1) + (layers - 1) * (count(2) - count(1))


def _sounds(spec: Spec) -> list[MediaSize]:
    settings = audio_settings(spec)
    sizes = []
    for seconds in SECONDS if isinstance(spec.audio, Audio) else PART_SECONDS:
        soft = settings.soft_tokens(round(seconds * settings.sampling_rate))
        flops = _flops(spec, "audio", partial(build_audio, soft=soft, dtype=spec.dtype))
        rows = soft * STRIDE if isinstance(spec.audio, Audio) else soft
        sizes.append(MediaSize(f"{seconds:g} s", soft, rows, flops))
    return sizes
