"""Images: equal to the reference's processors, files good and bad, the planner.
Videos: equal to the reference's processors; files as players show them: rotation, edit lists,
variable frame rates, damage.
"""

from __future__ import annotations

import copy
import importlib
import io
import os
import re
import shutil
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from g4ir.errors import InputError, MissingError
from g4ir.media import images, videos
from g4ir.media.audio import read_audio
from g4ir.media.images import FORMATS, pixels_of, prepare_image, read_image
from g4ir.media.videos import Video, prepare_video, read_footage, sample_frames, video_settings
from g4ir.model.images import BUDGETS, ImageSettings, fit_image, image_settings
from g4ir.spec.record import load_spec
from tests.cases import TABLES
from tests.media_tools import TOWER, UNIFIED, noise, outlives_damage, processor, read_video, smooth

#: the reference's other image processor, by Pillow and numpy: the same but for the resize
PILLOW = "transformers.models.gemma4.image_processing_pil_gemma4"


def cut(variant: str, budget: int | None = None) -> ImageSettings:
    return image_settings(load_spec(variant), budget)


# --- sizes ------------------------------------------------------------------------------------

sides = st.integers(1, 5000) | st.integers(1, 10**6) | st.integers(1, 120).map(lambda n: n * 48)


@given(sides, sides, st.integers(1, 2000), st.integers(1, 40), st.integers(1, 6))
def test_image_sizes(width: int, height: int, budget: int, patch: int, pooling: int) -> None:
    for s in (
        ImageSettings(patch, pooling, budget, False, 1 << 30),
        ImageSettings(16, 3, BUDGETS[budget % len(BUDGETS)], False, 1 << 20),
    ):
        size = importlib.import_module(PILLOW).get_aspect_ratio_preserving_size
        size = partial(size, height, width, s.patch_size, s.max_patches, s.pooling)
        try:
            wanted = size()
        except ValueError:  # for a budget of one, where a rounding takes the last token away
            assert s.budget == 1 == fit_image(s, width, height).soft_tokens
            continue
        grid = fit_image(s, width, height)
        assert (grid.height, grid.width) == wanted
        assert (grid.rows * s.patch_size, grid.columns * s.patch_size) == wanted
        assert grid.patches == grid.soft_tokens * s.pooling**2 <= s.max_patches


def test_a_position_table_that_is_too_short() -> None:
    short = ImageSettings(16, 3, 280, False, 100)
    fit_image(short, 100, 100)
    with pytest.raises(InputError, match="a side of 840 patches, the position table has 100"):
        fit_image(short, 1, 5000)


# --- images -----------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("variant", (TOWER, UNIFIED))
@pytest.mark.parametrize("shape", [(60, 90), (768, 768), (1, 300), (733, 41), (500, 1001)])
def test_images_are_the_references(variant: str, budget: int, shape: tuple[int, int]) -> None:
    """Equal to the bit: values, positions with their padding, counts."""
    options = {"return_tensors": "np", "input_data_format": "channels_last"}
    for pixels in (noise(*shape, 3), smooth(*shape)):
        wanted = processor(variant)(pixels, max_soft_tokens=budget, **options)
        found = prepare_image(pixels, cut(variant, budget))
        assert found.patches.dtype == np.float32 and found.positions.dtype == np.int64
        assert np.array_equal(found.patches, np.asarray(wanted["pixel_values"])[0])
        assert np.array_equal(found.positions, np.asarray(wanted["image_position_ids"])[0])
        assert found.soft_tokens == int(wanted["num_soft_tokens_per_image"][0])


def test_views_of_pixels_are_taken_as_they_look() -> None:
    turned = noise(100, 80, 3)[::-1, ::2]
    turned.setflags(write=False)
    kept = turned.copy()
    one, two = (prepare_image(p, cut(TOWER, 70)) for p in (turned, kept))
    assert np.array_equal(one.patches, two.patches) and np.array_equal(turned, kept)


@pytest.mark.parametrize(("shape", "dtype", "message"), TABLES["media"]["pixels"])
def test_bad_pixels(shape: list[int], dtype: str, message: str) -> None:
    pixels: Any = np.zeros(shape, dtype) if dtype else [shape]
    with pytest.raises(InputError, match=f"^x.png: {message}"):
        prepare_image(pixels, cut(TOWER), "x.png")


