"""Videos: a file or an array of frames -> the patches of sampled frames, with their times.

    clip = read_footage("clip.mp4", video_settings(spec))          # patches, positions, times
    clip = prepare_video(Video(frames, rate), video_settings(spec))

Frames are sampled evenly and each is prepared like an image with fewer soft tokens (rules 31, 38),
bit-identical to the video processors of transformers 5.17; files are decoded by av.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from g4ir.errors import G4Error, InputError
from g4ir.model.images import CHANNELS, Grid, ImageSettings, fit_image, frame_budget, image_settings
from g4ir.ops.types import torch
from g4ir.spec.record import Spec

from .files import check_size, is_cut, library, opened
from .images import F32, I64, U8, check_pixels, patchify, positions_of, resize
from .limits import check_limit

FRAMES = 32  # frames sampled of a video by default, as in the reference
ASSUMED_RATE = 24.0  # assumed frames per second if the file has no rate


@dataclass(frozen=True, eq=False)
class Video:
    """Decoded frames uint8 [T, H, W, 3]: all of a video, or some."""

    frames: U8
    rate: float | None = None  # frames per second
    name: str = "video"  # in errors; the file's name if there is one


@dataclass(frozen=True, eq=False)
class Footage:
    """One video prepared for a variant; every frame is a separate image."""

    patches: F32  # [T, P, cell * cell * 3], padding is zero
    positions: I64  # [T, P, 2], (x, y), padding (-1, -1)
    soft_tokens: int  # of each frame
    times: tuple[str, ...]  # of each frame, mm:ss


#: limits, checked before decoding, all but the first also during it: bytes of a file, pixels of a
#: frame, frames of a file (nine hours at 30 per second), pixels of all frames (two hours of
#: 1920x1080 at 30 per second)
MAX_BYTES, MAX_PIXELS, MAX_FRAMES, MAX_DECODED = 1 << 32, 1 << 25, 1 << 20, 1 << 39


# --- sampling ---------------------------------------------------------------------------------


def video_settings(spec: Spec, budget: int | None = None) -> ImageSettings:
    """Return a variant's settings for video frames; `budget`: maximum soft tokens per frame, None:
    the variant's. InputError as in `image_settings`."""
    return image_settings(spec, frame_budget(spec) if budget is None else budget)


def sample_frames(total: int, frames: int | None = None, name: str = "video") -> tuple[int, ...]:
    """Return indices of `frames` evenly spread frames out of `total`, from the first on; None:
    FRAMES, or all of a shorter video. InputError for a number below 1 or above the total."""
    if total < 1:
        raise InputError(f"{name}: no frames")
    count = min(FRAMES, total) if frames is None else frames
    if type(count) is not int or not 1 <= count <= total:
        raise InputError(
            f"{name}: {count!r} frames requested, the video has {total}; expected 1 to {total}"
        )
    # torch's rounding of the steps, as in the reference; one index may be past the end (61 frames,
    # 7 of them), which the reference cannot read either.
    chosen: list[int] = torch.arange(0, total, total / count).int().tolist()
    return tuple(i for i in chosen if i < total)


def frames_at(
    fps: float | None, seconds: Sequence[float], frames: int | None = None, name: str = "video"
) -> int | None:
    """Return how many frames to take of those at `seconds`: `fps` a second over the whole video, at
    least one, at most all, and at most `frames` if that is given. Without `fps` it is `frames`."""
    if fps is None:
        return frames
    count = min(len(seconds), _frame_count(fps, seconds, name))
    return count if frames is None else min(count, frames)


def _frame_count(fps: float, seconds: Sequence[float], name: str) -> int:
    if not (isinstance(fps, int | float) and np.isfinite(fps) and fps > 0):
        raise InputError(f"{name}: fps {fps!r}: expected frames per second above 0")
    total = len(seconds)
    # Assumes that the last frame is shown as long as the average one; rounds 7.9999999 to 8.
    span = (seconds[-1] - seconds[0]) * total / (total - 1) if total > 1 else 0.0
    return max(1, int(span * fps + 1e-6))


