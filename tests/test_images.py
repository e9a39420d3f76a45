"""Images and videos: equal to the reference's processors, files good and bad, the planner."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from g4ir.errors import InputError, MissingError
from g4ir.media.audio import read_audio
from g4ir.media.images import (
    FORMATS,
    ImageLimits,
    PreparedImage,
    pixels_of,
    prepare_image,
    read_image,
    stack_images,
)
from g4ir.media.videos import (
    FRAMES,
    Video,
    VideoLimits,
    frame_times,
    prepare_video,
    read_footage,
    read_video,
    sample_frames,
    video_settings,
)
from g4ir.model.images import BUDGETS, ImageSettings, fit_image, image_settings, plan_image
from g4ir.spec.record import load_spec
from tests.cli_tools import g4ir
from tests.torchvision_half import find_torchvision

VARIANTS = ("e2b", "e4b", "12b", "26b-a4b", "31b")
TOWER, UNIFIED = "e2b", "12b"
KINDS = {
    TOWER: "gemma4.{}_gemma4.Gemma4{}",
    UNIFIED: "gemma4_unified.{}_gemma4_unified.Gemma4Unified{}",
}


@cache
def processor(variant: str, kind: str = "image") -> Any:
    """The reference's processor with its defaults; skips where torchvision is not installed."""
    if not find_torchvision():
        pytest.skip("the reference's processors need torchvision")
    path = KINDS[variant].format(f"{kind}_processing", f"{kind.title()}Processor")
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)()


@cache
def pil_reference() -> Any:
    """The reference's other image processor, by Pillow and numpy: the same but for the resize."""
    return importlib.import_module("transformers.models.gemma4.image_processing_pil_gemma4")