# --- image files ------------------------------------------------------------------------------

MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "HSV", "LAB")


def load_image(path: Path) -> np.ndarray:
    """How the reference opens a file."""
    return np.array(importlib.import_module("transformers.image_utils").load_image(str(path)))


def made(mode: str) -> Image.Image:
    if mode == "LAB":
        return Image.merge("LAB", Image.fromarray(smooth(60, 90)).split())
    image = Image.fromarray(smooth(60, 90)).convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(noise(60, 90)))
    return image


def encoded(format: str = "PNG", mode: str = "RGB", **more: Any) -> bytes:
    """An image file; in RGB if the format has no such mode."""
    buffer = io.BytesIO()
    try:
        made(mode).save(buffer, format, **more)
    except (OSError, KeyError, ValueError):
        made(mode).convert("RGB").save(buffer, format, **more)
    return buffer.getvalue()


def oriented(n: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = n
    return exif


#: format, mode and options of a file
FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"{f} {mode}": (f, mode, {}) for f in FORMATS for mode in MODES},
    **{
        f"{f} orientation {n}": (f, "RGB", {"exif": oriented(n)})
        for f in ("JPEG", "WEBP")
        for n in range(2, 9)
    },
    "a palette with a transparent entry": ("PNG", "P", {"transparency": 3}),
    "an animation": (
        "GIF",
        "RGB",
        {"save_all": True, "append_images": [Image.new("RGB", (90, 60), "red")]},
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_are_read_as_the_reference_reads_them(tmp_path: Path, case: str) -> None:
    format, mode, options = FILES[case]
    path = tmp_path / "a"
    path.write_bytes(encoded(format, mode, **options))
    pixels = read_image(path)
    turned = case[-1] in "5678" and "orientation" in case
    assert pixels.dtype == np.uint8 and pixels.shape == ((90, 60, 3) if turned else (60, 90, 3))
    assert np.array_equal(pixels, load_image(path))


RAMP = np.arange(60 * 90).reshape(60, 90) * 65535 // (60 * 90 - 1)  # 0 to 65535
WHITE_IS_ZERO, ORIENTATION = 262, 274  # TIFF tags


@pytest.mark.parametrize("format", ["TIFF", "PNG"])
def test_16_bits_are_scaled(tmp_path: Path, format: str) -> None:
    path, turned = tmp_path / "a", {"tiffinfo": {ORIENTATION: 3}} if format == "TIFF" else {}
    Image.fromarray(RAMP.astype(np.uint16)).save(path, format, **turned)
    pixels = read_image(path)
    wanted = RAMP[::-1, ::-1] if turned else RAMP
    assert np.abs(pixels - wanted[..., None] / 257).max() <= 1
    with Image.open(path) as image:
        assert np.array_equal(pixels_of(image), pixels)


def png_of(width: int, height: int, pixels: bytes, bits: int = 8, colour: int = 2) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = (b"IHDR" + head, b"IDAT" + zlib.compress(pixels), b"IEND")
    sized = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(sized)


@pytest.mark.parametrize("colour, channels", [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_16_bits_in_grey_and_colour(tmp_path: Path, colour: int, channels: int) -> None:
    path, values = tmp_path / "a.png", np.repeat(RAMP[..., None], channels, axis=2).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    path.write_bytes(png_of(90, 60, rows, 16, colour))
    assert np.array_equal(read_image(path), np.repeat((RAMP >> 8)[..., None], 3, axis=2))


def test_white_may_be_zero(tmp_path: Path) -> None:
    path = tmp_path / "a.tiff"
    Image.fromarray(RAMP.astype(np.uint16)).save(path)
    data = path.read_bytes()
    entry = struct.pack("<HHIH", WHITE_IS_ZERO, 3, 1, 1)
    assert data.count(entry) == 1
    path.write_bytes(data.replace(entry, entry[:-2] + b"\0\0"))
    assert np.array_equal(read_image(path)[..., 0], 255 - (RAMP >> 8))


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_32_bits_are_refused(tmp_path: Path, kind: Any) -> None:
    image = Image.fromarray(RAMP.astype(kind))
    image.save(tmp_path / "a.tiff")
    with pytest.raises(InputError, match=r"a\.tiff: pixels of 32 bits.*save it with 8 or 16 bits"):
        read_image(tmp_path / "a.tiff")
    with pytest.raises(InputError, match=r"^image: pixels of 32 bits"):
        pixels_of(image)


#: others are in refused/media.yaml
BAD_FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no supported"),
    "a mark alone": (lambda: encoded()[:8], "no supported image|corrupt or truncated"),
    **{
        f"half a {f}": (
            partial(lambda f: encoded(f)[: len(encoded(f)) // 3], f),
            "corrupt or truncated|no supported image",
        )
        for f in FORMATS
    },
    "no pixels": (lambda: png_of(0, 5, b""), "no supported image|at least 1x1|corrupt"),
    "above the limit": (
        lambda: png_of(12000, 12000, b""),
        "12000x12000 are 144000000 pixels, at most",
    ),
    "a bomb": (lambda: png_of(60000, 60000, b""), "too large: .*3600000000 pixels"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_image_files(tmp_path: Path, case: str, recwarn: pytest.WarningsRecorder) -> None:
    content, message = BAD_FILES[case]
    path = tmp_path / "a.png"
    path.write_bytes(content())
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: (?:{message})"):
        read_image(path)
    assert not recwarn


def test_limits_come_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded())
    monkeypatch.setattr(images, "MAX_PIXELS", 5400)
    assert read_image(path).shape == (60, 90, 3)
    monkeypatch.setattr(images, "MAX_PIXELS", 5399)
    with pytest.raises(InputError, match=r"90x60 are 5400 pixels, at most 5399"):
        read_image(path)
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    with pytest.raises(InputError, match=r"bytes, at most 100; send a smaller image"):
        read_image(path)


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_images(tmp_path: Path, format: str) -> None:
    outlives_damage(read_image, encoded(format), tmp_path / f"damaged.{format}")


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(b"fLaC" + encoded())
    for module in ("PIL", "av", "soundfile"):
        monkeypatch.setitem(sys.modules, module, None)
    for read in (read_image, read_video, read_audio):
        with pytest.raises(MissingError, match=r"pip install 'g4ir\[mm\]'"):
            read(path)


def test_devices_pipes_and_folders_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    others = (tmp_path / "none", tmp_path, tmp_path / "pipe", tmp_path / "link")
    for path in (Path("/dev/zero"), *others):
        for kind, read in {"image": read_image, "video": read_video, "audio": read_audio}.items():
            problem = "is not a regular file" if path.exists() else f"no such {kind} file"
            with pytest.raises(InputError, match=problem):
                read(path)


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
    scale: int = 1,
    target: Any = None,
    title: str | None = None,
    **options: str,
) -> Path:
    """A video with frames at these times, in ticks; with audio from 0 on if `late`; written to
    `target` if that is not the path."""
    codec = {".webm": "libvpx-vp9", ".mpg": "mpeg2video", ".flv": "flv1"}.get(path.suffix, "mpeg4")
    form = {".mkv": "matroska"}.get(path.suffix, path.suffix[1:]) if target else None
    with av.open(target or str(path), "w", format=form, options=options) as out:
        if title:
            out.metadata["title"] = title
        stream = out.add_stream(codec, rate=25 if codec == "mpeg2video" else Fraction(1) / tick)
        stream.width, stream.height, stream.pix_fmt = 64 * scale, 48 * scale, "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.max_b_frames = 12, b_frames
        if late:
            sound = out.add_stream("aac", rate=16_000, layout="mono")
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), "f4"), "fltp", "mono")
            silence.sample_rate, silence.pts = 16_000, 0
            out.mux(sound.encode(silence))
        for i, time in enumerate(times):
            pixels = np.kron(picture(i), np.ones((scale, scale, 1), np.uint8))
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time + late, tick
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
        if late:
            out.mux(sound.encode())
    return path


def numbers(path: Path, count: int | None = None) -> list[int]:
    """The numbers of the frames that are read."""
    return [number(frame) for frame in read_video(path, count).frames]


def seconds(times: Sequence[str]) -> list[int]:
    return [60 * int(m) + int(s) for m, s in (t.split(":") for t in times)]


# --- arrays -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", (TOWER, UNIFIED))
@pytest.mark.parametrize(
    "total, frames, size, budget",
    [(40, None, (60, 90), 70), (33, 5, (300, 41), 140), (9, 2, (7, 9), 280)],
)
def test_videos_are_the_references(
    variant: str, total: int, frames: int | None, size: tuple[int, int], budget: int
) -> None:
    pixels = noise(total, *size, 3)
    wanted = processor(variant, "video")(
        pixels,
        video_metadata=[{"total_num_frames": total, "fps": 0.7}],
        return_metadata=True,
        max_soft_tokens=budget,
        return_tensors="pt",
        **({} if frames is None else {"num_frames": frames}),
    )
    found = prepare_video(Video(pixels, 0.7), video_settings(load_spec(variant), budget), frames)
    # Videos have an axis of their own before transformers 5.24.
    names = {"pixel_values_videos": found.patches, "video_position_ids": found.positions}
    for name, values in names.items():
        assert np.array_equal(values, wanted[name].numpy().reshape(values.shape))
    assert found.soft_tokens == int(wanted["num_soft_tokens_per_video"][0])
    assert found.times == tuple(reference_times(wanted["video_metadata"][0].timestamps))


def reference_times(timestamps: list[Any]) -> list[str]:
    """The line of its processor that writes them into the prompt."""
    return [f"{int(seconds // 60):02d}:{int(seconds % 60):02d}" for seconds in timestamps]


@given(st.integers(1, 200_000), st.integers(1, 400))
def test_frames_are_sampled_as_in_the_reference(total: int, frames: int) -> None:
    metadata = SimpleNamespace(total_num_frames=total, fps=None)
    try:
        wanted = processor(TOWER, "video").sample_frames(metadata, num_frames=frames).tolist()
    except ValueError:
        with pytest.raises(InputError, match=f"1 to {total}"):
            sample_frames(total, frames)
        return
    # Now and then it names one frame more, and sometimes one that is not there.
    found = list(sample_frames(total, frames))
    assert found == [i for i in wanted if i < total] == sorted({*found}) and found[0] == 0


@given(st.integers(1, 5000), st.sampled_from((8, 24, 25, 30, 60)), st.sampled_from((0.5, 1, 2, 4)))
def test_frames_per_second_are_the_references(total: int, rate: int, fps: float) -> None:
    """Where it takes one at least; the last frame is shown as long as the others."""
    metadata = SimpleNamespace(total_num_frames=total, fps=rate)
    count = videos.frames_at(fps, [i / rate for i in range(total)])
    if total / rate * fps >= 1 and total > 1 and fps <= rate:
        free = copy.copy(processor(TOWER, "video"))
        free.num_frames = None  # else its 32 win over `fps`
        wanted = free.sample_frames(metadata, fps=fps).tolist()
        assert list(sample_frames(total, count)) == [i for i in wanted if i < total]
    else:
        assert count == 1


def test_frames_per_second_of_files(tmp_path: Path) -> None:
    """Over the presentation time, also where most frames come in its first second; `frames` is
    the most."""
    even = film(tmp_path / "even.mp4", range(80))  # 8 s
    burst = film(tmp_path / "burst.mp4", [*range(10), *range(10, 81, 10)])  # 10 a second, then one
    for path in (even, burst):
        found = read_video(path, fps=1).seconds
        assert found and len(found) == 8 and all(abs(s - i) < 0.5 for i, s in enumerate(found))
        assert len(read_video(path, 4, 1).frames) == 4 and len(read_video(path, 9, 0.1).frames) == 1
    still = Video(np.zeros((48, 32, 32, 3), np.uint8), 24.0)
    assert prepare_video(still, SETTINGS, None, 2).times == ("00:00", "00:00", "00:01", "00:01")
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"even\.mp4: fps .*: expected frames per second"):
            read_video(even, fps=bad)