def frames_by_time(
    fps: float, seconds: Sequence[float], frames: int | None = None, name: str = "video"
) -> tuple[int, ...]:
    """Return the indices of the frames shown at 0, 1 / fps, 2 / fps, ... seconds: of at most
    `frames` (default FRAMES) of these times, evenly spread (`EmbeddingGemma2VideoProcessor` of
    transformers 5.24)."""
    limit, count = FRAMES if frames is None else frames, _frame_count(fps, seconds, name)
    if type(limit) is not int or limit < 1:
        raise InputError(f"{name}: {limit!r} frames requested; expected at least 1")
    targets = np.linspace(0, count - 1, min(count, limit), dtype=int) / fps
    after = np.searchsorted(np.asarray(seconds) - seconds[0], targets + 1e-6, side="right")
    return tuple((after - 1).tolist())


def spread_frames(
    seconds: Sequence[float], frames: int | None = None, name: str = "video"
) -> tuple[int, ...]:
    """Return indices of `frames` different frames nearest to evenly spread presentation times; at a
    constant rate, those of `sample_frames`. InputError as in `sample_frames`."""
    total, even = len(seconds), np.array(sample_frames(len(seconds), frames, name))
    if total == 1:
        return (0,)
    times = np.asarray(seconds)
    targets = times[0] + even * ((times[-1] - times[0]) / (total - 1))
    after = np.searchsorted(times, targets).clip(1, total - 1)
    nearest = after - (targets - times[after - 1] <= times[after] - targets)
    order = np.arange(len(even))
    once = np.maximum.accumulate(nearest - order) + order
    return tuple(np.minimum(once, total - len(even) + order).tolist())


def frame_times(
    indices: tuple[int, ...], rate: float | None, seconds: tuple[float, ...] | None = None
) -> tuple[str, ...]:
    """Return the times of frames in minutes and seconds, both rounded down: 01:05. The
    times are `seconds` if given, else those of a constant `rate` (None: ASSUMED_RATE)."""
    # In float32 like the reference: the last bit may change the second.
    even = np.array(indices, np.float32) / np.float32(rate or ASSUMED_RATE)
    return tuple(f"{int(s // 60):02d}:{int(s % 60):02d}" for s in seconds or even)


def prepare_video(
    video: Video,
    settings: ImageSettings,
    frames: int | None = None,
    fps: float | None = None,
    by_time: bool = False,
) -> Footage:
    """Return the patches of the sampled frames: as many as `frames_at` returns, evenly spread, or,
    with `by_time` and `fps`, those of `frames_by_time`. InputError, naming the video, for another
    type or shape, a size that `fit_image` refuses, a rate or `fps` that is no positive number, and
    a number of frames that the function refuses that selects them."""
    name, rate, total = video.name, video.rate, len(video.frames)
    check_pixels(video.frames, 4, name)
    if rate is not None and not (np.isfinite(rate) and rate > 0):
        raise InputError(f"{name}: {rate!r} frames per second; expected a number above 0")
    seconds = [i / (rate or ASSUMED_RATE) for i in range(total)]
    if by_time and fps and seconds:  # without a rate: as if its rate were `fps`
        indices = frames_by_time(fps if rate else ASSUMED_RATE, seconds, frames, name)
    else:
        indices = sample_frames(total, frames_at(fps, seconds, frames, name), name)
    times = frame_times(indices, rate)
    return _footage((video.frames[i] for i in indices), times, settings, name)


def _footage(
    frames: Iterable[U8],
    times: tuple[str, ...],
    settings: ImageSettings,
    name: str,
    max_tokens: int | None = None,
) -> Footage:
    """Prepare frame by frame, so that only one is in memory at full resolution. InputError for more
    than `max_tokens` soft tokens in all, and for frames of different sizes."""
    grid: Grid | None = None
    for i, frame in enumerate(frames):
        check_limit()
        fitted = fit_image(settings, frame.shape[1], frame.shape[0], name)
        if grid is None:
            grid = fitted
            if max_tokens is not None and len(times) * grid.soft_tokens > max_tokens:
                fewer = grid.soft_tokens <= max_tokens
                raise InputError(
                    f"{name}: {len(times)} frames of {grid.soft_tokens} soft tokens are more than "
                    f"the engine's --max-seq {max_tokens}; "
                    f"{'ask for fewer frames' if fewer else 'build with a larger one'}"
                )
            patches = np.zeros((len(times), settings.rows, settings.cell**2 * CHANNELS), "f4")
        elif grid != fitted:
            problem = f"{name}: the frame at {times[i]} has another size than the first"
            raise InputError(f"{problem}; send a video whose frames have one size")
        # Divides like the reference, which multiplies for images: the two differ in the last bit.
        cells = patchify(resize(frame[None], grid), settings.cell)[0] / np.float32(255)
        patches[i, : len(cells)] = cells
    assert grid is not None
    positions = np.repeat(positions_of(grid, settings)[None], len(times), axis=0)
    return Footage(patches, positions, grid.soft_tokens, times)


