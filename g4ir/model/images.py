"""Computes the size of an image for a model: pixels after resizing, patches, soft tokens.

    settings = image_settings(spec, budget=280)
    grid = fit_image(settings, 1920, 1080)     # 1056x576 pixels, 66x36 patches, 264 soft tokens

Pure arithmetic, with the results of the reference's image processors (rule 31); needs neither torch
nor Pillow. Sizes are width x height.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from g4ir.errors import InputError
from g4ir.spec.parts import FAMILIES, UnifiedVision, Vision
from g4ir.spec.record import Spec

#: soft tokens of an image or frame; the reference's processors refuse every other number
BUDGETS = (70, 140, 280, 560, 1120)
#: soft tokens of a video's frame by default
FRAME_BUDGET = 70
CHANNELS = 3


@dataclass(frozen=True)
class ImageSettings:
    """Patch and pooling settings of an image tower."""

    patch_size: int  # pixels
    pooling: int  # patches per side of a soft token
    budget: int  # maximum soft tokens of an image
    merged: bool  # the patches of a soft token arrive as one large patch (rule 42)
    positions: int  # rows per axis of the position table

    @property
    def side(self) -> int:
        """Pixels per side of a soft token."""
        return self.patch_size * self.pooling

    @property
    def max_patches(self) -> int:
        return self.budget * self.pooling**2

    @property
    def cell(self) -> int:
        """Pixels per side of the patch in one input row."""
        return self.side if self.merged else self.patch_size

    @property
    def rows(self) -> int:
        """Patches of the tower's input, padding included: P of [1,P,D]."""
        return self.budget if self.merged else self.max_patches


@dataclass(frozen=True)
class Grid:
    """An image after resizing, in pixels and in patches."""

    width: int
    height: int
    columns: int
    rows: int
    soft_tokens: int

    @property
    def patches(self) -> int:
        return self.columns * self.rows


def image_settings(spec: Spec, budget: int | None = None) -> ImageSettings:
    """Return a variant's image settings; `budget` defaults to the variant's own.

    InputError for a variant without vision, or an unsupported budget.
    """
    vision = spec.vision
    if isinstance(vision, Vision):
        default, positions = vision.default_output_length, vision.position_embedding_size
    elif isinstance(vision, UnifiedVision):
        default, positions = vision.num_soft_tokens, vision.mm_posemb_size
    else:
        raise InputError(f"{spec.name} takes no images; use a variant with a vision section")
    allowed = sorted({*BUDGETS, default})
    chosen = default if budget is None else budget
    if type(chosen) is not int or chosen not in allowed:
        raise InputError(
            f"budget {chosen!r}: expected one of {', '.join(map(str, allowed))} soft tokens"
        )
    merged = isinstance(vision, UnifiedVision)
    return ImageSettings(vision.patch_size, vision.pooling_kernel_size, chosen, merged, positions)


def frame_budget(spec: Spec) -> int:
    """Return the maximum soft tokens of a video's frame: the reference's default."""
    return int(FAMILIES[spec.model_type].get("video", {}).get("budget", FRAME_BUDGET))


def fit_image(settings: ImageSettings, width: int, height: int, name: str = "image") -> Grid:
    """Return the largest size of about the same aspect ratio that consists of whole soft tokens
    within the budget (rule 31); small images grow. A side that would round to 0 gets one.

    InputError, naming the image, for sizes below 1, if not one soft token fits, and for more
    patches on a side than the position table has.
    """
    if min(width, height) < 1:
        raise InputError(f"{name}: {width}x{height} pixels; expected at least 1x1")
    side = settings.side
    # The reference's operations in its order: one rounding more would flip a floor.
    factor = math.sqrt(settings.max_patches * settings.patch_size**2 / (height * width))
    across, down = (math.floor(factor * n / side) for n in (width, height))
    if not down:
        across, down = min(width // height, settings.budget), 1
    elif not across:
        across, down = 1, min(height // width, settings.budget)
    if not 1 <= across * down <= settings.budget:
        raise InputError(
            f"{name}: {width}x{height} pixels do not fit into {settings.budget} soft "
            f"tokens of {side}x{side} pixels; take a larger budget"
        )
    _check_positions(settings, max(across, down), name)
    k = settings.pooling
    return Grid(across * side, down * side, across * k, down * k, across * down)


def _check_positions(settings: ImageSettings, longest: int, name: str) -> None:
    needed = longest * settings.side // settings.cell
    if needed > settings.positions:
        problem = f"{name}: a side of {needed} patches, the position table has {settings.positions}"
        raise InputError(f"{problem}; take a smaller budget")