rates = st.sampled_from((23.976, 24.0, 25.0, 29.97, 30.0, 59.94, 0.1)) | st.floats(0.01, 300)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=8), rates)
def test_times_are_the_references(indices: list[int], rate: float) -> None:
    metadata = importlib.import_module("transformers.video_utils").VideoMetadata(
        max(indices) + 1, fps=rate, frames_indices=torch.tensor(indices, dtype=torch.int32)
    )
    assert list(videos.frame_times(tuple(indices), rate)) == reference_times(metadata.timestamps)


def test_short_videos_keep_all_their_frames() -> None:
    assert sample_frames(5) == (0, 1, 2, 3, 4) and len(sample_frames(1000)) == videos.FRAMES
    assert videos.frame_times((0, 24, 24 * 61), None) == ("00:00", "00:01", "01:01")
    with pytest.raises(InputError, match=r"clip: 2.0 frames requested, .* 5; expected 1 to 5"):
        sample_frames(5, 2.0, "clip")  # type: ignore[arg-type]


STILL = noise(4, 20, 20, 3)
BAD_VIDEOS = {
    "expected .frames, height, width, 3": Video(STILL[0], 1.0),
    "float64 pixels; give a numpy array of uint8, 0 to 255$": Video(STILL / 2, 1.0),
    "no frames": Video(STILL[:0], 1.0),
    "0.0 frames per second": Video(STILL, 0.0),
}


