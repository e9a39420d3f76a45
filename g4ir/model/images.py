"""Finds how large an image is to a model: size after resizing, patches, soft tokens.

    settings = image_settings(spec, budget=280)
    grid = fit_image(settings, 1920, 1080)     # 1056x576 pixels, 66x36 patches, 264 soft tokens

Arithmetic alone, equal to the reference's image processors (rule 31): neither torch nor Pillow is
needed, so `g4ir plan --image` answers at once. Sizes are width first, as people write them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from g4ir.errors import InputError
from g4ir.spec.parts import UnifiedVision, Vision
from g4ir.spec.record import Spec
from g4ir.ui.table import aligned

#: soft tokens of an image or frame; the reference's processors refuse every other number
BUDGETS = (70, 140, 280, 560, 1120)
#: soft tokens of a video's frame: the reference's default
FRAME_BUDGET = 70
CHANNELS = 3
_SIZE = re.compile(r"([0-9]{1,7})[xX×]([0-9]{1,7})")


@dataclass(frozen=True)
class ImageSettings:
    """The settings by which an image is cut."""

    patch_size: int  # pixels
    pooling: int  # patches per side of a soft token
    budget: int  # soft tokens at most
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
        """Pixels per side of what one row of the input holds."""
        return self.side if self.merged else self.patch_size

    @property
    def rows(self) -> int:
        """Rows of the input, padding included."""
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
    """Return how a variant cuts images; `budget` defaults to the variant's own.

    InputError for a variant without vision and for an unknown budget.
    """
    vision = spec.vision
    if isinstance(vision, Vision):
        own, positions = vision.default_output_length, vision.position_embedding_size
    elif isinstance(vision, UnifiedVision):
        own, positions = vision.num_soft_tokens, vision.mm_posemb_size
    else:
        raise InputError(f"{spec.name} takes no images; use a variant with a vision section")
    known = sorted({*BUDGETS, own})
    chosen = own if budget is None else budget
    if type(chosen) is not int or chosen not in known:
        raise InputError(
            f"budget {chosen!r}: soft tokens of an image are one of {', '.join(map(str, known))}"
        )
    merged = isinstance(vision, UnifiedVision)
    return ImageSettings(vision.patch_size, vision.pooling_kernel_size, chosen, merged, positions)


def fit_image(settings: ImageSettings, width: int, height: int, name: str = "image") -> Grid:
    """Return the largest size of about the same aspect ratio that is whole soft tokens within the
    budget (rule 31); small images grow. A side that would vanish gets one soft token.

    InputError, naming the image, for sizes below 1 and where a position table is too short.
    """
    if min(width, height) < 1:
        raise InputError(f"{name}: {width}x{height} pixels; at least 1x1")
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
        raise InputError(
            f"{name}: a side of {needed} patches, the position table has "
            f"{settings.positions}; take a smaller budget"
        )


# --- the planner ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImagePlan:
    """The cost of one image for one variant."""

    variant: str
    width: int
    height: int
    settings: ImageSettings
    grid: Grid
    prefill_tokens: int  # soft tokens with their begin and end

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; sizes are [width, height]."""
        s, g = self.settings, self.grid
        return {
            "variant": self.variant,
            "image": [self.width, self.height],
            "budget": s.budget,
            "resized": [g.width, g.height],
            "patch_size": s.patch_size,
            "grid": [g.columns, g.rows],
            "patches": g.patches,
            "padded_patches": s.max_patches,
            "soft_tokens": g.soft_tokens,
            "prefill_tokens": self.prefill_tokens,
        }


def plan_image(spec: Spec, width: int, height: int, budget: int | None = None) -> ImagePlan:
    """Return the plan of an image of width x height pixels. InputError as in `image_settings` and
    `fit_image`."""
    settings = image_settings(spec, budget)
    grid = fit_image(settings, width, height)
    marks = sum(mark is not None for mark in (spec.tokens.boi, spec.tokens.eoi))
    return ImagePlan(spec.name, width, height, settings, grid, grid.soft_tokens + marks)


def image_plan_text(plans: Sequence[ImagePlan]) -> str:
    """Return a line per image."""
    rows = [_columns(p) for p in plans]
    return aligned([tuple(rows[0]), *(tuple(row.values()) for row in rows)])


def _columns(p: ImagePlan) -> dict[str, str]:
    s, g = p.settings, p.grid
    return {
        "variant": p.variant,
        "image": f"{p.width}x{p.height}",
        "budget": str(s.budget),
        "resized": f"{g.width}x{g.height}",
        "patch": f"{s.patch_size}x{s.patch_size}",
        "patches": f"{g.columns}x{g.rows} = {g.patches}",
        "padded": str(s.max_patches),
        "soft tokens": str(g.soft_tokens),
        "prefill tokens": str(p.prefill_tokens),
    }


def parse_sizes(text: str, what: str) -> list[tuple[int, int]]:
    """`1920x1080,640x480` -> [(1920, 1080), (640, 480)]; InputError that names `what`."""
    return [_size(word, what) for word in text.split(",")]


def _size(word: str, what: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(word.strip())
    size = (int(match[1]), int(match[2])) if match else (0, 0)
    if not all(size):
        raise InputError(
            f"{what} {word[:40]!r}: expected width x height in pixels, such as 1920x1080"
        )
    return size


def parse_budgets(text: str | None, what: str) -> list[int | None]:
    """`70,280` -> [70, 280], [None] for the variant's own; InputError that lists the budgets."""
    if text is None:
        return [None]
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not re.fullmatch(r"[0-9]{1,9}", word):
            raise InputError(
                f"{what} {word[:40]!r}: soft tokens of an image are one of "
                f"{', '.join(map(str, BUDGETS))}"
            )
    return list(dict.fromkeys(map(int, words)))
