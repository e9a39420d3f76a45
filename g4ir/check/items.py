"""Media on which towers are checked, as inputs of their graphs: random pixels and samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from g4ir.engine.engine import Engine
from g4ir.engine.multimodal import sound_settings
from g4ir.media.audio import Waveform
from g4ir.media.soft import Soft
from g4ir.model.media import AUDIO, IMAGE, VIDEO

from .tokens import SEED

Tensor = torch.Tensor
#: test clip: max fraction of the audio graph's length, and max soft tokens
SHARE, LONGEST = 0.6, 48
#: height and width of a test image in pixels: with this aspect ratio every tower has some padding
SIDES = (48, 72)


@dataclass(frozen=True, eq=False)
class Item:
    """One image, video or audio clip as its tower's inputs `feeds`. The first `rows` of the `size`
    soft tokens are valid, the others padding; `times`: timestamps of a video's frames."""

    tower: str
    kind: str
    feeds: Mapping[str, Tensor]
    rows: int
    size: int
    times: tuple[str, ...]


def smallest_items(engine: Engine, every: bool = False) -> tuple[Item, ...]:
    """Return an item for the engine's smallest tower of images or videos and one for its smallest
    audio tower; with `every`, one for each kind of media."""
    media, out, rng = engine.media, [], np.random.default_rng(SEED)
    sizes = [(n, IMAGE, {"budget": n}) for n in media.budgets[:1]]
    sizes += [(n, VIDEO, {}) for n in (media.frame,) if n is not None]
    for _, kind, options in sizes if every else sorted(sizes)[:1]:
        pixels = rng.integers(0, 256, (*SIDES, 3), dtype=np.uint8)
        out.append(_item(engine, kind, pixels if kind == IMAGE else pixels[None], **options))
    if media.lengths:
        out.append(_audio(engine))
    return tuple(out)


def run_tower(engine: Engine, item: Item) -> Soft:
    """Return the soft tokens of an item by the engine's tower."""
    feeds = {name: t.to(engine.device) for name, t in item.feeds.items()}
    rows = engine.runtime.encode(item.tower, feeds)[0, : item.rows]
    return Soft(item.kind, (rows,), item.times)


def _audio(engine: Engine) -> Item:
    """Return an audio clip of noise; features of masked frames are 1, so that a tower that does not
    mask them fails."""
    settings = sound_settings(engine)
    rate = settings.sampling_rate
    tokens = min(max(1, int(SHARE * min(engine.media.lengths))), LONGEST)
    count = max(settings.fewest_samples, tokens * rate // settings.soft_tokens(rate))
    samples = 0.3 * np.random.default_rng(SEED).standard_normal(count)
    audio = _item(engine, AUDIO, Waveform(samples.astype(np.float32), rate))
    if "mask" not in audio.feeds:
        return audio
    features = audio.feeds["features"].where(audio.feeds["mask"][..., None], 1.0)
    return replace(audio, feeds={**audio.feeds, "features": features})


def _item(engine: Engine, kind: str, media: Any, **options: Any) -> Item:
    """Return an item with the inputs of its tower, as the engine computes them."""
    runs: list[tuple[str, Mapping[str, Tensor], int]] = []

    def encode(tower: str, feeds: Mapping[str, Tensor]) -> Tensor:
        shape = [int(d) for d in engine.program.graphs[tower].outputs[0].type.shape]
        runs.append((tower, feeds, shape[1]))
        return torch.zeros(shape)

    recorder: Any = SimpleNamespace(encode=encode)
    soft = replace(engine, runtime=recorder).encode(kind, media, **options)
    ((tower, feeds, size),) = runs
    return Item(tower, kind, feeds, soft.count, size, soft.times)
