"""Images: equal to the reference's processors, files good and bad, the planner."""

from __future__ import annotations

import importlib
import io
import os
import re
import struct
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from g4ir.errors import InputError, MissingError
from g4ir.media import images
from g4ir.media.audio import read_audio
from g4ir.media.images import FORMATS, pixels_of, prepare_image, read_image
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


BAD_FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "the file is empty"),
    "text": (lambda: b"hello, this is no image\n" * 9, "no image; send PNG, JPEG, WEBP, GIF"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image"),
    "a mark alone": (lambda: encoded()[:8], "no image|corrupt or truncated"),
    **{
        f"half a {f}": (
            partial(lambda f: encoded(f)[: len(encoded(f)) // 3], f),
            "corrupt or truncated|no image",
        )
        for f in FORMATS
    },
    "no pixels": (lambda: png_of(0, 5, b""), "no image|at least 1x1|corrupt"),
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
            with pytest.raises(InputError, match=f"no such {kind} file"):
                read(path)
