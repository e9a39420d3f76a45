"""Video files as players show them: rotation, edit lists, variable frame rates, damage."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from g4ir.errors import InputError
from g4ir.media.videos import (
    FRAMES,
    Video,
    VideoLimits,
    prepare_video,
    read_footage,
    read_video,
    sample_frames,
    spread_frames,
    video_settings,
)
from g4ir.spec.record import load_spec
from tests.media_tools import damaged, noise

av = pytest.importorskip("av")
SETTINGS = video_settings(load_spec("e2b"))
TENTHS = tuple(range(40))  # frames at a constant rate, in ticks
TICK = Fraction(1, 10)


def picture(i: int) -> np.ndarray:
    """The i-th frame: eight bars that spell its number, and a corner that says which way is up."""
    pixels = np.full((48, 64, 3), 60, np.uint8)
    pixels[:16, :16] = 250
    bits = np.array([i >> n & 1 for n in range(8)], np.uint8)
    pixels[24:] = np.repeat(bits * 250, 8)[None, :, None]
    return pixels


def number(frame: np.ndarray) -> int:
    bars = frame[28:44].reshape(16, 8, 8, 3).mean(axis=(0, 2, 3)) > 128
    return sum(int(bar) << n for n, bar in enumerate(bars))


def film(
    path: Path,
    times: Sequence[int] = TENTHS,
    tick: Fraction = TICK,
    b_frames: int = 0,
    late: int = 0,
    codec: str | None = None,
    **options: str,
) -> Path:
    """A video with frames at these times, in ticks; with sound from 0 on where `late`."""
    codec = codec or {".webm": "libvpx-vp9", ".mpg": "mpeg2video"}.get(path.suffix, "mpeg4")
    with av.open(str(path), "w", options=options) as out:
        stream = out.add_stream(codec, rate=25 if codec == "mpeg2video" else Fraction(1) / tick)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.max_b_frames = 12, b_frames
        if late:
            sound = out.add_stream("aac", rate=16_000, layout="mono")
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), "f4"), "fltp", "mono")
            silence.sample_rate, silence.pts = 16_000, 0
            out.mux(sound.encode(silence))
        for i, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(picture(i), format="rgb24")
            frame.pts, frame.time_base = time + late, tick
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
        if late:
            out.mux(sound.encode())
    return path


def seconds(times: Sequence[str]) -> list[int]:
    return [60 * int(m) + int(s) for m, s in (t.split(":") for t in times)]


# --- boxes of MP4 -----------------------------------------------------------------------------


def boxes(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    while at < end:
        size = int.from_bytes(data[at : at + 4], "big")
        yield data[at + 4 : at + 8], at, at + size
        at += size


def box(data: bytes, *kinds: bytes) -> list[tuple[int, int]]:
    """The places of the boxes on the way to one."""
    found, at, end = [], 0, len(data)
    for kind in kinds:
        at, end = next((a, e) for k, a, e in boxes(data, at, end) if k == kind)
        found.append((at, end))
        at += 8
    return found


def with_matrix(path: Path, matrix: Sequence[int]) -> Path:
    """Write a display matrix (a, b, c, d) into the track's header."""
    data = bytearray(path.read_bytes())
    at = box(data, b"moov", b"trak", b"tkhd")[-1][0] + 8 + 40
    a, b, c, d = (n << 16 for n in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


def with_edits(path: Path, edits: Sequence[tuple[float, float]]) -> Path:
    """Replace the edit list: (seconds, from which second of the media; -1 is nothing) each. The
    boxes come after the media, so that no offset changes."""
    data = path.read_bytes()
    way = box(data, b"moov", b"trak", b"edts")
    scale = int.from_bytes(data[box(data, b"moov", b"mvhd")[-1][0] + 20 :][:4], "big")
    media = int.from_bytes(
        data[box(data, b"moov", b"trak", b"mdia", b"mdhd")[-1][0] + 20 :][:4], "big"
    )
    entries = b"".join(
        struct.pack(">IiI", round(n * scale), round(at * media) if at >= 0 else -1, 1 << 16)
        for n, at in edits
    )
    elst = struct.pack(">I4sII", 16 + len(entries), b"elst", 0, len(edits)) + entries
    edts = struct.pack(">I4s", 8 + len(elst), b"edts") + elst
    at, end = way[-1]
    out = bytearray(data[:at] + edts + data[end:])
    for place, stop in way[:-1]:
        struct.pack_into(">I", out, place, stop - place + len(edts) - (end - at))
    path.write_bytes(out)
    return path


# --- rotation ---------------------------------------------------------------------------------

#: display matrices -> what players make of a frame
UPRIGHT: dict[str, tuple[tuple[int, int, int, int], Any]] = {
    "none": ((1, 0, 0, 1), lambda x: x),
    "zeros": ((0, 0, 0, 0), lambda x: x),
    "90 degrees clockwise": ((0, 1, -1, 0), lambda x: np.rot90(x, -1)),
    "90 degrees counterclockwise": ((0, -1, 1, 0), np.rot90),
    "180 degrees": ((-1, 0, 0, -1), lambda x: np.rot90(x, 2)),
    "mirrored": ((-1, 0, 0, 1), np.fliplr),
    "upside down": ((1, 0, 0, -1), np.flipud),
    "transposed": ((0, 1, 1, 0), lambda x: x.swapaxes(0, 1)),
    "transposed the other way": ((0, -1, -1, 0), lambda x: np.rot90(x, 2).swapaxes(0, 1)),
    "half the size": ((0, 2, -2, 0), lambda x: np.rot90(x, -1)),
}


@pytest.mark.parametrize("ending", ["mp4", "mov"])
@pytest.mark.parametrize("case", UPRIGHT)
def test_frames_are_upright(tmp_path: Path, ending: str, case: str) -> None:
    matrix, turned = UPRIGHT[case]
    path = film(tmp_path / f"a.{ending}")
    lying = read_video(path, 3).frames
    video = read_video(with_matrix(path, matrix), 3)
    for frame, raw in zip(video.frames, lying, strict=True):
        assert np.array_equal(frame, turned(raw))
    footage, prepared = read_footage(path, SETTINGS, 3), prepare_video(video, SETTINGS)
    assert np.array_equal(footage.patches, prepared.patches)
    tall = video.frames.shape[1] > video.frames.shape[2]
    assert tall == (int(footage.positions[0, :, 1].max()) > int(footage.positions[0, :, 0].max()))


@pytest.mark.parametrize("ending", ["mkv", "webm", "mp4"])
@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotation_in_other_containers(tmp_path: Path, ending: str, degrees: int) -> None:
    path, plain = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    if not hasattr(av.VideoStream, "set_display_rotation"):
        pytest.skip("this av writes no display matrix")
    with av.open(str(film(plain))) as source, av.open(str(path), "w") as out:
        (given,) = source.streams.video
        stream = out.add_stream_from_template(given)
        stream.set_display_rotation(degrees)
        for packet in source.demux(given):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    wanted = [np.rot90(x, degrees // 90) for x in read_video(plain, 2).frames]
    assert np.array_equal(read_video(path, 2).frames, wanted)


def test_an_oblique_angle_is_refused(tmp_path: Path) -> None:
    path = with_matrix(film(tmp_path / "a.mp4"), (1, 1, -1, 1))
    with pytest.raises(InputError, match=r"a\.mp4: is shown at an oblique angle"):
        read_video(path)


# --- edit lists -------------------------------------------------------------------------------

#: edits of four seconds at ten frames each -> the frames that are shown
EDITS: dict[str, tuple[list[tuple[float, float]], list[int]]] = {
    "all": ([(4, 0)], [*range(40)]),
    "the beginning is cut": ([(3, 1)], [*range(10, 40)]),
    "the end is cut": ([(2.5, 0)], [*range(25)]),
    "both": ([(1.5, 1.7)], [*range(17, 32)]),
    "one frame": ([(0.1, 2)], [20]),
    "two pieces": ([(1, 0.5), (1, 3)], [*range(5, 15), *range(30, 40)]),
    "a pause first": ([(2, -1), (1, 1)], [*range(10, 20)]),
}


@pytest.mark.parametrize("ending", ["mp4", "mov"])
@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize("case", EDITS)
def test_edit_lists_are_followed(tmp_path: Path, ending: str, b_frames: int, case: str) -> None:
    edits, shown = EDITS[case]
    delay = 0.1 * (b_frames > 0)  # by which presentation begins after decoding
    edits = [(n, at + delay if at >= 0 else at) for n, at in edits]
    path = with_edits(film(tmp_path / f"a.{ending}", b_frames=b_frames), edits)
    for count in (1, 2, 7, len(shown), None):
        if count is not None and count > len(shown):
            continue
        video = read_video(path, count)
        wanted = [shown[i] for i in sample_frames(len(shown), count)]
        assert [number(f) for f in video.frames] == wanted


def cut_out(source: Path, path: Path, start: float) -> Path:
    """A clip from `start` on without encoding, as `ffmpeg -ss START -c copy` makes it."""
    with av.open(str(source)) as given, av.open(str(path), "w") as out:
        (stream,) = given.streams.video
        packets = [p for p in given.demux(stream) if p.dts is not None]
        first = round(start / stream.time_base)
        keys = [i for i, p in enumerate(packets) if p.is_keyframe and p.pts <= first]
        copy = out.add_stream_from_template(stream)
        for packet in packets[keys[-1] :]:
            packet.pts, packet.dts, packet.stream = packet.pts - first, packet.dts - first, copy
            out.mux(packet)
    return path


@pytest.mark.parametrize("ending", ["mp4", "mov", "mkv", "avi"])
@pytest.mark.parametrize("b_frames", [0, 2])
def test_clips_cut_without_encoding(tmp_path: Path, ending: str, b_frames: int) -> None:
    path = cut_out(film(tmp_path / "a.mp4", b_frames=b_frames), tmp_path / f"b.{ending}", 1.5)
    video = read_video(path, 5)
    if ending in ("mp4", "mov"):
        assert [number(f) for f in video.frames] == [15, 20, 25, 30, 35]
        assert video.seconds == (0, 0.5, 1, 1.5, 2)
        assert [number(f) for f in read_video(path).frames] == [*range(15, 40)]
    else:  # which begin at the key frame, as players do
        assert len(video.frames) == 5 and number(video.frames[0]) <= 15


def test_a_picture_that_begins_after_the_sound(tmp_path: Path) -> None:
    for ending in ("mp4", "mkv"):
        path = film(tmp_path / f"a.{ending}", late=20)
        assert seconds(read_footage(path, SETTINGS, 4).times) == [2, 3, 4, 5]


# --- frame rates ------------------------------------------------------------------------------

CENTI = Fraction(1, 100)
UNEVEN: dict[str, list[int]] = {  # in hundredths of a second
    "three at once, then few": [0, 3, 6, *range(70, 4_100, 70)],
    "few, then many": [0, 1_000, 2_000, *range(3_000, 3_200, 4)],
    "a pause": [*range(0, 100, 4), *range(3_000, 3_100, 4)],
    "slides": [0, 100, 200, 3_000, 6_000],
}


@pytest.mark.parametrize("ending", ["mp4", "mov", "mkv", "webm", "avi", "ts"])
@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize("case", UNEVEN)
def test_frames_are_spread_by_presentation_time(
    tmp_path: Path, ending: str, b_frames: int, case: str
) -> None:
    times = UNEVEN[case]
    count = min(8, len(times))
    path = film(tmp_path / f"a.{ending}", times, CENTI, 0 if ending == "avi" else b_frames)
    footage, video = read_footage(path, SETTINGS, count), read_video(path, count)
    chosen = [number(f) for f in video.frames]
    assert chosen == list(spread_frames([t / 100 for t in times], count))
    assert seconds(footage.times) == [times[i] // 100 for i in chosen]
    even = [times[-1] * i / (len(times) - 1) for i in sample_frames(len(times), count)]
    if case == "three at once, then few":
        assert max(abs(times[i] - t) for i, t in zip(chosen, even, strict=True)) <= 35


@given(st.integers(1, 300), st.integers(1, 40), st.floats(0.01, 100), st.randoms())
def test_a_constant_rate_is_sampled_by_count(
    total: int, frames: int, step: float, draw: random.Random
) -> None:
    frames = min(frames, total)
    rounded = [i * step + draw.uniform(-0.24, 0.24) * step for i in range(total)]
    for times in ([i * step for i in range(total)], rounded, range(total)):
        assert spread_frames(times, frames) == sample_frames(total, frames)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=80), st.integers(1, 80))
def test_no_frame_is_taken_twice(times: list[int], frames: int) -> None:
    times, frames = sorted(times), min(frames, len(times))
    chosen = spread_frames(times, frames)
    assert len(chosen) == len(sample_frames(len(times), frames))
    assert list(chosen) == sorted({*chosen}) and chosen[0] >= 0 and chosen[-1] < len(times)


def test_times_of_arrays() -> None:
    frames = noise(5, 20, 20, 3)
    at = (0.0, 0.2, 30.0, 61.0, 90.0)
    clip = prepare_video(Video(frames, seconds=at), SETTINGS, 3)
    assert clip.times == ("00:00", "00:30", "01:01")
    assert (
        prepare_video(Video(frames, None, (9, 10, 11, 12, 13), "a", at), SETTINGS).times[-1]
        == "01:30"
    )
    with pytest.raises(InputError, match="5 frames at 2 seconds; one for each"):
        prepare_video(Video(frames, seconds=(0.0, 1.0)), SETTINGS)


def test_a_clock_that_starts_anew(tmp_path: Path) -> None:
    """Two recordings in one file: frames count."""
    parts = [film(tmp_path / f"{i}.ts", TENTHS[:20]).read_bytes() for i in range(2)]
    path = tmp_path / "a.ts"
    path.write_bytes(b"".join(parts))
    video = read_video(path, 4)
    assert [number(f) for f in video.frames] == [0, 10, 0, 10]


# --- files cut off and damaged ----------------------------------------------------------------


@pytest.mark.parametrize("ending", ["mp4", "mov", "mkv", "webm", "avi"])
def test_files_that_are_cut_off_are_called_truncated(tmp_path: Path, ending: str) -> None:
    fast = {"movflags": "+faststart"} if ending in ("mp4", "mov") else {}
    data = film(tmp_path / f"a.{ending}", **fast).read_bytes()
    for end in (len(data) * 7 // 10, len(data) * 9 // 10, len(data) - 40):
        path = tmp_path / f"cut.{ending}"
        path.write_bytes(data[:end])
        with pytest.raises(InputError, match=f"cut.{ending}: truncated"):
            read_video(path)


@pytest.mark.parametrize("options", [{}, {"movflags": "frag_keyframe+empty_moov"}])
def test_fragments_and_what_follows_the_video(tmp_path: Path, options: dict[str, str]) -> None:
    path = film(tmp_path / "a.mp4", **options)
    assert [number(f) for f in read_video(path, 4).frames] == [0, 10, 20, 30]
    path.write_bytes(path.read_bytes() + b"\0\0\x70\0junk" * 40)
    assert len(read_video(path).frames) == FRAMES


@pytest.mark.parametrize("ending", ["mkv", "webm", "avi", "flv"])
def test_files_that_went_through_a_pipe(tmp_path: Path, ending: str) -> None:
    """Their headers do not say how large they are."""

    class Pipe:
        def __init__(self, path: Path) -> None:
            self.file = path.open("wb")

        def write(self, data: bytes) -> int:
            return self.file.write(data)

    path = tmp_path / f"a.{ending}"
    pipe, codec = Pipe(path), {"webm": "libvpx-vp9", "flv": "flv1"}.get(ending, "mpeg4")
    form = {"mkv": "matroska"}.get(ending, ending)
    with av.open(pipe, "w", format=form) as out:
        stream = out.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(20):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture(i), format="rgb24")))
        out.mux(stream.encode())
    pipe.file.close()
    assert [number(f) for f in read_video(path, 4).frames] == [0, 5, 10, 15]