@pytest.mark.parametrize("message", BAD_VIDEOS)
def test_bad_videos(message: str) -> None:
    with pytest.raises(InputError, match=f"^video: .*{message}"):
        prepare_video(BAD_VIDEOS[message], SETTINGS)


# --- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [None, 7])
def test_files_are_read_as_by_the_reference(tmp_path: Path, frames: int | None) -> None:
    path, count = film(tmp_path / "a.mp4"), frames or videos.FRAMES
    wanted, metadata = importlib.import_module("transformers.video_utils").read_video_pyav(
        str(path), lambda metadata: torch.arange(0, 40, 40 / count).int()
    )
    video = read_video(path, frames)
    assert np.array_equal(video.frames, wanted) and video.rate == metadata.fps == 10
    assert video.seconds == tuple(i / 10 for i in metadata.frames_indices.tolist())


@pytest.mark.parametrize("ending", ["mp4", "mkv", "avi", "ts", "mpg"])
def test_footage_is_what_preparing_the_frames_gives(tmp_path: Path, ending: str) -> None:
    path = film(tmp_path / f"a.{ending}", TENTHS[:12])
    video, found = read_video(path, 5), read_footage(path, SETTINGS, 5)
    whole = prepare_video(Video(video.frames), SETTINGS)
    assert np.array_equal(found.patches, whole.patches)
    assert np.array_equal(found.positions, whole.positions)
    assert found.soft_tokens == whole.soft_tokens
    assert found.times == videos.frame_times((), None, video.seconds)
    with pytest.raises(InputError, match=r"5 frames of \d+ soft .*--max-seq 99; ask for few"):
        read_footage(path, SETTINGS, 5, max_tokens=99)
    with pytest.raises(InputError, match=r"1 frames of \d+ soft .*--max-seq 9; build with"):
        read_footage(path, SETTINGS, 1, max_tokens=9)


