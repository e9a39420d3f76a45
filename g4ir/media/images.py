"""Images: a file or an array of pixels -> the patches that the image path of a variant takes.

    pixels = read_image("photo.jpg")                             # uint8 [H, W, 3]
    image = prepare_image(pixels, image_settings(spec, 280))   # patches, positions, soft_tokens

From pixels onwards the results are bit-identical to the image processors of transformers 5.17 on a
CPU, whose resize works on uint8 and so rounds and clamps after each direction. As the
reference's `load_image` does, we apply the EXIF orientation and convert to RGB by Pillow: alpha is
dropped, palettes are looked up, of animations the first frame counts. (Its torchvision
processors, given a path, ignore the orientation.) Grey pixels of 16 bits, which Pillow would clip,
are scaled to 8.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from g4ir.errors import G4Error, InputError
from g4ir.model.images import CHANNELS, Grid, ImageSettings, fit_image
from g4ir.ops.types import torch

from .files import check_size, library, opened

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

#: accepted formats: Pillow supports dozens more, some by starting other programs
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
NO_PATCH = -1  # position of padding
MAX_BYTES, MAX_PIXELS = 1 << 28, 1 << 27  # maximum bytes of a file; maximum pixels


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """One image prepared for a variant. If a model takes the patches of a soft token merged into
    one, P counts merged ones. Patches after the image's own are padding: zeros at (-1, -1)."""

    patches: F32  # [P, cell * cell * 3], order (row, column, channel), values in [0, 1]
    positions: I64  # [P, 2], (x, y)
    soft_tokens: int


# --- pixels -----------------------------------------------------------------------------------


def prepare_image(
    pixels: NDArray[Any], settings: ImageSettings, name: str = "image"
) -> PreparedImage:
    """Return the patches of uint8 pixels [H, W, 3], their positions, and the number of soft tokens.
    InputError, naming the image, for another type or shape, and for a size that `fit_image`
    refuses."""
    check_pixels(pixels, 3, name)
    height, width, _ = pixels.shape
    grid = fit_image(settings, width, height, name)
    # Multiplies like the reference: a division would differ in the last bit.
    values = patchify(resize(pixels[None], grid), settings.cell)[0] * np.float32(1 / 255)
    fill = settings.rows - len(values)
    patches = np.pad(values, ((0, fill), (0, 0)))
    return PreparedImage(patches, positions_of(grid, settings), grid.soft_tokens)


def pixels_of(image: Any) -> Any:
    """Return the pixels of a Pillow image, converted as by `read_image`; any other value
    unchanged."""
    pillow = sys.modules.get("PIL.Image")  # imported if any such image exists
    if pillow is None or not isinstance(image, pillow.Image):
        return image
    return _rgb(image, "image")


def check_pixels(pixels: NDArray[Any], ndim: int, name: str) -> None:
    """Raise InputError unless `pixels` are a uint8 array [.., H, W, 3] of `ndim` axes."""
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        actual = pixels.dtype if isinstance(pixels, np.ndarray) else type(pixels).__name__
        fix = "give a numpy array of uint8, 0 to 255" + ", or a Pillow image" * (ndim == 3)
        raise InputError(f"{name}: {actual} pixels; {fix}")
    if pixels.ndim != ndim or pixels.shape[-1] != CHANNELS:
        expected = "frames, height, width, 3" if ndim == 4 else "height, width, 3"
        raise InputError(f"{name}: pixels of shape {list(pixels.shape)}; expected [{expected}]")


def resize(frames: U8, grid: Grid) -> U8:
    """Resize frames by antialiased bicubic interpolation: uint8 [T, H, W, 3] ->
    [T, grid.height, grid.width, 3] (rule 31)."""
    if frames.shape[1:3] == (grid.height, grid.width):
        return frames
    # A copy, since torch warns of read-only arrays and refuses negative strides.
    source = torch.from_numpy(np.array(frames, order="C")).permute(0, 3, 1, 2)
    size = [grid.height, grid.width]
    resized: torch.Tensor = torch.nn.functional.interpolate(
        source, size, mode="bicubic", align_corners=False, antialias=True
    )
    return resized.permute(0, 2, 3, 1).numpy()


def patchify(frames: U8, cell: int) -> F32:
    """Cut frames into patches of cell x cell pixels, in reading order: uint8 [T, H, W, 3] -> f32
    [T, H * W / cell^2, cell * cell * 3]."""
    count, height, width, channels = frames.shape
    cells = frames.reshape(count, height // cell, cell, width // cell, cell, channels)
    flat = cells.transpose(0, 1, 3, 2, 4, 5).reshape(count, -1, cell * cell * channels)
    return flat.astype(np.float32)


def positions_of(grid: Grid, settings: ImageSettings) -> I64:
    """Return the positions (x, y) of the patches in reading order, then of padding: i64 [P, 2]."""
    size = grid.width // settings.cell, grid.height // settings.cell
    positions = np.stack(np.meshgrid(*map(np.arange, size)), axis=-1).reshape(-1, 2)
    fill = settings.rows - len(positions)
    return np.pad(positions, ((0, fill), (0, 0)), constant_values=NO_PATCH)


# --- files ------------------------------------------------------------------------------------


def read_image(path: str | Path) -> U8:
    """Return the pixels of an image file, uint8 [H, W, 3]. InputError, naming the file, if it is
    missing, empty, no image of FORMATS, corrupt, truncated, too large or of 32-bit pixels;
    MissingError if Pillow cannot be imported."""
    with opened(Path(path), "image", MAX_BYTES, "send a smaller image") as file:
        return _decode(file, Path(path))


def _decode(file: BinaryIO, path: Path) -> U8:
    image_module = library("PIL.Image", f"{path}: images need Pillow")
    with warnings.catch_warnings():  # of images within our limit, and broken metadata
        warnings.simplefilter("ignore")
        try:
            with image_module.open(file, formats=FORMATS) as image:  # reads the header only
                width, height = image.size
                check_size(path, width, height, MAX_PIXELS)
                return _rgb(image, str(path))
        except (G4Error, MemoryError):
            raise
        except image_module.UnidentifiedImageError as e:
            raise InputError(f"{path}: no supported image; send {', '.join(FORMATS)}") from e
        except image_module.DecompressionBombError as e:
            raise InputError(f"{path}: too large: {e}") from e
        except Exception as e:  # decoders raise whatever a broken file leads them to
            raise InputError(f"{path}: corrupt or truncated: {e}") from e


def _rgb(image: Any, name: str) -> U8:
    white_is_zero = getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == 0
    deep = image.format == "PNG" and image.mode == "I"  # PNG of 16 bits in older Pillow versions
    image = library("PIL.ImageOps", f"{name}: images need Pillow").exif_transpose(image)
    if image.mode[0] not in "IF":
        return np.array(image.convert("RGB"))
    if image.mode in "IF" and not deep:
        problem = "pixels of 32 bits, whose value range is unknown"
        raise InputError(f"{name}: {problem}; save it with 8 or 16 bits")
    grey = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
    return np.repeat((255 - grey if white_is_zero else grey)[..., None], CHANNELS, axis=-1)


PHOTOMETRIC = 262  # TIFF tag PhotometricInterpretation: whether the lowest value is white