@pytest.mark.parametrize("ending", ["mp4", "mov", "mkv", "webm", "avi", "ts", "mpg"])
def test_damaged_files_of_every_container(tmp_path: Path, ending: str) -> None:
    """250 copies, cut or with other bytes: one InputError, or frames."""
    fast = {"movflags": "+faststart"} if ending in ("mp4", "mov") else {}
    data = film(
        tmp_path / f"a.{ending}", TENTHS[:12], b_frames=ending != "webm", **fast
    ).read_bytes()
    draw, path = random.Random(ending), tmp_path / f"damaged.{ending}"
    for _ in range(250):
        path.write_bytes(damaged(data, draw))
        try:
            frames = read_video(path, draw.choice((None, 1, 3)), VideoLimits(max_pixels=1 << 20))
        except InputError as e:
            assert str(e).startswith(f"{path}: ")
        else:
            assert len(frames.frames) == len(frames.indices or ()) == len(frames.seconds or ())


def test_a_codec_that_nobody_knows(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mp4")
    data = path.read_bytes().replace(b"mp4v", b"zzzz")
    path.write_bytes(data.replace(b"esds", b"free"))
    with pytest.raises(InputError, match=r"a\.mp4: corrupt, or of a codec without a decoder"):
        read_video(path)


def test_a_title_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.avi"
    with av.open(str(path), "w") as out:
        out.metadata["title"] = "TITLE"
        stream = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        out.mux(stream.encode(av.VideoFrame.from_ndarray(picture(0), format="rgb24")))
        out.mux(stream.encode())
    path.write_bytes(path.read_bytes().replace(b"TITLE", "Größe".encode("latin-1")))
    assert len(read_video(path).frames) == 1