def test_one_frame_at_a_time_is_held_in_full_resolution(tmp_path: Path) -> None:
    path, scale = film(tmp_path / "a.mp4", TENTHS[:16], scale=15), 15
    read_footage(path, SETTINGS, 1)  # what is imported and kept counts once
    tracemalloc.start()
    footage = read_footage(path, SETTINGS)
    peak = tracemalloc.get_traced_memory()[1] - footage.patches.nbytes
    tracemalloc.stop()
    assert len(footage.patches) == 16 and peak < 8 * (64 * scale) * (48 * scale) * 3


@pytest.mark.parametrize(("name", "limit", "message"), TABLES["media"]["limits of videos"])
def test_limits_of_videos_come_before_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: int, message: str
) -> None:
    path = film(tmp_path / "a.mp4")
    monkeypatch.setattr(videos, name, limit)
    with pytest.raises(InputError, match=message):
        read_video(path)


def test_playlists_open_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(film(tmp_path / "b.mp4", TENTHS[:3]), "10:30.mp4")
    film(tmp_path / "real.ts", TENTHS[:3])
    assert len(read_video("10:30.mp4").frames) == 3
    for name, text in TABLES["media"]["lists"].items():
        Path(name).write_text(text)
        with pytest.raises(InputError, match=f"^{name}: no supported video.*send MP4"):
            read_video(name)


# --- boxes of MP4 -----------------------------------------------------------------------------


def word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")