# --- files ------------------------------------------------------------------------------------


#: containers that are opened, by FFmpeg's names; no playlists, which open other files
CONTAINERS = ("mov", "matroska", "avi", "mpegts", "mpeg", "ogg", "flv", "gif")


def read_footage(
    path: str | Path,
    settings: ImageSettings,
    frames: int | None = None,
    max_tokens: int | None = None,
    fps: float | None = None,
    by_time: bool = False,
) -> Footage:
    """Return the patches of sampled frames of a video file as players show it: turned and mirrored
    by the display matrix, without frames that edit lists hide. The frames are spread by
    presentation time, or, with `by_time` and `fps`, those of `frames_by_time`; memory holds one at
    full resolution.

    InputError, naming the file, for one that is missing, empty, none of CONTAINERS, without images,
    corrupt, truncated, too large, of a codec without a decoder or shown at an oblique angle, for
    more than `max_tokens` soft tokens, and for `frames` and `fps` as in `prepare_video`;
    MissingError if av cannot be imported."""
    path = Path(path)
    sample = _sample(path, frames, fps, by_time)
    times = frame_times(sample.indices, sample.rate, sample.seconds)
    return _footage(_decoded(path, sample), times, settings, str(path), max_tokens)


@dataclass(frozen=True)
class _Sample:
    """The frames to take from a file: `indices` in presentation order, times in `seconds`, and
    timestamps in `keys` (time base of the stream) to find them by. If `keys` is None, they are
    found by index."""

    total: int  # frames that the file shows
    rate: float | None
    indices: tuple[int, ...]
    seconds: tuple[float, ...]
    keys: tuple[int, ...] | None


LOST = 16  # frames that a decoder may drop at a cut: H.264 has at most 16 reference frames


def _sample(path: Path, frames: int | None, fps: float | None, by_time: bool = False) -> _Sample:
    """Choose frames by the timestamps of the packets; nothing is decoded."""
    with opened(path, "video", MAX_BYTES, "send a smaller video") as file:
        if is_cut(file, path.stat().st_size):
            raise InputError(f"{path}: truncated: its header announces more than the file has")
    with _opened(path) as container:
        stream = container.streams.video[0]
        check_size(path, stream.width, stream.height, MAX_PIXELS)
        rate = float(stream.average_rate) if stream.average_rate else None
        stamps = _timestamps(container, path)
        unit, start = stream.time_base, (container.start_time or 0) / 10**6
        by_index = container.format.name == "avi"  # FFmpeg stamps its packets in decoding order
    if None in stamps or not unit:
        stamps, unit, by_index = range(len(stamps)), 1 / Fraction(rate or ASSUMED_RATE), True
    ticks = sorted(stamps)
    # Integers and one division, since the last bit may change the second.
    seconds = [(t - ticks[0]) * unit.numerator / unit.denominator for t in ticks]
    if by_time and fps:
        indices = frames_by_time(fps, seconds, frames, str(path))
    else:
        indices = spread_frames(seconds, frames_at(fps, seconds, frames, str(path)), str(path))
    late = ticks[0] * unit.numerator / unit.denominator - start
    late = late if late >= 1 else 0.0  # times count from audio that starts a second or more before
    keys = None if by_index else tuple(ticks[i] for i in indices)
    times = tuple(late + seconds[i] for i in indices)
    return _Sample(len(ticks), rate, indices, times, keys)


