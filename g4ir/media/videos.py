"""Videos: a file or an array of frames -> the patches of sampled frames, with their times.

    video = read_video("clip.mp4")                            # or Video(frames, rate)
    clip = prepare_video(video, video_settings(spec))         # patches, positions, times

Frames are sampled evenly and each is prepared like an image of a smaller budget (rules 31, 38).
From decoded frames onwards all is equal to the bit to the video processors of transformers 5.17;
decoding is a library's (av).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4ir.errors import InputError, MissingError
from g4ir.spec import Spec

from .budget import FRAME_BUDGET, ImageSettings, fit_image, image_settings
from .images import (
    F32,
    I64,
    NO_PATCH,
    U8,
    check_file,
    check_pixels,
    check_size,
    patchify,
    positions_of,
    resize,
)

FRAMES = 32  # sampled of a video; the reference's default, as is the next
ASSUMED_RATE = 24.0  # frames per second where nothing says


@dataclass(frozen=True, eq=False)
class Video:
    """Frames uint8 [T, H, W, 3], all of a video or a choice of them."""

    frames: U8
    rate: float | None = None  # of the whole video, frames per second
    indices: tuple[int, ...] | None = None  # of a choice: which frames of the video these are
    name: str = "video"  # for messages: the file's name


@dataclass(frozen=True, eq=False)
class Footage:
    """One video as a variant takes it; every frame is an image of its own."""

    patches: F32  # [T, P, cell * cell * 3], rows of padding are zero
    positions: I64  # [T, P, 2], (x, y), padding (-1, -1)
    soft_tokens: int  # of each frame
    times: tuple[str, ...]  # of each frame, mm:ss


@dataclass(frozen=True)
class VideoLimits:
    """Sizes that are looked at before anything is decoded."""

    max_bytes: int = 1 << 32  # of the file
    max_pixels: int = 1 << 25  # of a frame
    max_frames: int = 1 << 20  # of the file; nine hours at 30 per second


# --- sampling ---------------------------------------------------------------------------------


def video_settings(spec: Spec, budget: int | None = None) -> ImageSettings:
    """How a variant cuts frames; `budget` is soft tokens of a frame. InputError as there."""
    return image_settings(spec, FRAME_BUDGET if budget is None else budget)


def sample_frames(total: int, frames: int | None = None, name: str = "video") -> tuple[int, ...]:
    """Indices of `frames` evenly spread frames out of `total`, from the first on.

    None means FRAMES, or all of a shorter video, which the reference refuses. InputError for a
    number below 1 or above the total.
    """
    if total < 1:
        raise InputError(f"{name}: no frames")
    count = min(FRAMES, total) if frames is None else frames
    if type(count) is not int or not 1 <= count <= total:
        raise InputError(f"{name}: {count!r} frames asked for, the video has {total}; "
                         f"1 to {total}")  # fmt: skip
    import torch

    # Its rounding of the steps decides between two neighbours now and then, and of whether one
    # frame more comes out, which may be one past the end (61 frames, 7 of them): that one the
    # reference cannot read either.
    chosen: list[int] = torch.arange(0, total, total / count).int().tolist()
    return tuple(i for i in chosen if i < total)


def frame_times(indices: tuple[int, ...], rate: float | None) -> tuple[str, ...]:
    """The times of frames in minutes and seconds, both rounded down: 01:05."""
    # In float32 as in the reference: one bit can make a second.
    seconds = np.array(indices, np.float32) / np.float32(rate or ASSUMED_RATE)
    return tuple(f"{int(s // 60):02d}:{int(s % 60):02d}" for s in seconds)


def prepare_video(video: Video, settings: ImageSettings, frames: int | None = None) -> Footage:
    """The patches of the sampled frames; a video with `indices` was sampled before.

    InputError, naming the video, for another type or shape, a rate that is no positive number,
    and numbers of frames as in `sample_frames`.
    """
    name, rate = video.name, video.rate
    check_pixels(video.frames, 4, name)
    if rate is not None and not (np.isfinite(rate) and rate > 0):
        raise InputError(f"{name}: {rate!r} frames per second; expected a number above 0")
    indices, chosen = _chosen(video, frames)
    _, height, width, _ = chosen.shape
    grid = fit_image(settings, width, height, name)
    # A division, where images are multiplied, as in the reference: they differ in the last bit.
    values = patchify(resize(chosen, grid), settings.cell) / np.float32(255)
    positions = positions_of(grid, settings)
    fill = settings.rows - len(positions)
    positions = np.pad(positions, ((0, fill), (0, 0)), constant_values=NO_PATCH)
    return Footage(
        np.pad(values, ((0, 0), (0, fill), (0, 0))),
        np.repeat(positions[None], len(chosen), axis=0),
        grid.soft_tokens,
        frame_times(indices, rate),
    )


def _chosen(video: Video, frames: int | None) -> tuple[tuple[int, ...], NDArray[Any]]:
    total, known = len(video.frames), video.indices
    if known is None:
        indices = sample_frames(total, frames, video.name)
        return indices, video.frames[list(indices)]
    if frames not in (None, total) or len(known) != total or not total:
        raise InputError(f"{video.name}: {total} frames at {len(known)} indices; a video with "
                         "indices is sampled already, one frame for each")  # fmt: skip
    return known, video.frames


# --- files ------------------------------------------------------------------------------------


def read_video(
    path: str | Path, frames: int | None = None, limits: VideoLimits | None = None
) -> Video:
    """The sampled frames of a video file; the others are decoded but not kept.

    InputError, naming the file, for one that is missing, empty, without a picture, corrupt,
    truncated or above the limits; MissingError where av is not installed.
    """
    path, limits = Path(path), limits or VideoLimits()
    try:
        check_file(path, "video", limits.max_bytes)
    except OSError as e:
        raise InputError(f"{path}: cannot be read: {e.strerror or e}") from e
    av = _av(path)
    try:
        return _decode(av, path, frames, limits)
    except (av.FFmpegError, OSError, ValueError) as e:
        raise InputError(f"{path}: no video, corrupt or truncated: {e}") from e


def _decode(av: Any, path: Path, frames: int | None, limits: VideoLimits) -> Video:
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise InputError(f"{path}: has no picture; send sound as audio")
        stream = container.streams.video[0]
        check_size(path, stream.width, stream.height, limits.max_pixels)
        rate = float(stream.average_rate) if stream.average_rate else None
        total = stream.frames
    # Some containers do not say how many frames they hold.
    total = total or sum(1 for _ in _frames(av, path, limits))
    _check_count(path, total, limits)
    indices = sample_frames(total, frames, str(path))
    wanted = frozenset(indices)
    kept = [frame.to_ndarray(format="rgb24")
            for i, frame in _frames(av, path, limits, indices[-1]) if i in wanted]  # fmt: skip
    if len(kept) < len(indices):
        raise InputError(f"{path}: truncated: {total} frames announced, fewer are there")
    return Video(np.stack(kept), rate, indices, str(path))


def _frames(
    av: Any, path: Path, limits: VideoLimits, last: int | None = None
) -> Iterator[tuple[int, Any]]:
    """Decoded frames with their number, up to the last one."""
    with av.open(str(path)) as container:
        for i, frame in enumerate(container.decode(video=0)):
            _check_count(path, i + 1, limits)
            check_size(path, frame.width, frame.height, limits.max_pixels)
            yield i, frame
            if i == last:
                return


def _check_count(path: Path, count: int, limits: VideoLimits) -> None:
    if count > limits.max_frames:
        raise InputError(f"{path}: {count} frames, at most {limits.max_frames}; cut it")


def _av(path: Path) -> Any:
    try:
        return importlib.import_module("av")
    except ImportError as e:
        raise MissingError(f"{path}: videos need av: pip install 'g4ir[mm]'") from e