def with_matrix(path: Path, matrix: Sequence[int]) -> Path:
    """Write a display matrix (a, b, c, d) into the track's header."""
    data = bytearray(path.read_bytes())
    at = data.rindex(b"tkhd") + 44
    a, b, c, d = (n << 16 for n in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


def with_edits(path: Path, edits: Sequence[tuple[float, float]]) -> Path:
    """Replace the edit list: (seconds, from which second of the media; -1 is nothing) each. The
    boxes come after the media, so that no offset changes."""
    data = path.read_bytes()
    scale, media = (word(data, data.rindex(kind) + 16) for kind in (b"mvhd", b"mdhd"))
    entries = b"".join(
        struct.pack(">IiI", round(n * scale), round(at * media) if at >= 0 else -1, 1 << 16)
        for n, at in edits
    )
    elst = struct.pack(">I4sII", 16 + len(entries), b"elst", 0, len(edits)) + entries
    edts = struct.pack(">I4s", 8 + len(elst), b"edts") + elst
    at = data.rindex(b"edts") - 4
    old = word(data, at)
    out = bytearray(data[:at] + edts + data[at + old :])
    for kind in (b"moov", b"trak"):
        start = data.rindex(kind) - 4
        struct.pack_into(">I", out, start, word(data, start) + len(edts) - old)
    path.write_bytes(out)
    return path


# --- rotation ---------------------------------------------------------------------------------

#: display matrices -> what players make of a frame
UPRIGHT: dict[str, tuple[tuple[int, int, int, int], Any]] = {
    "none": ((1, 0, 0, 1), lambda x: x),
    "90 degrees clockwise": ((0, 1, -1, 0), lambda x: np.rot90(x, -1)),
    "90 degrees counterclockwise": ((0, -1, 1, 0), np.rot90),
    "180 degrees": ((-1, 0, 0, -1), lambda x: np.rot90(x, 2)),
    "mirrored": ((-1, 0, 0, 1), np.fliplr),
    "upside down": ((1, 0, 0, -1), np.flipud),
    "transposed": ((0, 1, 1, 0), lambda x: x.swapaxes(0, 1)),
    "transposed the other way": ((0, -1, -1, 0), lambda x: np.rot90(x, 2).swapaxes(0, 1)),
    "half the size": ((0, 2, -2, 0), lambda x: np.rot90(x, -1)),
}


@pytest.mark.parametrize("case", UPRIGHT)
def test_frames_are_upright(tmp_path: Path, case: str) -> None:
    matrix, turned = UPRIGHT[case]
    path = film(tmp_path / "a.mp4")
    lying = read_video(path, 3).frames
    video = read_video(with_matrix(path, matrix), 3)
    for frame, raw in zip(video.frames, lying, strict=True):
        assert np.array_equal(frame, turned(raw))
    footage = read_footage(path, SETTINGS, 3)
    tall = video.frames.shape[1] > video.frames.shape[2]
    assert tall == (int(footage.positions[0, :, 1].max()) > int(footage.positions[0, :, 0].max()))
    with pytest.raises(InputError, match=r"a\.mp4: is shown at an oblique angle"):
        read_video(with_matrix(path, (1, 1, -1, 1)))


# --- edit lists -------------------------------------------------------------------------------


@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize("case", TABLES["media"]["edits"])
def test_edit_lists_are_followed(tmp_path: Path, b_frames: int, case: str) -> None:
    edits, parts = TABLES["media"]["edits"][case]
    shown = [*chain.from_iterable(starmap(range, parts))]
    delay = 0.1 * (b_frames > 0)  # by which presentation begins after decoding
    edits = [(n, at + delay if at >= 0 else at) for n, at in edits]
    path = with_edits(film(tmp_path / "a.mp4", b_frames=b_frames), edits)
    for count in {1, min(7, len(shown)), None}:
        assert numbers(path, count) == [shown[i] for i in sample_frames(len(shown), count)]


def test_frames_that_begin_after_the_audio(tmp_path: Path) -> None:
    for ending in ("mp4", "mkv"):
        path = film(tmp_path / f"a.{ending}", late=20)
        assert seconds(read_footage(path, SETTINGS, 4).times) == [2, 3, 4, 5]


# --- frame rates ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ending, b_frames", [("mp4", 2), ("mkv", 0), ("webm", 0), ("avi", 0), ("ts", 2)]
)
@pytest.mark.parametrize("case", TABLES["media"]["uneven"])
def test_frames_by_presentation_time(tmp_path: Path, ending: str, b_frames: int, case: str) -> None:
    times = [*chain.from_iterable(starmap(range, TABLES["media"]["uneven"][case]))]
    count = min(8, len(times))
    path = film(tmp_path / f"a.{ending}", times, TICK / 10, b_frames)
    footage, chosen = read_footage(path, SETTINGS, count), numbers(path, count)
    assert chosen == list(videos.spread_frames([t / 100 for t in times], count))
    assert seconds(footage.times) == [times[i] // 100 for i in chosen]
    even = [times[-1] * i / (len(times) - 1) for i in sample_frames(len(times), count)]
    if case == "three at once, then few":
        assert max(abs(times[i] - t) for i, t in zip(chosen, even, strict=True)) <= 35


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=80), st.integers(1, 80))
def test_no_frame_is_taken_twice(times: list[int], frames: int) -> None:
    times, frames = sorted(times), min(frames, len(times))
    chosen = videos.spread_frames(times, frames)
    assert len(chosen) == len(sample_frames(len(times), frames))
    assert list(chosen) == sorted({*chosen}) and chosen[0] >= 0 and chosen[-1] < len(times)


