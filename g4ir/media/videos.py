"""Videos: a file or an array of frames -> the patches of sampled frames, with their times.

    clip = read_footage("clip.mp4", video_settings(spec))          # patches, positions, times
    clip = prepare_video(Video(frames, rate), video_settings(spec))

Frames are sampled evenly and each is prepared like an image of a smaller budget (rules 31, 38).
From decoded frames onwards all is equal to the bit to the video processors of transformers 5.17;
decoding is a library's (av).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from g4ir.errors import InputError, MissingError
from g4ir.model.images import CHANNELS, FRAME_BUDGET, Grid, ImageSettings, fit_image, image_settings
from g4ir.spec.record import Spec

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
    max_decoded: int = 1 << 39  # pixels of all frames; two hours of 1920x1080 at 30 per second


# --- sampling ---------------------------------------------------------------------------------


def video_settings(spec: Spec, budget: int | None = None) -> ImageSettings:
    """Return how a variant cuts frames; `budget` is soft tokens of a frame. InputError as there."""
    return image_settings(spec, FRAME_BUDGET if budget is None else budget)


def sample_frames(total: int, frames: int | None = None, name: str = "video") -> tuple[int, ...]:
    """Return indices of `frames` evenly spread frames out of `total`, from the first on.

    None means FRAMES, or all of a shorter video, which the reference refuses. InputError for a
    number below 1 or above the total.
    """
    if total < 1:
        raise InputError(f"{name}: no frames")
    count = min(FRAMES, total) if frames is None else frames
    if type(count) is not int or not 1 <= count <= total:
        raise InputError(f"{name}: {count!r} frames asked for, the video has {total}; 1 to {total}")
    import torch

    # Its rounding of the steps decides between two neighbours now and then, and of whether one
    # frame more comes out, which may be one past the end (61 frames, 7 of them): that one the
    # reference cannot read either.
    chosen: list[int] = torch.arange(0, total, total / count).int().tolist()
    return tuple(i for i in chosen if i < total)


def frame_times(indices: tuple[int, ...], rate: float | None) -> tuple[str, ...]:
    """Return the times of frames in minutes and seconds, both rounded down: 01:05."""
    # In float32 as in the reference: one bit can make a second.
    seconds = np.array(indices, np.float32) / np.float32(rate or ASSUMED_RATE)
    return tuple(f"{int(s // 60):02d}:{int(s % 60):02d}" for s in seconds)


def prepare_video(video: Video, settings: ImageSettings, frames: int | None = None) -> Footage:
    """Return the patches of the sampled frames; a video with `indices` was sampled before.

    InputError, naming the video, for another type or shape, a rate that is no positive number,
    and numbers of frames as in `sample_frames`.
    """
    name, rate = video.name, video.rate
    check_pixels(video.frames, 4, name)
    if rate is not None and not (np.isfinite(rate) and rate > 0):
        raise InputError(f"{name}: {rate!r} frames per second; expected a number above 0")
    indices, chosen = _chosen(video, frames)
    return _footage(chosen, indices, rate, settings, name)


def _chosen(video: Video, frames: int | None) -> tuple[tuple[int, ...], Iterable[U8]]:
    total, known = len(video.frames), video.indices
    if known is None:
        indices = sample_frames(total, frames, video.name)
        return indices, (video.frames[i] for i in indices)
    if frames not in (None, total) or len(known) != total or not total:
        raise InputError(
            f"{video.name}: {total} frames at {len(known)} indices; a video with "
            "indices is sampled already, one frame for each"
        )
    return known, video.frames


def _footage(
    frames: Iterable[U8],
    indices: tuple[int, ...],
    rate: float | None,
    settings: ImageSettings,
    name: str,
    most: int | None = None,
) -> Footage:
    """Prepare one frame after the other, so that one is held in full resolution. InputError for
    more than `most` soft tokens in all."""
    grid: Grid | None = None
    for i, frame in enumerate(frames):
        found = fit_image(settings, frame.shape[1], frame.shape[0], name)
        if grid is None:
            grid = found
            _check_tokens(name, len(indices), grid.soft_tokens, most)
            patches = np.zeros((len(indices), settings.rows, settings.cell**2 * CHANNELS), "f4")
        elif grid != found:
            raise InputError(f"{name}: frame {indices[i]} has another size than those before")
        # A division, where images are multiplied, as in the reference: they differ in the last bit.
        made = patchify(resize(frame[None], grid), settings.cell)[0] / np.float32(255)
        patches[i, : len(made)] = made
    assert grid is not None
    places = positions_of(grid, settings)
    fill = settings.rows - len(places)
    positions = np.pad(places, ((0, fill), (0, 0)), constant_values=NO_PATCH)
    return Footage(
        patches,
        np.repeat(positions[None], len(indices), axis=0),
        grid.soft_tokens,
        frame_times(indices, rate),
    )


def _check_tokens(name: str, frames: int, each: int, most: int | None) -> None:
    if most is not None and frames * each > most:
        raise InputError(
            f"{name}: {frames} frames of {each} soft tokens are more than the "
            f"engine's --max-seq {most}; ask for fewer frames"
        )


# --- files ------------------------------------------------------------------------------------


#: containers that are opened at all, in FFmpeg's words: playlists, which open other files, are none
CONTAINERS = ("mov", "matroska", "avi", "mpegts", "mpeg", "ogg", "flv", "gif")


def read_video(
    path: str | Path, frames: int | None = None, limits: VideoLimits | None = None
) -> Video:
    """Read the sampled frames of a video file in full resolution; others are decoded, not kept.

    InputError, naming the file, for one that is missing, empty, none of CONTAINERS, without a
    picture, corrupt, truncated or above the limits; MissingError where av is not installed.
    """
    with _sampled(Path(path), frames, limits or VideoLimits()) as (head, pictures):
        return Video(np.stack([*pictures]), head.rate, head.indices, str(path))


def read_footage(
    path: str | Path,
    settings: ImageSettings,
    frames: int | None = None,
    most: int | None = None,
    limits: VideoLimits | None = None,
) -> Footage:
    """Return `prepare_video` of `read_video`, with one frame at a time in full resolution. Errors
    as there, and InputError for more than `most` soft tokens."""
    with _sampled(Path(path), frames, limits or VideoLimits()) as (head, pictures):
        return _footage(pictures, head.indices, head.rate, settings, str(path), most)


@dataclass(frozen=True)
class _Head:
    """The facts of a video that are known before frames are decoded."""

    rate: float | None
    indices: tuple[int, ...]


@contextmanager
def _sampled(
    path: Path, frames: int | None, limits: VideoLimits
) -> Iterator[tuple[_Head, Iterator[U8]]]:
    """A context with the head of a video file and its sampled frames, one by one."""
    try:
        check_file(path, "video", limits.max_bytes)
    except OSError as e:
        raise InputError(f"{path}: cannot be read: {e.strerror or e}") from e
    av = _av(path)
    try:
        with path.open("rb") as file:
            head = _head(av, file, path, frames, limits)
            yield head, _kept(av, file, path, head, limits)
    except (av.FFmpegError, OSError, ValueError) as e:
        raise InputError(
            f"{path}: no video, corrupt or truncated ({e}); send MP4, MOV, MKV, WebM, AVI or MPEG"
        ) from e


def _open(av: Any, file: BinaryIO) -> Any:
    """Open the container of a file. Not by its name: FFmpeg takes `10:30.mp4` for a protocol."""
    file.seek(0)
    allowed = {"format_whitelist": ",".join(CONTAINERS), "protocol_whitelist": "none"}
    return av.open(file, container_options=allowed)


def _head(av: Any, file: BinaryIO, path: Path, frames: int | None, limits: VideoLimits) -> _Head:
    with _open(av, file) as container:
        if not container.streams.video:
            raise InputError(f"{path}: has no picture; send sound as audio")
        stream = container.streams.video[0]
        size = stream.width * stream.height
        check_size(path, stream.width, stream.height, limits.max_pixels)
        rate = float(stream.average_rate) if stream.average_rate else None
        total = stream.frames
    # Some containers do not say how many frames they hold.
    total = total or sum(1 for _ in _frames(av, file, path, limits))
    _check_count(path, total, size, limits)
    return _Head(rate, sample_frames(total, frames, str(path)))


def _kept(av: Any, file: BinaryIO, path: Path, head: _Head, limits: VideoLimits) -> Iterator[U8]:
    wanted, found = frozenset(head.indices), 0
    for i, frame in _frames(av, file, path, limits, head.indices[-1]):
        if i in wanted:
            found += 1
            yield frame.to_ndarray(format="rgb24")
    if found < len(wanted):
        raise InputError(f"{path}: truncated: it has fewer frames than it announces")


def _frames(
    av: Any, file: BinaryIO, path: Path, limits: VideoLimits, last: int | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield decoded frames with their number, up to the last one."""
    with _open(av, file) as container:
        for i, frame in enumerate(container.decode(video=0)):
            check_size(path, frame.width, frame.height, limits.max_pixels)
            _check_count(path, i + 1, frame.width * frame.height, limits)
            yield i, frame
            if i == last:
                return


def _check_count(path: Path, count: int, size: int, limits: VideoLimits) -> None:
    """Raise InputError for too many frames, or too many pixels in all."""
    most = min(limits.max_frames, limits.max_decoded // size)
    if count > most:
        raise InputError(f"{path}: {count} frames, at most {most} of this size; cut it")


def _av(path: Path) -> Any:
    try:
        return importlib.import_module("av")
    except ImportError as e:
        raise MissingError(f"{path}: videos need av: pip install 'g4ir[mm]'") from e