def _timestamps(container: Any, path: Path) -> Sequence[Any]:
    """Return the presentation timestamp of each packet that is shown; None for a packet without,
    and for all packets if timestamps restart within the file."""
    stream = container.streams.video[0]
    stamps, clock, complete = list[Any](), list[int](), True
    for packet in container.demux(stream):
        check_limit()
        if not packet.size:  # the end of the stream
            continue
        complete = not packet.is_corrupt
        clock += [packet.dts] if packet.dts is not None else []
        if not packet.is_discard:  # by an edit list
            stamps.append(packet.pts)
            _check_count(path, len(stamps), stream.width * stream.height)
    if not complete:
        raise InputError(f"{path}: truncated: the file ends in the middle of a frame")
    anew = any(after < before for before, after in pairwise(clock))
    return [None] * len(stamps) if anew else stamps


def _decoded(path: Path, sample: _Sample) -> Iterator[U8]:
    """Decode the frames of a sample one by one, as uint8 [H, W, 3]. Instead of a frame that the
    decoder drops, as between a cut and the next key frame, yield the next one, or the last."""
    keys, pending, i, frame = sample.keys, deque(sample.keys or sample.indices), 0, None
    with _opened(path) as container:
        # one thread: the other cores compute decode steps of running requests
        container.streams.video[0].codec_context.thread_count = 1
        for i, frame in enumerate(container.decode(video=0), 1):
            check_limit()
            check_size(path, frame.width, frame.height, MAX_PIXELS)
            _check_count(path, i, frame.width * frame.height)
            key = i - 1 if keys is None or frame.pts is None else frame.pts
            while pending and key >= pending[0]:
                pending.popleft()
                yield _upright(frame, path)
            if not pending:
                return
        if frame is None or (len(pending) > 1 and sample.total - i > LOST):
            raise InputError(f"{path}: corrupt: {i} of its {sample.total} frames can be decoded")
        for _ in pending:
            yield _upright(frame, path)


def _upright(frame: Any, path: Path) -> U8:
    """Return a frame as players show it: turned and mirrored by its display matrix, if any."""
    (a, b), (c, d) = _display_matrix(frame)  # pixel (x, y) goes to (ax + cy, bx + dy)
    pixels: U8 = frame.to_ndarray(format="rgb24")
    if abs(b) > abs(a):
        pixels, a, b, c, d = pixels.swapaxes(0, 1), c, d, a, b
    if max(abs(b), abs(c)) > 0.02 * min(abs(a), abs(d)):  # more than about a degree
        raise InputError(f"{path}: is shown at an oblique angle; rotate it by right angles only")
    return pixels[:: 1 if d > 0 else -1, :: 1 if a > 0 else -1]


def _display_matrix(frame: Any) -> Any:
    try:
        data = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # av lists all side data or none, and raises for unknown kinds
        turn = math.radians(frame.rotation)
        return (math.cos(turn), -math.sin(turn)), (math.sin(turn), math.cos(turn))
    matrix = np.frombuffer(bytes(data or b""), np.int32).reshape(-1, 3)[:2, :2] / 65536
    return matrix if matrix.any() else np.eye(2)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Context with the container of a video file; converts errors of av to InputError."""
    av = library("av", f"{path}: videos need av")
    try:
        with path.open("rb") as file, _container(av, file) as container:
            if not container.streams.video:
                raise InputError(f"{path}: has no video stream; send a video, or send it as audio")
            if container.streams.video[0].codec_context is None:
                raise InputError(f"{path}: corrupt, or of a codec without a decoder; send H.264")
            yield container
    except G4Error:
        raise
    except Exception as e:  # decoders raise whatever a broken file leads them to
        if type(e) is MemoryError:  # not av's subclass: it means a wrong size in a damaged header
            raise
        why = f"no supported video, corrupt or truncated ({e})"
        raise InputError(f"{path}: {why}; send MP4, MOV, MKV, WebM, AVI or MPEG") from e


def _container(av: Any, file: BinaryIO) -> Any:
    """Open the container of a file. Not by its name: FFmpeg takes `10:30.mp4` for a protocol."""
    allowed = {"format_whitelist": ",".join(CONTAINERS), "protocol_whitelist": "none"}
    try:
        return av.open(file, container_options=allowed)
    except UnicodeDecodeError:  # metadata in another encoding than UTF-8
        file.seek(0)
        return av.open(file, container_options=allowed, metadata_errors="replace")


def _check_count(path: Path, count: int, size: int) -> None:
    limit = min(MAX_FRAMES, MAX_DECODED // size)
    if count > limit:
        raise InputError(f"{path}: more than {limit} frames of {size} pixels; send a shorter video")