def test_a_clock_that_starts_anew(tmp_path: Path) -> None:
    """Two recordings in one file: frames count."""
    parts = [film(tmp_path / f"{i}.ts", TENTHS[:20]).read_bytes() for i in range(2)]
    path = tmp_path / "a.ts"
    path.write_bytes(b"".join(parts))
    assert numbers(path, 4) == [0, 10, 0, 10]


# --- files cut off and damaged ----------------------------------------------------------------


@pytest.mark.parametrize("ending", ["mp4", "mkv", "webm", "avi"])
def test_files_that_are_cut_off_are_called_truncated(tmp_path: Path, ending: str) -> None:
    fast = {"movflags": "+faststart"} if ending == "mp4" else {}
    data = film(tmp_path / f"a.{ending}", **fast).read_bytes()
    for end in (len(data) * 7 // 10, len(data) * 9 // 10, len(data) - 40):
        path = tmp_path / f"cut.{ending}"
        path.write_bytes(data[:end])
        with pytest.raises(InputError, match=f"cut.{ending}: truncated"):
            read_video(path)


@pytest.mark.parametrize("options", [{}, {"movflags": "frag_keyframe+empty_moov"}])
def test_fragments_and_what_follows_the_video(tmp_path: Path, options: dict[str, str]) -> None:
    path = film(tmp_path / "a.mp4", **options)
    assert numbers(path, 4) == [0, 10, 20, 30]
    path.write_bytes(path.read_bytes() + b"\0\0\x70\0junk" * 40)
    assert len(read_video(path).frames) == videos.FRAMES


@pytest.mark.parametrize("ending", ["mkv", "webm", "avi", "flv"])
def test_files_that_went_through_a_pipe(tmp_path: Path, ending: str) -> None:
    """Their headers do not say how large they are."""
    path = tmp_path / f"a.{ending}"
    with path.open("wb") as file:
        film(path, TENTHS[:20], target=SimpleNamespace(write=file.write))
    assert numbers(path, 4) == [0, 5, 10, 15]


@pytest.mark.parametrize("ending", ["mp4", "mkv", "webm", "avi", "ts", "mpg"])
def test_damaged_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(videos, "MAX_PIXELS", 1 << 20)
    fast = {"movflags": "+faststart"} if ending == "mp4" else {}
    path = film(tmp_path / f"a.{ending}", TENTHS[:12], b_frames=ending != "webm", **fast)
    damaged = tmp_path / f"damaged.{ending}"
    outlives_damage(lambda path: read_video(path, 3).frames, path.read_bytes(), damaged)


def test_a_codec_that_nobody_knows(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mp4")
    data = path.read_bytes().replace(b"mp4v", b"zzzz")
    path.write_bytes(data.replace(b"esds", b"free"))
    with pytest.raises(InputError, match=r"a\.mp4: corrupt, or of a codec without a decoder"):
        read_video(path)


@pytest.mark.parametrize(("rate", "total", "options", "expected"), TABLES["media"]["by time"])
def test_frames_by_time(rate: float, total: int, options: Any, expected: list[int]) -> None:
    """Those of `EmbeddingGemma2VideoProcessor.sample_frames` of transformers 5.24."""
    seconds = [3.5 + i / rate for i in range(total)]
    assert videos.frames_by_time(**{"fps": 1.0, "seconds": seconds, **options}) == (*expected,)
