"""Encodes a file, an array or a message part to soft tokens, through an engine's towers.

    soft = engine.encode("image", "photo.png", budget=280)
    soft = engine.encode("video", "clip.mp4", frames=8)
    soft = engine.encode("audio", "speech.wav", too_long="refuse")

An item is a path, decoded pixels (an array, or a Pillow image) or samples, or one that this package
has preprocessed. Nothing is downloaded here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch

from g4ir.chat.messages import Medium, source_of
from g4ir.errors import InputError
from g4ir.media.audio import Clip, Waveform, prepare_audio, read_audio
from g4ir.media.images import PreparedImage, pixels_of, prepare_image, read_image
from g4ir.media.limits import check_limit
from g4ir.media.soft import Soft
from g4ir.media.videos import Footage, Video, prepare_video, read_footage, video_settings
from g4ir.model.audio import CUT, AudioSettings, MelSettings, audio_settings
from g4ir.model.images import image_settings
from g4ir.model.media import AUDIO, IMAGE, VIDEO, check_budget, check_file, check_supported
from g4ir.model.towers import STRIDE, audio_name, vision_name
from g4ir.spec.parts import FAMILIES, UnifiedAudio
from g4ir.weights.checkpoint import read_extractor

from .parts import EngineParts


def encode(
    engine: EngineParts,
    kind: str,
    item: Any,
    *,
    budget: int | None = None,
    frames: int | None = None,
    fps: float | None = None,
    too_long: str = CUT,
) -> Soft:
    """Return the soft tokens of one item.

    `budget`: maximum soft tokens of an image, one of those the engine was built for; `frames`:
    number of frames of a video (default 32, or all of a shorter one); `fps`: frames per second
    instead, at most `frames` if passed. (Models with a default rate, `fps` in model_types.yaml,
    take frames at `fps` or that rate, at most `frames`, default 32, without their times.)
    `too_long`: whether audio beyond the limit is cut or refused. InputError for a kind that the
    engine does not take, a file that cannot be read as that kind, and in a forked process;
    MissingError if a library for decoding is missing.
    """
    engine.check_process()
    check_supported(kind, engine.media, engine.spec)
    if kind == IMAGE:
        return _image(engine, item, budget)
    return _video(engine, item, frames, fps) if kind == VIDEO else _audio(engine, item, too_long)


def _image(engine: EngineParts, item: Any, budget: int | None) -> Soft:
    chosen = engine.media.default if budget is None else budget
    check_budget(chosen, engine.media)
    settings = image_settings(engine.spec, chosen)
    if isinstance(item, str | Path):
        item = prepare_image(read_image(item), settings, str(item))
    if not isinstance(item, PreparedImage):
        item = prepare_image(pixels_of(item), settings)
    return Soft(IMAGE, (_seen(engine, item.patches, item.positions, item.soft_tokens),))


def _video(engine: EngineParts, item: Any, frames: int | None, fps: float | None) -> Soft:
    settings = video_settings(engine.spec, engine.media.frame)
    rate = FAMILIES[engine.spec.model_type].get("video", {}).get("fps")
    fps, by_time = rate if fps is None else fps, rate is not None
    if isinstance(item, str | Path):
        item = read_footage(item, settings, frames, engine.limits.max_seq, fps, by_time)
    if isinstance(item, np.ndarray):
        item = Video(item)
    if not isinstance(item, Footage):
        item = prepare_video(_checked(item, Video, VIDEO), settings, frames, fps, by_time)
    pieces = [
        _seen(engine, patches, positions, item.soft_tokens)
        for patches, positions in zip(item.patches, item.positions, strict=True)
    ]
    return Soft(VIDEO, tuple(pieces), () if by_time else tuple(item.times))


def _seen(engine: EngineParts, patches: Any, positions: Any, soft: int) -> torch.Tensor:
    grids = {image_settings(engine.spec, n).rows: n for n in engine.media.grids}
    if len(patches) not in grids:
        why = f"this engine was built for {' or '.join(map(str, sorted(grids)))} of them"
        fix = "prepare it with this engine's settings"
        raise InputError(f"an image or frame of {len(patches)} patches: {why}; {fix}")
    feeds = {"patches": patches, "positions": positions}
    return _run(engine, vision_name(grids[len(patches)]), feeds)[:soft]


def _audio(engine: EngineParts, item: Any, too_long: str) -> Soft:
    if isinstance(item, str | Path):
        item = read_audio(item)
    if not isinstance(item, Clip):
        item = prepare_audio(_checked(item, Waveform, AUDIO), sound_settings(engine), too_long)
    encode_clip = _framed if isinstance(engine.spec.audio, UnifiedAudio) else _heard
    return Soft(AUDIO, (encode_clip(engine, item),))


def sound_settings(engine: EngineParts) -> AudioSettings:
    """Return the checkpoint's audio settings, bounded by the limits that the engine was built
    for."""
    settings = audio_settings(engine.spec, read_extractor(engine.path))
    if isinstance(settings, MelSettings):
        return settings.limited_to(max(engine.media.lengths))
    return settings


def _heard(engine: EngineParts, clip: Clip) -> torch.Tensor:
    fits = [n for n in engine.media.lengths if n >= clip.soft_tokens]
    if not fits:
        raise InputError(
            f"an audio clip of {clip.soft_tokens} soft tokens: this engine was built for at most "
            f"{max(engine.media.lengths)}; build it with a longer --audio-seconds"
        )
    frames = fits[0] * STRIDE
    # The feature extractor pads the samples to a multiple: frames of padding alone are cut.
    features, mask = clip.features[:frames], clip.mask[:frames]
    fill = frames - len(mask)
    feeds = {"features": np.pad(features, ((0, fill), (0, 0))), "mask": np.pad(mask, (0, fill))}
    return _run(engine, audio_name(fits[0]), feeds)[: clip.soft_tokens]


def _framed(engine: EngineParts, clip: Clip) -> torch.Tensor:
    """Encode an audio clip of any length in parts: frames are independent."""
    step, parts = max(engine.media.lengths), list[torch.Tensor]()
    for at in range(0, len(clip.features), step):
        part = clip.features[at : at + step]
        filled = np.pad(part, ((0, step - len(part)), (0, 0)))
        parts.append(_run(engine, audio_name(step), {"features": filled})[: len(part)])
    return torch.cat(parts)[: clip.soft_tokens]


def _checked(item: Any, kind: type, name: str) -> Any:
    if not isinstance(item, kind):
        array = "an array, " if kind is Video else ""
        expected = f"expected a path, {array}a {kind.__name__} or the result of prepare_{name}"
        raise InputError(f"{name}: {expected}, found {type(item).__name__}")
    return item


def _run(engine: EngineParts, tower: str, feeds: Mapping[str, Any]) -> torch.Tensor:
    inputs = {
        name: torch.from_numpy(np.ascontiguousarray(x))[None].to(engine.device)
        for name, x in feeds.items()
    }
    check_limit()
    with engine.towers:  # one at a time
        return engine.runtime.encode(tower, inputs)[0]


_FILE = "file://"


def read_local(engine: EngineParts, medium: Medium, **settings: Any) -> Soft:
    """Encode a medium of a trusted user, who may read local files: a data URL, a file URL or a
    path; with the settings of `encode`. InputError for kinds that the engine does not support, and
    for files that cannot be decoded."""
    check_supported(medium.kind, engine.media, engine.spec)
    source = source_of(medium)
    if source.raw is not None:
        return soft_of(engine, medium, source.raw, **settings)
    if source.text.startswith("data:"):
        raise InputError(f"{source.where}: is no data URL in base64")
    path = source.text
    if path.startswith(_FILE):
        path = unquote(path.removeprefix(_FILE))
    elif "://" in path:
        raise InputError(f"{source.where}: no path, data URL or file URL; nothing is fetched")
    check_file(medium.kind, path)
    return encode(engine, medium.kind, path, **settings)


def soft_of(engine: EngineParts, medium: Medium, raw: bytes, **settings: Any) -> Soft:
    """Encode a file's bytes to soft tokens, with the settings of `encode`. Where an InputError
    names the file, it names the part of the message instead."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "medium"
        path.write_bytes(raw)
        try:
            check_limit()
            return encode(engine, medium.kind, path, **settings)
        except InputError as e:
            raise InputError(str(e).replace(str(path), medium.where)) from None