def cut(variant: str, budget: int | None = None) -> ImageSettings:
    return image_settings(load_spec(variant), budget)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Something like a picture: flat areas, edges, a gradient."""
    x, y = np.meshgrid(np.linspace(0, 6, width), np.linspace(0, 4, height))
    waves = [np.sin(x * (c + 1) + y + seed) * 90 + 128 + 60 * (x > 3) for c in range(3)]
    return np.clip(np.stack(waves, -1), 0, 255).astype(np.uint8)


def same_as(picture: PreparedImage, wanted: Any) -> None:
    """Equal to the bit: values, positions with their padding, counts."""
    assert picture.patches.dtype == np.float32 and picture.positions.dtype == np.int64
    assert np.array_equal(picture.patches, np.asarray(wanted["pixel_values"])[0])
    assert np.array_equal(picture.positions, np.asarray(wanted["image_position_ids"])[0])
    assert picture.soft_tokens == int(wanted["num_soft_tokens_per_image"][0])


# --- sizes ------------------------------------------------------------------------------------

sides = st.integers(1, 5000) | st.integers(1, 10**6) | st.integers(1, 120).map(lambda n: n * 48)


@given(sides, sides, st.sampled_from(BUDGETS))
def test_sizes_are_the_references(width: int, height: int, budget: int) -> None:
    same_size(ImageSettings(16, 3, budget, False, 1 << 20), width, height)


@given(sides, sides, st.integers(1, 2000), st.integers(1, 40), st.integers(1, 6))
def test_sizes_of_other_geometries(
    width: int, height: int, budget: int, patch: int, pooling: int
) -> None:
    same_size(ImageSettings(patch, pooling, budget, False, 1 << 30), width, height)


def same_size(s: ImageSettings, width: int, height: int) -> None:
    size = partial(
        pil_reference().get_aspect_ratio_preserving_size,
        height,
        width,
        s.patch_size,
        s.max_patches,
        s.pooling,
    )
    try:
        wanted = size()
    except ValueError:  # for a budget of one, where a rounding takes the last token away
        assert s.budget == 1 == fit_image(s, width, height).soft_tokens
        return
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
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("shape", [(60, 90), (768, 768), (1, 300), (733, 41), (500, 1001)])
def test_images_are_the_references(variant: str, budget: int, shape: tuple[int, int]) -> None:
    for pixels in (noise(*shape, 3), smooth(*shape)):
        # An array with a side of 1, 3 or 4 does not say where its channels are.
        for image, layout in ((pixels, "channels_last"), (Image.fromarray(pixels), None)):
            wanted = processor(variant)(
                image, max_soft_tokens=budget, return_tensors="np", input_data_format=layout
            )
            same_as(prepare_image(pixels, cut(variant, budget)), wanted)


@settings(max_examples=60)
@given(
    st.integers(4, 900),
    st.integers(4, 900),
    st.sampled_from(BUDGETS[:3]),
    st.integers(0, 99),
    st.sampled_from(list(KINDS)),
)
def test_random_sizes_are_the_references(
    height: int, width: int, budget: int, seed: int, variant: str
) -> None:
    pixels = noise(height, width, 3, seed=seed)
    wanted = processor(variant)(
        pixels, max_soft_tokens=budget, return_tensors="np", input_data_format="channels_last"
    )
    same_as(prepare_image(pixels, cut(variant, budget)), wanted)


@pytest.mark.parametrize("budget", BUDGETS)
def test_images_that_fit_are_those_of_the_processor_without_torchvision(budget: int) -> None:
    """No resize, so nothing may differ."""
    s = cut(TOWER, budget)
    for size in ((1000, 700), (90, 4000), (33, 32)):  # resized until nothing changes
        grid = fit_image(s, *size)
        while size != (grid.width, grid.height):
            size = grid.width, grid.height
            grid = fit_image(s, *size)
        pixels = noise(grid.height, grid.width, 3)
        wanted = pil_reference().Gemma4ImageProcessorPil()(pixels, max_soft_tokens=budget)
        picture = prepare_image(pixels, s)
        assert np.abs(picture.patches - wanted["pixel_values"][0]).max() < 1e-6
        assert np.array_equal(picture.positions, wanted["image_position_ids"][0])
        assert picture.soft_tokens == wanted["num_soft_tokens_per_image"][0]


@pytest.mark.parametrize("shape", [(60, 90), (1, 300), (733, 41), (500, 1001)])
def test_the_resize_is_about_pillows(shape: tuple[int, int]) -> None:
    """The same filter with weights of fewer bits: a step of 255 for either direction."""
    for pixels in (noise(*shape, 3), smooth(*shape)):
        reference = pil_reference().Gemma4ImageProcessorPil()
        wanted = reference(pixels, input_data_format="channels_last")
        picture = prepare_image(pixels, cut(TOWER))
        assert np.abs(picture.patches - wanted["pixel_values"][0]).max() < 2.01 / 255
        assert np.array_equal(picture.positions, wanted["image_position_ids"][0])


def test_a_merged_patch_is_the_patches_of_a_soft_token() -> None:
    pixels = noise(200, 300, 3)
    small, large = (prepare_image(pixels, cut(v)) for v in (TOWER, UNIFIED))
    assert small.soft_tokens == large.soft_tokens
    assert large.patches.shape == (280, 48 * 48 * 3)
    for token in (0, 1, 100, large.soft_tokens - 1):
        x, y = large.positions[token]
        tile = large.patches[token].reshape(48, 48, 3)
        for dy in range(3):
            for dx in range(3):
                (i,) = np.flatnonzero((small.positions == (3 * x + dx, 3 * y + dy)).all(1))
                part = tile[16 * dy : 16 * dy + 16, 16 * dx : 16 * dx + 16]
                assert np.array_equal(part.ravel(), small.patches[i])


def test_views_of_pixels_are_taken_as_they_look() -> None:
    pixels = noise(100, 80, 3)
    turned = pixels[::-1, ::2]
    turned.setflags(write=False)
    kept = turned.copy()
    one, two = (prepare_image(p, cut(TOWER, 70)) for p in (turned, kept))
    assert np.array_equal(one.patches, two.patches) and np.array_equal(turned, kept)


def test_images_are_stacked() -> None:
    pictures = [prepare_image(noise(*s, 3), cut(TOWER, 70)) for s in ((40, 80), (99, 20))]
    patches, positions = stack_images(pictures)
    assert patches.shape == (2, 630, 768) and positions.shape == (2, 630, 2)
    for wrong in ([], [pictures[0], prepare_image(noise(9, 9, 3), cut(TOWER, 140))]):
        with pytest.raises(InputError, match="same budget"):
            stack_images(wrong)


BAD_PIXELS: dict[str, tuple[Any, str]] = {
    "floats": (np.full((4, 4, 3), np.nan, np.float32), "float32 pixels; give .* uint8"),
    "16 bits": (np.zeros((4, 4, 3), np.uint16), "uint16 pixels"),
    "a list": ([[1, 2, 3]], "list pixels"),
    "grey": (np.zeros((4, 4), np.uint8), r"pixels of shape \[4, 4\]; expected .height, width, 3"),
    "alpha": (np.zeros((4, 4, 4), np.uint8), r"pixels of shape \[4, 4, 4\]"),
    "channels first": (np.zeros((3, 8, 8), np.uint8), r"pixels of shape \[3, 8, 8\]"),
    "nothing": (np.zeros((0, 4, 3), np.uint8), "4x0 pixels; at least 1x1"),
}


@pytest.mark.parametrize("case", BAD_PIXELS)
def test_bad_pixels(case: str) -> None:
    pixels, message = BAD_PIXELS[case]
    with pytest.raises(InputError, match=f"^x.png: {message}"):
        prepare_image(pixels, cut(TOWER), "x.png")


# --- image files ------------------------------------------------------------------------------

MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "HSV", "LAB")
SUFFIXES = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tiff"}


def load_image(path: Path) -> np.ndarray:
    """How the reference opens a file."""
    return np.array(importlib.import_module("transformers.image_utils").load_image(str(path)))


def made(mode: str) -> Image.Image:
    if mode == "LAB":
        return Image.merge("LAB", Image.fromarray(smooth(60, 90)).split())
    return Image.fromarray(smooth(60, 90)).convert(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("format", FORMATS)
def test_files_are_read_as_the_reference_reads_them(tmp_path: Path, format: str, mode: str) -> None:
    path = tmp_path / f"a.{SUFFIXES[format]}"
    image = made(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(noise(60, 90)))
    try:
        image.save(path, format)
    except (OSError, KeyError, ValueError):  # no such mode in this format
        image.convert("RGB").save(path, format)
    pixels = read_image(path)
    assert pixels.dtype == np.uint8 and pixels.shape == (60, 90, 3)
    assert np.array_equal(pixels, load_image(path))


def test_a_palette_with_a_transparent_entry(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    made("P").save(path, transparency=3)
    assert np.array_equal(read_image(path), load_image(path))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied(tmp_path: Path, orientation: int, format: str) -> None:
    path = tmp_path / "a"
    exif = Image.Exif()
    exif[0x0112] = orientation
    made("RGB").save(path, format, exif=exif)
    pixels = read_image(path)
    assert pixels.shape == ((90, 60, 3) if orientation > 4 else (60, 90, 3))
    assert np.array_equal(pixels, load_image(path))


RAMP = np.arange(60 * 90).reshape(60, 90) * 65535 // (60 * 90 - 1)  # 0 to 65535
LIMITS, WHITE_IS_ZERO, ORIENTATION = (340, 341), 262, 274  # TIFF tags
#: pixels, format, tags -> what they are in 8 bits
DEEP: dict[str, tuple[np.ndarray, str, dict[int, Any], np.ndarray]] = {
    "16-bit PNG": (RAMP.astype(np.uint16), "PNG", {}, RAMP / 257),
    "16-bit TIFF": (RAMP.astype(np.uint16), "TIFF", {}, RAMP / 257),
    "16-bit TIFF, turned": (
        RAMP.astype(np.uint16),
        "TIFF",
        {ORIENTATION: 3},
        RAMP[::-1, ::-1] / 257,
    ),
    "12 of 16 bits": (
        (RAMP // 16).astype(np.uint16),
        "TIFF",
        {LIMITS[0]: 0, LIMITS[1]: 4095},
        RAMP // 16 / 4095 * 255,
    ),
    "32-bit integers": (
        (RAMP * 1000 - 9).astype(np.int32),
        "TIFF",
        {LIMITS[0]: -9, LIMITS[1]: 65_534_991},
        RAMP / 257,
    ),
    "floats in [0, 1]": ((RAMP / 65535).astype(np.float32), "TIFF", {}, RAMP / 257),
    "floats of a stated range": (
        (RAMP / 100 - 50).astype(np.float32),
        "TIFF",
        {LIMITS[0]: -50.0, LIMITS[1]: 605.35},
        RAMP / 257,
    ),
    "floats beyond it": (
        (RAMP / 100).astype(np.float32),
        "TIFF",
        {LIMITS[0]: 100.0, LIMITS[1]: 200.0},
        ((RAMP / 100 - 100) * 2.55).clip(0, 255),
    ),
}


@pytest.mark.parametrize("case", DEEP)
def test_more_than_8_bits_are_scaled(tmp_path: Path, case: str) -> None:
    values, format, tags, wanted = DEEP[case]
    path = tmp_path / "a"
    Image.fromarray(values).save(path, format, **({"tiffinfo": tags} if tags else {}))
    pixels = read_image(path)
    assert pixels.shape == (60, 90, 3) and pixels.std() > 20
    assert np.abs(pixels - wanted[..., None]).max() <= 1
    with Image.open(path) as image:
        assert np.array_equal(pixels_of(image), pixels)


@pytest.mark.parametrize("colour, channels", [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_16_bits_are_equal_in_grey_and_in_colour(
    tmp_path: Path, colour: int, channels: int
) -> None:
    path, values = tmp_path / "a.png", np.repeat(RAMP[..., None], channels, axis=2).astype(">u2")
    chunks = [b"".join(b"\0" + row.tobytes() for row in values)]
    head = struct.pack(">IIBBBBB", 90, 60, 16, colour, 0, 0, 0)
    chunks = [b"IHDR" + head, b"IDAT" + zlib.compress(chunks[0]), b"IEND"]
    sized = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(sized))
    assert np.array_equal(read_image(path), np.repeat((RAMP >> 8)[..., None], 3, axis=2))


def test_white_may_be_zero(tmp_path: Path) -> None:
    path = tmp_path / "a.tiff"
    Image.fromarray(RAMP.astype(np.uint16)).save(path)
    data = path.read_bytes()
    entry = struct.pack("<HHIH", WHITE_IS_ZERO, 3, 1, 1)
    assert data.count(entry) == 1
    path.write_bytes(data.replace(entry, entry[:-2] + b"\0\0"))
    assert np.array_equal(read_image(path)[..., 0], 255 - (RAMP >> 8))


@pytest.mark.parametrize(
    "values, message",
    [
        (RAMP.astype(np.int32), "int32 pixels from 0 to 65535 without a range"),
        (RAMP.astype(np.float32), "float32 pixels from 0.0 to 65535.0 without a range"),
        (np.full((3, 3), np.nan, np.float32), "float32 pixels from nan to nan"),
    ],
)
def test_a_range_that_nothing_states(tmp_path: Path, values: np.ndarray, message: str) -> None:
    Image.fromarray(values).save(tmp_path / "a.tiff")
    with pytest.raises(InputError, match=f"a.tiff: {message}.*save it with 8 or 16 bits"):
        read_image(tmp_path / "a.tiff")
    with pytest.raises(InputError, match=f"^image: {message}"):
        pixels_of(Image.fromarray(values))


def test_the_first_frame_of_an_animation_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    made("RGB").save(path, save_all=True, append_images=[Image.new("RGB", (90, 60), "red")])
    assert np.array_equal(read_image(path), load_image(path))


def encoded(format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    made("RGB").save(buffer, format)
    return buffer.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A PNG that announces another size."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + head
        + struct.pack(">I", zlib.crc32(head))
        + encoded()[33:]
    )


BAD_FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "the file is empty"),
    "text": (lambda: b"hello, this is no image\n" * 9, "no image; send PNG, JPEG, WEBP, GIF"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image"),
    "a mark alone": (lambda: encoded()[:8], "no image|corrupt or truncated"),
    "half a png": (lambda: encoded()[: len(encoded()) // 2], "corrupt or truncated"),
    "half a jpeg": (lambda: encoded("JPEG")[: len(encoded("JPEG")) // 2], "corrupt or truncated"),
    "half a gif": (lambda: encoded("GIF")[:2000], "corrupt or truncated"),
    "half a bmp": (lambda: encoded("BMP")[:4000], "corrupt or truncated"),
    "half a tiff": (lambda: encoded("TIFF")[:4000], "corrupt or truncated|no image"),
    "half a webp": (lambda: encoded("WEBP")[:200], "corrupt or truncated|no image"),
    "no pixels": (lambda: png_of(0, 5), "no image|at least 1x1|corrupt"),
    "above the limit": (lambda: png_of(12000, 12000), "12000x12000 are 144000000 pixels, at most"),
    "a bomb": (lambda: png_of(60000, 60000), "too large: .*3600000000 pixels"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_image_files(tmp_path: Path, case: str, recwarn: pytest.WarningsRecorder) -> None:
    content, message = BAD_FILES[case]
    path = tmp_path / "a.png"
    path.write_bytes(content())
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: (?:{message})"):
        read_image(path)
    assert not recwarn


def test_files_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path / "none.png", tmp_path):
        with pytest.raises(InputError, match="no such image file"):
            read_image(path)
        with pytest.raises(InputError, match="no such video file"):
            read_video(path)


def test_limits_come_before_decoding(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded())
    with pytest.raises(InputError, match=r"90x60 are 5400 pixels, at most 5399"):
        read_image(path, ImageLimits(max_pixels=5399))
    with pytest.raises(InputError, match=r"bytes, at most 100; send a smaller image"):
        read_image(path, ImageLimits(max_bytes=100))
    assert read_image(path, ImageLimits(max_pixels=5400)).shape == (60, 90, 3)


@settings(max_examples=300)
@given(st.sampled_from(FORMATS), st.data())
def test_no_broken_file_gets_another_error(
    tmp_path_factory: pytest.TempPathFactory, format: str, data: st.DataObject
) -> None:
    content = bytearray(encoded(format))
    for _ in range(data.draw(st.integers(0, 6))):
        place = data.draw(st.integers(0, min(len(content) - 1, 600)))
        content[place] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(1, len(content)) | st.just(len(content)))
    path = tmp_path_factory.getbasetemp() / "broken"
    path.write_bytes(content[:end])
    try:
        pixels = read_image(path, ImageLimits(max_pixels=1 << 20))
    except InputError as e:
        assert str(path) in str(e)
    else:
        assert pixels.ndim == 3 and pixels.size


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded())
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "av", None)
    for read in (read_image, read_video):
        with pytest.raises(MissingError, match=r"pip install 'g4ir\[mm\]'"):
            read(path)


# --- videos -----------------------------------------------------------------------------------


GIVEN = ("pixel_values_videos", "video_position_ids")


@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize(
    "total, frames, size, budget",
    [
        (40, None, (60, 90), 70),
        (33, 5, (300, 41), 140),
        (4, 4, (384, 384), 70),
        (9, 2, (7, 9), 280),
    ],
)
def test_videos_are_the_references(
    variant: str, total: int, frames: int | None, size: tuple[int, int], budget: int
) -> None:
    pixels = noise(total, *size, 3)
    metadata = {"total_num_frames": total, "fps": 0.7}
    asked = {} if frames is None else {"num_frames": frames}
    wanted = processor(variant, "video")(
        pixels,
        video_metadata=[metadata],
        return_metadata=True,
        max_soft_tokens=budget,
        return_tensors="pt",
        **asked,
    )
    found = prepare_video(Video(pixels, 0.7), video_settings(load_spec(variant), budget), frames)
    # Videos have an axis of their own before transformers 5.24.
    frames_of = {n: wanted[n].numpy().reshape(-1, *wanted[n].shape[-2:]) for n in GIVEN}
    assert np.array_equal(found.patches, frames_of["pixel_values_videos"])
    assert np.array_equal(found.positions, frames_of["video_position_ids"])
    assert found.soft_tokens == int(wanted["num_soft_tokens_per_video"][0])
    assert found.times == tuple(reference_times(wanted["video_metadata"][0].timestamps))


def reference_times(timestamps: list[Any]) -> list[str]:
    """The line of its processor that writes them into the prompt."""
    return [f"{int(seconds // 60):02d}:{int(seconds % 60):02d}" for seconds in timestamps]


@given(st.integers(1, 200_000), st.integers(1, 400))
def test_frames_are_sampled_as_in_the_reference(total: int, frames: int) -> None:
    reference = processor(TOWER, "video")
    metadata = SimpleNamespace(total_num_frames=total, fps=None)
    try:
        wanted = reference.sample_frames(metadata, num_frames=frames).tolist()
    except ValueError:
        with pytest.raises(InputError, match=f"1 to {total}"):
            sample_frames(total, frames)
        return
    # Now and then it names one frame more, and sometimes one that is not there.
    assert list(sample_frames(total, frames)) == [i for i in wanted if i < total]


@given(st.integers(1, 10**6), st.integers(1, 400))
def test_sampled_frames_are_in_order_and_there(total: int, frames: int) -> None:
    frames = min(frames, total)
    indices = sample_frames(total, frames)
    assert indices[0] == 0 and indices[-1] < total
    assert list(indices) == sorted(set(indices)) and len(indices) in (frames, frames + 1)


rates = st.sampled_from((23.976, 24.0, 25.0, 29.97, 30.0, 59.94, 0.1)) | st.floats(0.01, 300)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=8), rates)
def test_times_are_the_references(indices: list[int], rate: float) -> None:
    video_utils = importlib.import_module("transformers.video_utils")
    metadata = video_utils.VideoMetadata(
        max(indices) + 1, fps=rate, frames_indices=torch.tensor(indices, dtype=torch.int32)
    )
    assert list(frame_times(tuple(indices), rate)) == reference_times(metadata.timestamps)


def test_times_without_a_rate() -> None:
    assert frame_times((0, 24, 24 * 61), None) == ("00:00", "00:01", "01:01")


def test_short_videos_keep_all_their_frames() -> None:
    assert sample_frames(5) == (0, 1, 2, 3, 4) and len(sample_frames(1000)) == FRAMES
    for total, frames in ((5, 6), (5, 0), (5, 2.0)):
        with pytest.raises(InputError, match=r"clip: .* frames asked for, the video has 5; 1 to 5"):
            sample_frames(total, frames, "clip")  # type: ignore[arg-type]


def test_bad_videos() -> None:
    frames = noise(4, 20, 20, 3)
    cases = [
        (Video(frames[0], 1.0), "expected .frames, height, width, 3"),
        (Video(frames / 2, 1.0), "float64 pixels"),
        (Video(frames[:0], 1.0), "no frames"),
        (Video(frames, 0.0), "frames per second"),
        (Video(frames, math.nan), "frames per second"),
        (Video(frames, 1.0, (0, 1)), "4 frames at 2 indices"),
    ]
    for video, message in cases:
        with pytest.raises(InputError, match=f"^video: .*{message}"):
            prepare_video(video, video_settings(load_spec(TOWER)))


def write_video(path: Path, count: int = 50, size: tuple[int, int] = (64, 48)) -> Path:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for i in range(count):
            picture = np.roll(smooth(size[1], size[0]), 3 * i, axis=1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("frames", [None, 1, 7, 50])
def test_video_files_are_read_as_the_reference_reads_them(
    tmp_path: Path, frames: int | None
) -> None:
    path = write_video(tmp_path / "a.mp4")
    video_utils = importlib.import_module("transformers.video_utils")
    count = frames or FRAMES
    wanted, metadata = video_utils.read_video_pyav(
        str(path), lambda metadata: torch.arange(0, 50, 50 / count).int()
    )
    video = read_video(path, frames)
    assert np.array_equal(video.frames, wanted) and video.rate == metadata.fps == 10
    assert video.indices == tuple(metadata.frames_indices.tolist())
    footage = prepare_video(video, video_settings(load_spec(TOWER)))
    assert footage.patches.shape[0] == count == len(footage.times)


def test_videos_that_do_not_say_how_long_they_are(tmp_path: Path) -> None:
    video = read_video(write_video(tmp_path / "a.mkv"))
    assert len(video.frames) == FRAMES and video.indices is not None and video.indices[-1] == 48


def test_bad_video_files(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4")
    content = path.read_bytes()
    bad = tmp_path / "bad.mp4"
    for cut_to in (0, 4, 100, len(content) // 2):
        bad.write_bytes(content[:cut_to])
        with pytest.raises(InputError, match=f"^{re.escape(str(bad))}: "):
            read_video(bad)
    bad.write_bytes(b"no video at all " * 100)
    with pytest.raises(InputError, match="no video, corrupt or truncated"):
        read_video(bad)
    for limits, message in (
        (VideoLimits(max_bytes=100), "bytes, at most 100; send a smaller video"),
        (VideoLimits(max_pixels=64 * 48 - 1), "64x48 are 3072 pixels, at most 3071"),
        (VideoLimits(max_frames=49), "50 frames, at most 49"),
        (VideoLimits(max_decoded=64 * 48 * 49), "50 frames, at most 49 of this size"),
    ):
        with pytest.raises(InputError, match=message):
            read_video(path, limits=limits)


CONTAINERS = ("mp4", "mkv", "avi", "ts", "mpg")


@pytest.mark.parametrize("ending", CONTAINERS)
def test_footage_is_what_preparing_the_frames_gives(tmp_path: Path, ending: str) -> None:
    path, settings = write_video(tmp_path / f"a.{ending}", 12), video_settings(load_spec(TOWER))
    whole = prepare_video(read_video(path, 5), settings)
    found = read_footage(path, settings, 5)
    assert np.array_equal(found.patches, whole.patches)
    assert np.array_equal(found.positions, whole.positions)
    assert (found.soft_tokens, found.times) == (whole.soft_tokens, whole.times)
    with pytest.raises(InputError, match=r"5 frames of \d+ soft .*--max-seq 99; ask for few"):
        read_footage(path, settings, 5, most=99)


def test_one_frame_at_a_time_is_held_in_full_resolution(tmp_path: Path) -> None:
    count, size = 16, (960, 720)
    path = write_video(tmp_path / "a.mp4", count, size)
    settings = video_settings(load_spec(TOWER))
    read_footage(path, settings, 1)  # what is imported and kept counts once
    tracemalloc.start()
    footage = read_footage(path, settings)
    peak = tracemalloc.get_traced_memory()[1] - footage.patches.nbytes
    tracemalloc.stop()
    assert len(footage.patches) == count and peak < 8 * math.prod(size) * 3


def test_names_are_no_protocols(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(write_video(tmp_path / "a.mp4", 3), "10:30.mp4")
    assert len(read_video("10:30.mp4").frames) == 3


LISTS = {
    "a.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:1,\nreal.ts\n#EXT-X-ENDLIST\n",
    "a.mp4": "ffconcat version 1.0\nfile real.ts\n",
    "a.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nm=video 5004 RTP/AVP 96\n",
}


@pytest.mark.parametrize("name", LISTS)
def test_playlists_open_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_video(tmp_path / "real.ts", 3)
    Path(name).write_text(LISTS[name])
    with pytest.raises(InputError, match=f"^{name}: no video.*send MP4"):
        read_video(name)


def test_devices_and_pipes_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path / "link"):
        for read in (read_image, read_video, read_audio):
            with pytest.raises(InputError, match=r"no such (image|video|audio) file"):
                read(path)


# --- the planner ------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("budget", [None, *BUDGETS])
def test_a_plan_is_what_preparing_gives(variant: str, budget: int | None) -> None:
    plan = plan_image(load_spec(variant), 320, 200, budget)
    picture = prepare_image(noise(200, 320, 3), cut(variant, budget))
    assert plan.grid.soft_tokens == picture.soft_tokens == plan.prefill_tokens - 2
    rows = int((picture.positions >= 0).all(1).sum())
    assert rows == (plan.grid.soft_tokens if variant == UNIFIED else plan.grid.patches)


def test_the_planner_on_the_command_line() -> None:
    outcome = g4ir("plan", "--variant", "e2b", "--image", "1920x1080", "--json")
    assert outcome.code == 0 and json.loads(outcome.out) == {
        "schema": 1,
        "images": [
            {
                "variant": "e2b",
                "image": [1920, 1080],
                "budget": 280,
                "resized": [1056, 576],
                "patch_size": 16,
                "grid": [66, 36],
                "patches": 2376,
                "padded_patches": 2520,
                "soft_tokens": 264,
                "prefill_tokens": 266,
            }
        ],
    }
    text = g4ir("plan", "--variant", "e2b,31b", "--image", "1920x1080,90x60", "--budget", "70,1120")
    assert text.code == 0 and len(text.out.splitlines()) == 9
    assert "1920x1080      70    528x288" in text.out and "66x36 = 2376" not in text.out
    everyone = g4ir("plan", "--image", "64x64", "--json")
    assert {x["variant"] for x in json.loads(everyone.out)["images"]} == set(VARIANTS)


def test_a_budget_is_a_number() -> None:
    with pytest.raises(InputError, match="one of 70"):
        image_settings(load_spec(TOWER), True)


def test_planning_an_image_needs_no_torch() -> None:
    code = (
        "import sys; from g4ir.cli import main; "
        "main(['plan', '--variant', 'e2b', '--image', '64x64']); "
        "assert not {'torch', 'numpy', 'PIL'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
