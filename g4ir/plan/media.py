"""The cost of media for a variant: weights of towers, soft tokens, and work before the prompt.

    for part in media_plan(spec): print(part.name, part.params, part.sizes)

FLOPs are those of a tower's graph, padding included: its size is fixed. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

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
    """The towers of one modality: `vision` or `audio`."""

    name: str
    params: int
    sizes: tuple[MediaSize, ...]


def media_plan(spec: Spec) -> tuple[MediaPart, ...]:
    """Return every part of a variant; none for one that takes text alone."""
    can, params = offered(spec), {True: 0, False: 0}
    for part, tensors in part_tensors(spec).items():
        params[part in SIGHT] += numel(tensors)
    parts = []
    if IMAGE in can or VIDEO in can:
        parts.append(MediaPart("vision", params[True], tuple(_images(spec))))
    if AUDIO in can:
        parts.append(MediaPart("audio", params[False], tuple(_sounds(spec))))
    return tuple(parts)


def _images(spec: Spec) -> Iterator[MediaSize]:
    for budget in sorted({*BUDGETS, image_settings(spec).budget}):
        flops = _flops(spec, "vision", partial(build_vision, soft=budget, dtype=spec.dtype))
        yield MediaSize(str(budget), budget, image_settings(spec, budget).rows, flops)


def _sounds(spec: Spec) -> Iterator[MediaSize]:
    settings, tower = audio_settings(spec), isinstance(spec.audio, Audio)
    for seconds in SECONDS if tower else PART_SECONDS:
        soft = settings.soft_tokens(round(seconds * settings.sampling_rate))
        flops = _flops(spec, "audio", partial(build_audio, soft=soft, dtype=spec.dtype))
        yield MediaSize(f"{seconds:g} s", soft, soft * STRIDE if tower else soft, flops)


def _flops(spec: Spec, part: str, build: Callable[[Spec], Graph]) -> int:
    """Return FLOPs of a tower, whose layers are alike: two are counted, the others follow."""
    layers = getattr(getattr(spec, part), "num_hidden_layers", None)
    if layers is None:
        return total(graph_costs(build(spec))).flops

    def count(n: int) -> int:
        tower = replace(getattr(spec, part), num_hidden_layers=n)
        return total(graph_costs(build(replace(spec, **{part: tower})))).flops

    return count(1) + (layers - 1) * (count(2) - count(1))
